import io
import pickle
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bisam.lab.config import Config
from bisam.lab.data import DataError, DataSet, Stream, sources, split
from bisam.lab.data.shards import Shard
from bisam.lab.data.stream import centre, random_box, random_part

SIZE = 14
TINYNET = DataSet(
    "tinynet",
    classes=3,
    samples={"train": 41, "test": 9},
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    size=None,
    hub="nobody/tinynet",
    files={"train": "train", "test": "validation"},
)


def picture(number):
    """A gradient in one of several sizes and modes."""
    width, height = 18 + 7 * (number % 5), 16 + 9 * (number % 4)
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    image = Image.fromarray(np.stack([across, down, np.full_like(down, 6 * number % 256)], 2).astype(np.uint8))
    return image.convert({1: "L", 2: "RGBA", 3: "CMYK"}.get(number % 9, "RGB"))


def kind(number):
    return {2: "PNG"}.get(number % 9, "JPEG")


@pytest.fixture
def folder(tmp_path, hub_layout, register):
    register(TINYNET)
    for name, parts in (("train", [range(20), range(20, 41)]), ("validation", [range(9)])):
        for shard, numbers in enumerate(parts):
            images = [hub_layout.encoded(picture(number), kind(number)) for number in numbers]
            path = tmp_path / "data" / f"{name}-{shard:05d}-of-{len(parts):05d}.parquet"
            hub_layout.write_file(path, images, np.array([number % 3 for number in numbers]), "image", row_group=4)
    return tmp_path


@pytest.fixture
def stream(folder):
    def made(**options):
        usual = {"batch": 6, "device": "cpu", "seed": 0, "augment": True, "size": SIZE, "workers": 0, "mixing": 2}
        return Stream("tinynet", folder, **{**usual, **options})

    return made


def equal(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, z) and torch.equal(y, w) for (x, y), (z, w) in zip(a, b, strict=True)
    )


