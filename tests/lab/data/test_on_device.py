import random
from collections import Counter
from itertools import product

import pytest
import torch

from bisam.lab.data import Batches, on_device
from bisam.lab.data.on_device import Normalization
from bisam.lab.data.shards import Shard

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
PADDING, HEIGHT, WIDTH = 2, 6, 8


def some(count=40, height=HEIGHT, width=WIDTH):
    """Random images; the label of each is its position."""
    pixels = torch.randint(0, 256, (count, 3, height, width), generator=torch.Generator().manual_seed(1))
    return pixels.to(torch.uint8), torch.arange(count)


def batches(images=None, labels=None, **options):
    if images is None:
        images, labels = some()
    usual = {"batch": 8, "mean": MEAN, "std": STD, "device": "cpu", "seed": 0, "augment": True, "padding": PADDING}
    return Batches(images, labels, **{**usual, **options})


def together(pairs):
    x, y = zip(*pairs, strict=True)
    return torch.cat(x), torch.cat(y)


def equal(a, b):
    return len(a) == len(b) and all(
        torch.equal(x.cpu(), z.cpu()) and torch.equal(y.cpu(), w.cpu()) for (x, y), (z, w) in zip(a, b, strict=True)
    )


def normalized(image):
    """(pixel/255 − mean)/std, a channel at a time."""
    channels = [(image[c].float() / 255 - MEAN[c]) / STD[c] for c in range(3)]
    return torch.stack(channels)


def views(image, padding, flip):
    """Every crop that a sample may become, computed slowly: (top, left, mirrored) → the normalised pixels."""
    padded = torch.zeros(3, HEIGHT + 2 * padding, WIDTH + 2 * padding, dtype=torch.uint8)
    for row, column in product(range(HEIGHT), range(WIDTH)):
        padded[:, padding + row, padding + column] = image[:, row, column]
    found = {}
    for top, left, mirrored in product(range(2 * padding + 1), range(2 * padding + 1), range(1 + flip)):
        part = padded[:, top : top + HEIGHT, left : left + WIDTH]
        found[top, left, mirrored] = normalized(part.flip(2) if mirrored else part)
    return found


def view_of(x, image, padding=PADDING, flip=True):
    """The place of the one crop that equals `x`; there must be exactly one."""
    (view,) = [key for key, each in views(image, padding, flip).items() if torch.allclose(each, x, atol=1e-5)]
    return view


@pytest.mark.parametrize(("padding", "flip"), [(2, True), (1, False), (0, True), (0, False)])
def test_every_sample_is_a_crop_of_its_padded_image_mirrored_or_not(device, padding, flip):
    images, _ = some()
    for x, y in batches(padding=padding, flip=flip, device=device).epoch(3):
        for sample, label in zip(x.cpu(), y.cpu(), strict=True):
            view_of(sample, images[label], padding, flip)


def test_crops_and_flips_are_uniform_and_independent_per_sample():
    images, _ = some(count=1)
    count = 4000
    made = batches(images.expand(count, -1, -1, -1), torch.zeros(count, dtype=torch.int64), batch=count)
    x, _ = next(made.epoch(0))
    known = torch.stack([*views(images[0], PADDING, flip=True).values()])
    counts = torch.bincount(torch.cdist(x.flatten(1), known.flatten(1)).argmin(1), minlength=50)
    expected = count / 50  # 5 × 5 × 2 views
    chi_square = counts.sub(expected).square().div(expected).sum()
    assert chi_square < 79  # 49 degrees of freedom: three standard deviations, 10 each


def test_the_border_is_black_before_normalisation():
    images = torch.full((64, 3, 4, 4), 255, dtype=torch.uint8)
    x, _ = together(batches(images, torch.zeros(64, dtype=torch.int64), batch=64, padding=4).epoch(0))
    black = torch.tensor([-m / s for m, s in zip(MEAN, STD, strict=True)]).view(1, 3, 1, 1)
    white = torch.tensor([(1 - m) / s for m, s in zip(MEAN, STD, strict=True)]).view(1, 3, 1, 1)
    is_black, is_white = (x - black).abs() < 1e-5, (x - white).abs() < 1e-5
    assert (is_black | is_white).all()
    assert is_black.any()
    assert is_white.any()


