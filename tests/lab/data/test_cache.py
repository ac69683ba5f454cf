import json

import pytest
import torch

from bisam.lab.data import DataError, load
from bisam.lab.data import cache as caching


@pytest.fixture
def lines():
    return []


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def no_hub(monkeypatch):
    def download(dataset, split):
        raise DataError(f"{dataset.hub} could not be downloaded")

    monkeypatch.setattr(caching.hub, "download", download)


@pytest.fixture
def no_decoding(monkeypatch):
    def start():
        monkeypatch.setattr(caching.parquet, "decode", lambda *_: pytest.fail("decoded again"))

    return start


def same(a, b):
    return all(
        torch.equal(getattr(a, split).pixels, getattr(b, split).pixels)
        and torch.equal(getattr(a, split).labels, getattr(b, split).labels)
        for split in ("train", "test")
    )


def test_images_are_decoded_only_once(tiny, cache, lines, no_decoding):
    first = load("tiny", tiny, cache, lines.append)
    no_decoding()
    again = load("tiny", tiny, cache, lines.append)
    assert same(first, again)
    assert first.checksum == again.checksum
    assert len(lines) == 3  # one for each file, only the first time


def test_a_cached_data_set_loads_without_its_original_files(tiny, cache, lines, no_decoding):
    first = load("tiny", tiny, cache, lines.append)
    no_decoding()
    for path in tiny.iterdir():
        path.unlink()
    assert same(first, load("tiny", cache=cache, log=lines.append))


def test_the_sidecar_file_records_contents_checksum_and_source_files(tiny, cache, lines):
    data = load("tiny", tiny, cache, lines.append)
    about = json.loads((cache / "tiny" / "train.json").read_text())
    assert about["sha256"] == data.train.checksum
    assert (about["name"], about["split"], about["samples"]) == ("tiny", "train", 24)
    assert [file["name"] for file in about["files"]] == [f"train-0000{n}-of-00002.parquet" for n in range(2)]
    assert [file["bytes"] for file in about["files"]] == [path.stat().st_size for path in sorted(tiny.glob("train*"))]


def test_loading_leaves_only_complete_files_in_the_cache(tiny, cache, lines):
    load("tiny", tiny, cache, lines.append)
    names = sorted(path.name for path in (cache / "tiny").iterdir())
    assert names == ["test.json", "test.safetensors", "train.json", "train.safetensors"]


