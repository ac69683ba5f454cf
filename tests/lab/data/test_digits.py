import pytest
import torch

from bisam.lab.data import load


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_every_digit_is_in_exactly_one_of_the_two_splits(digits):
    from sklearn.datasets import load_digits

    assert digits.train.pixels.shape == (1197, 1, 8, 8)
    assert digits.test.pixels.shape == (600, 1, 8, 8)
    found = torch.cat([digits.train.pixels, digits.test.pixels]).flatten(1)
    labels = torch.cat([digits.train.labels, digits.test.labels])
    original = load_digits()
    rows = sorted([*row, label] for row, label in zip(found.tolist(), labels.tolist(), strict=True))
    scaled = torch.tensor(original.data).mul(255 / 16).round().long().tolist()
    assert rows == sorted([*row, int(label)] for row, label in zip(scaled, original.target, strict=True))


def test_all_17_grey_levels_remain_distinct(digits):
    levels = digits.train.pixels.unique()
    assert (len(levels), int(levels.min()), int(levels.max())) == (17, 0, 255)


def test_both_splits_have_the_same_proportions_of_classes(digits):
    train, test = digits.train.labels.bincount(), digits.test.labels.bincount()
    exact = (train + test) * 600 / 1797
    assert (test - exact).abs().max() <= 1


def test_the_split_is_always_the_same(digits):
    assert digits.checksum == "511f05b0453434dc12ddb6500aba997854dd3e1465f9bab3894ea35a652234e1"


def test_the_statistics_are_those_of_the_training_digits(digits):
    pixels = digits.train.pixels.double() / 255
    assert (round(pixels.mean().item(), 4), round(pixels.std().item(), 4)) == (*digits.mean, *digits.std)


def test_a_folder_given_for_the_digits_is_refused(tmp_path):
    with pytest.raises(ValueError, match="digits is not read from files: remove --data"):
        load("digits", tmp_path)