def test_an_epoch_has_every_sample_at_most_once_and_all_without_drop_last():
    images, labels = some(43)
    _, y = together(batches(images, labels).epoch(0))
    assert len(y) == 40 == len(y.unique())
    _, y = together(batches(images, labels, drop_last=False).epoch(0))
    assert sorted(y.tolist()) == list(range(43))


@pytest.mark.parametrize(("count", "dropping", "keeping"), [(40, 5, 5), (43, 5, 6), (7, 0, 1), (0, 0, 0)])
def test_the_number_of_batches_depends_on_drop_last(count, dropping, keeping):
    images, labels = some(count)
    for drop_last, expected in ((True, dropping), (False, keeping)):
        made = batches(images, labels, drop_last=drop_last)
        assert len(made) == expected == len(list(made.epoch(0)))


def test_evaluation_images_are_in_order_and_not_augmented(device):
    images, labels = some(43)
    x, y = together(batches(images, labels, augment=False, drop_last=False, device=device).epoch(0))
    assert y.tolist() == list(range(43))
    torch.testing.assert_close(x.cpu(), torch.stack([normalized(image) for image in images]), rtol=1e-5, atol=1e-5)


def test_shuffling_without_augmentation_changes_only_the_order():
    images, _ = some()
    x, y = together(batches(augment=False, shuffle=True).epoch(0))
    assert y.tolist() != sorted(y.tolist())
    torch.testing.assert_close(x, torch.stack([normalized(images[label]) for label in y]), rtol=1e-5, atol=1e-5)


def test_augmentation_without_shuffling_keeps_the_order():
    _, y = together(batches(shuffle=False).epoch(0))
    assert y.tolist() == list(range(40))


def test_an_epoch_depends_only_on_the_seed_and_its_number(device):
    first = list(batches(device=device).epoch(5))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    made = batches(device=device)
    list(made.epoch(2))
    assert equal(first, list(made.epoch(5)))
    assert torch.equal(torch.get_rng_state(), before)
    assert not equal(first, list(made.epoch(6)))
    assert not equal(first, list(batches(seed=1, device=device).epoch(5)))
    assert not equal(list(batches(seed=1).epoch(0)), list(batches(seed=0).epoch(1)))


def test_every_device_has_the_same_batches(device):
    options = {"cutout": 3, "drop_last": False}
    assert equal(list(batches(**options).epoch(1)), list(batches(device=device, **options).epoch(1)))


def test_order_crops_flips_and_cutout_reproduce_those_of_the_published_runs():
    """Records contain only the seed: every version must draw the same numbers from it."""
    images, _ = some()
    x, y = together(batches().epoch(0))
    assert y[:8].tolist() == [5, 4, 8, 37, 15, 31, 39, 0]
    found = [view_of(sample, images[label]) for sample, label in zip(x[:4], y[:4], strict=True)]
    assert found == [(2, 3, 1), (2, 4, 0), (0, 3, 0), (3, 1, 0)]  # top, left, mirrored
    cut, _ = together(batches(cutout=3).epoch(0))
    squares = [
        (before != after).any(0).nonzero().aminmax(dim=0) for before, after in zip(x[2:4], cut[2:4], strict=True)
    ]
    assert [(low.tolist(), high.tolist()) for low, high in squares] == [([3, 1], [5, 3]), ([0, 3], [1, 5])]
    assert torch.equal(cut[:2], x[:2])
    assert torch.equal(cut[4:8], x[4:8])


