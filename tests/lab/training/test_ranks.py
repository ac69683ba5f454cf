"""One run on several processes: the same result as in one process, one record, and resuming after a rank died."""

import os
import re
import signal
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.fsdp import FSDPModule
from typer.testing import CliRunner

import bisam
from bisam.lab import records
from bisam.lab.cli import app
from bisam.lab.config import Config
from bisam.lab.data.batches import Rounds, TensorBatches
from bisam.lab.data.shards import Shard
from bisam.lab.data.sources import open_source
from bisam.lab.models import compiling
from bisam.lab.models.resnet import ResNet
from bisam.lab.recipes import find_recipe
from bisam.lab.training import jobs, loop
from bisam.lab.training.loop import Stopped
from bisam.lab.training.progress import Progress
from bisam.lab.training.ranks import ALONE, RankLost, Ranks, joined, unlike_fields
from bisam.lab.training.run import TrainingRun
from bisam.lab.training.sharding import ShardedModel
from bisam.tensors.buckets import locals_of

import ranks
from family import assert_identical
from torchrun import DYING_NET, torchrun

CPU = torch.device("cpu")
EPOCHS = 2
GLOBAL, SHARDS = {"perturb": "global"}, {"shard": True}
on_cpu = pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 cannot run fully_shard on a CPU")


def without_batch_norm(config, source):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, source.classes))


def with_batch_norm(config, source):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, source.classes))


def with_dropout(config, source):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, source.classes))


class Stopping(Progress):
    """Sends this process SIGTERM in the middle of the second epoch, in one rank."""

    def __init__(self, rank):
        super().__init__(Console(quiet=True))
        self._rank, self._steps = rank, 0

    def step(self, number):
        super().step(number)
        self._steps += 1
        if self._steps == 6 and self._rank == (dist.get_rank() if dist.is_initialized() else 0):
            os.kill(os.getpid(), signal.SIGTERM)


def train(root, method="sam", stop_rank=None, build=without_batch_norm, ranked=None, **changes):
    """Train the demo in all processes; `ranked` are options for several ranks."""
    fields = {"epochs": str(EPOCHS), "epoch_steps": "4", **changes}
    with joined(CPU, **(ranked or {})) as group:
        sam = find_recipe("demo/40%/sam")
        cells = {(row, method): replace(config, method=method) for (row, _), config in sam.cells.items()}
        recipe = replace(sam, cells=cells)
        made = jobs.jobs_of(recipe, [0], fields, Path(root), group)
        group.refuse_unlike(unlike_fields([job.config for job in made], {}))
        progress = Progress(Console(quiet=True)) if stop_rank is None else Stopping(stop_rank)
        try:
            with progress:
                jobs.run(made, partial(open_source, log=print), CPU, progress, build=build, ranks=group)
        except Stopped:
            return "stopped"
    return "done"


def result(root):
    (record,) = records.find_records(Path(root))
    with records.RunFolder.open(record.folder, record.config) as folder:
        return record, folder.load_weights()


def assert_alike(one, other):
    """Equal up to rounding: sums over ranks are rounded differently from sums over a batch."""
    (first, weights), (second, others) = result(one), result(other)
    assert first.config == second.config
    for name in weights:
        torch.testing.assert_close(weights[name], others[name], rtol=1e-4, atol=1e-5)
    assert len(first.metrics) == len(second.metrics) == EPOCHS
    for ours, theirs in zip(first.metrics, second.metrics, strict=True):
        names = {"loss", "error", "flips", "ascent_norm", "perturbed_loss", "validation_accuracy", "lr"}
        assert ours.keys() == theirs.keys()
        for name in names & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name


# The mathematics.


@pytest.mark.parametrize("method", ["sam", "bisam-log"])
def test_two_ranks_with_global_perturbation_train_like_one_process(tmp_path, method):
    assert ranks.run(_train, str(tmp_path / "two"), method, GLOBAL) == ["done", "done"]
    train(tmp_path / "one", method)
    assert_alike(tmp_path / "one", tmp_path / "two")


def _train(root, method, ranked, options=None):
    return train(root, method, ranked=ranked, **(options or {}))


