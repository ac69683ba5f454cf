"""Every recipe family trains for a few steps, through the real command line, on tiny data made here."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import bisam
from bisam.lab.cli import app
from bisam.lab.recipes import RECIPES, find

FAMILIES = {
    "cifar10": ("cifar10/resnet56", {"model": "resnet20"}),
    "cifar100": ("cifar100/wrn28-2/bisam-tanh", {"model": "resnet20"}),
    "adaptive": ("adaptive/resnet56", {"model": "resnet20"}),
    "efficient": ("efficient/resnet56", {"model": "resnet20"}),
    "label_noise": ("label_noise/80%", {"model": "resnet20"}),
    "imagenet": ("imagenet/resnet50/bisam-log", {"micro_batch": "2"}),
    "demo": ("demo", {}),
}


@pytest.fixture
def folder(tmp_path, hub_layout):
    """Random images and labels in the hub's layout, of each data set."""
    draws = np.random.default_rng(0)

    def make(name, side, columns, classes, splits):
        for split, count in splits.items():
            images = [hub_layout.encoded(draws.integers(0, 256, (3, side, side), np.uint8)) for _ in range(count)]
            path = tmp_path / name / f"{split}-00000-of-00001.parquet"
            image, label = columns
            hub_layout.write_file(path, images, draws.integers(0, classes, count), image=image, label=label)

    make("cifar10", 32, ("img", "label"), 10, {"train": 60, "test": 12})
    make("cifar100", 32, ("img", "fine_label"), 100, {"train": 60, "test": 12})
    make("imagenet", 64, ("image", "label"), 1000, {"train": 12, "validation": 4})
    return tmp_path


@pytest.mark.parametrize(("table", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_label_smoothing_is_that_of_the_authors_code(table, classes):
    """Which has 0.1/(K − 1) on each wrong class and 0.9 on the right one."""
    (config,) = find(f"{table}/vgg19bn/sam").cells.values()
    logits, labels = torch.randn(7, classes, dtype=torch.float64), torch.randint(classes, (7,))
    targets = torch.full_like(logits, 0.1 / (classes - 1)).scatter(1, labels[:, None], 0.9)
    expected = -(targets * logits.log_softmax(1)).sum(1).mean()
    ours = bisam.CrossEntropy(label_smoothing=config.label_smoothing)(logits, labels)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)  # the recipe rounds to six digits


@pytest.mark.parametrize("table", ["cifar10", "cifar100", "adaptive", "efficient", "label_noise"])
def test_the_tables_of_cifar_cut_16_by_16_out_of_half_of_the_images(table):
    assert {(config.cutout, config.cutout_probability) for config in find(table).cells.values()} == {(16, 0.5)}


def test_every_recipe_has_a_family_here():
    assert FAMILIES.keys() == RECIPES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains(family, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("BISAM_CACHE", str(tmp_path / "cache"))
    name, changes = FAMILIES[family]
    recipe = find(name)
    (data,) = {config.data for config in recipe.cells.values()}
    arguments = ["train", name, "--runs", str(tmp_path / "runs"), "--device", "cpu", "--set", "epochs=1"]
    if data != "digits":
        changes = {"batch": "4" if data == "imagenet" else "16", **changes}
        arguments += ["--data", str(folder / data), "--partial-data"]
    for field, value in changes.items():
        arguments += ["--set", f"{field}={value}"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr or done.exception
    results = [json.loads(path.read_text()) for path in (tmp_path / "runs").rglob("result.json")]
    assert len(results) == len(recipe.cells)
    assert all(result["status"] == "done" and 0 <= result["test_accuracy"] <= 100 for result in results)


def test_data_that_is_only_a_part_is_refused_unless_it_is_asked_for(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("BISAM_CACHE", str(tmp_path / "cache"))
    arguments = ["train", "cifar10/resnet56/sam", "--runs", str(tmp_path / "runs"), "--data", str(folder / "cifar10")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "60 samples" in done.stderr
    assert "50000" in done.stderr


def test_a_data_set_is_prepared_and_told_of(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("BISAM_CACHE", str(tmp_path / "cache"))
    done = CliRunner().invoke(app, ["data", "cifar10", "--data", str(folder / "cifar10"), "--partial-data"])
    assert done.exit_code == 0, done.stderr
    assert "cifar10, train: 60 images of 3×32×32, 10 classes" in done.stdout
    assert "sha256" in done.stdout
    done = CliRunner().invoke(app, ["data", "imagenet", "--data", str(folder / "imagenet"), "--partial-data"])
    assert done.exit_code == 0, done.stderr
    assert "imagenet, train: 12 images" in done.stdout


def test_a_path_with_brackets_is_told_as_it_is(folder, tmp_path, monkeypatch):
    cache = tmp_path / "a [b] :snake: [/b]"
    monkeypatch.setenv("BISAM_CACHE", str(cache))
    arguments = ["data", "cifar10", "--data", str(folder / "cifar10"), "--partial-data"]
    CliRunner().invoke(app, arguments)
    (cache / "part-of-cifar10" / "test.json").write_text("{")
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    assert f"{cache / 'part-of-cifar10' / 'test.safetensors'} is damaged: test.json cannot be read" in done.stdout