@pytest.mark.parametrize("augment", [True, False])
def test_an_epoch_can_be_resumed_from_any_batch(augment):
    images, labels = some(43)
    made = batches(images, labels, augment=augment, drop_last=False, cutout=3)
    whole = list(made.epoch(4))
    for start in range(len(made) + 1):
        assert equal(whole[start:], list(made.epoch(4, start=start)))


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("at_once", [2, 3, 100])
def test_batches_built_several_at_a_time_equal_those_built_singly(monkeypatch, at_once, start):
    options = {"cutout": 3, "cutout_probability": 1.0, "drop_last": False, "batch": 7}
    monkeypatch.setattr(on_device, "PIXELS_AT_ONCE", 1)
    singly = list(batches(**options).epoch(3, start=start))
    monkeypatch.setattr(on_device, "PIXELS_AT_ONCE", at_once * 7 * HEIGHT * WIDTH)
    several = list(batches(**options).epoch(3, start=start))
    assert equal(several, singly)
    storages = [x.untyped_storage().data_ptr() for x, _ in several]
    assert len(set(storages)) == -(-len(several) // at_once)
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x, _ in several)


def test_a_rank_builds_only_its_shard_of_each_batch(monkeypatch):
    monkeypatch.setattr(on_device, "PIXELS_AT_ONCE", 2**20)
    whole, parts = batches(), [batches(), batches()]
    for number, part in enumerate(parts):
        part.shard = Shard(number, 2)
    together_again = [together(pairs) for pairs in zip(*(part.epoch(1) for part in parts), strict=True)]
    assert equal(together_again, list(whole.epoch(1)))
    assert all(x.untyped_storage().nbytes() == x.nbytes for x, _ in parts[0].epoch(1))


def test_the_random_numbers_of_the_next_epoch_are_drawn_ahead_and_used(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        on_device, "generator", lambda *names: drawn.append(names[-1]) or torch.Generator().manual_seed(names[-1])
    )
    made, fresh = batches(cutout=4), batches(cutout=4)
    first = list(made.epoch(0))
    assert drawn == [0, 1]
    second = list(made.epoch(1))
    assert drawn == [0, 1, 2]  # the numbers that were drawn ahead are used
    again = list(made.epoch(1))
    assert equal(first, list(fresh.epoch(0)))
    assert equal(second, again)
    assert equal(second, list(batches(cutout=4).epoch(1)))


def test_two_epochs_may_be_read_in_alternation():
    made = batches()
    pairs = list(zip(made.epoch(0), made.epoch(1), strict=True))
    assert equal([a for a, _ in pairs], list(made.epoch(0)))
    assert equal([b for _, b in pairs], list(made.epoch(1)))