def test_two_ranks_that_perturb_separately_train_like_one_process_with_micro_batches(tmp_path):
    ranks.run(train, str(tmp_path / "two"), "sam")
    train(tmp_path / "one", "sam", micro_batch="32")
    assert_alike(tmp_path / "one", tmp_path / "two")
    record, _ = result(tmp_path / "two")
    assert record.config["micro_batch"] == 32
    assert (record.receipt["ranks"], record.receipt["perturb"]) == (2, "rank")


def test_all_ranks_evaluate_the_weights_and_statistics_of_the_record(tmp_path):
    """Each rank has batch statistics of its own samples; those of the first rank are used and recorded."""
    ranks.run(_train_with_batch_norm, str(tmp_path))
    record, weights = result(tmp_path)
    alone = TrainingRun(Config.from_dict(record.config), open_source("digits", log=print), CPU, with_batch_norm)
    alone.model.load_state_dict(weights)
    assert alone.measured(alone.test, "test") == {"test_accuracy": record.result["test_accuracy"]}
    last = alone.measured(alone.validation, "validation")["validation_accuracy"]
    assert last == record.metrics[-1]["validation_accuracy"]


def _train_with_batch_norm(root):
    return train(root, build=with_batch_norm, lr="0.5")


def test_shards_are_the_parts_of_a_batch_in_order():
    x, y = torch.arange(7.0).view(7, 1), torch.arange(7)

    def labels(shard):
        batches = Rounds(TensorBatches(x, y, batch=4, device="cpu", seed=0, shuffle=True), 3)
        batches.shard = shard
        return [labels.tolist() for _, labels in batches.epoch(0)]

    parts = [labels(Shard(number, 3)) for number in range(3)]
    assert [sum(of_batch, []) for of_batch in zip(*parts, strict=True)] == labels(Shard())  # noqa: RUF017


def test_a_rank_without_samples_of_a_batch_has_an_empty_batch():
    texts = {"input_ids": torch.ones(1, 5, dtype=torch.long), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    batches = TensorBatches(texts, torch.tensor([1]), batch=4, device="cpu", seed=0, trim=True)
    batches.shard = Shard(0, 2)
    ((inputs, labels),) = batches.epoch(0)
    assert (len(inputs["input_ids"]), len(labels)) == (0, 0)


# FSDP2.


@on_cpu
@pytest.mark.parametrize("method", ["sam", "bisam-log"])
def test_two_ranks_with_half_of_each_parameter_train_like_one_process(tmp_path, method):
    assert ranks.run(_train, str(tmp_path / "two"), method, SHARDS) == ["done", "done"]
    train(tmp_path / "one", method)
    assert_alike(tmp_path / "one", tmp_path / "two")
    record, _ = result(tmp_path / "two")
    assert (record.receipt["shard"], record.receipt["perturb"]) == (True, "global")


def hold_shards():
    """The sharded modules of a model with blocks, a rank's share of it, and a test of fewer samples than ranks."""
    with joined(CPU, **SHARDS) as group:
        config = group.adapted(Config(method="sam", data="digits", batch=64, precision="fp32", label_smoothing=0.0))
        run = TrainingRun(config, open_source("digits", log=print), CPU, with_blocks, group)
        cut = [name for name, module in run.model.named_modules() if isinstance(module, FSDPModule)]
        run.optimizer._sync.forget_gathered()
        parts = sum(part.numel() for part in locals_of(run.model.parameters()))
        one = TensorBatches(torch.randn(1, 1, 8, 8), torch.tensor([1]), batch=4, device="cpu", seed=0)
        one.shard = Shard(group.rank, group.count)
        accuracy = run.measured(one, "test")["test_accuracy"]
        found = run.diverged
        run.optimizer._sync.forget_gathered()
        next(run.model.parameters()).detach().to_local().fill_(float("nan") if group.is_first else 0.0)
        return cut, parts, accuracy, (found, run.diverged), run.optimizer._sync.unrecordable()


def with_blocks(config, source):
    convolutions = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 16))
    blocks = nn.Sequential(OneLayer(16), OneLayer(16))
    return nn.Sequential(convolutions, blocks, OneLayer(16), nn.Linear(16, source.classes))


class OneLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


