import hashlib
import re

import pytest
import torch

from bisam.lab.data import DATA_SETS, Images, ImageSplits, Stream, find_dataset, load


def images(pixels=0, label=0, count=3):
    return Images(torch.full((count, 3, 4, 4), pixels, dtype=torch.uint8), torch.full((count,), label))


def data_set(train, test):
    return ImageSplits("some", train, test, 2, (0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize(
    ("name", "near"), [("CIFAR-10", "cifar10"), ("cifar", "cifar10, cifar100"), ("image-net", "imagenet")]
)
def test_an_unknown_name_is_refused_with_the_nearest_and_all_names(name, near):
    with pytest.raises(ValueError, match=rf"{name!r}.*nearest names are {near}.*choose from {', '.join(DATA_SETS)}"):
        load(name)


def test_an_unknown_name_without_a_near_one_is_refused_with_all_names():
    with pytest.raises(ValueError, match=f"'mnist': choose from {', '.join(DATA_SETS)}"):
        load("mnist")


@pytest.mark.parametrize("name", [name for name in DATA_SETS if name != "digits"])
def test_a_data_set_is_also_found_by_its_name_in_the_hub(name):
    assert find_dataset(DATA_SETS[name].hub) is find_dataset(name)


def test_cifar100_has_statistics_of_its_own():
    assert find_dataset("cifar100").mean != find_dataset("cifar10").mean
    assert find_dataset("cifar100").std != find_dataset("cifar10").std


def test_loading_a_data_set_too_large_for_memory_is_refused_in_favour_of_stream():
    with pytest.raises(ValueError, match=re.escape("use Stream('imagenet'")):
        load("imagenet")


def test_streaming_a_data_set_without_files_is_refused_in_favour_of_load():
    with pytest.raises(ValueError, match=re.escape("use load('digits')")):
        Stream("digits", batch=2, device="cpu", seed=0, augment=False)


def test_the_checksum_is_the_sha256_of_shape_pixels_and_labels():
    pixels, labels = torch.arange(96).to(torch.uint8).view(2, 3, 4, 4), torch.tensor([7, 1])
    contents = b"(2, 3, 4, 4)" + bytes(range(96)) + (7).to_bytes(8, "little") + (1).to_bytes(8, "little")
    expected = hashlib.sha256(contents).hexdigest()
    assert Images(pixels, labels).checksum == expected
    in_another_order_of_memory = pixels.to(memory_format=torch.channels_last)
    assert Images(in_another_order_of_memory, labels).checksum == expected


def test_other_pixels_labels_or_shapes_have_another_checksum():
    found = {images().checksum, images(pixels=1).checksum, images(label=1).checksum, images(count=4).checksum}
    assert len(found) == 4
    assert images().checksum == images().checksum
    flat = Images(torch.zeros(3, 1, 3, 16, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
    assert flat.checksum not in found


def test_the_checksum_of_a_data_set_depends_on_both_splits():
    a, b = images(), images(label=1)
    assert len({data_set(a, a).checksum, data_set(a, b).checksum, data_set(b, a).checksum}) == 3


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64), "uint8.*float32"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), r"\(2, 4, 4\)"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2), "int64.*float32"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), r"2 images.*\(3,\)"),
    ],
)
def test_images_must_be_uint8_with_one_label_each(pixels, labels, message):
    with pytest.raises(ValueError, match=message):
        Images(pixels, labels)
