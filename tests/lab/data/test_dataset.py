from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from bisam.lab.cli import app
from bisam.lab.config import Config
from bisam.lab.data import DATA_SETS, DataError, DataSet, Images, load
from bisam.lab.data.sources import open_source
from bisam.lab.recipes import RECIPES, table


def blobs(train=6, test=4, size=5, classes=2):
    """Random images of two classes, none of which equals a digit."""

    def images(count, seed):
        draws = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=draws)
        return Images(pixels, torch.arange(count) % classes)

    return images(train, 0), images(test, 1)


BLOBS = DataSet(
    "blobs", classes=2, samples={"train": 6, "test": 4}, mean=(0.5,) * 3, std=(0.3,) * 3, size=5, load=blobs
)


def test_a_data_set_loads_its_own_images_and_not_those_of_another(register):
    register(BLOBS)
    data = load("blobs")
    assert data.name == "blobs"
    assert torch.equal(data.train.pixels, blobs()[0].pixels)
    assert torch.equal(data.test.labels, blobs()[1].labels)
    assert open_source("blobs", log=print).checksum != open_source("digits", log=print).checksum


@pytest.mark.parametrize(("hub", "source", "found"), [(None, None, "neither"), ("a/b", blobs, "both")])
def test_a_data_set_needs_exactly_one_source(hub, source, found):
    with pytest.raises(ValueError, match=rf"'blobs' needs a source, either load= .* or hub= .*, got {found}"):
        replace(BLOBS, hub=hub, load=source)


def test_a_data_set_loaded_into_memory_needs_an_image_size():
    with pytest.raises(ValueError, match="'blobs' is loaded into memory: give size="):
        replace(BLOBS, size=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": {"train": 7, "test": 4}}, r"train images of shape \(6, 3, 5, 5\) .* has \(7, 3, 5, 5\)"),
        ({"samples": {"train": 6, "test": 5}}, r"test images of shape \(4, 3, 5, 5\) .* has \(5, 3, 5, 5\)"),
        ({"mean": (0.5,), "std": (0.3,)}, r"\(6, 3, 5, 5\) .* has \(6, 1, 5, 5\)"),
        ({"size": 8}, r"\(6, 3, 5, 5\) .* has \(6, 3, 8, 8\)"),
        ({"classes": 1}, r"train labels 0 … 1 .* has 1 classes"),
    ],
)
def test_loaded_images_that_do_not_match_the_description_are_refused(register, changes, message):
    register(BLOBS, **changes)
    with pytest.raises(DataError, match=f"blobs: load.. returned .*{message}"):
        load("blobs")


def test_a_data_set_that_is_not_read_from_files_refuses_a_folder(register, tmp_path):
    register(BLOBS)
    with pytest.raises(ValueError, match="blobs is not read from files: remove --data"):
        load("blobs", tmp_path)


@pytest.mark.parametrize("data", ["blobs", "registered-nowhere"])
def test_bisam_list_shows_recipes_even_if_their_data_set_is_unknown(register, monkeypatch, data):
    register(BLOBS)

    def recipe():
        config = Config(data=data, model="resnet56")
        return table("own", "Blobs", ["resnet56"], ["sam"], lambda row, method: config)

    monkeypatch.setitem(RECIPES, "own", recipe)
    done = CliRunner().invoke(app, ["list"])
    assert done.exit_code == 0, done.output
    assert "Blobs" in done.output


def test_every_data_set_has_as_many_means_as_standard_deviations():
    assert all(len(dataset.mean) == len(dataset.std) for dataset in DATA_SETS.values())
