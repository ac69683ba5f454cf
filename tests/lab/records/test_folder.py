import errno
import json
import math
import os
import resource
import signal
import tempfile
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bisam.lab import records
from bisam.lab.config import Config
from bisam.lab.records import ConfigMismatch, RecordError, RunFolder, RunInUse, check, checkpoint, find_records, read

import forked

CONFIG = {"model": "resnet20", "lr": 0.1, "seed": 1, "optimizer": {"name": "sgd", "milestones": [60, 120]}}
WORDS = ("nan", "inf", "-inf")

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6).filter(lambda text: text not in WORDS),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=4), part, max_size=3),
    max_leaves=8,
)
rows = st.dictionaries(st.text(max_size=4).filter("epoch".__ne__), plain, max_size=4)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def is_same(a, b) -> bool:
    """Equal, where nan equals nan, and 1 equals neither 1.0 nor True."""
    return repr(a) == repr(b)


def lines(folder) -> list[bytes]:
    return (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)


def strict_json(text):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# Opening.


def test_a_new_folder_gets_a_configuration_file_with_the_format_version(tmp_path):
    with RunFolder.open(tmp_path / "a" / "b", CONFIG) as run:
        assert run.config == CONFIG
        assert run.notes == []
        assert list(run.metrics) == []
        assert run.result is None
        assert run.checkpoints == tmp_path / "a" / "b" / "checkpoints"
    assert json.loads((run.folder / "config.json").read_text()) == {"format": 1, "config": CONFIG}


def test_a_run_reopens_with_an_equal_configuration_in_any_order_and_with_tuples_for_lists(tmp_path):
    config = {**CONFIG, "betas": (0.9, 0.999), "limit": math.inf, "missing": math.nan}
    with RunFolder.open(tmp_path, config):
        pass
    before = (tmp_path / "config.json").read_bytes()
    with RunFolder.open(tmp_path, dict(reversed(config.items()))) as run:
        assert run.config["betas"] == [0.9, 0.999]
        assert run.config["limit"] == math.inf
    assert (tmp_path / "config.json").read_bytes() == before


def test_another_configuration_is_refused_with_all_fields_that_differ(tmp_path):
    with RunFolder.open(tmp_path, {**CONFIG, "clip": math.inf, "old": None, "flag": 1}):
        pass
    now = {**CONFIG, "lr": 0.05, "clip": 1.0, "new": 0.1, "flag": True, "seed": 1.0}
    now["optimizer"] = {"name": "adam", "milestones": [60, 150]}
    with pytest.raises(ConfigMismatch) as raised:
        RunFolder.open(tmp_path, now)
    assert isinstance(raised.value, ValueError)
    assert raised.value.differences == [
        "lr: 0.1 there, 0.05 now",
        "optimizer.name: 'sgd' there, 'adam' now",
        "optimizer.milestones.1: 120 there, 150 now",
        "clip: inf there, 1.0 now",
        "old: None there, absent now",
        "flag: 1 there, True now",
        "new: absent there, 0.1 now",
    ]
    assert all(line in str(raised.value) for line in (str(tmp_path), *raised.value.differences))
    with pytest.raises(ConfigMismatch, match=r"milestones: \[60, 120\] there, \[60\] now"):
        RunFolder.open(tmp_path, {**CONFIG, "optimizer": {"name": "sgd", "milestones": [60]}})


def test_fields_that_an_older_version_did_not_have_are_taken_as_their_defaults(tmp_path):
    own = Config(method="sam", seed=3).as_dict()
    needed = {name: own[name] for name in ("recipe", "data", "model", "method", "seed", "epochs")}
    with RunFolder.open(tmp_path, needed):
        pass
    before = (tmp_path / "config.json").read_bytes()
    assert check(tmp_path, own)
    with RunFolder.open(tmp_path, own):
        pass
    assert (tmp_path / "config.json").read_bytes() == before
    with pytest.raises(ConfigMismatch, match=r":\n  rho: 0\.05 there, 0\.1 now\n"):
        check(tmp_path, {**own, "rho": 0.1})
    del needed["model"]
    with RunFolder.open(tmp_path / "other", needed):
        pass
    with pytest.raises(ConfigMismatch, match=r":\n  model: absent there, 'resnet56' now\n"):
        check(tmp_path / "other", own)


