"""The default settings of a training."""

import pytest
import torch

from bisam.lab.data.own_dataset import DataSplit, OwnDataset
from bisam.lab.fitting.defaults import model_for, settings
from bisam.lab.models.pretraining import Expected

CPU = torch.device("cpu")
ANY_SIZE = Expected(None, "data")


def dataset(kind, inputs, counts=(10, 10), validation=None):
    part = DataSplit(inputs, torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)))
    return OwnDataset("mine", kind, part, part, [*"abcdef"[: len(counts)]], validation)


def rows(**options):
    return dataset("rows", torch.zeros(20, 4), **options)


def images(height=32, width=32):
    return dataset("image", torch.zeros(1, 3, height, width, dtype=torch.uint8).expand(20, -1, -1, -1))


TEXTS = dataset("text", [("a",)] * 20)
ENCODED = dataset("image", [b""] * 20)


def values(of, model="perceptron", expected=ANY_SIZE, train=100_000, validation=1000, device=CPU, **options):
    """The lines that are shown, as a dictionary."""
    found = settings(of, model, expected, {"train": train, "validation": validation}, device, **options)
    return dict(line.split("=") for line in found.lines)


SGD = {"optimizer": "sgd", "schedule": "cosine", "weight_decay": "0.0005", "momentum": "0.9", "clip_norm": "None"}
ADAMW = {
    "optimizer": "adamw", "schedule": "linear", "warmup": "0.1", "weight_decay": "0.01", "clip_norm": "1.0",
    "label_smoothing": "0.0",
}  # fmt: skip
ALL = {"validation": "0.1", "select": "best", "measures": "accuracy", "precision": "fp32"}


@pytest.mark.parametrize(
    ("of", "model", "expected"),
    [
        (rows(), "perceptron", {**SGD, "epochs": "50", "batch": "64", "lr": "0.05", "label_smoothing": "0.0"}),
        (
            images(),
            "resnet20",
            {
                **SGD, "epochs": "30", "batch": "128", "lr": "0.1", "label_smoothing": "0.1",
                "size": "32", "pixels": "data", "padding": "4", "flip": "True",
            },
        ),
        (TEXTS, "transformers:a", {**ADAMW, "lr": "2e-05", "epochs": "3", "batch": "32", "length": "128"}),
        (
            images(),
            "timm:a",
            {
                **ADAMW, "lr": "0.0001", "epochs": "10", "batch": "64",
                "size": "32", "pixels": "data", "padding": "4", "flip": "True",
            },
        ),
    ],
    ids=["rows", "images", "texts", "images and a pretrained model"],
)  # fmt: skip
def test_each_kind_of_data_and_model_has_its_own_defaults_and_shows_no_others(of, model, expected):
    assert values(of, model) == {**expected, **ALL}
    config = settings(of, model, ANY_SIZE, {"train": 100, "validation": 10}, CPU).config
    assert (config.data, config.model) == ("mine", model)
    assert (config.padding > 0, config.flip) == (of.kind == "image", of.kind == "image")


def test_pretrained_networks_get_the_image_size_and_normalisation_that_they_expect():
    made = Expected(224, "imagenet")
    tuned, scratch = values(images(), "timm:a", made), values(images(), "timm:a", made, pretrained=False)
    assert (tuned["size"], tuned["padding"], tuned["pixels"]) == ("224", "28", "imagenet")
    assert (scratch["size"], scratch["padding"], scratch["pixels"]) == ("32", "4", "data")
    assert values(images(), "resnet20", made, pretrained=True)["optimizer"] == "adamw"


@pytest.mark.parametrize(
    ("of", "size", "padding"),
    [
        (images(6, 9), 8, 1),  # the smallest size
        (images(40, 100), 40, 5),
        (images(100, 48), 48, 6),
        (images(600, 640), 600, 64),  # the largest padding that a configuration may have
        (images(1200, 1300), 1024, 64),
        (ENCODED, 32, 4),
    ],
)
def test_the_image_size_is_the_shorter_side_within_limits(of, size, padding):
    found = values(of, "resnet20")
    assert (found["size"], found["padding"]) == (str(size), str(padding))


@pytest.mark.parametrize("size", [512, 518, 600, 800])
def test_the_padding_of_large_pretrained_networks_is_limited(size):
    found = values(images(), "timm:a", Expected(size, "imagenet"))
    assert (found["size"], found["padding"]) == (str(size), "64")


@pytest.mark.parametrize(("train", "batch"), [(256, 64), (255, 32), (128, 32), (20, 4), (8, 2), (3, 2)])
def test_a_batch_is_halved_until_an_epoch_has_four_steps(train, batch):
    assert values(rows(), train=train)["batch"] == str(batch)


def test_with_few_validation_samples_the_last_epoch_is_tested():
    assert values(rows(), validation=1000)["select"] == "best"
    assert values(rows(), validation=999)["select"] == "last"


def test_unbalanced_classes_have_more_measures_than_accuracy():
    assert values(rows(counts=(12, 8)))["measures"] == "accuracy"
    assert values(rows(counts=(13, 7)))["measures"] == "accuracy,balanced_accuracy,macro_f1"


def test_a_gpu_trains_in_bfloat16():
    assert values(rows(), device=torch.device("cuda"))["precision"] == "bf16"


def test_the_validation_fraction_is_shown_only_if_the_data_have_no_validation_part():
    own = DataSplit(torch.zeros(2, 4), torch.arange(2))
    assert "validation" in values(rows())
    assert "validation" not in values(rows(validation=own))


def test_changed_settings_are_shown_and_those_without_effect_are_not():
    changes = {"optimizer": "adamw", "schedule": "linear", "warmup": "0.25", "epoch_steps": "7", "lr": "0.001"}
    found = values(rows(), changes=changes)
    assert {name: found[name] for name in changes} == changes
    assert "momentum" not in found
    lines = settings(rows(), "perceptron", ANY_SIZE, {"train": 100, "validation": 9}, CPU, changes=changes).lines
    assert len(lines) == len(set(lines))
    assert settings(rows(), "perceptron", ANY_SIZE, {"train": 100, "validation": 9}, CPU).config.epoch_steps is None


def test_rows_and_images_have_a_default_model_and_text_without_a_model_is_refused():
    assert (model_for(rows()), model_for(images())) == ("perceptron", "resnet20")
    with pytest.raises(ValueError, match=r"text needs a pretrained model: .* give --model transformers:NAME-OR-FOLDER"):
        model_for(TEXTS)
