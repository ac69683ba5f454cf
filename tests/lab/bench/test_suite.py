"""The parts of `bisam bench`: that they measure, judge and store correctly, whatever the speed."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import bisam
from bisam.lab.bench import bars as bench_bars
from bisam.lab.bench import loss as bench_loss
from bisam.lab.bench import steps as bench_steps
from bisam.lab.bench import suite as bench
from bisam.lab.bench import tables as bench_tables
from bisam.lab.bench.bars import BARS, judged
from bisam.lab.bench.timing import take_turns
from bisam.lab.models import MODELS
from bisam.lab.recipes import find_recipe
from bisam.lab.records import receipt
from bisam.lab.tables import costs
from bisam.lab.tables.published import PublishedCell, table, tables

CPU = torch.device("cpu")
PLAN = bench.BenchmarkPlan(CPU, ("loss",), quick=True)
RESULTS = Path(__file__).parents[3] / "benchmarks/results"


def published_result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.fixture
def planned(monkeypatch):
    """Units that measure nothing, at a commit that the test can set with the returned monkeypatch."""
    monkeypatch.setenv("BISAM_COMMIT", "abc")
    unit = bench.Unit("loss", "128x10", lambda: {"found": 1}, str)
    monkeypatch.setattr(bench.BenchmarkPlan, "units", lambda plan: [unit, unit._replace(name="128x100")])
    monkeypatch.setattr(bench, "judged", lambda result: [])
    return monkeypatch


def no_log(_):
    pass


def test_a_later_run_at_the_same_commit_keeps_the_results_that_it_does_not_measure_again(planned, tmp_path):
    out = tmp_path / "bench.json"
    bench.run(PLAN, out, no_log)
    stored = json.loads(out.read_text())
    stored["epoch"] = {"resnet56": {"found": 2}}
    stored["loss"] |= {"128x10": {"found": 3}, "512x1000": {"found": 3}}
    out.write_text(json.dumps(stored))
    bench.run(PLAN, out, no_log)
    result = json.loads(out.read_text())
    assert result["epoch"] == {"resnet56": {"found": 2}}
    found = {size: entry["found"] for size, entry in result["loss"].items()}
    assert found == {"128x10": 1, "128x100": 1, "512x1000": 3}


@pytest.mark.parametrize("commit", ["def", "unknown"])
def test_a_run_at_another_or_an_unknown_commit_replaces_all_results(planned, tmp_path, commit):
    out, lines = tmp_path / "bench.json", []
    planned.setenv("BISAM_COMMIT", "unknown" if commit == "unknown" else "abc")
    bench.run(PLAN, out, no_log)
    out.write_text(json.dumps({**json.loads(out.read_text()), "epoch": {}}))
    planned.setenv("BISAM_COMMIT", commit)
    bench.run(PLAN, out, lines.append)
    assert "epoch" not in json.loads(out.read_text())
    assert any("is replaced" in line for line in lines)


def test_an_interrupted_run_keeps_its_completed_measurements(planned, tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    units = [bench.Unit("loss", "128x10", lambda: {"found": 1}, str), bench.Unit("loss", "128x100", interrupt, str)]
    planned.setattr(bench.BenchmarkPlan, "units", lambda plan: units)
    out = tmp_path / "bench.json"
    with pytest.raises(KeyboardInterrupt):
        bench.run(PLAN, out, no_log)
    assert json.loads(out.read_text())["loss"] == {"128x10": {"found": 1, "quick": True}}


def test_a_result_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "result.json"
    receipt.save(path, {"one": 1})
    with pytest.raises(TypeError):
        receipt.save(path, {"one": object()})
    assert json.loads(path.read_text()) == {"one": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_the_looped_loss_has_the_value_and_gradient_of_the_vectorised_loss():
    z = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    y = torch.randint(5, (8,))
    values = [loss(z, y) for loss in (bench_loss.looped, bisam.LowerBound("log"))]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*(torch.autograd.grad(value, z) for value in values))


def test_take_turns_interleaves_the_contestants_and_returns_their_medians():
    calls = []

    def contestant(name, values):
        values = iter(values)
        return lambda: calls.append(name) or next(values)

    medians = take_turns({"a": contestant("a", [1, 9, 2]), "b": contestant("b", [5, 4, 3])}, rounds=3)
    assert medians == {"a": 2, "b": 4}
    assert all(set(calls[i : i + 2]) == {"a", "b"} for i in (0, 2, 4))


def test_simultaneous_trainings_are_measured_per_model_and_step(monkeypatch):
    monkeypatch.setattr(bench_steps, "take_turns", lambda runs, rounds: dict.fromkeys(runs, 0.012))
    entry = bench_steps.together("resnet20", 2, device=CPU, batch=2, compiled=False, steps=1, rounds=1)
    assert entry["ms_per_model_and_step"] == 6
    assert entry["extrapolated_minutes_of_200_epochs"] == pytest.approx(0.012 * 200 * 22_500 / 60)


def test_models_are_compiled_where_it_is_faster_unless_configured_otherwise(monkeypatch):
    monkeypatch.setattr(bench, "COMPILED", {"resnet56"})
    cuda = bench.BenchmarkPlan(torch.device("cuda"))
    assert [cuda.compiles(name) for name in ("resnet56", "wrn28-10")] == [True, False]
    assert not bench.BenchmarkPlan(CPU).compiles("resnet56")
    assert replace(cuda, compiling="always").compiles("wrn28-10")
    assert not replace(cuda, compiling="never").compiles("resnet56")


def test_on_cuda_every_bar_has_a_unit_that_measures_it():
    units = {(unit.section, unit.name) for unit in bench.BenchmarkPlan(torch.device("cuda")).units()}
    assert units >= {bar.path[:2] for bar in BARS if bar.device == "cuda"}
    assert len(units) == 4 + 5 + 5 + 1
    assert set(bench_steps.AUTHORS_MS) == set(table("tab:time_cifar10").cells) == set(bench.MODELS["cuda"])
    assert set(bench_steps.AUTHORS_MS) <= set(MODELS)


def on_cuda(section, name, **entry):
    return {"device": "cuda", section: {name: {"batch": 128, **entry}}}


def judged_bar(name, result):
    (bar,) = (bar for bar in judged(result) if bar["name"] == name)
    return bar["measured"], bar["met"]


def test_bars_are_met_up_to_their_limit_and_missed_beyond():
    name = "resnet56: BiSAM ÷ SAM"
    for ratio, met in ((1.02, True), (1.021, False)):
        ratios = {"bisam-log/sam": ratio, "bisam-log/sgd": 2}
        result = on_cuda("epoch", "resnet56", ratio=ratios, speed_up_over_authors=9)
        assert judged_bar(name, result) == (ratio, met)
        assert judged_bar("resnet56: faster than the authors' code", result) == (9, True)
    name = "wrn28-10: copies of the weights beyond SGD's peak"
    for copies, met in ((1.02, True), (1.021, False)):
        assert judged_bar(name, on_cuda("memory", "wrn28-10", copies_beyond_sgd={"bisam-log": copies})) == (copies, met)


def test_a_bar_is_not_judged_without_a_measurement_or_with_another_batch_size():
    assert {bar["met"] for bar in judged({"device": "cuda"})} == {None}
    other = {"device": "cuda", "together": {"resnet56 x6": {"batch": 64, "ms_per_model_and_step": 1.0}}}
    assert judged_bar("six resnet56: ms per model and step", other) == (None, None)


def test_a_result_of_a_gpu_is_shown_with_all_its_tables():
    ms = {"sgd": 4.0, "sam": 8.0, "bisam-log": 8.1, "bisam-tanh": 8.2, "eager": 30.0}
    times = {"cross_entropy": 10.0, "log": 9.0, "tanh": 9.5, "plain_log": 50.0, "plain_tanh": 50.0}
    ratios = {name: value / 10 for name, value in times.items() if name != "cross_entropy"}
    loss = {"eager_us": times, "eager_ratio": ratios, "device_us": times, "device_ratio": ratios}
    peaks = {"sgd": 1000.0, "sam": 1139.0, "bisam-log": 1139.0}
    result = {
        "device": "cuda",
        "loss": {"128x10": loss},
        "epoch": {
            "resnet56": {
                "batch": 128,
                "precision": "bf16 autocast",
                "compiled": True,
                "ms": ms,
                "setup_s": {"sgd": 30.0, "sam": 2.0},
                "seconds_of_epoch": {name: 0.352 * value for name, value in ms.items()},
                "ratio": {"bisam-log/sam": 1.0125, "bisam-log/sgd": 2.025},
                "paper": bench_steps._paper("resnet56"),
                "speed_up_over_authors": 9.98,
            }
        },
        "together": {
            "resnet56 x6": {"batch": 128, "ms_per_model_and_step": 4.0, "extrapolated_minutes_of_200_epochs": 28.2}
        },
        "memory": {
            "wrn28-10": {
                "batch": 128,
                "weights_mib": 139.0,
                "peak_mib": peaks,
                "peak_copies": {name: value / 139 for name, value in peaks.items()},
                "copies_beyond_sgd": {"sam": 1.0, "bisam-log": 1.0},
            }
        },
    }
    result["bars"] = judged(result)
    console = Console(width=140, record=True, file=io.StringIO())
    bench_tables.show(result, console)
    text = console.export_text()
    for words in ("9.0 (0.90)", "resnet56, compiled", "1.30", "resnet56 x6", "28.2", "139 MiB", "1.012", "10.0"):
        assert words in text
    assert text.count("not measured") == len([bar for bar in result["bars"] if bar["met"] is None])


def test_the_papers_tables_are_read_as_printed_and_an_unknown_name_is_refused():
    assert table("tab:time_cifar10").hardware == "A100"
    assert table("tab:cifar10").average["sgd"].std is not None
    assert table("tab:glue").cells["adamw"]["glue"] == PublishedCell(73.21)
    assert all(table(name).cells for name in tables())
    with pytest.raises(ValueError, match=r"'tab:cifar'.*tab:cifar10"):
        table("tab:cifar")


def test_a_receipt_has_the_commit_of_the_environment_variable(monkeypatch):
    monkeypatch.setenv("BISAM_COMMIT", "told")
    found = receipt.receipt()
    assert found["commit"] == "told"
    assert found["torch"] == torch.__version__
    assert json.loads(json.dumps(found)) == found


def test_an_installed_copy_does_not_take_the_commit_of_the_repository_around_it(monkeypatch, tmp_path):
    monkeypatch.delenv("BISAM_COMMIT", raising=False)
    monkeypatch.setattr(receipt, "ROOT", tmp_path)
    assert receipt.receipt()["commit"] == "unknown"


def test_bars_have_the_batch_size_of_the_authors_times():
    assert bench_bars.BATCH == bench_steps.AUTHORS_BATCH == bench.BATCH["cuda"]


def test_the_authors_times_equal_those_of_their_published_result():
    record = published_result("authors_h200")
    assert {name: ms["bisam-log"] for name, ms in record["ms"].items()} == bench_steps.AUTHORS_MS
    assert record["batch"] == bench_steps.AUTHORS_BATCH
    assert bench_steps.AUTHORS_GPU in record["receipt"]["gpu"]


def test_costs_of_recipes_follow_from_the_measured_step_times():
    step_ms = {name: entry["ms"]["sgd"] for name, entry in published_result("bench_h200")["epoch"].items()}
    step_ms["resnet32"] = published_result("frontier_h200")["models"]["resnet32"]["ms"]["sgd"]
    assert {name: round(value, 2) for name, value in step_ms.items()} == costs.PLAIN_STEP_MS
    plain_steps = 4 * 400 * 351 * 6  # four methods with 400 epochs of plain steps each, or 200 of two, and six seeds
    assert costs.hours(find_recipe("cifar10/resnet56")) == pytest.approx(
        plain_steps * costs.PLAIN_STEP_MS["resnet56"] / 3.6e6
    )