def test_a_refused_configuration_does_not_keep_the_run_locked(tmp_path):
    with RunFolder.open(tmp_path, CONFIG):
        pass
    with pytest.raises(ConfigMismatch):
        RunFolder.open(tmp_path, {})
    with RunFolder.open(tmp_path, CONFIG):
        pass


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "half-written or foreign"),
        ('{"format": 1, "conf', "half-written or foreign"),
        ("[1]", "not an object"),
        ('{"lr": 0.1}', "not a run's configuration"),
        ('{"format": 2, "config": {}}', "has format 2, and this version reads format 1"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_not_overwritten(tmp_path, content, reason):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RecordError, match=reason):
        RunFolder.open(tmp_path, CONFIG)
    assert (tmp_path / "config.json").read_text() == content


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "receipt.json", "best.safetensors", "checkpoints"])
def test_a_run_with_results_but_without_a_configuration_is_not_resumed(name, tmp_path):
    (tmp_path / name).mkdir() if name == "checkpoints" else (tmp_path / name).write_text("")
    with pytest.raises(RecordError, match=rf"has {name} but no config\.json"):
        RunFolder.open(tmp_path, CONFIG)


def test_leftovers_of_killed_writes_are_removed_and_foreign_files_are_not(tmp_path):
    for name in ("config.json", "metrics.jsonl", "result.json", "receipt.json", "best.safetensors"):
        for ending in (".tmp", ".0123abcd.tmp"):  # an older version used the first
            (tmp_path / f"{name}{ending}").write_text("half")
    foreign = ["my-result.json.tmp", "notes.txt", "result.json.old.tmp", "result.json.tmp.zip"]
    for name in foreign:
        (tmp_path / name).write_text("mine")
    with RunFolder.open(tmp_path, CONFIG):
        assert names(tmp_path) == sorted(["config.json", "lock", "metrics.jsonl", *foreign])


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"a": {"b": [1, Path("x")]}}, TypeError, r"a\.b\.1 is a (Posix|Windows)Path"),
        ({"a": {1: 2}}, TypeError, "a has the key 1"),
        ({"lr": torch.tensor(0.1)}, TypeError, "lr is a Tensor"),
        ({"norm": "inf"}, ValueError, "norm is the string 'inf'"),
    ],
)
def test_values_that_json_cannot_restore_are_refused_with_their_path(tmp_path, config, error, message):
    with pytest.raises(error, match=message):
        RunFolder.open(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()


def test_a_file_in_place_of_the_folder_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RecordError, match=r"cannot use .*file.* move it away or give another folder"):
            RunFolder.open(folder, CONFIG)


def test_an_unwritable_folder_is_an_error_with_a_remedy():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with RunFolder.open(folder / "run", CONFIG):
            pass
        (folder / "run" / "lock").chmod(0o666)
        (folder / "run").chmod(0o555)
        folder.chmod(0o555)
        try:
            if os.getuid() == 0:
                os.seteuid(65534)  # root may write anywhere
            with pytest.raises(RecordError, match=r"cannot use .*new.*Permission denied\. Make it writable or give"):
                RunFolder.open(folder / "new", CONFIG)
            refused = pytest.raises(RecordError, match=r"cannot write .*result\.json: Permission denied\. Make it")
            with RunFolder.open(folder / "run", CONFIG) as run, refused:
                run.finish({"status": "done"})
            assert read(folder / "run").problems == []
        finally:
            os.seteuid(os.getuid())
            folder.chmod(0o755)
            (folder / "run").chmod(0o755)


# Metrics.