@on_cpu
def test_each_rank_holds_a_shard_of_every_block(tmp_path):
    whole = sum(param.numel() for param in with_blocks(None, open_source("digits", log=print)).parameters())
    for cut, parts, accuracy, diverged, why_not_captured in ranks.run(hold_shards):
        assert cut == ["", "1.0", "1.1"]
        assert parts == whole / 2
        assert accuracy in (0.0, 100.0)
        assert diverged == (False, True)
        assert "FSDP2 gathers and frees sharded parameters from the host" in why_not_captured


def resume_from_best():
    """Test accuracies of the best weights and of others, before and after the run was resumed."""
    with joined(CPU, **SHARDS) as group:
        config = group.adapted(Config(method="sam", data="digits", batch=64, precision="fp32", label_smoothing=0.0))
        source = open_source("digits", log=print)
        before, after = (TrainingRun(config, source, CPU, without_batch_norm, group) for _ in range(2))
        before.end_epoch(3, together=1)
        state = before.state()
        sent = group.of_first(before.held.outline(state))
        after.load(state if group.is_first else sent)
        with torch.no_grad():
            for param in after.model.parameters():
                param.zero_()
        zeros = after.last_test_accuracies()
        return after.best.epoch, before.test_accuracies(), after.test_accuracies(), zeros


@on_cpu
def test_a_resumed_sharded_run_has_its_best_weights():
    for epoch, before, after, zeros in ranks.run(resume_from_best):
        assert epoch == 3
        assert before == after != zeros


def compiled(wrap):
    """How a ResNet is compiled if there are kernels for it."""
    model, calls = ResNet(8, 10), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "_has_kernels", lambda device: True)
        patch.setattr(ResNet, "fuse", lambda self: calls.append("kernels"))
        patch.setattr(nn.Module, "compile", lambda self, **options: calls.append("torch"))
        compiling.compile_model(wrap(model), CPU, bf16=True)
    return calls


def compiled_shards():
    with joined(CPU, **SHARDS) as group:
        return compiled(group.wrapped)


def test_kernels_are_used_unless_batch_norm_is_synchronised():
    assert compiled(lambda model: model) == ["kernels"]
    assert compiled(nn.SyncBatchNorm.convert_sync_batchnorm) == ["torch"]


@on_cpu
def test_kernels_are_not_used_for_sharded_models():
    assert ranks.run(compiled_shards) == [["torch"], ["torch"]]


# Interruptions.


BISAM = "bisam-log", {}
LOOKSAM = "looksam", {"every": "4"}  # its state is needed when it resumes
ADAMW = "sam", {"optimizer": "adamw", "lr": "0.01"}  # it counts its steps for each parameter


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ("replicas", "one process", BISAM),
        ("one process", "replicas", BISAM),
        pytest.param("shards", "one process", LOOKSAM, marks=on_cpu),
        pytest.param("one process", "shards", LOOKSAM, marks=on_cpu),
        pytest.param("shards", "replicas", BISAM, marks=on_cpu),
        pytest.param("shards", "shards", ADAMW, marks=on_cpu),
    ],
)
def test_a_run_resumes_within_an_epoch_with_another_number_of_ranks_or_sharding(tmp_path, first, second, what):
    """The signal reaches one rank only; both stop after the same step."""
    ways = {"replicas": GLOBAL, "shards": SHARDS}
    method, fields = what

    def trained(way, **options):
        if way in ways:
            return ranks.run(_train, str(tmp_path / "run"), method, ways[way], {**options, **fields})
        return [train(tmp_path / "run", method, **options, **fields)] * 2

    assert trained(first, stop_rank=1 if first in ways else 0) == ["stopped", "stopped"]
    assert len(records.read(next((tmp_path / "run/demo").iterdir())).metrics) == 1
    assert trained(second) == ["done", "done"]
    train(tmp_path / "whole", method, **fields)
    assert_alike(tmp_path / "whole", tmp_path / "run")


