import io
import struct
import subprocess
import zlib
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from bisam.lab.data import DataError, load
from bisam.lab.data.parquet import ParquetShard


def silent(_):
    pass


@pytest.fixture
def read(tmp_path):
    return lambda folder: load("tiny", folder, tmp_path / "cache", silent)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("subfolder", [".", "data", "plain_text", "tiny"])
@pytest.mark.parametrize("shards", [1, 3])
def test_decoded_images_equal_the_encoded_ones(tmp_path, hub_layout, register, read, kind, subfolder, shards):
    register(hub_layout.dataset)
    for split in ("train", "test"):
        hub_layout.write_split(tmp_path / subfolder, split, shards, kind)
    data = read(tmp_path)
    for split, found in (("train", data.train), ("test", data.test)):
        pixels, labels = hub_layout.contents(split)
        assert torch.equal(found.pixels, torch.from_numpy(pixels))
        assert torch.equal(found.labels, torch.from_numpy(labels))
        assert found.pixels.is_contiguous()
    assert (data.name, data.classes, data.mean, data.std) == ("tiny", 4, (0.5,) * 3, (0.25,) * 3)


def test_the_named_data_set_is_read_from_a_folder_with_several(tmp_path, hub_layout, register, read):
    register(hub_layout.dataset)
    for split in ("train", "test"):
        hub_layout.write_split(tmp_path / "cifar100", split, label="fine_label")
        hub_layout.write_split(tmp_path / "tiny", split)
    assert len(read(tmp_path).train) == len(hub_layout.contents("train")[1])


def test_image_and_label_columns_may_have_other_names(tmp_path, hub_layout, register, read):
    register(hub_layout.dataset, image="image", label="fine_label")
    for split in ("train", "test"):
        hub_layout.write_split(tmp_path, split, image="image", label="fine_label")
    assert torch.equal(read(tmp_path).train.labels, torch.from_numpy(hub_layout.contents("train")[1]))


def test_the_test_split_may_be_stored_as_validation(tmp_path, hub_layout, register, read):
    register(hub_layout.dataset, files={"train": "train", "test": "validation"})
    hub_layout.write_split(tmp_path, "train")
    hub_layout.write_split(tmp_path, "test")
    (tmp_path / "test-00000-of-00001.parquet").rename(tmp_path / "validation-00000-of-00001.parquet")
    assert len(read(tmp_path).test) == 8


def test_decoding_is_reported_file_by_file(tiny, tmp_path):
    lines = []
    load("tiny", tiny, tmp_path / "cache", lines.append)
    assert len(lines) == 3
    assert "train-00001-of-00002.parquet, 12 images, file 2 of 2" in lines[1]


# Bad input: each error names the file and the remedy.


def refused(read, folder, message):
    with pytest.raises(DataError, match=f"(?s){message}"):
        read(folder)


def test_a_missing_folder_is_refused(tiny, read):
    refused(read, tiny / "nowhere", r"nowhere is not a folder: give the one that has train-\*\.parquet")


def test_a_folder_without_the_split_is_refused(tiny, read):
    (tiny / "test-00000-of-00001.parquet").unlink()
    refused(read, tiny, r"tiny has no test-\*\.parquet.*tiny needs train-\*\.parquet and test-\*\.parquet")


def test_a_missing_shard_is_refused(tiny, read):
    (tiny / "train-00000-of-00002.parquet").unlink()
    refused(read, tiny, "has no train-00000-of-00002.parquet: copy all 2 files")


def test_shards_of_two_versions_are_refused(tiny, hub_layout, read):
    hub_layout.write_split(tiny, "train", shards=1)
    refused(read, tiny, "train-00000-of-00001.parquet beside train-00000-of-00002.parquet: keep the files of one")


@pytest.mark.parametrize("kept", [0, 3, 100, -1])
def test_a_truncated_file_is_refused(tiny, read, kept):
    path = tiny / "train-00001-of-00002.parquet"
    path.write_bytes(path.read_bytes()[:kept])
    refused(read, tiny, "train-00001-of-00002.parquet is not a complete Parquet file .*get it again")


def test_a_file_that_is_not_parquet_is_refused(tiny, read):
    (tiny / "test-00000-of-00001.parquet").write_text("<html>not found</html>" * 100)
    refused(read, tiny, "test-00000-of-00001.parquet is not a complete Parquet file")


def test_a_file_with_overwritten_pages_is_refused(tiny, read):
    path = tiny / "train-00000-of-00002.parquet"
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    path.write_bytes(data)
    refused(read, tiny, "train-00000-of-00002.parquet")


@pytest.mark.parametrize("columns", [{"image": "image"}, {"label": "coarse_label"}])
def test_wrong_columns_are_refused(tiny, hub_layout, read, columns):
    hub_layout.write_split(tiny, "test", **columns)
    (name,) = columns.values()
    refused(read, tiny, f"test-00000-of-00001.parquet has no column .*, it has .*{name}.*tiny has img and label")