@settings(max_examples=50)
@given(st.lists(rows, max_size=4))
def test_metrics_are_read_back_unchanged_and_stored_as_strict_json(written):
    written = [{"epoch": epoch, **row} for epoch, row in enumerate(written)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with RunFolder.open(folder, CONFIG) as run:
            for row in written:
                run.metrics.append(row)
            assert is_same(list(run.metrics), written)
        assert is_same(read(folder).metrics, written)
        assert len([strict_json(line) for line in lines(folder)]) == len(written)


def test_nan_and_infinities_are_stored_as_words(tmp_path):
    row = {"epoch": 0, "loss": math.nan, "gap": -math.inf, "nested": [{"bound": math.inf}]}
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.metrics.append(row)
        assert is_same(run.metrics.read(), [row])
    expected = {"epoch": 0, "loss": "nan", "gap": "-inf", "nested": [{"bound": "inf"}]}
    assert strict_json(lines(tmp_path)[0]) == expected


@pytest.mark.parametrize("row", [{}, {"epoch": None}, {"epoch": 1.0}, {"epoch": True}, {"epoch": -1}, {"epoch": "1"}])
def test_a_line_of_metrics_needs_an_epoch(tmp_path, row):
    with RunFolder.open(tmp_path, CONFIG) as run, pytest.raises(ValueError, match="needs an epoch"):
        run.metrics.append(row)


def test_an_epoch_is_not_written_twice(tmp_path):
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.metrics.append({"epoch": 3})
        with pytest.raises(ValueError, match=r"epoch 3 cannot follow epoch 3: call rewind\(3\) first"):
            run.metrics.append({"epoch": 3})
    with RunFolder.open(tmp_path, CONFIG) as run, pytest.raises(ValueError, match="epoch 2 cannot follow epoch 3"):
        run.metrics.append({"epoch": 2})


def test_rewind_removes_the_lines_from_the_given_epoch_on(tmp_path):
    with RunFolder.open(tmp_path, CONFIG) as run:
        for epoch in range(5):
            run.metrics.append({"epoch": epoch, "loss": math.inf})
        before = lines(tmp_path)
        assert run.metrics.rewind(9) == 0
        assert run.metrics.rewind(3) == 2
        assert lines(tmp_path) == before[:3]
        run.metrics.append({"epoch": 3, "loss": math.inf})
        assert lines(tmp_path) == before[:4]
        assert run.metrics.rewind(0) == 4
        run.metrics.append({"epoch": 0})
        assert run.metrics.read() == [{"epoch": 0}]


@pytest.mark.parametrize("form", ["cut", "zeros"])
def test_a_half_written_last_line_is_removed_wherever_it_ends(tmp_path, form):
    with RunFolder.open(tmp_path, CONFIG) as run:
        for epoch in range(2):
            run.metrics.append({"epoch": epoch, "loss": 1.5, "name": "é"})
    first, last = lines(tmp_path)
    path = tmp_path / "metrics.jsonl"
    for length in range(1, len(last)):
        path.write_bytes(first + (last[:length] if form == "cut" else bytes(length)))
        record = read(tmp_path)
        assert [row["epoch"] for row in record.metrics] == [0]
        assert record.problems == ["metrics.jsonl: the last line is half-written"]
        with RunFolder.open(tmp_path, CONFIG) as run:
            assert run.notes == [f"metrics.jsonl: the last line was half-written and is removed ({length} bytes)"]
            run.metrics.append({"epoch": 1})
        assert lines(tmp_path) == [first, b'{"epoch": 1}\n']


def test_a_line_that_cannot_be_written_leaves_the_earlier_ones_intact(tmp_path, monkeypatch):
    def fail(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunFolder.open(tmp_path, CONFIG) as run:
        for epoch in range(4):
            run.metrics.append({"epoch": epoch})
        for kept in (4, 2, 1):
            run.metrics.rewind(kept)
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", fail)
                with pytest.raises(RecordError, match="No space left"):
                    run.metrics.append({"epoch": kept})
                with pytest.raises(RecordError, match="No space left"):
                    run.metrics.rewind(0)
            assert lines(tmp_path) == [b'{"epoch": %d}\n' % epoch for epoch in range(kept)]
        run.metrics.append({"epoch": 1})
        assert [row["epoch"] for row in run.metrics] == [0, 1]


def test_the_removal_of_a_half_written_line_is_synced_to_disk(tmp_path, monkeypatch):
    RunFolder.open(tmp_path, CONFIG).close()
    (tmp_path / "metrics.jsonl").write_bytes(b'{"epoch": 0}\n{"ep')
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(lines(tmp_path)))
    RunFolder.open(tmp_path, CONFIG).close()
    assert synced == [[b'{"epoch": 0}\n']]


def test_missing_epochs_are_reported_even_if_lines_of_later_epochs_exist(tmp_path):
    with RunFolder.open(tmp_path, CONFIG) as run:
        for epoch in (0, 1, 3):
            run.metrics.append({"epoch": epoch})
        assert [run.metrics.lacks(epochs) for epochs in (0, 1, 2)] == ["", "", ""]
        assert run.metrics.lacks(3) == (
            "metrics.jsonl lacks 1 of the lines of epochs 0 to 2, the first is that of epoch 2"
        )


def test_damaged_lines_in_the_middle_are_refused_and_left_unchanged(tmp_path):
    with RunFolder.open(tmp_path, CONFIG):
        pass
    content = '{"epoch": 0}\nnonsense\n{"loss": 1}\n{"epoch": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(
        RecordError, match=r"metrics\.jsonl is damaged: line 2 is not a JSON object; line 3 has no epoch"
    ):
        RunFolder.open(tmp_path, CONFIG)
    assert (tmp_path / "metrics.jsonl").read_text() == content
    assert read(tmp_path).metrics == [{"epoch": 0}, {"epoch": 1}]