def pixels_of(x):
    """The normalised images as uint8 (B, H, W, C) again."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (TINYNET.mean, TINYNET.std))
    return ((x * std + mean) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*worker processes:UserWarning")
def test_worker_processes_do_not_change_the_batches(stream):
    without_workers, with_workers = stream(), stream(workers=2)
    expected = list(without_workers.epoch(1))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert equal(expected, list(with_workers.epoch(1)))
    assert equal(expected[3:], list(with_workers.epoch(1, start=3)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*worker processes:UserWarning")
def test_a_damaged_image_is_reported_by_a_worker_with_its_file_and_row(folder, hub_layout, stream):
    images = [hub_layout.encoded(picture(number), kind(number)) for number in range(9)]
    images[7] = images[7][:100]
    path = folder / "data" / "validation-00000-of-00001.parquet"
    hub_layout.write_file(path, images, np.arange(9) % 3, "image", row_group=4)
    with pytest.raises(DataError, match=r"^\S+validation-00000-of-00001\.parquet, row 7: the image is damaged"):
        list(stream(split="test", augment=False, drop_last=False, workers=2).epoch(0))


def test_every_sample_appears_once_per_epoch_with_its_label(stream):
    made = stream(drop_last=False)
    order = made.order(0)
    assert sorted(order.tolist()) == list(range(41))
    labels = torch.cat([y for _, y in made.epoch(0)])
    assert torch.equal(labels, order % 3)
    assert (len(made), len(stream())) == (7, 6)
    assert [len(y) for _, y in made.epoch(0)] == [6] * 6 + [5]


def test_a_batch_reads_few_row_groups(stream):
    made = stream(mixing=2, batch=4)
    order = made.order(0)
    first = torch.tensor(made.samples.first)
    for rows in order[:40].view(10, 4):
        groups = torch.searchsorted(first, rows, right=True).unique()
        assert len(groups) <= 4  # two that are mixed, and two more where one mix ends and the next begins
    assert made.samples.first == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 41]
    assert not torch.equal(order, made.order(1))


def test_an_epoch_depends_only_on_the_seed_and_its_number(stream):
    first = list(stream().epoch(2))
    assert equal(first, list(stream().epoch(2)))
    assert not equal(first, list(stream().epoch(3)))
    assert not equal(first, list(stream(seed=1).epoch(2)))


def test_an_epoch_can_be_resumed_from_any_batch(stream):
    made = stream(drop_last=False)
    whole = list(made.epoch(4))
    for start in range(len(made) + 1):
        assert equal(whole[start:], list(made.epoch(4, start=start)))
    with pytest.raises(ValueError, match="start must be in 0 … 7"):
        made.epoch(4, start=8)


@pytest.mark.parametrize("steps", [None, 2, 9])
def test_epochs_have_the_configured_number_of_steps(folder, steps, monkeypatch):
    """Two epochs of 2 steps are the first 4 of 6 batches; one of 9 steps continues with the next pass over the data."""
    monkeypatch.setattr(sources, "Stream", partial(Stream, size=SIZE, workers=0))
    config = Config(data="tinynet", batch=6, validation=0.1, padding=0, epoch_steps=steps)
    loaders = sources.OnDisk("tinynet", folder).loaders(config, torch.device("cpu"))
    whole = sources.OnDisk("tinynet", folder).loaders(replace(config, epoch_steps=None), torch.device("cpu"))
    found = [batch for epoch in range(2) for batch in loaders.train.epoch(epoch)]
    expected = [batch for epoch in range(3) for batch in whole.train.epoch(epoch)]
    assert len(loaders.train) == (steps or 6)
    assert equal(found, expected[: 2 * (steps or 6)])


def test_the_augmentation_of_a_sample_depends_on_seed_epoch_and_row_but_not_on_its_batch(stream):
    def views(number=0, **options):
        made = stream(drop_last=False, **options)
        pixels = torch.cat([x for x, _ in made.epoch(number)])
        return {int(row): x for row, x in zip(made.order(number), pixels, strict=True)}

    few, many = views(batch=3), views(batch=20)
    assert all(torch.equal(few[row], many[row]) for row in range(41))
    for other in (views(number=1), views(seed=1)):
        assert not any(torch.equal(few[row], other[row]) for row in range(41))


def test_the_order_depends_on_seed_and_epoch_and_not_on_the_order_of_the_rows(stream):
    order = stream().order(0)
    assert not torch.equal(order, stream().order(1))
    assert not torch.equal(order, stream(seed=1).order(0))
    assert torch.equal(order, stream(rows=torch.arange(41).flip(0)).order(0))


def test_the_shards_of_two_ranks_make_up_each_batch(stream):
    whole, ranks = stream(), [stream(), stream()]
    for number, made in enumerate(ranks):
        made.shard = Shard(number, 2)
    for (x, y), *parts in zip(whole.epoch(0), *(made.epoch(0) for made in ranks), strict=True):
        assert [len(labels) for _, labels in parts] == [3, 3]
        assert equal([(x, y)], [tuple(map(torch.cat, zip(*parts, strict=True)))])


def test_evaluation_images_are_in_order_scaled_and_centre_cropped(stream):
    made = stream(split="test", augment=False, drop_last=False)
    x, y = (torch.cat(parts) for parts in zip(*made.epoch(0), strict=True))
    assert y.tolist() == [number % 3 for number in range(9)]
    again = torch.stack([torch.from_numpy(np.asarray(centre(rgb(number), SIZE)).copy()) for number in range(9)])
    assert torch.equal(pixels_of(x), again)


def rgb(number):
    buffer = io.BytesIO()
    picture(number).save(buffer, format=kind(number))
    return Image.open(buffer).convert("RGB")


def test_images_of_every_colour_mode_get_three_channels(stream):
    modes = {picture(number).mode for number in range(9)}
    assert modes == {"RGB", "L", "RGBA", "CMYK"}
    x, _ = next(stream(split="test", augment=False, batch=9).epoch(0))
    assert x.shape == (9, 3, SIZE, SIZE)
    grey = pixels_of(x)[1]
    assert torch.equal(grey[..., 0], grey[..., 1])
    assert torch.equal(grey[..., 0], grey[..., 2])


def test_the_centre_crop_is_seven_eighths_of_the_shorter_side():
    image = Image.fromarray(np.arange(512 * 256 * 3, dtype=np.uint32).astype(np.uint8).reshape(256, 512, 3))
    found = np.asarray(centre(image, 224))  # 256 is its shorter side already
    assert np.array_equal(found, np.asarray(image)[16:240, 144:368])
    assert centre(Image.new("RGB", (100, 37)), 224).size == (224, 224)


@given(width=st.integers(1, 600), height=st.integers(1, 600), seed=st.integers(0, 10**6))
def test_a_random_crop_box_is_inside_the_image_and_not_empty(width, height, seed):
    left, top, right, bottom = random_box(width, height, random.Random(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_random_crop_boxes_have_the_specified_areas_and_aspect_ratios():
    draws = random.Random(0)
    boxes = np.array([random_box(500, 400, draws) for _ in range(4000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, aspect = width * height / (500 * 400), width / height
    assert 0.079 < area.min() < 0.1
    assert 0.95 < area.max() <= 1
    assert 0.74 < aspect.min() < 0.76
    assert 1.32 < aspect.max() < 1.345
    small = area < 0.4  # these fit at the first attempt, whatever their shape
    assert area[small].mean() == pytest.approx(0.24, abs=0.01)
    assert np.log(aspect[small]).mean() == pytest.approx(0, abs=0.02)
    free = (500 - width[small], 400 - height[small])
    assert (boxes[small, 0] / free[0]).mean() == pytest.approx(0.5, abs=0.03)
    assert (boxes[small, 1] / free[1]).mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("size", "box"), [((1000, 10), (493, 0, 506, 10)), ((10, 1000), (0, 493, 10, 506))], ids=["wide", "tall"]
)
def test_an_image_too_elongated_for_a_random_crop_is_centre_cropped(size, box):
    class Largest(random.Random):
        def random(self):
            return 1.0

    assert random_box(*size, Largest()) == box


def test_half_of_the_random_crops_are_mirrored():
    image = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8)[None, :, None], (256, 1, 3)))
    parts = [np.asarray(random_part(image, 8, random.Random(seed))).astype(int) for seed in range(400)]
    mirrored = sum(part[0, 0, 0] > part[0, -1, 0] for part in parts)
    assert 160 < mirrored < 240  # four standard deviations


def test_a_stream_can_be_restricted_to_some_of_the_rows(stream):
    train, validation = split(range(41), 0.25, seed=0)
    both = [stream(rows=rows, drop_last=False) for rows in (train, validation)]
    orders = [made.order(0) for made in both]
    assert sorted(orders[0].tolist()) == train.tolist()
    assert sorted(orders[1].tolist()) == validation.tolist()
    labels = torch.cat([y for _, y in both[1].epoch(0)])
    assert torch.equal(labels, orders[1] % 3)


def test_memory_format_and_dtype_are_as_requested(stream):
    usual, _ = next(stream().epoch(0))
    assert usual.dtype == torch.float32
    assert usual.is_contiguous(memory_format=torch.channels_last)
    other, _ = next(stream(dtype=torch.bfloat16, channels_last=False).epoch(0))
    assert other.is_contiguous()
    assert torch.equal(other, usual.bfloat16())


def test_every_device_has_the_same_batches(stream, device):
    found = [(x.cpu(), y.cpu()) for x, y in stream(device=device).epoch(0)]
    assert equal(list(stream().epoch(0)), found)


def test_samples_can_be_pickled_for_processes_that_are_not_forked(stream):
    samples = stream().samples
    expected = samples[0, [3, 30]]
    again = pickle.loads(pickle.dumps(samples))
    assert equal([expected], [again[0, [3, 30]]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "must be positive, got 0"),
        ({"mixing": 0}, "must be positive, got 6 and 0"),
        ({"split": "validation"}, "split must be train or test, got 'validation'"),
        ({"rows": torch.tensor([3, 41])}, "rows must be in 0 … 40, got 3 … 41"),
    ],
)
def test_invalid_options_are_refused(stream, options, message):
    with pytest.raises(ValueError, match=message):
        stream(**options)


def test_missing_and_wrong_files_are_refused(folder, stream, register):
    register(TINYNET, samples={"train": 42, "test": 9})
    with pytest.raises(DataError, match="train split has 41 samples in 2 files and that of tinynet has 42"):
        stream()
    with pytest.raises(DataError, match="nowhere is not a folder"):
        Stream("tinynet", folder / "nowhere", batch=2, device="cpu", seed=0, augment=True)
    register(TINYNET, label="class")
    with pytest.raises(DataError, match=r"train-00000-of-00002\.parquet has no column 'class'"):
        stream()
