"""`bisam fit` from end to end: images, rows and texts; the answer compared with the records; resuming."""

import html
import json
import re
import statistics
import sys

import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import t
from torch import nn

from bisam.lab import records
from bisam.lab.fitting import study
from bisam.lab.fitting.rehearsal import Cost
from bisam.lab.models import build


def results(folder):
    """The results of the runs, by method and seed."""
    found = {}
    for record in records.find_records(folder):
        assert records.verify(record) == []
        found.setdefault(record.config["method"], {})[record.config["seed"]] = record.result
    return found


def expected_gap(found, method, base, name="test_accuracy"):
    """Mean and interval of the paired differences, by hand."""
    gaps = [found[method][seed][name] - found[base][seed][name] for seed in found[base]]
    half = t.ppf(0.975, len(gaps) - 1) * statistics.stdev(gaps) / len(gaps) ** 0.5
    return statistics.fmean(gaps), statistics.fmean(gaps) - half, statistics.fmean(gaps) + half


def printed(value):
    return f"{value:+.2f}".replace("-", "−")


@pytest.fixture(scope="module")
def rows(bisam, breast_cancer, tmp_path_factory):
    """A fit of rows with a search of ρ, and its output."""
    root = tmp_path_factory.mktemp("runs")
    options = ["--runs", root, "--epochs", 2, "--seeds", "0-2", "--name", "cancer", "--device", "cpu"]
    done = bisam("fit", breast_cancer, *options)
    assert done.exit_code == 0, done.output
    return root / "cancer", done, options


def test_the_printed_answer_agrees_with_the_records(rows):
    folder, done, _ = rows
    found = results(folder)
    assert {method: [*seeds] for method, seeds in found.items()} == {
        method: [0, 1, 2] for method in ("bisam-log", "sam", "sgd")
    }
    sentence = done.output.strip().splitlines()[-1]
    method = "bisam-log" if "BiSAM" in sentence else "sam"
    validation = {
        name: statistics.fmean(one["validation_accuracy"] for one in found[name].values())
        for name in ("sam", "bisam-log")
    }
    assert validation[method] == max(validation.values())
    mean, low, high = expected_gap(found, method, "sgd")
    assert f"by {abs(mean):.2f} points" in sentence
    assert f"{printed(low)} to {printed(high)}" in sentence
    resolved = low > 0 or high < 0
    assert sentence.split(":")[0] == ("Inconclusive" if not resolved else "Yes" if mean > 0 else "No")
    assert ("more seed" in sentence) == (not resolved)


def test_unbalanced_classes_are_also_measured_by_balanced_accuracy_and_macro_f1(rows):
    folder, done, _ = rows
    assert "measures=accuracy,balanced_accuracy,macro_f1" in done.output
    for seeds in results(folder).values():
        for result in seeds.values():
            assert {"test_accuracy", "test_balanced_accuracy", "test_macro_f1", "validation_macro_f1"} <= {*result}
    page = (folder / "report.html").read_text()
    assert "perceptron, balanced accuracy" in page
    assert "validation macro F1, per cent" in page


def test_the_report_begins_with_the_answer_and_what_the_terminal_shows(rows):
    folder, done, _ = rows
    page = html.unescape((folder / "report.html").read_text())
    sentence = done.output.strip().splitlines()[-1]
    first = page[page.index("<main") : page.index("What came out", page.index("<main"))]
    rho = json.loads((folder / "plan.json").read_text())["rho"]
    words = [
        sentence, "more seeds", f"bisam predict {folder} DATA", f"{folder}/best.safetensors", "held out for the test",
        *(f">{rho[method]:g}<" for method in ("sam", "bisam-log")),
    ]  # fmt: skip
    for text in words:
        assert text in first, text
    assert re.findall(r"(\d of \d differences?) resolved", page) == ["0 of 1 difference"] * 2


def test_rho_is_chosen_from_a_grid_and_written_into_the_plan(rows):
    folder, _, _ = rows
    plan = json.loads((folder / "plan.json").read_text())
    configs = {record.config["method"]: record.config["rho"] for record in records.find_records(folder)}
    for method, rho in plan["rho"].items():
        assert rho in (0.01, 0.02, 0.05, 0.1, 0.2)
        assert configs[method] == rho
        assert any("→" in line and f"{rho:g}" in line for line in plan["search"][method])


def test_every_setting_is_shown_before_the_training(rows):
    _, done, _ = rows
    settings = done.output.index("settings")
    assert re.search(r"this takes about [^,]*\n", done.output)
    assert settings < done.output.index("epoch 2/2")
    for shown in ("optimizer=sgd", "lr=0.05", "schedule=cosine", "epochs=2", "batch=64", "validation=0.1"):
        assert shown in done.output