@pytest.mark.parametrize(
    ("epochs", "result", "lacking"),
    [
        ([0, 1, 2], None, ""),
        ([0, 1, 2], 3, ""),
        ([], None, ""),
        ([0, 2, 4], None, "it lacks 2 of the lines of epochs 0 to 4, the first is that of epoch 1"),
        ([0, 1], 3, "it lacks 1 of the lines of epochs 0 to 2, the first is that of epoch 2"),
        ([], 3, "it lacks 3 of the lines of epochs 0 to 2, the first is that of epoch 0"),
        ([10**15], None, f"it lacks {10**15} of the lines of epochs 0 to {10**15}, the first is that of epoch 0"),
        ([0, 1], "three", ""),
    ],
    ids=repr,
)
def test_missing_lines_are_a_problem_of_the_record(tmp_path, epochs, result, lacking):
    with RunFolder.open(tmp_path, CONFIG) as run:
        for epoch in epochs:
            run.metrics.append({"epoch": epoch})
        if result is not None:
            run.finish({"status": "done", "epochs": result})
    assert read(tmp_path).problems == [f"metrics.jsonl: {lacking}"] * bool(lacking)


# Results, receipts, weights.


def test_the_reason_not_to_count_a_run_is_read_as_one_line(tmp_path):
    RunFolder.open(tmp_path, CONFIG).close()
    assert read(tmp_path).not_counted == ""
    path = tmp_path / "not-counted.txt"
    path.write_text("The wrong\n  labels.\n")
    assert read(tmp_path).not_counted == "The wrong labels."
    path.write_bytes(b"\xff\n")
    assert read(tmp_path).not_counted == "\ufffd"
    path.write_text(" \n")
    assert read(tmp_path).not_counted == "no reason is given"
    path.unlink()
    path.mkdir()
    unreadable = read(tmp_path)
    assert unreadable.not_counted == "the reason cannot be read"
    assert unreadable.problems == ["not-counted.txt: it cannot be read (it is a folder, not a file)"]


def test_result_and_receipt_are_read_back_as_written(tmp_path):
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.finish({"status": "diverged", "epoch": 3, "loss": math.nan})
        assert is_same(run.result, {"status": "diverged", "epoch": 3, "loss": math.nan})
        run.receipt({"torch": "2"})
    with RunFolder.open(tmp_path, CONFIG) as run:
        assert run.result["status"] == "diverged"
        run.finish({"status": "done"})
        assert run.result == {"status": "done"}
    record = read(tmp_path)
    assert (record.result, record.receipt, record.problems) == ({"status": "done"}, {"torch": "2"}, [])


def test_a_result_needs_a_status(tmp_path):
    with RunFolder.open(tmp_path, CONFIG) as run:
        with pytest.raises(ValueError, match="needs a status such as 'done'"):
            run.finish({"accuracy": 1.0})
        assert run.result is None


def test_a_damaged_result_is_an_error_with_a_remedy(tmp_path):
    with RunFolder.open(tmp_path, CONFIG) as run:
        (tmp_path / "result.json").write_text('{"status"')
        with pytest.raises(RecordError, match=r"result\.json cannot be read .*: remove it and run again"):
            _ = run.result