def test_an_interrupted_write_keeps_the_old_file_and_leaves_no_draft(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write():
        with caching._draft(path) as draft:
            draft.write_text("new")
            raise RuntimeError("broke off")

    with pytest.raises(RuntimeError, match="broke off"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_partial_data_set_has_a_cache_of_its_own(tiny, cache, lines):
    load("tiny", tiny, cache, lines.append, partial=True)
    assert [path.name for path in cache.iterdir()] == ["part-of-tiny"]


def test_the_checksum_depends_on_the_contents_and_not_on_the_files(tmp_path, hub_layout, register, lines):
    register(hub_layout.dataset)
    checksums = set()
    for shards, kind in ((1, "PNG"), (3, "WEBP")):
        folder = tmp_path / kind
        for split in ("train", "test"):
            hub_layout.write_split(folder, split, shards, kind)
        checksums.add(load("tiny", folder, tmp_path / f"{kind} cache", lines.append).checksum)
    assert len(checksums) == 1


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a bit": ("train.safetensors", flip_a_bit, "is damaged: its contents"),
    "truncated": ("train.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-9]), "is damaged"),
    "empty": ("train.safetensors", lambda path: path.write_bytes(b""), "is damaged"),
    "sidecar": ("train.json", lambda path: path.write_text("{"), "is damaged: train.json cannot be read"),
    "version": ("train.json", lambda path: path.write_text('{"version": 0}'), "was written by another version"),
    "no tensors": ("train.safetensors", lambda path: path.unlink(), None),
    "no sidecar": ("train.json", lambda path: path.unlink(), None),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_reported_and_rebuilt(tiny, cache, lines, no_decoding, damage):
    file, harm, message = DAMAGE[damage]
    first = load("tiny", tiny, cache, lines.append)
    harm(cache / "tiny" / file)
    lines.clear()
    assert same(first, load("tiny", tiny, cache, lines.append))
    if message is not None:
        assert "train.safetensors" in lines[0]
        assert message in lines[0]
        assert "decoded again" in lines[0]
    assert sum("decoding" in line for line in lines) == 2  # its two files, and not that of the undamaged split
    no_decoding()
    assert same(first, load("tiny", tiny, cache, lines.append))


def test_a_damaged_cache_is_rebuilt_from_its_original_folder(tiny, cache, lines, no_hub):
    first = load("tiny", tiny, cache, lines.append)
    flip_a_bit(cache / "tiny" / "test.safetensors")
    assert same(first, load("tiny", cache=cache, log=lines.append))


def test_a_damaged_cache_without_a_source_is_refused(tiny, cache, lines, no_hub):
    load("tiny", tiny, cache, lines.append)
    tiny.rename(tiny.with_name("elsewhere"))
    flip_a_bit(cache / "tiny" / "test.safetensors")
    with pytest.raises(DataError, match=r"test\.safetensors is damaged.*are not there: nobody/tiny could not be"):
        load("tiny", cache=cache, log=lines.append)


def test_loading_without_a_cache_and_without_a_source_is_refused(tiny, cache, lines, no_hub):
    with pytest.raises(DataError, match=r"^nobody/tiny could not be downloaded"):
        load("tiny", cache=cache, log=lines.append)


def test_changed_source_files_are_decoded_again(tiny, cache, lines, hub_layout):
    first = load("tiny", tiny, cache, lines.append)
    pixels, labels = hub_layout.contents("test")
    images = [hub_layout.encoded(image) for image in pixels[::-1]]
    hub_layout.write_file(tiny / "test-00000-of-00001.parquet", images, labels)
    lines.clear()
    second = load("tiny", tiny, cache, lines.append)
    assert "was made of other files: its files are decoded again" in lines[0]
    assert torch.equal(second.test.pixels, first.test.pixels.flip(0))
    assert first.checksum != second.checksum


def test_a_cache_that_cannot_be_written_is_reported_and_the_images_are_loaded(tiny, tmp_path, lines):
    (tmp_path / "file").write_text("")
    assert len(load("tiny", tiny, tmp_path / "file", lines.append).train) == 24
    assert any("cannot be written" in line for line in lines)


def test_the_cache_folder_is_bisam_cache_or_else_in_xdg_cache_home_or_else_in_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("BISAM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert caching.default_folder() == tmp_path / ".cache" / "bisam"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert caching.default_folder() == tmp_path / "caches" / "bisam"
    monkeypatch.setenv("BISAM_CACHE", str(tmp_path / "here"))
    assert caching.default_folder() == tmp_path / "here"


def test_load_uses_the_default_cache_and_logs_to_stderr(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("BISAM_CACHE", str(tmp_path / "here"))
    load("tiny", tiny)
    assert (tmp_path / "here" / "tiny" / "train.safetensors").exists()
    assert "decoding train-00000-of-00002.parquet" in capsys.readouterr().err


# Data sets whose checksum is known.


@pytest.fixture
def known_sum(tiny, cache, lines, register, hub_layout):
    return register(hub_layout.dataset, checksum=load("tiny", tiny, cache, lines.append).checksum)


def test_data_with_the_known_checksum_are_accepted_from_files_and_cache(tiny, cache, lines, known_sum, no_decoding):
    assert load("tiny", tiny, cache / "new", lines.append).checksum == known_sum.checksum
    no_decoding()
    assert load("tiny", cache=cache, log=lines.append).checksum == known_sum.checksum


def one_bit(pixels, labels):
    pixels[7, 0, 0, 0] ^= 1


def two_swapped(pixels, labels):
    pixels[[0, 4]], labels[[0, 4]] = pixels[[4, 0]], labels[[4, 0]]  # of one class, so that only the order differs


@pytest.mark.parametrize("damage", [one_bit, two_swapped])
def test_damaged_or_reordered_data_are_refused_from_files_and_from_a_cache(
    damage, tiny, cache, lines, known_sum, hub_layout
):
    pixels, labels = hub_layout.contents("train")
    damage(pixels, labels)
    for path in tiny.glob("train*"):
        path.unlink()
    hub_layout.write_file(tiny / "train-00000-of-00001.parquet", [*map(hub_layout.encoded, pixels)], labels)
    for folder, where in ((tiny, str(tiny)), (None, "nobody/tiny")):
        with pytest.raises(DataError) as raised:
            load("tiny", folder, cache, lines.append)
        assert str(raised.value).startswith(f"{where}: the decoded contents have the sha256 ")
        assert f"those of tiny have {known_sum.checksum[:12]}…: images or labels are damaged" in str(raised.value)
        assert f"remove the cache {cache / 'tiny'}" in str(raised.value)
    assert load("tiny", tiny, cache, lines.append, partial=True)  # partial data are not compared