def test_two_ranks_with_dropout_resume_bit_for_bit_from_the_middle_of_an_epoch(tmp_path):
    assert ranks.run(_train_with_dropout, str(tmp_path / "run"), 1) == ["stopped", "stopped"]
    for root in ("run", "whole"):
        assert ranks.run(_train_with_dropout, str(tmp_path / root), None) == ["done", "done"]
    (record, weights), (whole, expected) = result(tmp_path / "run"), result(tmp_path / "whole")
    assert [line["perturbed_loss"] for line in record.metrics] == [line["perturbed_loss"] for line in whole.metrics]
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("method", ["fsam", "vasso"])
def test_the_optimizer_state_of_each_rank_resumes_bit_for_bit(tmp_path, method):
    assert ranks.run(_train_by_rank, str(tmp_path / "run"), method, 1) == ["stopped", "stopped"]
    for root in ("run", "whole"):
        assert ranks.run(_train_by_rank, str(tmp_path / root), method, None) == ["done", "done"]
    (record, weights), (whole, expected) = result(tmp_path / "run"), result(tmp_path / "whole")
    assert [line["perturbed_loss"] for line in record.metrics] == [line["perturbed_loss"] for line in whole.metrics]
    assert_identical([weights[name] for name in expected], [*expected.values()])


def _train_by_rank(root, method, stop_rank):
    return train(root, method, stop_rank=stop_rank, ranked={"perturb": "rank"})


def _train_with_dropout(root, stop_rank):
    return train(root, stop_rank=stop_rank, build=with_dropout, ranked=GLOBAL)


def test_three_ranks_restarted_by_torchrun_train_like_one_process(tmp_path):
    """One of them is killed in its second epoch; the others print why they stop."""
    (tmp_path / "net.py").write_text(DYING_NET.format(folder=str(tmp_path), inputs=64))
    options = [
        "demo/40%/sam", "--model", f"{tmp_path / 'net.py'}:net", "--device", "cpu", "--checkpoint-seconds", "0",
        "--set", f"epochs={EPOCHS}", "--set", "epoch_steps=4", "--set", "batch=66",
    ]  # fmt: skip
    command = ["train", *options, "--perturb", "global", "--runs", tmp_path / "three"]
    done = torchrun(3, *command, restarts=1, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    for rank in (0, 2):
        assert done.stderr.count(f"Error: rank {rank} stops: another process of this training has ended") == 1
    assert "resumes at epoch 2, batch 1" in done.stdout
    assert len(re.findall(r"test accuracy [\d.]+ %", done.stdout)) == 1  # of the first rank
    alone = CliRunner().invoke(app, ["train", *options, "--runs", str(tmp_path / "one")])
    assert alone.exit_code == 0, alone.output
    assert_alike(tmp_path / "one", tmp_path / "three")


# Bad input.


@pytest.mark.parametrize(
    ("count", "config", "message"),
    [
        (
            3,
            Config(method="sam"),
            "a batch of 128 cannot be shared evenly by 3 ranks: set another, as in --set batch=126",
        ),
        (2, Config(method="sam", micro_batch=48), "micro-batches of 48 do not fit evenly into the 64 samples"),
    ],
)
def test_a_batch_that_ranks_cannot_share_evenly_is_refused(count, config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Ranks(0, count).adapted(config)


@pytest.mark.parametrize(("shard", "option"), [(False, "--perturb global"), (True, "--shard")])
def test_micro_batches_with_one_perturbation_for_all_ranks_are_refused(shard, option):
    with pytest.raises(ValueError, match=f"and {option} all samples alike: use one of them"):
        Ranks(0, 2, perturb="global", shard=shard).adapted(Config(method="sam", micro_batch=64))


def test_configurations_that_need_no_micro_batches_for_the_ranks_are_unchanged():
    config = Config(method="sam")
    assert ALONE.adapted(config) == config
    for method in ("sgd", "msam"):  # MSAM perturbs along its momentum, which is the same on all ranks
        assert Ranks(1, 2).adapted(Config(method=method)) == Config(method=method)
    assert Ranks(1, 2).adapted(Config(method="sam", micro_batch=32)).micro_batch == 32


def test_ranks_with_micro_batches_perturb_separately():
    whole, parts = Config(method="sam"), Config(method="sam", micro_batch=32)
    assert (ALONE.sharpness(whole), ALONE.sharpness(parts)) == (None, None)
    for perturb, expected in (("rank", "local"), ("global", "global")):
        assert Ranks(0, 2, perturb=perturb).sharpness(whole) == expected
        assert Ranks(0, 2, perturb=perturb).sharpness(parts) == "local"


def test_half_of_a_batch_has_at_least_one_sample_for_each_rank():
    assert [Ranks(0, count).half(batch) for count, batch in ((1, 64), (3, 64), (3, 4), (1, 1))] == [32, 30, 3, 1]


def test_fields_compared_between_ranks_are_numbered_by_run():
    one, other = Config(seed=0), Config(seed=1)
    found = unlike_fields([one, other], {"perturb": "rank"})
    assert (found["runs"], found["perturb"], found["seed of run 0"], found["seed of run 1"]) == (2, "rank", 0, 1)
    assert unlike_fields([one], {})["seed"] == 0


def train_with_different_options(root):
    with pytest.raises(ValueError, match=r"rank 1 has lr=0.1, and rank 0 has lr=0.2: start all ranks with the same"):
        train(root, lr="0.2" if dist.get_rank() == 0 else "0.1")
    with joined(CPU) as group, pytest.raises(ValueError, match="2 ranks train one run at a time: remove --together 3"):
        jobs.run([], open_source, CPU, Progress(Console(quiet=True)), together=3, ranks=group)
    with pytest.raises(ValueError, match="SyncBatchNorm on CUDA only"), joined(CPU, sync_batchnorm=True):
        pass
    with joined(CPU), pytest.raises(RuntimeError, match="of one's own"):
        raise RuntimeError("of one's own")
    with pytest.raises(RankLost, match="another process of this training has ended"), joined(CPU):
        raise RuntimeError("[tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242")
    return not Path(root).exists()


def test_ranks_started_with_different_options_are_refused_before_the_first_step(tmp_path):
    assert ranks.run(train_with_different_options, str(tmp_path / "runs")) == [True, True]


def test_an_unknown_perturbation_is_refused():
    with pytest.raises(ValueError, match="--perturb is rank or global, got 'none'"), joined(CPU, perturb="none"):
        pass


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--shard", {"shard": True}),
        ("--sync-batchnorm", {"sync_batchnorm": True}),
        ("--perturb", {"perturb": "global"}),
        ("--perturb and --shard", {"perturb": "global", "shard": True}),
    ],
)
def test_options_for_several_processes_are_refused_in_one(option, given):
    message = f"{option} needs several processes: start them with torchrun, or remove {option}"
    with pytest.raises(ValueError, match=message), joined(CPU, **given):
        pass


