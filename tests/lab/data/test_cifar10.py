import os

import pytest
import torch

from bisam.lab.data import load

pytestmark = pytest.mark.skipif("BISAM_CIFAR10" not in os.environ, reason="BISAM_CIFAR10 names no folder of CIFAR-10")


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory):
    return load("cifar10", os.environ["BISAM_CIFAR10"], tmp_path_factory.mktemp("cache"))


def test_the_images_have_the_published_shapes_and_class_counts(cifar10):
    assert cifar10.train.pixels.shape == (50_000, 3, 32, 32)
    assert cifar10.test.pixels.shape == (10_000, 3, 32, 32)
    assert cifar10.train.labels.bincount().tolist() == [5000] * 10
    assert cifar10.test.labels.bincount().tolist() == [1000] * 10


def test_the_statistics_are_those_of_the_training_images(cifar10):
    for channel in range(3):
        pixels = cifar10.train.pixels[:, channel].flatten()
        counts = torch.bincount(pixels.int(), minlength=256).double() / len(pixels)
        levels = torch.arange(256).double() / 255
        mean = (counts * levels).sum()
        std = (counts * (levels - mean).square()).sum().sqrt()
        assert mean.item() == pytest.approx(cifar10.mean[channel], abs=5e-5)
        assert std.item() == pytest.approx(cifar10.std[channel], abs=5e-5)
