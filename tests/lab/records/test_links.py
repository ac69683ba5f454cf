"""Links that were placed into a folder by others: nothing is written through them."""

import os

import pytest
from typer.testing import CliRunner

from bisam.lab.bench.suite import check_writable
from bisam.lab.cli import app
from bisam.lab.files import write_atomically
from bisam.lab.records import RecordError, RunFolder, checkpoint

CONFIG = {"model": "resnet20", "seed": 1}


@pytest.fixture
def mine(tmp_path):
    """A file outside of the run folder that must stay as it is."""
    path = tmp_path / "mine"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


def bisam(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.mark.parametrize("command", ["report", "demo"])
def test_a_default_report_page_that_is_a_link_is_refused(command, mine, tmp_path, recorded, write_run, monkeypatch):
    runs = tmp_path / "runs"
    write_run(runs / "a", recorded("demo/40%/sam", trained=0))
    (runs / "report.html").symlink_to(mine)
    monkeypatch.setattr("bisam.lab.cli.runs._run", lambda *_, **__: None)
    done = bisam("report", runs) if command == "report" else bisam("demo", "--runs", runs)
    assert done.exit_code == 1
    assert f"{runs / 'report.html'} is a link and is not written to: remove it, or name" in done.stderr


def test_other_default_output_files_that_are_links_are_refused(mine, tmp_path, recorded, write_run, monkeypatch):
    for name in ("compare.html", "lower-bounds.svg", "bench.json"):
        (tmp_path / name).symlink_to(mine)
    monkeypatch.chdir(tmp_path)
    runs = [write_run(tmp_path / name, recorded("demo/40%/sam", seed, trained=1)) for seed, name in enumerate("ab")]
    for arguments in (["compare", *runs, "--no-weights"], ["figure", "lower-bounds"], ["bench", "--quick"]):
        done = bisam(*arguments)
        assert done.exit_code in (1, 2)
        assert " is a link and is not written to: remove it, or name" in " ".join(done.stderr.split())


def test_an_explicitly_named_output_file_may_be_a_link(tmp_path, recorded, write_run):
    write_run(tmp_path / "runs" / "a", recorded("demo/40%/sam", trained=0))
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    assert bisam("report", tmp_path / "runs", "--out", tmp_path / "link").exit_code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!")


def test_a_link_with_the_name_of_a_draft_is_not_written_through(mine, tmp_path):
    (tmp_path / "page.tmp").symlink_to(mine)
    write_atomically(tmp_path / "page", b"new")
    check_writable(tmp_path / "page")
    assert (tmp_path / "page").read_bytes() == b"new"


def test_a_draft_never_overwrites_an_existing_file(mine, tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)
    (tmp_path / "page.00000000.tmp").hardlink_to(mine)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "page", b"new")  # the fixture `mine` checks that the file is unchanged
    assert not (tmp_path / "page").exists()


def test_two_drafts_of_one_file_have_different_names(tmp_path):
    from bisam.lab.files import new_draft

    drafts = []
    for _ in range(2):
        handle, draft = new_draft(tmp_path / "page")
        os.close(handle)
        drafts.append(draft)
    assert len({*drafts}) == 2
    assert all(draft.name.startswith("page.") and draft.suffix == ".tmp" for draft in drafts)


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl"])
def test_a_lock_or_metrics_behind_a_link_are_refused(name, mine, tmp_path):
    run = tmp_path / "run"
    with RunFolder.open(run, CONFIG):
        pass
    (run / name).unlink()
    (run / name).symlink_to(mine)
    with pytest.raises(RecordError, match=f"{name} is a link and is not written to: .*give another folder"):
        RunFolder.open(run, CONFIG)


def test_metrics_that_become_a_link_during_a_run_are_not_written_through(mine, tmp_path):
    with RunFolder.open(tmp_path / "run", CONFIG) as run:
        run.metrics.path.unlink()
        run.metrics.path.symlink_to(mine)
        with pytest.raises(RecordError, match=r"cannot write .*metrics\.jsonl"):
            run.metrics.append({"epoch": 0})


def test_writing_a_record_replaces_links(mine, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").symlink_to(tmp_path / "nothing")
    with RunFolder.open(tmp_path / "run", CONFIG) as run:
        for name in ("result.json", "receipt.json", "best.safetensors"):
            (run.folder / name).symlink_to(mine)
        run.finish({"status": "done"})
        run.receipt({"commit": "abc"})
        run.save_weights({})
        run.checkpoints.mkdir()
        (run.checkpoints / "checkpoint-000000001.safetensors").symlink_to(mine)
        checkpoint.save(run.checkpoints, 1, {})
    assert not any(path.is_symlink() for path in (tmp_path / "run").rglob("*"))
    assert not (tmp_path / "nothing").exists()


def test_a_link_to_a_folder_is_replaced_and_the_folder_is_unchanged(tmp_path):
    (tmp_path / "folder").mkdir()
    RunFolder.open(tmp_path / "run", CONFIG).close()
    (tmp_path / "run" / "receipt.json").symlink_to(tmp_path / "folder")
    with RunFolder.open(tmp_path / "run", CONFIG) as run:
        run.receipt({"commit": "abc"})
    assert (tmp_path / "run" / "receipt.json").read_bytes() == b'{\n "commit": "abc"\n}\n'
    assert [*(tmp_path / "folder").iterdir()] == []


def test_writing_a_figure_replaces_a_link(mine, tmp_path, recorded, write_run):
    write_run(tmp_path / "runs" / "a", recorded("demo/40%/sam", trained=2))
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "demo-40-loss.svg").symlink_to(mine)
    assert bisam("report", tmp_path / "runs", "--figures", tmp_path / "figures").exit_code == 0
    assert "<svg" in (tmp_path / "figures" / "demo-40-loss.svg").read_text()
