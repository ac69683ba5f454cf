"""Atomic writing of files, also through links and to pipes, and reading up to a maximum size."""

import errno
import os
import threading

import pytest

from bisam.lab.files import UnreadableError, explained, read_file, write_atomically


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("before", [b"old", None])
def test_a_write_through_links_replaces_the_target_and_keeps_the_links(before, tmp_path):
    for folder in ("disk", "here"):
        (tmp_path / folder).mkdir()
    file, link, chain = tmp_path / "disk" / "file", tmp_path / "here" / "link", tmp_path / "here" / "chain"
    link.symlink_to("../disk/file")
    chain.symlink_to(link)
    if before is not None:
        file.write_bytes(before)
    write_atomically(chain, b"n", memoryview(b"ew"))
    assert file.read_bytes() == b"new"
    assert (os.readlink(link), os.readlink(chain)) == ("../disk/file", str(link))
    assert (names(tmp_path / "disk"), names(tmp_path / "here")) == (["file"], ["chain", "link"])


def test_a_failed_write_through_a_link_keeps_the_old_contents_and_leaves_no_draft(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")

    def fail(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file", "link"]


def test_contents_are_synced_before_the_rename_and_the_folder_before_the_return(tmp_path, monkeypatch):
    """A loss of power keeps what was synced: the contents, then the folder with the new name."""
    path, synced = tmp_path / "file", []
    path.write_bytes(b"old")

    def sync(handle):
        synced.append((os.path.samestat(os.fstat(handle), tmp_path.stat()), path.read_bytes()))

    monkeypatch.setattr(os, "fsync", sync)
    write_atomically(path, b"new")
    assert synced == [(False, b"old"), (True, b"new")]


def test_an_interrupted_write_leaves_no_draft(tmp_path, monkeypatch):
    def interrupt(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"new")
    assert names(tmp_path) == []


@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_is_written_to_and_stays_a_pipe(linked, tmp_path):
    pipe, path, got = tmp_path / "pipe", tmp_path / ("link" if linked else "pipe"), []
    os.mkfifo(pipe)
    if linked:
        path.symlink_to(pipe)
    before = names(tmp_path)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)  # waits for a writer
    reader.start()
    write_atomically(path, b"a", b"", memoryview(b"b"))
    reader.join(120)
    assert got == [b"ab"]
    assert pipe.is_fifo()
    assert names(tmp_path) == before


def test_a_file_of_the_maximum_size_is_read_and_a_larger_one_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"1234")
    assert read_file(tmp_path / "file", 4) == b"1234"
    with pytest.raises(UnreadableError, match="it has 4 bytes, and at most 3 are read"):
        read_file(tmp_path / "file", 3)


def test_the_error_for_a_too_long_file_name_suggests_a_shorter_one(tmp_path):
    with pytest.raises(OSError, match="File name too long") as raised:
        write_atomically(tmp_path / ("x" * 300), b"")
    message = explained(raised.value, "cannot write it")
    assert message.startswith("cannot write it: File name too long. Give a shorter one, or fewer changes")
