from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bisam.lab.config import Config
from bisam.lab.data import split, with_noise
from bisam.lab.data.held_out import stratified_split
from bisam.lab.data.own import from_parts
from bisam.lab.data.own_source import OwnData
from tiny import tiny_images

SEEDS = st.integers(-(2**70), 2**70)
RATES = [0.2, 0.4, 0.6, 0.8]


@given(count=st.integers(0, 300), fraction=st.floats(0, 0.99), seed=SEEDS)
def test_a_split_is_disjoint_covers_everything_and_has_the_requested_size(count, fraction, seed):
    train, validation = split(range(count), fraction, seed=seed)
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(count))
    assert len(validation) == round(fraction * count)
    assert train.tolist() == sorted(train.tolist())


@given(seed=SEEDS)
def test_a_split_depends_on_its_seed_alone(seed):
    labels = torch.arange(100)
    torch.manual_seed(0)
    first = split(labels, seed=seed)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    again, other = split(labels, seed=seed), split(labels, seed=seed + 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], other[1])


def test_a_split_is_ninety_to_ten_by_default():
    train, validation = split(range(50_000), seed=0)
    assert (len(train), len(validation)) == (45_000, 5_000)


@given(count=st.integers(0, 200), classes=st.integers(2, 20), rate=st.floats(0, 1), seed=SEEDS)
def test_noise_changes_exactly_the_requested_number_of_labels_to_another_class(count, classes, rate, seed):
    labels = torch.arange(count) % classes
    noisy = with_noise(labels, rate, classes, seed=seed)
    assert int(noisy.ne(labels).sum()) == round(rate * count)
    assert torch.equal(labels, torch.arange(count) % classes)  # the given labels are unchanged
    if count:
        assert 0 <= int(noisy.min()) <= int(noisy.max()) < classes


@pytest.mark.parametrize("rate", RATES)
def test_noise_is_uniform_over_the_classes(rate):
    classes, each = 10, 5000
    labels = torch.arange(classes).repeat_interleave(each)
    noisy = with_noise(labels, rate, classes, seed=0)
    counts = torch.bincount(labels * classes + noisy, minlength=classes * classes).view(classes, classes).double()
    assert int(noisy.ne(labels).sum()) == round(rate * len(labels))
    moved = counts.diagonal().sub(each).neg()
    spread = (each * rate * (1 - rate)) ** 0.5
    assert moved.sub(each * rate).abs().max() < 4 * spread
    expected = each * rate / (classes - 1)
    others = counts[~torch.eye(classes, dtype=torch.bool)]
    chi_square = others.sub(expected).square().div(expected).sum().item()
    assert 45 < chi_square < 150  # about 80 degrees of freedom: a bit more than three standard deviations of 13


def test_noise_depends_on_its_seed_alone():
    labels = torch.arange(1000) % 10
    torch.manual_seed(0)
    first = with_noise(labels, 0.4, 10, seed=3)
    torch.manual_seed(1)
    assert torch.equal(first, with_noise(labels, 0.4, 10, seed=3))
    assert not torch.equal(first, with_noise(labels, 0.4, 10, seed=4))


def test_split_and_noise_reproduce_those_of_the_published_runs():
    """Records contain only the seed: every version must draw the same numbers from it."""
    assert split(range(30), 0.2, seed=0)[1].tolist() == [0, 10, 22, 25, 26, 28]
    noisy = with_noise(torch.arange(20) % 10, 0.4, 10, seed=0)
    assert noisy.tolist() == [0, 1, 9, 3, 5, 5, 8, 3, 8, 9, 0, 7, 8, 3, 4, 5, 4, 7, 8, 8]
    assert stratified_split(torch.tensor([0] * 8 + [1] * 12), 0.25)[1].tolist() == [2, 4, 11, 14, 19]


def test_a_higher_noise_rate_keeps_the_changed_labels_of_a_lower_one():
    labels = torch.arange(1000) % 10
    noisy = [with_noise(labels, rate, 10, seed=0) for rate in RATES]
    for less, more in pairwise(noisy):
        moved = less.ne(labels)
        assert torch.equal(more[moved], less[moved])


def test_noise_and_split_of_one_seed_are_independent():
    labels = torch.arange(10_000) % 10
    moved = with_noise(labels, 0.4, 10, seed=0).ne(labels)
    _, validation = split(labels, seed=0)
    assert moved[validation].double().mean().item() == pytest.approx(0.4, abs=0.05)  # three standard deviations


def test_noise_is_the_same_on_every_device(device):
    labels = (torch.arange(100) % 10).to(device)
    assert torch.equal(with_noise(labels, 0.4, 10, seed=0).cpu(), with_noise(labels.cpu(), 0.4, 10, seed=0))


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_noise_rate_outside_0_to_1_is_refused(rate):
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\], got"):
        with_noise(torch.zeros(3, dtype=torch.int64), rate, 10, seed=0)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_validation_fraction_outside_0_to_1_is_refused(fraction):
    with pytest.raises(ValueError, match=r"fraction must be in \[0, 1\), got"):
        split(range(3), fraction, seed=0)


def test_labels_out_of_range_or_not_int64_and_a_single_class_are_refused():
    with pytest.raises(ValueError, match=r"0 … 9, got 3 … 10"):
        with_noise(torch.tensor([3, 10]), 0.4, 10, seed=0)
    with pytest.raises(ValueError, match=r"0 … 9, got -1 … 3"):
        with_noise(torch.tensor([3, -1]), 0.4, 10, seed=0)
    with pytest.raises(ValueError, match=r"int64.*float32"):
        with_noise(torch.zeros(3), 0.4, 10, seed=0)
    with pytest.raises(ValueError, match="1 class"):
        with_noise(torch.zeros(3, dtype=torch.int64), 0.4, 1, seed=0)


def labels_of(source, **changes):
    """Labels of the training and of the validation samples."""
    loaders = source.loaders(Config(batch=1, validation=0.5, **changes), torch.device("cpu"))
    return [torch.cat([labels for _, labels in part.epoch(0)]) for part in (loaders.train, loaders.validation)]


def test_validation_labels_are_noisy_unless_configured_to_stay_clean():
    clean = labels_of(tiny_images())
    noisy, spared = (labels_of(tiny_images(), noise=0.8, validation_noise=choice) for choice in (True, False))
    assert torch.equal(spared[1], clean[1])
    assert not torch.equal(noisy[1], clean[1])
    assert torch.equal(spared[0], noisy[0])
    assert not torch.equal(noisy[0], clean[0])


def test_validation_labels_of_user_data_are_noisy_unless_configured_to_stay_clean():
    source = OwnData(from_parts("x", {"train": (torch.randn(100, 2), torch.arange(100) % 4)}, "x"))
    clean = source.dataset.train.labels[source._rows(Config(noise=0.8, validation=0.5))[1]]
    noisy, spared = (labels_of(source, noise=0.8, validation_noise=choice) for choice in (True, False))
    assert torch.equal(spared[1], clean)
    assert not torch.equal(noisy[1], clean)
    assert torch.equal(spared[0], noisy[0])
