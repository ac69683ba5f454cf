"""The settings of the recipes; and every family trains for a few steps from the command line, on tiny data."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import bisam
from bisam.lab.cli import app
from bisam.lab.config import rate
from bisam.lab.recipes import RECIPES, find_recipe
from bisam.lab.tables import published
from bisam.lab.tables.cells import collect, training_of
from bisam.lab.tables.summary import sheet

FAMILIES = {
    "cifar10": ("cifar10/resnet56", {"model": "resnet20"}),
    "cifar100": ("cifar100/wrn28-2/bisam-tanh", {"model": "resnet20"}),
    "adaptive": ("adaptive/resnet56", {"model": "resnet20"}),
    "efficient": ("efficient/resnet56", {"model": "resnet20"}),
    "label_noise": ("label_noise/80%", {"model": "resnet20"}),
    "frontier": ("frontier/resnet32", {"model": "resnet20"}),
    "imagenet": ("imagenet/resnet50/bisam-log", {"micro_batch": "2"}),
    "frontier_digits": ("frontier_digits/digitsnet-noise40", {}),
    "demo": ("demo", {}),
    "label_noise_digits": ("label_noise_digits/60%", {}),
    "finetune": ("finetune/flowers", {"epoch_steps": "2", "size": "16", "padding": "2"}),
    "glue": ("glue/mrpc", {"epoch_steps": "2"}),
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
    make("flowers", 20, ("image", "label"), 3, {"train": 24, "validation": 6, "test": 6})
    (tmp_path / "glue" / "mrpc").mkdir(parents=True)
    for split, count in {"train": 40, "validation": 10}.items():
        texts = [f"the {draws.choice(['dog', 'cat'])} sat" for _ in range(2 * count)]
        table = {"sentence1": texts[:count], "sentence2": texts[count:], "label": np.arange(count) % 2}
        pq.write_table(pa.table(table), tmp_path / "glue" / "mrpc" / f"{split}-00000-of-00001.parquet")
    return tmp_path


@pytest.mark.parametrize(("table", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_label_smoothing_is_that_of_the_authors_code(table, classes):
    """Which has 0.1/(K − 1) on each wrong class and 0.9 on the right one."""
    (config,) = find_recipe(f"{table}/vgg19bn/sam").cells.values()
    logits, labels = torch.randn(7, classes, dtype=torch.float64), torch.randint(classes, (7,))
    targets = torch.full_like(logits, 0.1 / (classes - 1)).scatter(1, labels[:, None], 0.9)
    expected = -(targets * logits.log_softmax(1)).sum(1).mean()
    ours = bisam.CrossEntropy(label_smoothing=config.label_smoothing)(logits, labels)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)  # the recipe rounds to six digits


@pytest.mark.parametrize("table", ["cifar10", "cifar100", "adaptive", "efficient", "label_noise", "frontier"])
def test_the_cifar_tables_use_cutout_of_16_by_16_pixels_on_half_of_the_images(table):
    assert {(config.cutout, config.cutout_probability) for config in find_recipe(table).cells.values()} == {(16, 0.5)}


def test_the_settings_of_the_frontier_share_a_protocol_and_differ_in_one_or_two_fields():
    cells = find_recipe("frontier").cells
    for (row, method), config in cells.items():
        model, *rest = row.split("-")
        noise, setting = rest[0] == "noise40" if rest else False, rest[-1] if rest and rest[-1] != "noise40" else ""
        assert (config.model, config.noise, config.row) == (model, 0.4 if noise else 0.0, row)
        assert config.epochs == (400 if method == "sgd" and setting != "200epochs" else 200)
        steps, _, rho = setting.partition("rho")
        assert config.every == (5 if steps.endswith("every5") else None)
        starts = {"late50": 0.5, "late25": 0.75, "late14": 0.86, "late10": 0.9, "late50every5": 0.5}
        assert config.start == starts.get(steps, 0.0)
        assert config.stop == {"early50": 0.5, "early25": 0.25}.get(steps, 1.0)
        assert config.rho == (float(rho) if rho else 0.3 if method == "msam" else 0.05)
    theirs = find_recipe("label_noise").cells["40%", "bisam-log"]
    assert training_of(cells["resnet32-noise40", "bisam-log"]) == training_of(theirs)
    assert training_of(cells["vgg19bn", "sgd"]) == training_of(find_recipe("cifar10").cells["vgg19bn", "sgd"])
    assert len(cells) == 4 * (8 + 1 + 8 * 2 + 6)


def test_other_noise_rates_on_digits_use_the_demo_s_training_with_the_rho_best_on_validation():
    demo = find_recipe("demo").cells
    searched = json.loads((Path(__file__).parents[2] / "benchmarks/results/digits_noise_rho.json").read_text())["rates"]
    for (row, method), config in [*find_recipe("label_noise_digits").cells.items(), *demo.items()]:
        own = replace(demo["40%", method], noise=float(row.rstrip("%")) / 100, rho=config.rho)
        assert training_of(config) == training_of(own)
        if method != "sgd":
            assert config.rho == best_on_validation(searched[row][method])


def best_on_validation(by_rho):
    """The ρ with the best mean over 20 seeds, the smallest of ties."""
    means = {float(rho): fmean(of["validation"]) for rho, of in by_rho.items() if len(of["validation"]) == 20}
    return min(rho for rho in means if means[rho] == pytest.approx(max(means.values())))


def test_each_setting_of_the_frontier_on_digits_has_the_rho_best_on_validation():
    searched = json.loads((Path(__file__).parents[2] / "benchmarks/results/digits_rho.json").read_text())["cells"]
    compared, demo = set(), find_recipe("demo").methods
    for (row, method), config in find_recipe("frontier_digits").cells.items():
        setting = row.removeprefix("digitsnet-noise40").removeprefix("-")
        if config.method != "sgd" and "rho" not in setting and (setting or method not in demo):
            name = setting or method
            compared.add(name)
            # LookSAM's hardly matters below 0.003: docs/variants.md
            assert config.rho == best_on_validation(searched[name]) or name == "looksam"
    assert compared == {*searched}


def test_the_frontier_on_digits_uses_the_demo_s_training_with_a_rho_for_each_setting():
    cells, demo = find_recipe("frontier_digits").cells, find_recipe("demo").cells
    for method in ("sgd", "sam", "bisam-log"):
        assert training_of(cells["digitsnet-noise40", method]) == training_of(demo["40%", method])
    for (row, method), config in cells.items():
        setting = row.removeprefix("digitsnet-noise40").removeprefix("-")
        steps, _, rho = setting.partition("rho")
        assert (config.model, config.row, config.noise, config.select) == ("digitsnet", row, 0.4, "last")
        assert config.epochs == (60 if method == "sgd" and setting != "30epochs" else 30)
        assert (config.start, config.stop) == {
            "late50": (0.5, 1), "late25": (0.75, 1), "late10": (0.9, 1), "early50": (0, 0.5), "early25": (0, 0.25),
        }.get(steps, (0, 1))  # fmt: skip
        assert config.every == (5 if steps == "every5" else None)
        assert not rho or config.rho == float(rho)


def test_the_fine_tuning_tables_have_the_paper_s_settings():
    for (data, method), config in find_recipe("finetune").cells.items():
        assert (config.optimizer, config.weight_decay, config.schedule, config.clip_norm) == (
            "adamw",
            0.0,
            "linear",
            1.0,
        )
        steps = config.epochs * config.epoch_steps
        assert (steps, round(config.warmup * steps), config.lr, config.batch) == (500, 100, 1e-4, 512)
        mu = {("flowers", "bisam-log"): 4, ("pets", "bisam-log"): 6, "bisam-tanh": 20}
        assert config.mu == mu.get((data, method), mu.get(method))
    cells = find_recipe("glue").cells
    for (task, _), config in cells.items():
        assert (config.optimizer, config.schedule, config.clip_norm) == ("adamw", "linear", 1.0)
        assert (config.lr, config.batch) == (2e-5, 32)
        assert config.epochs == (5 if task in ("mrpc", "wnli") else 3)
        assert config.rho == {"cola": 0.01, "rte": 0.005}.get(task, 0.05)
        assert config.measured == {"cola": ("mcc",)}.get(
            task, ("accuracy", "f1") if task in ("mrpc", "qqp") else ("accuracy",)
        )
    assert {task for task, _ in cells} == {"cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "wnli"}


@pytest.mark.parametrize("table", ["cifar10", "cifar100", "adaptive", "efficient", "label_noise"])
def test_the_tables_of_cifar_have_the_paper_s_settings(table):
    recipe = find_recipe(table)
    for (row, method), config in recipe.cells.items():
        assert (config.data, config.model) == (
            "cifar100" if table == "cifar100" else "cifar10",
            "resnet32" if table == "label_noise" else row,
        )
        assert (config.optimizer, config.momentum, config.weight_decay) == ("sgd", 0.9, 5e-4)
        assert (config.lr, config.schedule, config.batch) == (0.1, "cosine", 128)
        assert config.epochs == (400 if method == "sgd" else 200)
        assert config.rho == (2.0 if table == "adaptive" else 0.01 if row == "80%" else 0.05)
        assert config.noise == (float(row[:-1]) / 100 if table == "label_noise" else 0.0)
        assert (config.mu, config.alpha, config.micro_batch) == (None, 0.1, None)  # the paper's 1 and 10
        assert (config.recipe, config.method) == (table, method)
    assert recipe.seeds == (5 if table in ("adaptive", "efficient") else 6)


def test_imagenet_has_the_paper_s_settings():
    recipe = find_recipe("imagenet")
    for (_, method), config in recipe.cells.items():
        assert (config.epochs, config.lr, config.batch, config.micro_batch) == (90, 0.2, 512, 128)
        assert (config.mu, config.rho) == ({"bisam-log": 5.0, "bisam-tanh": 20.0}.get(method), 0.05)
        assert config.padding == 0
    assert (recipe.methods, recipe.seeds) == (["sam", "bisam-log", "bisam-tanh"], 3)
    assert recipe.measure == "test accuracy"  # top 1 and top 5


def test_the_fine_tuning_tables_evaluate_the_weights_of_the_last_epoch():
    for table, validation in (("finetune", 0.1), ("glue", 0.05)):
        recipe = find_recipe(table)
        assert {(one.select, one.validation) for one in recipe.cells.values()} == {("last", validation)}
        assert {one.label_smoothing for one in recipe.cells.values()} == {0.0}
        assert recipe.stands_in
    assert (find_recipe("glue").seeds, find_recipe("finetune").seeds) == (10, 3)


def test_the_lines_of_a_part_are_those_of_its_rows():
    assert find_recipe("glue/mrpc").lines == [("mrpc_acc", "mrpc", "test_accuracy"), ("mrpc_f1", "mrpc", "test_f1")]
    one = replace(find_recipe("glue/mrpc"), labels={})  # as in a table that is not the paper's
    assert one.lines == [("mrpc, accuracy", "mrpc", "test_accuracy"), ("mrpc, F1", "mrpc", "test_f1")]
    assert one.measure == "test results"


def test_a_recipe_name_has_at_most_a_row_and_a_method():
    assert find_recipe("label-noise/80%").rows == ["80%"]
    with pytest.raises(ValueError, match=r"a recipe is table, table/row or table/row/method, got 'demo/40%/sam/0'"):
        find_recipe("demo/40%/sam/0")


def test_a_linear_schedule_rises_to_its_peak_and_then_falls_with_every_step():
    (config, *_) = find_recipe("finetune/flowers/sam").cells.values()
    rates = [rate(config, step // 50, step % 50, 50) for step in range(500)]
    assert rates[0] == pytest.approx(1e-6)
    assert rates[99] == rates[100] == pytest.approx(1e-4)
    assert rates[300] == pytest.approx(0.5e-4)
    assert rates[499] == pytest.approx(1e-4 / 400)


def test_the_published_average_of_glue_follows_from_the_published_cells():
    """The average is over tasks, each with the mean of its measures."""
    paper = published.of(find_recipe("glue"))
    for method, average in paper.average.items():
        means = {}
        for label, row, _ in find_recipe("glue").lines:
            means.setdefault(row, []).append(paper.cells[label][method].mean)
        assert np.mean([np.mean(values) for values in means.values()]) == pytest.approx(average.mean, abs=0.0051)


def test_a_stand_in_model_is_named_beside_the_paper_s_numbers(recorded):
    result = {"test_mcc": 40.0, "validation_mcc": 41.0}
    records = [recorded("glue/cola/sam", seed, result=result, model="transformers:minilm") for seed in (0, 1)]
    (result_table,) = collect(records).tables
    table = sheet(result_table)
    assert table.title == (
        "Fine-tuning on GLUE, with model=transformers:minilm: test results in per cent, the paper's (bert-base) below"
    )
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["cola_mcc"] == ["–\n56.63", "40.00 ± 0.00, n = 2\n58.78", "–\n58.94"]


def test_the_average_of_our_runs_counts_each_task_once(recorded):
    records = []
    for task in find_recipe("glue").rows:
        names = find_recipe(f"glue/{task}/sam").lines
        values = {name: 60.0 if name == "test_f1" else 80.0 for _, _, name in names}
        accuracy = values.pop("test_accuracy", 1.0)
        records.append(recorded(f"glue/{task}/sam", 0, accuracy, result=values))
    (table,) = collect(records).tables
    (average,) = (row for row in sheet(table).rows if row[0] == "average")
    assert average[2] == "77.50\n75.60"  # six tasks of 80, two of 70


def test_every_recipe_is_among_the_families_that_are_trained():
    assert FAMILIES.keys() == RECIPES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recipe_family_trains(family, folder, tiny_networks, tmp_path, monkeypatch):
    monkeypatch.setenv("BISAM_CACHE", str(tmp_path / "cache"))
    name, changes = FAMILIES[family]
    recipe = find_recipe(name)
    (data,) = {config.data for config in recipe.cells.values()}
    arguments = ["train", name, "--runs", str(tmp_path / "runs"), "--device", "cpu", "--set", "epochs=1"]
    if data != "digits":
        changes = {"batch": "4" if data in ("imagenet", "glue/mrpc", "flowers") else "16", **changes}
        arguments += ["--data", str(folder / data.split("/")[0]), "--partial-data"]
    if family in ("finetune", "glue"):
        arguments += ["--model", f"transformers:{tiny_networks[family]}"]
    for field, value in changes.items():
        arguments += ["--set", f"{field}={value}"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr or done.exception
    results = [json.loads(path.read_text()) for path in (tmp_path / "runs").rglob("result.json")]
    assert len(results) == len(recipe.cells)
    assert all(result["status"] == "done" and 0 <= result["test_accuracy"] <= 100 for result in results)


def test_partial_data_is_refused_unless_requested(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("BISAM_CACHE", str(tmp_path / "cache"))
    arguments = ["train", "cifar10/resnet56/sam", "--runs", str(tmp_path / "runs"), "--data", str(folder / "cifar10")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "60 samples" in done.stderr
    assert "50000" in done.stderr


def test_the_data_command_prepares_and_describes_a_data_set(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("BISAM_CACHE", str(tmp_path / "cache"))
    done = CliRunner().invoke(app, ["data", "cifar10", "--data", str(folder / "cifar10"), "--partial-data"])
    assert done.exit_code == 0, done.stderr
    assert "cifar10, train: 60 images of 3×32×32, 10 classes" in done.stdout
    assert "sha256" in done.stdout
    done = CliRunner().invoke(app, ["data", "imagenet", "--data", str(folder / "imagenet"), "--partial-data"])
    assert done.exit_code == 0, done.stderr
    assert "imagenet, train: 12 images" in done.stdout


def test_a_path_with_brackets_is_printed_verbatim(folder, tmp_path, monkeypatch):
    cache = tmp_path / "a [b] :snake: [/b]"
    monkeypatch.setenv("BISAM_CACHE", str(cache))
    arguments = ["data", "cifar10", "--data", str(folder / "cifar10"), "--partial-data"]
    CliRunner().invoke(app, arguments)
    (cache / "part-of-cifar10" / "test.json").write_text("{")
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    assert f"{cache / 'part-of-cifar10' / 'test.safetensors'} is damaged: test.json cannot be read" in done.stdout