def test_weights_are_a_plain_safetensors_file(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    model.register_parameter("tied", model[0].weight)
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.save_weights(model.state_dict())
        ours = run.load_weights()
    theirs = safetensors.torch.load_file(tmp_path / "best.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(ours[name], tensor)
        assert torch.equal(theirs[name], tensor)
    assert ours.keys() == theirs.keys() == model.state_dict().keys()


def test_missing_and_damaged_weights_are_errors_with_a_remedy(tmp_path):
    with RunFolder.open(tmp_path, CONFIG) as run:
        with pytest.raises(RecordError, match=r"save_weights\(\) has not been called"):
            run.load_weights()
        run.save_weights({"x": torch.ones(9)})
        os.truncate(tmp_path / "best.safetensors", 100)
        with pytest.raises(RecordError, match="damaged"):
            run.load_weights()
        with pytest.raises(TypeError, match="x is of type int, not a plain tensor"):
            run.save_weights({"x": 1})


def test_writing_to_a_closed_run_is_an_error(tmp_path):
    with RunFolder.open(tmp_path, CONFIG) as run:
        pass
    run.close()
    acts = [
        lambda: run.metrics.append({"epoch": 0}),
        lambda: run.metrics.rewind(0),
        lambda: run.finish({"status": "done"}),
        lambda: run.receipt({}),
        lambda: run.save_weights({}),
    ]
    for act in acts:
        with pytest.raises(RuntimeError, match="is closed: open it again"):
            act()
    assert names(tmp_path) == ["config.json", "lock", "metrics.jsonl"]


# Reading for reports.


def test_reading_changes_nothing_and_needs_no_lock(tmp_path):
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.metrics.append({"epoch": 0})
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"ep')
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        record = read(tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert (record.folder, record.config, record.metrics) == (tmp_path, CONFIG, [{"epoch": 0}])
    assert (record.result, record.receipt) == (None, None)


CONTENT = [
    b"",
    b"\xff\xfe",
    b"{",
    b"[]",
    b"1",
    b"null",
    b"{}",
    b'{"format": "x", "config": 3}',
    b"[" * 100_000,
    b"\0" * 9,
]
CONTENT += [b'{"epoch": 0}\n{"epoch": 0}\n', b'{"format": 7, "config": {"lr": 1}, "status": 3}', b"1" * 5000]


@pytest.mark.parametrize("content", CONTENT, ids=lambda content: repr(content[:20]))
def test_reading_a_record_never_raises_whatever_its_files_contain(tmp_path, content):
    for name in ("config.json", "metrics.jsonl", "result.json", "receipt.json"):
        (tmp_path / name).write_bytes(content)
    record = read(tmp_path)
    assert any(problem.startswith("config.json") for problem in record.problems)
    if content:
        assert any(problem.startswith("metrics.jsonl") for problem in record.problems)
    assert isinstance(record.config, dict)


def test_reading_something_that_is_not_a_run_never_raises(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "odd").mkdir()
    for name in ("config.json", "metrics.jsonl", "result.json", "receipt.json"):
        (tmp_path / "odd" / name).mkdir()
    for place in ("nowhere", "file", "odd"):
        record = read(tmp_path / place)
        assert record.problems
        assert (record.config, record.metrics, record.result, record.receipt) == ({}, [], None, None)


def test_a_record_of_a_later_format_is_read_as_far_as_possible(tmp_path):
    (tmp_path / "config.json").write_text('{"format": 2, "config": {"lr": 0.1}}')
    record = read(tmp_path)
    assert record.config == {"lr": 0.1}
    assert record.problems == ["config.json: it has format 2, and this version reads format 1"]


def test_find_records_returns_every_run_of_a_tree_sorted_by_path(tmp_path):
    for place in ("b/2", "a", "b/1/x"):
        with RunFolder.open(tmp_path / place, {"place": place}):
            pass
    (tmp_path / "b" / "no run").mkdir()
    assert [record.config["place"] for record in find_records(tmp_path)] == ["a", "b/1/x", "b/2"]
    assert [record.folder for record in find_records(tmp_path / "a")] == [tmp_path / "a"]
    assert find_records(tmp_path / "b" / "no run") == []
    with pytest.raises(RecordError, match="is not a folder: give the one that has the runs"):
        find_records(tmp_path / "nowhere")


def test_find_records_follows_links_and_returns_each_folder_once(tmp_path):
    root, elsewhere = tmp_path / "runs", tmp_path / "disk"
    for place in (root / "b", elsewhere / "c" / "deep"):
        with RunFolder.open(place, {"place": place.name}):
            pass
    (root / "a").symlink_to(root / "b")  # earlier in the alphabet, but the folder is reported and not the link
    (root / "again").symlink_to(elsewhere)
    (root / "also").symlink_to(elsewhere / "c")
    (root / "b" / "loop").symlink_to(root)
    (elsewhere / "back").symlink_to(root)
    (root / "nowhere").symlink_to(tmp_path / "nowhere")
    assert [record.folder for record in find_records(root)] == [root / "again" / "c" / "deep", root / "b"]
    assert [record.folder for record in find_records(root / "a")] == [
        root / "a",
        root / "a" / "loop" / "again" / "c" / "deep",
    ]


def test_environments_and_folders_of_other_programs_are_not_searched_unless_they_are_named(tmp_path):
    foreign = [tmp_path / ".git" / "a", tmp_path / "web" / "node_modules" / "b", tmp_path / "env" / "lib" / "c"]
    for folder in (*foreign, tmp_path / "environment", tmp_path / ".runs"):
        RunFolder.open(folder, CONFIG).close()
    (tmp_path / "env" / "pyvenv.cfg").write_text("home = /usr/bin")
    seen = []
    assert [record.folder.name for record in find_records(tmp_path, lambda *counts: seen.append(counts))] == [
        ".runs",
        "environment",
    ]
    files = sum(len(names(folder)) for folder in (tmp_path / "environment", tmp_path / ".runs"))
    assert seen[-1] == (5 + files + 1, 2)  # tmp_path, web, env and the two, their files and pyvenv.cfg
    assert [record.folder for record in find_records(tmp_path / ".git")] == foreign[:1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json"])
def test_find_records_also_returns_runs_that_lost_their_configuration(tmp_path, name):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_text('{"status": "done"}\n' * (name == "result.json"))
    (record,) = find_records(tmp_path)
    assert record.problems == ["config.json: it is missing, so the run cannot be identified"]


def test_find_records_returns_an_unreadable_folder_with_the_reason():
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for place in ("open", "shut"):
            with RunFolder.open(root / place / "run", CONFIG):
                pass
        root.chmod(0o755)
        (root / "shut").chmod(0)
        try:
            if os.getuid() == 0:
                os.seteuid(65534)  # root may read anything
            found = find_records(root)
        finally:
            os.seteuid(os.getuid())
            (root / "shut").chmod(0o755)
        assert [record.folder for record in found] == [root / "open" / "run", root / "shut"]
        assert [record.problems for record in found] == [[], ["it cannot be read (Permission denied)"]]


def test_find_records_ignores_checkpoints_that_a_run_removes_meanwhile(tmp_path, monkeypatch):
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.checkpoints.mkdir()
    own = os.scandir

    def scandir(place):
        if Path(place) == run.checkpoints:
            run.checkpoints.rmdir()
        return own(place)

    monkeypatch.setattr(os, "scandir", scandir)
    (record,) = find_records(tmp_path)
    assert not run.checkpoints.exists()
    assert (record.folder, record.problems) == (tmp_path, [])


# Processes.


def hold_open(folder, with_a_worker):
    """Open a run, print that, and hold it until a signal comes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    with RunFolder.open(folder, CONFIG) as run:
        run.metrics.append({"epoch": 0})
        if with_a_worker and os.fork() == 0:  # the worker prints its number itself: only then it has released the lock
            print(os.getpid(), flush=True)
            signal.pause()
        if not with_a_worker:
            print("open", flush=True)
        signal.sigwait({signal.SIGUSR1})


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path):
    first = forked.Process(hold_open, tmp_path, False)
    try:
        first.until(lambda: first.stdout == "open\n")
        with pytest.raises(RunInUse, match=rf"the run in {tmp_path} is in use by process {first.pid}"):
            RunFolder.open(tmp_path, CONFIG)
        assert read(tmp_path).metrics == [{"epoch": 0}]
        first.send_signal(signal.SIGUSR1)
        assert (first.wait(), first.stderr) == (0, "")
    finally:
        first.kill()
    with RunFolder.open(tmp_path, CONFIG), pytest.raises(RunInUse, match=f"in use by process {os.getpid()}"):
        RunFolder.open(tmp_path, CONFIG)


def test_a_killed_process_releases_the_run_though_its_workers_survive(tmp_path):
    first = forked.Process(hold_open, tmp_path, True)
    try:
        worker = int(first.until(lambda: first.stdout.endswith("\n")).stdout)
        try:
            with pytest.raises(RunInUse):
                RunFolder.open(tmp_path, CONFIG)
            first.kill()
            os.kill(worker, 0)  # it is alive
            with RunFolder.open(tmp_path, CONFIG) as run:
                assert run.metrics.read() == [{"epoch": 0}]
        finally:
            os.kill(worker, signal.SIGKILL)
    finally:
        first.kill()


def be_killed_while_writing(folder):
    """For each size, a process that writes epochs, rewinds and results until a file would be larger, which kills it."""

    def write_on(limit):
        with RunFolder.open(folder, CONFIG) as run:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            run.metrics.rewind(2)
            for epoch in range(2, 100):
                run.metrics.append({"epoch": epoch, "loss": math.nan})

    notes = 0
    with RunFolder.open(folder, CONFIG) as run:
        for epoch in range(2):
            run.metrics.append({"epoch": epoch, "loss": math.nan})
    for limit in range(60, 100):  # bytes: a line and a half
        pid = os.fork()
        if pid == 0:
            try:
                write_on(limit)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGXFSZ
        with RunFolder.open(folder, CONFIG) as run:
            epochs = [row["epoch"] for row in run.metrics]
            assert epochs == list(range(len(epochs)))
            assert len(epochs) >= 2
            notes += len(run.notes)
    print(notes)


def in_a_process(function, *args) -> str:
    """Runs a function in a process of its own; returns what it prints."""
    done = forked.run(function, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_killed_at_any_byte_of_its_metrics_leaves_complete_lines(tmp_path):
    assert int(in_a_process(be_killed_while_writing, tmp_path)) > 30  # were cut in the middle of a line


def run_out_of_space(folder):
    with RunFolder.open(folder, CONFIG) as run:
        for epoch in range(5):
            run.metrics.append({"epoch": epoch})
        run.metrics.rewind(1)
        run.save_weights({"x": torch.zeros(10)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))
        for act in (
            lambda: run.metrics.append({"epoch": 1, "text": "x" * 1000}),
            lambda: run.finish({"status": "x" * 1000}),
            lambda: run.save_weights({"x": torch.ones(1000)}),
        ):
            with pytest.raises(RecordError, match=r"cannot write .*ulimit -f"):
                act()
        run.metrics.append({"epoch": 1})
        assert run.metrics.read() == [{"epoch": 0}, {"epoch": 1}]
        assert run.result is None
        assert torch.equal(run.load_weights()["x"], torch.zeros(10))


def test_running_out_of_disk_space_leaves_the_existing_records_intact(tmp_path):
    in_a_process(run_out_of_space, tmp_path)
    assert names(tmp_path) == ["best.safetensors", "config.json", "lock", "metrics.jsonl"]


def test_only_one_of_many_concurrent_openers_gets_the_run(tmp_path):
    barrier, opened, refused = threading.Barrier(8), [], []

    def attempt():
        barrier.wait()
        try:
            opened.append(RunFolder.open(tmp_path, CONFIG))
        except RunInUse as error:
            refused.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(opened), len(refused)) == (1, 7)
    opened[0].close()


def test_checkpoints_are_saved_in_the_folder_of_the_run(tmp_path):
    with RunFolder.open(tmp_path, CONFIG) as run:
        checkpoint.save(run.checkpoints, 1, {})
        assert names(tmp_path / "checkpoints") == ["checkpoint-000000001.safetensors"]
    assert records.CHECKPOINTS in names(tmp_path)