def test_images_that_are_not_structs_of_bytes_are_refused(tiny, read):
    pq.write_table(pa.table({"img": ["a.png"] * 8, "label": [0] * 8}), tiny / "test-00000-of-00001.parquet")
    refused(read, tiny, "test-00000-of-00001.parquet: column 'img' must be a struct of the bytes.*got string")


def test_labels_that_are_not_integers_are_refused(tiny, hub_layout, read):
    images = [hub_layout.encoded(image) for image in hub_layout.contents("test")[0]]
    hub_layout.write_file(tiny / "test-00000-of-00001.parquet", images, ["cat"] * 8)
    refused(read, tiny, "column 'label' must have integers.*got string")


@pytest.mark.parametrize("wrong", [-1, 4, None])
def test_a_label_out_of_range_is_refused(tiny, hub_layout, read, wrong):
    pixels, labels = hub_layout.contents("test")
    labels = labels.tolist()
    labels[6] = wrong
    hub_layout.write_file(tiny / "test-00000-of-00001.parquet", [hub_layout.encoded(x) for x in pixels], labels)
    refused(read, tiny, f"test-00000-of-00001.parquet, row 6: the label is {wrong} and tiny has 0 … 3")


def test_the_wrong_number_of_samples_is_refused(tiny, hub_layout, register, read):
    register(hub_layout.dataset, samples={"train": 25, "test": 8})
    refused(read, tiny, "the train split has 24 samples in 2 files and that of tiny has 25: files are missing")


def test_images_of_another_size_are_refused(tiny, hub_layout, register, read):
    register(hub_layout.dataset, size=7)
    refused(read, tiny, "train-00000-of-00002.parquet, row 0: the image is 6×6 and those of tiny are 7×7")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "the image is damaged"),
        (lambda data: data[:50] + bytes(20) + data[70:], "the image is damaged"),
        (lambda data: b"", "the image is damaged"),
        (lambda data: None, "the image is not in the file"),
    ],
    ids=["truncated", "overwritten", "empty", "missing"],
)
def test_a_damaged_image_is_refused(tiny, hub_layout, read, damage, message):
    pixels, labels = hub_layout.contents("test")
    images = [hub_layout.encoded(image) for image in pixels]
    images[5] = damage(images[5])
    hub_layout.write_file(tiny / "test-00000-of-00001.parquet", images, labels)
    refused(read, tiny, f"test-00000-of-00001.parquet, row 5: {message}")


@pytest.mark.parametrize("kind", ["EPS", "BMP", "TIFF", "GIF"])
def test_other_image_formats_are_refused_before_decoding(kind, tiny, hub_layout, read, monkeypatch):
    pixels, labels = hub_layout.contents("test")
    images, buffer = [hub_layout.encoded(image) for image in pixels], io.BytesIO()
    Image.fromarray(pixels[5].transpose(1, 2, 0)).save(buffer, format=kind)
    images[5] = buffer.getvalue()
    hub_layout.write_file(tiny / "test-00000-of-00001.parquet", images, labels)
    started = []
    monkeypatch.setattr(subprocess, "check_call", lambda *command, **_: started.append(command))
    refused(read, tiny, "row 5: the image is damaged, or not one of PNG, JPEG, WEBP")
    assert started == []


@pytest.mark.parametrize(("side", "message"), [(6, "those of tiny are 6×6"), (None, "at most 89,000,000 pixels are")])
def test_the_size_of_an_image_is_checked_before_it_is_decoded(side, message, hub_layout, tmp_path, monkeypatch):
    path = tmp_path / "test.parquet"
    head = struct.pack(">IIBBBBB", 13_000, 13_000, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    hub_layout.write_file(path, [b"\x89PNG\r\n\x1a\n" + b"".join(chunks)], [0])
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("it was decoded"))
    shard = ParquetShard(path, replace(hub_layout.dataset, size=side))
    with pytest.raises(DataError, match=f"row 0: the image is 13000×13000.*{message}"):
        next(shard.samples(0))


def test_labels_that_are_not_balanced_as_described_are_refused(tiny, hub_layout, read):
    pixels, labels = hub_layout.contents("test")
    images = [hub_layout.encoded(image) for image in pixels]
    hub_layout.write_file(tiny / "test-00000-of-00001.parquet", images, labels // 2)
    refused(read, tiny, "class 0 has 4 samples in the test split and tiny has 2 of each")


def test_pixels_whose_means_are_not_as_described_are_refused(tiny, hub_layout, read):
    pixels, labels = hub_layout.contents("test")
    images = [hub_layout.encoded(image // 2) for image in pixels]
    hub_layout.write_file(tiny / "test-00000-of-00001.parquet", images, labels)
    refused(read, tiny, r"channels of the test split have means 0\.2\d\d.*those of tiny have 0\.5")