def test_the_best_weights_are_saved_and_load_into_the_model(rows):
    folder, _, _ = rows
    build("perceptron", 2, features=30).load_state_dict(load_file(folder / "best.safetensors"))
    method = re.search(r"(\S+) = bisam\.(\w+)\(", (folder / "train.py").read_text())[2]
    runs = [
        run
        for run in records.find_records(folder)
        if run.config["method"] == {"SAM": "sam", "BiSAM": "bisam-log"}[method]
    ]
    best = max(runs, key=lambda run: run.result["validation_accuracy"])
    written, expected = ((where / "best.safetensors").read_bytes() for where in (folder, best.folder))
    assert written == expected


def test_the_generated_python_code_trains_with_the_settings_of_the_run(rows):
    folder, done, _ = rows
    code = (folder / "train.py").read_text()
    assert len(code.splitlines()) == 9
    assert all(line in done.output for line in code.splitlines())
    model = nn.Linear(30, 2)
    before = model.weight.detach().clone()
    names = {"model": model, "loader": [(torch.randn(8, 30), torch.arange(8) % 2)]}
    exec(code, names)
    assert not torch.equal(before, model.weight)
    config = next(record.config for record in records.find_records(folder) if record.config["method"] != "sgd")
    assert names["optimizer"].param_groups[0]["momentum"] == config["momentum"]
    assert re.search(r"rho=(\S+?)[,)]", code)[1] in {
        f"{record.config['rho']:g}" for record in records.find_records(folder)
    }


def test_repeating_the_command_trains_nothing_and_more_seeds_train_only_the_new_ones(rows, bisam, breast_cancer):
    folder, done, options = rows
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")}
    again = bisam("fit", breast_cancer, *options)
    assert again.exit_code == 0, again.output
    assert "9 of 9 runs are done already" in again.output
    assert again.output.strip().splitlines()[-1] == done.output.strip().splitlines()[-1]
    more = [*options[:5], "0-3", *options[6:]]
    with_more = bisam("fit", breast_cancer, *more).output
    assert "9 of 12 runs are done already" in with_more
    assert re.search(r"has the plan: \d+ epochs, 4 seeds", with_more)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    fewer = bisam("fit", breast_cancer, *options[:5], "1", *options[6:]).output
    assert "finished runs of seeds 0, 2, 3 are there too, and not compared here" in fewer
    assert "not compared here" not in again.output


def test_an_added_method_gets_its_own_rho_and_the_others_keep_theirs(bisam, breast_cancer, tmp_path):
    options = ["--runs", tmp_path, "--epochs", 1, "--seeds", "0", "--name", "cancer", "--device", "cpu"]
    plans = []
    for methods in ("sam", "sam,asam"):
        done = bisam("fit", breast_cancer, *options, "--methods", methods)
        assert done.exit_code == 0, done.output
        plans.append(json.loads((tmp_path / "cancer" / "plan.json").read_text()))
    assert "has the plan: 1 epoch, 1 seed, ρ of SAM" in done.output
    assert "2 of 3 runs are done already" in done.output
    assert plans[1]["rho"]["sam"] == plans[0]["rho"]["sam"]
    assert plans[1]["rho"]["asam"] in (0.1, 0.5, 1.0, 2.0, 3.0)
    assert {**plans[1], "rho": 0, "search": 0} == {**plans[0], "rho": 0, "search": 0}


def test_a_report_needs_only_the_records(rows, bisam, tmp_path):
    folder, _, _ = rows
    done = bisam("report", folder, "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert "breast, perceptron: test results in per cent" in done.output
    assert "of no recipe" not in done.output


def test_the_answer_is_printed_without_the_library_for_charts(rows, bisam, breast_cancer, monkeypatch):
    _, done, options = rows
    monkeypatch.setitem(sys.modules, "bisam.lab.report.report", None)  # as if it could not be imported
    again = bisam("fit", breast_cancer, *options)
    assert again.exit_code == 0, again.output
    assert "no page: charts need the library" in again.output
    assert again.output.strip().splitlines()[-1] == done.output.strip().splitlines()[-1]


def test_other_data_of_the_same_name_are_refused(rows, bisam, breast_cancer, tmp_path):
    _, _, options = rows
    other = tmp_path / "breast.csv"
    other.write_text("".join(breast_cancer.read_text().splitlines(keepends=True)[:-5]))
    refused = bisam("fit", other, *options)
    assert refused.exit_code == 1
    assert "was trained with other data: give another --name" in refused.output


def test_a_fit_of_a_folder_of_images_prints_the_difference_of_its_records(bisam, images, tmp_path):
    root = tmp_path / "runs"
    done = bisam(
        "fit", images, "--methods", "sam", "--rho", 0.05, "--epochs", 1, "--batch", 8, "--set", "size=8", "--seeds",
        "0,1", "--runs", root, "--device", "cpu", "--together", 2, "--tensorboard",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (line,) = (line for line in done.output.splitlines() if line.startswith("this takes about"))
    assert line.endswith(", one run after the other: it does not count --together 2")
    assert (root / "tensorboard").is_dir()
    assert "6 of 30 samples are held out" in done.output
    found = results(root)
    assert {*found} == {"sgd", "sam"}
    gap = statistics.fmean(found["sam"][seed]["test_accuracy"] - found["sgd"][seed]["test_accuracy"] for seed in (0, 1))
    assert f"by {abs(gap):.2f} points" in done.output.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["pets", "digits"])
def test_a_folder_takes_precedence_over_a_data_set_of_the_same_name(bisam, images, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    images.rename(tmp_path / name)
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef net(n):\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, n))\n"
    )
    options = ["--methods", "sam", "--rho", 0.05, "--epochs", 1, "--batch", 8, "--seeds", "0", "--device", "cpu"]
    done = bisam("fit", name, "--model", "net.py:net", "--set", "size=8", *options)
    assert done.exit_code == 0, done.output
    assert f"./{name}, train: 24 samples (image), 3 classes" in done.output
    assert "hub" not in done.output
    found = records.find_records(tmp_path / "runs")
    assert {record.config["data"] for record in found} == {f"./{name}"}
    assert {record.folder.parent.name.partition("-")[0] for record in found} == {name}