@pytest.mark.parametrize("side", [1, 3, 4])
def test_cutout_is_a_square_of_zeros_clipped_at_the_border(side):
    images, labels = some()
    plain, _ = together(batches(images, labels).epoch(0))
    cut, _ = together(batches(images, labels, cutout=side, cutout_probability=1).epoch(0))
    sizes = Counter()
    for before, after in zip(plain, cut, strict=True):  # the same crops and flips: cutout draws its numbers after them
        changed = (before != after).any(0)
        rows, columns = changed.any(1).nonzero().flatten(), changed.any(0).nonzero().flatten()
        hole = after[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert not hole.any()
        assert changed.sum() == hole[0].numel()
        height, width = hole.shape[1:]
        assert height == side or rows[0] == 0 or rows[-1] == HEIGHT - 1
        assert width == side or columns[0] == 0 or columns[-1] == WIDTH - 1
        sizes[height, width] += 1
    assert max(sizes) == (side, side)


def cut_by_hand(image, draws):
    """A 16×16 square of zeros in half of the images; its centre is any pixel, and it is clipped at the border."""
    if draws.random() < 0.5:
        row, column = draws.randrange(32), draws.randrange(32)
        image[:, max(0, row - 8) : row + 8, max(0, column - 8) : column + 8] = 0
    return image


def test_cutout_has_the_distribution_of_a_loop_over_the_images():
    count = 20_000
    images = torch.full((count, 1, 32, 32), 200, dtype=torch.uint8)
    made = Batches(
        images, torch.zeros(count, dtype=torch.int64), batch=1000, mean=[0.5], std=[0.25], device="cpu", seed=0,
        augment=True, padding=0, cutout=16,
    )  # fmt: skip
    x, _ = together(made.epoch(0))
    draws = random.Random(0)
    by_hand = torch.stack([cut_by_hand(image, draws) for image in torch.ones(count, 1, 32, 32)])
    ours, theirs = ((batch == 0).sum((1, 2, 3)).bincount(minlength=257) / count for batch in (x, by_hand))
    assert len(ours) == len(theirs) == 257  # areas of 0 to 256 pixels
    assert ours[0].item() == pytest.approx(0.5, abs=0.015)  # four deviations
    # two samples of 20 000 from one distribution: their cumulative counts differ by more in one of 10 000 cases
    assert (ours.cumsum(0) - theirs.cumsum(0)).abs().max() < 0.0223
    # the places as well: how often each pixel is cut, four deviations of a difference at probability ½ · ¼
    assert ((x == 0).float().mean((0, 1)) - (by_hand == 0).float().mean((0, 1))).abs().max() < 0.0141


@pytest.mark.parametrize("augment", [True, False])
def test_memory_format_and_dtype_are_as_requested(device, augment):
    usual, _ = next(batches(augment=augment, device=device).epoch(0))
    assert usual.dtype == torch.float32
    assert usual.is_contiguous(memory_format=torch.channels_last)
    plain, _ = next(batches(augment=augment, device=device, channels_last=False).epoch(0))
    assert plain.is_contiguous()
    assert torch.equal(plain, usual)
    half, _ = next(batches(augment=augment, device=device, dtype=torch.bfloat16).epoch(0))
    assert torch.equal(half, usual.bfloat16())  # rounded once, at the end


def test_images_may_have_a_single_channel():
    images = torch.randint(0, 256, (16, 1, 8, 8)).to(torch.uint8)
    made = Batches(images, torch.arange(16), batch=4, mean=[0.5], std=[0.5], device="cpu", seed=0, augment=True)
    assert next(made.epoch(0))[0].shape == (4, 1, 8, 8)


def test_writing_into_a_batch_does_not_change_the_data_set():
    images, labels = some()
    for augment in (True, False):
        for x, y in batches(images, labels, augment=augment).epoch(0):
            x.zero_()
            y.zero_()
    assert all(torch.equal(*pair) for pair in zip((images, labels), some(), strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_building_batches_does_not_synchronise_with_the_device():
    made, plain = batches(device="cuda", cutout=3), batches(device="cuda", augment=False)
    list(made.epoch(0))
    torch.cuda.set_sync_debug_mode("error")
    try:
        list(made.epoch(1))
        list(plain.epoch(1))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_normalisation_agrees_with_float64():
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3)
    x = Normalization(MEAN, STD, device=torch.device("cpu"))(pixels)
    exact = (pixels.permute(0, 3, 1, 2).double() / 255 - torch.tensor(MEAN).double().view(3, 1, 1)) / torch.tensor(
        STD
    ).double().view(3, 1, 1)
    torch.testing.assert_close(x.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch must be positive, got 0"),
        ({"padding": -1}, "must not be negative, got -1"),
        ({"cutout": -1}, "must not be negative.*-1"),
        ({"padding": 7}, "padding=7 leaves most crops of 6×6 black: set 6 at most"),
        ({"cutout": 12}, "cutout=12 covers images of 6×6 wherever it is: set less than 12"),
        ({"cutout_probability": 1.5}, r"in \[0, 1\], got 1.5"),
        ({"mean": [0.5]}, "3 values, one a channel, got 1 and 3"),
        ({"std": [0.5, 0.0, 0.5]}, "std must be positive"),
        ({"images": torch.zeros(2, 3, 4, 4), "labels": torch.zeros(2)}, "uint8.*float32"),
        ({"images": torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "labels": torch.zeros(3)}, r"labels \(3,\)"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        batches(**options)


@pytest.mark.parametrize("options", [{"padding": 6}, {"cutout": 11}, {"padding": 7, "cutout": 12, "augment": False}])
def test_padding_and_cutout_are_accepted_up_to_their_limits(options):
    assert len(list(batches(**options).epoch(0))) == 5


@pytest.mark.parametrize("start", [-1, 6])
def test_a_start_outside_of_the_epoch_is_refused(start):
    with pytest.raises(ValueError, match=f"start must be in 0 … 5.*got {start}"):
        batches().epoch(0, start=start)
