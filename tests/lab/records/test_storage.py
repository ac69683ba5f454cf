"""Runs in a storage: what is copied, in which order, and what a kill in the middle leaves."""

import itertools
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from bisam.lab import records
from bisam.lab.records.checkpoint import load, save
from bisam.lab.records.storage import Storage, StorageError, storage_of

CONFIG = {"seed": 1}
RESULT = {"status": "done", "epochs": 2, "best_epoch": 1, "validation_accuracy": 50.0, "test_accuracy": 50.0}


@pytest.fixture(params=["file", "memory"])
def storage(request, tmp_path):
    """A storage in a folder, and one in the memory of this process, which has no folders of its own."""
    url = (tmp_path / "bucket").as_uri() if request.param == "file" else "memory://bucket/runs"
    fsspec.filesystem("memory").mkdir("/bucket")
    yield Storage(url)
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def paths(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def contents(folder):
    return {path: (folder / path).read_bytes() for path in paths(folder) if path != "lock"}


def trained(folder, epochs, *, finished=False):
    """Continue a run as a worker does: with lines of metrics, checkpoints and perhaps a result."""
    with records.RunFolder.open(folder, CONFIG) as run:
        for epoch in range(len([*run.metrics]), epochs):
            run.metrics.append({"epoch": epoch, "loss": 1.0})
            save(run.checkpoints, epoch + 1, {"epoch": epoch + 1})
        if finished:
            run.finish(RESULT, {"commit": "unknown"})
            shutil.rmtree(run.checkpoints)


def test_a_fetched_run_equals_the_pushed_one_without_its_lock(storage, tmp_path):
    trained(tmp_path / "a", 3)
    storage.push(tmp_path / "a", "table/run")
    assert storage.fetch("table/run", tmp_path / "b")
    assert paths(tmp_path / "b") == [
        "checkpoints/checkpoint-000000002.safetensors",
        "checkpoints/checkpoint-000000003.safetensors",
        "config.json",
        "metrics.jsonl",
    ]
    for name in paths(tmp_path / "b"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert not storage.fetch("table/other", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_later_push_removes_old_checkpoints_and_a_finished_run_has_none(storage, tmp_path):
    for epochs, finished in ((2, False), (4, False), (4, True)):
        trained(tmp_path / "a", epochs, finished=finished)
        storage.push(tmp_path / "a", "table/run")
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        storage.fetch("table/run", tmp_path / "b")
        assert paths(tmp_path / "b") == [path for path in paths(tmp_path / "a") if path != "lock"]
    assert paths(tmp_path / "b") == ["config.json", "metrics.jsonl", "receipt.json", "result.json"]


def test_records_are_gathered_without_checkpoints_and_finished_runs_only_once(storage, tmp_path, monkeypatch):
    trained(tmp_path / "a", 2)
    trained(tmp_path / "b", 2, finished=True)
    storage.push(tmp_path / "a", "table/a")
    storage.push(tmp_path / "b", "table/b")
    storage.gather(["table/a", "table/b", "table/c"], tmp_path / "here")
    assert paths(tmp_path / "here") == [
        "table/a/config.json",
        "table/a/metrics.jsonl",
        *(f"table/b/{name}" for name in ("config.json", "metrics.jsonl", "receipt.json", "result.json")),
    ]
    fetched = []
    monkeypatch.setattr(Storage, "_fetched", lambda self, name, *_, **__: fetched.append(name))
    storage.gather(["table/a", "table/b", "table/c"], tmp_path / "here")
    assert fetched == ["table/a", "table/c"]


def test_an_interrupted_copy_leaves_no_draft_and_is_completed_the_next_time(tmp_path, monkeypatch):
    storage = Storage((tmp_path / "bucket").as_uri())
    trained(tmp_path / "a", 2, finished=True)
    (tmp_path / "a" / "result.json.0123abcd.tmp").write_text("half")  # drafts are not pushed
    storage.push(tmp_path / "a", "table/a")
    (tmp_path / "a" / "result.json.0123abcd.tmp").unlink()
    original = LocalFileSystem.get_file

    def fail(self, source, *arguments, **options):
        if source.endswith("receipt.json"):
            raise TimeoutError("no answer")
        return original(self, source, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "get_file", fail)
        with pytest.raises(StorageError, match="no answer"):
            storage.gather(["table/a"], tmp_path / "here")
    assert paths(tmp_path / "here") == ["table/a/config.json", "table/a/metrics.jsonl"]
    storage.gather(["table/a"], tmp_path / "here")
    assert contents(tmp_path / "here" / "table" / "a") == contents(tmp_path / "a")


@pytest.mark.parametrize("finished", [False, True])
def test_a_push_killed_at_any_write_leaves_a_run_that_can_resume_or_is_complete(finished, tmp_path, monkeypatch):
    """For each n, the first n operations of a push are carried out, and half of the next one."""
    left = None

    def counted(name):
        original = getattr(LocalFileSystem, name)

        def call(self, path, *arguments, **options):
            nonlocal left
            if left == 0:
                if name == "put_file":
                    half = Path(path).read_bytes()
                    Path(arguments[0]).write_bytes(half[: len(half) // 2])
                raise KeyboardInterrupt
            left = None if left is None else left - 1
            return original(self, path, *arguments, **options)

        return call

    for name in ("put_file", "mv", "rm_file"):
        monkeypatch.setattr(LocalFileSystem, name, counted(name))
    steps, wholes = set(), set()
    for number in itertools.count():
        place = tmp_path / str(number)
        storage = Storage((place / "bucket").as_uri())
        trained(place / "run", 2)
        storage.push(place / "run", "run")
        trained(place / "run", 4, finished=finished)
        left = number
        with suppress(KeyboardInterrupt):
            storage.push(place / "run", "run")
            break
        left = None
        storage.fetch("run", place / "fetched")
        with records.RunFolder.open(place / "fetched", CONFIG) as run:
            wholes.add(run.result is not None)
            if run.result is None:
                steps.add(load(run.checkpoints, lambda state, run=run: run.metrics.lacks(state["epoch"])).step)
            else:
                assert [row["epoch"] for row in run.metrics] == [0, 1, 2, 3]
                assert (place / "fetched" / "receipt.json").is_file()
        storage.push(place / "run", "run")
        storage.fetch("run", place / "again")
        assert contents(place / "again") == contents(place / "run")
    assert number > 6
    assert (steps, wholes) == (({2}, {False, True}) if finished else ({2, 4}, {False}))


def test_changed_tensors_of_the_same_size_are_sent_and_unchanged_ones_are_not(storage, tmp_path, monkeypatch):
    """A killed worker may leave a checkpoint and weights; repeated on a GPU, the training may give others."""
    sent, original = [], Storage._put
    monkeypatch.setattr(
        Storage, "_put", lambda self, path, target: sent.append(path.name) or original(self, path, target)
    )
    tensors = ["best.safetensors", "checkpoint-000000002.safetensors"]
    for value in (1.0, 2.0):
        state = {"weight": torch.full((3,), value)}
        with records.RunFolder.open(tmp_path / "a", CONFIG) as run:
            run.save_weights(state)
            save(run.checkpoints, 2, state)
        for expected in (tensors, []):
            sent.clear()
            storage.push(tmp_path / "a", "run")
            assert [name for name in sent if name in tensors] == expected
    storage.fetch("run", tmp_path / "b")
    assert contents(tmp_path / "b") == contents(tmp_path / "a")


def test_names_that_lead_out_of_the_folder_are_not_fetched(tmp_path):
    storage = Storage("memory://bucket/runs")
    system = fsspec.filesystem("memory")
    system.pipe_file("/bucket/runs/run/../../evil.txt", b"evil")
    system.pipe_file("/bucket/runs/run/config.json", b"{}")
    try:
        storage.fetch("run", tmp_path / "deep" / "run")
    finally:
        system.rm("/bucket", recursive=True)
    assert paths(tmp_path) == ["deep/run/config.json"]


def test_a_storage_is_pickled_as_its_url(tmp_path):
    storage = Storage((tmp_path / "bucket").as_uri())
    trained(tmp_path / "a", 1)
    storage.push(tmp_path / "a", "run")
    other = pickle.loads(pickle.dumps(storage))
    assert vars(other) == {"url": storage.url}
    assert other.fetch("run", tmp_path / "b")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("xyz://bucket/runs", "xyz://bucket/runs is no storage that fsspec supports: "),
        ("adl://bucket/runs", "adl://bucket/runs cannot be opened: "),  # its library is not installed
    ],
)
def test_a_url_that_cannot_be_opened_is_a_one_line_error(url, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        Storage(url).gather(["table/run"], tmp_path)
    assert "\n" not in str(caught.value)


def test_a_storage_that_does_not_answer_is_a_one_line_error(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no route\nand more")  # libraries of storages may raise any exception

    monkeypatch.setattr(LocalFileSystem, "find", fail)
    storage = Storage((tmp_path / "bucket").as_uri())
    with pytest.raises(StorageError) as caught:
        storage.fetch("run", tmp_path)
    assert str(caught.value) == f"cannot read {storage.url}: RuntimeError: no route"


def test_the_check_of_a_storage_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    good = Storage((tmp_path / "bucket").as_uri())
    good.check()
    assert paths(tmp_path) == []

    missing = Storage("file:///nowhere-at-all/runs")
    with pytest.raises(StorageError) as caught:
        missing.check()
    assert str(caught.value) == (
        "cannot write file:///nowhere-at-all/runs: FileNotFoundError: there is no /nowhere-at-all: make it, or give "
        "another URL"
    )
    assert not Path("/nowhere-at-all").exists()


def test_a_memory_url_is_refused_as_a_storage():
    with pytest.raises(ValueError, match="memory://x is the memory of one process, and workers are others"):
        storage_of("memory://x")