def train_the_remaining_run(root):
    """The first of three runs is finished and the second one in use, which only the first rank can see."""
    with joined(CPU) as group:
        recipe, fields = find_recipe("demo/40%/sam"), {"epochs": "1", "epoch_steps": "1"}
        where = Path(root) / ("runs" if group.is_first else "rank 1")
        finished, taken, _ = made = jobs.jobs_of(recipe, range(3), fields, where, group)
        with ExitStack() as stack:
            if group.is_first:
                with records.RunFolder.open(finished.folder, finished.config.as_dict()) as run:
                    result = {"status": "done", "epochs": 1, "best_epoch": 0, "validation_accuracy": 90.0}
                    run.finish({**result, "test_accuracy": 90.0})
                stack.enter_context(records.RunFolder.open(taken.folder, taken.config.as_dict()))
            source, quiet = open_source("digits", log=print), Progress(Console(quiet=True))
            elsewhere = loop.train(made, source, CPU, quiet, together=1, build=without_batch_norm, ranks=group)
    return [str(error) for error in elsewhere]


def test_runs_that_the_first_rank_skips_are_skipped_by_all_ranks(tmp_path):
    (line,), others = ranks.run(train_the_remaining_run, str(tmp_path))
    assert "seed1" in line
    assert others == []
    found = {record.config["seed"]: record for record in records.find_records(tmp_path / "runs")}
    assert found[0].result["test_accuracy"] == 90.0
    assert found[1].result is None
    assert len(found[2].metrics) == 1


def test_an_optimizer_state_that_cannot_be_gathered_is_an_error_with_a_remedy():
    model = nn.Linear(3, 2)
    optimizer = bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    optimizer.minimize(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ValueError, match=r"SAM keeps a plain tensor for a part of a parameter, .*: remove --shard"):
        ShardedModel().state(model, optimizer)
