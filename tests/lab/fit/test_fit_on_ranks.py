"""`bisam fit` and `bisam sweep` on several ranks: the first one plans and writes; a fit resumes after a rank died."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import bisam
from bisam.lab import records
from bisam.lab.cli import app
from bisam.lab.data.sources import own_data
from bisam.lab.fitting import radius
from bisam.lab.fitting.rehearsal import Cost
from bisam.lab.fitting.study import Study
from bisam.lab.training.ranks import joined

import ranks
from torchrun import DYING_NET, torchrun

CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 cannot run fully_shard on a CPU")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    draws, labels = np.random.default_rng(0), np.arange(240) % 3
    inputs = draws.normal(size=(240, 6)).astype(np.float32)
    inputs[:, 0] += 1.5 * labels
    path = tmp_path_factory.mktemp("rows") / "rows.npz"
    np.savez(path, x=inputs, y=labels)
    return path


@pytest.fixture(scope="module")
def options(rows, tmp_path_factory):
    """Options of a fit of a model without batch norm that kills its second rank once; and the folder of that model."""
    folder = tmp_path_factory.mktemp("net")
    (folder / "net.py").write_text(DYING_NET.format(folder=str(folder), inputs=6))
    model = ["--model", f"{folder / 'net.py'}:net", "--methods", "sam", "--seeds", "0", "--epochs", "2"]
    return [rows, *model, "--batch", "64", "--device", "cpu", "--checkpoint-seconds", "0"], folder


@pytest.fixture(scope="module")
def alone(options, tmp_path_factory):
    """The folder of the same fit in one process."""
    root = tmp_path_factory.mktemp("alone")
    done = CliRunner().invoke(app, ["fit", *map(str, options[0]), "--runs", str(root)])
    assert done.exit_code == 0, done.output
    return next(root.iterdir())


def assert_alike(one, other):
    assert one.name == other.name
    plans = [json.loads((folder / "plan.json").read_text()) for folder in (one, other)]
    assert plans[0] == plans[1]
    found = [{record.folder.name: record for record in records.find_records(folder)} for folder in (one, other)]
    assert found[0].keys() == found[1].keys()
    for name, record in found[0].items():
        assert record.config == found[1][name].config
        for ours, theirs in zip(record.metrics, found[1][name].metrics, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
            assert ours["validation_accuracy"] == theirs["validation_accuracy"]


def test_a_fit_restarted_after_a_rank_died_equals_a_fit_in_one_process(options, alone):
    given, folder = options
    done = torchrun(2, "fit", *given, "--perturb", "global", "--runs", folder / "runs", restarts=1, folder=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "killed").exists()
    made = next((folder / "runs").iterdir())
    assert_alike(alone, made)
    assert done.stdout.count("has the plan: 2 epochs, 1 seed, ") == 1
    assert done.stdout.count("resumes at epoch 2, batch 1") == 1
    assert done.stdout.count("to train in the same way") == 1
    assert {"best.safetensors", "train.py", "report.html"} <= {path.name for path in made.iterdir()}


def command(*arguments):
    """Runs a command in a rank; returns its exit code and output."""
    with ranks.launched():
        done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, done.output


@on_cpu
def test_a_sharded_fit_equals_a_fit_in_one_process(options, alone, tmp_path):
    (first, text), (second, other) = ranks.run(command, "fit", *options[0], "--shard", "--runs", tmp_path)
    assert (first, second, other) == (0, 0, ""), text
    assert_alike(alone, next(tmp_path.iterdir()))


def decide_by_different_clocks(rows, root):
    """Plans on ranks with different clocks and folders: the second one is far slower, and its folder stays empty."""
    rank, sizes = dist.get_rank(), set()

    def find_rho(model, make_optimizer, train, *arguments, **options):
        sizes.add(len(next(iter(train))[1]))
        return bisam.find_rho(model, make_optimizer, train, *arguments, **options)

    with joined(CPU) as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(radius, "find_rho", find_rho)
        patch.setattr("bisam.lab.fitting.rehearsal._measured", lambda *_: Cost(0.001 + 10 * rank, 0.001, 2))
        study = Study(own_data(str(rows)), "perceptron", root / str(rank), CPU, minutes=1, ranks=group)
        plan = study.decide(lambda line: None)
        again = study.decide(lambda line: None)
        with pytest.raises(ValueError, match=r"rank 1 has seeds=\[1\], and rank 0 has seeds=\[0\]"):
            Study(own_data(str(rows)), "perceptron", root, CPU, seeds=[rank], ranks=group)
    return plan, again, study.name, sizes


def test_all_ranks_use_the_plan_of_the_first_rank(rows, tmp_path):
    (first, again, name, sizes), (second, also, _, other_sizes) = ranks.run(decide_by_different_clocks, rows, tmp_path)
    assert first == second == again == also
    assert sizes == other_sizes == {16}  # of a batch of 32
    assert first.budget.epochs == 50  # by the fast clock
    assert [path.parent.parent.name for path in tmp_path.rglob("plan.json")] == ["0"]
    assert "micro_batch" in name  # each rank perturbs by its own part: another result than in one process


def test_invalid_options_are_refused_on_every_rank_before_anything_is_written(rows, tmp_path):
    fit = ["fit", rows, "--device", "cpu", "--runs", tmp_path / "runs"]
    for more, message in {
        ("--together", "2"): "2 ranks train one run at a time: remove --together 2",
        ("--sync-batchnorm",): "torch has SyncBatchNorm on CUDA only: remove --sync-batchnorm",
        ("--batch", "33"): "a batch of 33 cannot be shared evenly by 2 ranks: set another, as in --set batch=32",
        ("--shard", "--perturb", "rank"): "--shard perturbs all ranks alike",
    }.items():
        for code, text in ranks.run(command, *fit, *more):
            assert code == 1
            assert message in text
    assert not (tmp_path / "runs").exists()


def test_a_sweep_trains_each_value_on_all_ranks(tmp_path):
    sweep = ["sweep", "demo/40%/sam", "--seeds", "0", "--set", "epochs=1", "--set", "epoch_steps=2", "--device", "cpu"]
    (code, text), other = ranks.run(command, *sweep, "--over", "rho", "--values", "0.05,0.2", "--runs", tmp_path)
    assert code == 0, text
    assert other == (0, "")
    assert "Chosen: rho =" in text
    configs = [record.config for record in records.find_records(tmp_path)]
    assert sorted((config["rho"], config["micro_batch"]) for config in configs) == [(0.05, 32), (0.2, 32)]
    for code, text in ranks.run(command, *sweep, "--over", "batch", "--values", "32,64", "--runs", tmp_path):
        assert code == 1
        assert "use --perturb global, or --set micro_batch=32" in text
