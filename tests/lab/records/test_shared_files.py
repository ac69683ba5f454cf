"""Files with hard links, folders in place of files, and files that change while they are read."""

import os
import socket
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bisam.lab import files
from bisam.lab.cli import app
from bisam.lab.records import RecordError, RunFolder, RunInUse, checkpoint, digests, read
from bisam.lab.records.checkpoint import CheckpointError
from bisam.lab.records.digests import sha256_of
from bisam.lab.records.lock import Lock

CONFIG = {"model": "resnet20", "seed": 1}


def bisam(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "300"})


@pytest.fixture
def run(tmp_path):
    with RunFolder.open(tmp_path / "run", CONFIG) as opened:
        opened.metrics.append({"epoch": 0})
    return tmp_path / "run"


def test_a_hard_linked_lock_is_refused_and_the_other_file_is_unchanged(run, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (run / "lock").unlink()
    (run / "lock").hardlink_to(tmp_path / "mine")
    with pytest.raises(RecordError, match=r"lock is another file too \(a hard link\): remove it, or give another"):
        RunFolder.open(run, CONFIG)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_lock_contains_only_the_process_id_of_its_owner(run):
    (run / "lock").write_text("1234567890123\n")  # of an earlier owner
    with RunFolder.open(run, CONFIG):
        assert (run / "lock").read_text() == f"{os.getpid()}\n"
        before = os.dup(0)  # the lowest number that is free
        os.close(before)
        with pytest.raises(RunInUse, match=f"in use by process {os.getpid()}: wait for it"):
            RunFolder.open(run, CONFIG)
        after = os.dup(0)
        os.close(after)
        assert after == before  # the refused opening left no file open


def test_appending_to_hard_linked_metrics_does_not_change_the_copy(run, tmp_path):
    """As after cp -al, which copies a folder as hard links."""
    copy = tmp_path / "copy.jsonl"
    copy.hardlink_to(run / "metrics.jsonl")
    before = copy.read_bytes()
    with RunFolder.open(run, CONFIG) as opened:
        opened.metrics.append({"epoch": 1})
        assert [row["epoch"] for row in opened.metrics] == [0, 1]
    assert copy.read_bytes() == before


def test_checkpoints_behind_a_link_are_neither_read_nor_written_nor_removed(tmp_path):
    other = tmp_path / "other"
    checkpoint.save(other, 1, {"x": 1})
    (tmp_path / "checkpoints").symlink_to(other)
    with pytest.raises(CheckpointError, match="checkpoints is a link, which is not followed: remove it, or put"):
        checkpoint.load(tmp_path / "checkpoints")
    for step in (2, 3):
        with pytest.raises(CheckpointError, match="is a link, which is not followed"):
            checkpoint.save(tmp_path / "checkpoints", step, {"x": step})
    assert [path.name for path in other.iterdir()] == ["checkpoint-000000001.safetensors"]


def test_a_folder_with_the_name_of_a_draft_is_tolerated(run):
    for name in ("config.json.tmp", "metrics.jsonl.0123abcd.tmp", "checkpoints/checkpoint-000000001.safetensors.tmp"):
        (run / name).mkdir(parents=True)
    with RunFolder.open(run, CONFIG) as opened:
        checkpoint.save(opened.checkpoints, 1, {"x": 1})
        assert checkpoint.load(opened.checkpoints).step == 1


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "result.json", "receipt.json", "best.safetensors"])
def test_a_run_with_a_folder_in_place_of_a_file_is_refused_on_opening(name, run):
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    with pytest.raises(RecordError, match=f"{name} is a folder"):
        RunFolder.open(run, CONFIG)


def test_metrics_that_are_too_large_are_refused(run):
    os.truncate(run / "metrics.jsonl", 2**40)
    with pytest.raises(RecordError, match=r"metrics.jsonl cannot be used: it has 1,099,511,627,776 bytes, .* Move it"):
        RunFolder.open(run, CONFIG)


@pytest.mark.parametrize("content", [b"not a number", b"1\n" * 2**20, b"\xff\x1b[2J", b""])
def test_an_invalid_owner_of_a_lock_is_reported_as_unknown(content, tmp_path):
    lock = Lock(tmp_path / "lock")
    (tmp_path / "lock").write_bytes(content)
    with pytest.raises(RunInUse, match="in use by process unknown: wait for it"):
        Lock(tmp_path / "lock")
    lock.release()


def test_a_digest_covers_the_file_as_it_was_when_it_was_opened(tmp_path, monkeypatch):
    """A file that grows as fast as it is read would never end."""
    path = tmp_path / "file"
    path.write_bytes(b"a" * 100)
    expected = sha256_of(path)

    class Growing:
        def __init__(self):
            self.digest, self.chunks = sha256(), 0

        def update(self, chunk):
            self.chunks += 1
            self.digest.update(chunk)
            with path.open("ab") as file:
                file.write(b"b" * (self.chunks < 5))

        def hexdigest(self):
            return self.digest.hexdigest()

    sha256 = digests.hashlib.sha256
    monkeypatch.setattr(digests.hashlib, "sha256", Growing)
    assert sha256_of(path) == expected


def test_a_digest_does_not_block_on_a_pipe_that_replaced_a_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    os.mkfifo(path)
    monkeypatch.setattr(files, "check_file", lambda *_: None)  # as if it was still a file at this check
    found = []

    def digest():
        try:
            sha256_of(path)
        except OSError as error:
            found.append(str(error))

    thread = threading.Thread(target=digest, daemon=True)
    thread.start()
    thread.join(30)
    assert found == ["it is a named pipe, not a file"]


def test_a_run_folder_that_links_to_itself_is_an_error_and_not_an_uncounted_run(tmp_path):
    folder = tmp_path / "demo" / "noise40-sgd-seed0+epochs=1"
    folder.parent.mkdir()
    folder.symlink_to(folder.name)
    assert read(folder).not_counted == ""
    done = bisam("train", "demo/40%/sgd", "--set", "epochs=1", "--device", "cpu", "--runs", tmp_path)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"Error: cannot use {folder} for a run: ")


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "result.json", "receipt.json", "not-counted.txt"])
@pytest.mark.parametrize("kind", ["socket", "folder"])
def test_sockets_and_folders_in_place_of_records_are_reported(kind, name, run, monkeypatch):
    (run / name).unlink(missing_ok=True)
    monkeypatch.chdir(run)  # the path of a socket is short
    if kind == "folder":
        Path(name).mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(name)
    assert any(f"{name}: it cannot be read (it is a {kind}, not a file)" in line for line in read(run).problems)