def test_a_fit_of_a_csv_of_texts_fine_tunes_a_pretrained_model(bisam, reviews, minilm, tmp_path):
    root = tmp_path / "runs"
    done = bisam(
        "fit", reviews, "--text", "review", "--label", "stars", "--model", minilm, "--methods", "sam", "--rho", 0.01,
        "--epochs", 1, "--batch", 8, "--seeds", "0", "--runs", root, "--device", "cpu",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "optimizer=adamw, lr=2e-05, schedule=linear, warmup=0.1" in done.output
    found = results(root)
    gap = found["sam"][0]["test_accuracy"] - found["adamw"][0]["test_accuracy"]
    sentence = done.output.strip().splitlines()[-1]
    assert f"by {abs(gap):.2f} points" in sentence
    assert "two seeds or more" in sentence
    first = next(record for record in records.find_records(root) if record.config["method"] == "adamw").metrics[0]
    assert first["loss"] < 0.8  # near log 2: a new head on a pretrained network


def test_the_minutes_option_plans_what_fits_and_shows_what_is_given_up(bisam, breast_cancer, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "rehearse", lambda *_: Cost(step=0.1, validation=0.1, steps=6))
    options = ["--methods", "sam", "--device", "cpu", "--together", 2]
    done = bisam("fit", breast_cancer, "--minutes", 0.2, "--runs", tmp_path, *options)
    assert done.exit_code == 0, done.output
    (line,) = (line for line in done.output.splitlines() if line.startswith("for --minutes"))
    plan = json.loads(next(tmp_path.rglob("plan.json")).read_text())
    # 2 methods of e epochs cost 1.4 e for each seed: of 12 seconds, no search and a few epochs are left
    assert plan["budget"] == {"epochs": 3, "seeds": 2, "grid": 0, "repeats": 0}
    assert plan["given_up"] == ["3 epochs instead of 50", "2 seeds instead of 3", "no search: ρ is the paper's"]
    assert all(lost in line for lost in plan["given_up"])
    assert line.endswith("; about 8 seconds, one run after the other: it does not count --together 2")
    assert {record.config["epochs"] for record in records.find_records(tmp_path)} == {3}
    refused = bisam("fit", breast_cancer, "--minutes", 0.01, "--runs", tmp_path, "--device", "cpu")
    assert refused.exit_code == 1
    assert "the least that can be compared" in refused.output


def test_a_network_whose_code_has_changed_is_refused(bisam, breast_cancer, tmp_path):
    """The layers stay the same, so the weights would still load. Comments may change."""
    head = "from torch import nn\n\n\nclass Net(nn.Linear):\n"
    code = f"{head}    def __init__(self):\n        super().__init__(30, 2)\n\n"
    path = tmp_path / "net.py"
    options = ["--model", f"{path}:Net", "--rho", 0.05, "--methods", "sam", "--epochs", 1, "--seeds", 0]
    results = []
    for line in (
        "return super().forward(x)",
        "# as it is\n        return super().forward(x)",
        "return -super().forward(x)",
    ):
        path.write_text(f"{code}    def forward(self, x):\n        {line}\n")
        results.append(bisam("fit", breast_cancer, *options, "--runs", tmp_path / "runs", "--device", "cpu"))
    assert [done.exit_code for done in results] == [0, 0, 1], results[1].output
    assert "2 of 2 runs are done already" in results[1].output
    message = " ".join(results[2].output.split())
    assert f"{path} has changed since the runs in" in message
    assert "its network may be another: give another --name" in message
    (folder,) = (tmp_path / "runs").iterdir()
    predicting = ["predict", folder, breast_cancer, "--run-code", "--out", tmp_path / "found.csv"]
    refused = bisam(*predicting)
    assert refused.exit_code == 1
    assert f"the code of {path}:Net has changed since the training" in " ".join(refused.output.split())
    path.write_text(f"{code}    # as before\n    def forward(self, x):\n        return super().forward(x)\n")
    right = bisam(*predicting)
    assert right.exit_code == 0, right.output
    path.write_text(f"{code}    def forward(self, x):\n        return 1 * super().forward(x)\n")
    assert bisam(*predicting, "--model", f"{path}:Net").exit_code == 0
