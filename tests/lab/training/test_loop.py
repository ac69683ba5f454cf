"""Training through the real command line, in real processes that are killed."""

import importlib.util
import json
import os
import random
import shlex
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from bisam.lab.cli import app
from bisam.lab.config import Config, rate
from bisam.lab.recipes import find_recipe
from bisam.lab.records import RunFolder, checkpoint
from bisam.lab.training.jobs import equal_finished_runs, jobs_of
from bisam.lab.training.trackers import Service, trackers

import forked

COLUMNS = {"COLUMNS": "200"}
SHORT = ["--set", "epochs=10", "--checkpoint-seconds", "0"]


def started(*arguments, runs, **options):
    return forked.Process("bisam", *arguments, "--runs", runs, **{"env": COLUMNS, **options})


def bisam(*arguments, runs, check=True):
    done = forked.run("bisam", *arguments, "--runs", runs, env=COLUMNS)
    assert not check or done.returncode == 0, done.stderr
    return done


def lines_of_metrics(runs):
    return [line for path in runs.rglob("metrics.jsonl") for line in path.read_text().splitlines()]


def has_epochs(runs, count):
    return len(lines_of_metrics(runs)) >= count


def has_begun(runs):
    return [*runs.rglob("metrics.jsonl")]


def only_folder(runs):
    (config,) = runs.rglob("config.json")
    return config.parent


def outcome(folder):
    """The parts of a record that must not depend on interruptions: all but the times."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in metrics:
        for name in ("seconds", "samples_per_second", "together", "alike"):
            del row[name]
    result = json.loads((folder / "result.json").read_text())
    del result["seconds"]
    weights = {name: tensor.tolist() for name, tensor in load_file(folder / "best.safetensors").items()}
    return metrics, result, weights


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    runs = tmp_path_factory.mktemp("undisturbed")
    bisam("train", "demo/40%/bisam-log", *SHORT, runs=runs)
    return only_folder(runs)


def test_a_finished_run_leaves_a_complete_record(uninterrupted):
    metrics, result, _ = outcome(uninterrupted)
    assert [row["epoch"] for row in metrics] == list(range(10))
    assert [row["lr"] for row in metrics] == [rate(Config(lr=0.05, epochs=10), epoch) for epoch in range(10)]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert {"perturbed_loss", "flips", "error", "ascent_norm", "validation_accuracy"} <= metrics[0].keys()
    assert result["status"] == "done"
    assert 50 < result["test_accuracy"] <= 100
    assert result["last_test_accuracy"] == result["test_accuracy"]  # the demo tests its last weights
    receipt = json.loads((uninterrupted / "receipt.json").read_text())
    assert receipt["torch"] == torch.__version__
    assert len(receipt["data_checksum"]) == 64
    assert receipt["seconds"] > 0
    assert load_file(uninterrupted / "best.safetensors")["classifier.weight"].shape == (10, 256)
    assert not (uninterrupted / "checkpoints").exists()


def test_a_run_killed_at_any_moment_resumes_and_ends_bit_for_bit_the_same(uninterrupted, tmp_path):
    chance = random.Random(0)
    kills = 0
    for epochs in (chance.randint(1, 2), chance.randint(3, 5)):  # test_crashes.py kills at more moments, from within
        process = started("train", "demo/40%/bisam-log", *SHORT, runs=tmp_path)
        process.until(partial(has_epochs, tmp_path, epochs)).kill()
        kills += process.returncode == -signal.SIGKILL
    assert kills > 0
    done = bisam("train", "demo/40%/bisam-log", *SHORT, runs=tmp_path)
    assert outcome(only_folder(tmp_path)) == outcome(uninterrupted), done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_and_the_same_command_resumes(uninterrupted, tmp_path, number):
    terminal = {"COLUMNS": "60", "FORCE_COLOR": "1"}
    # it saves no checkpoint before the signal
    process = started("train", "demo/40%/bisam-log", "--set", "epochs=10", runs=tmp_path, env=terminal)
    process.until(partial(has_begun, tmp_path)).send_signal(number)
    assert process.wait() == 130, process.stderr
    assert "the same command resumes" in process.stderr
    assert process.stderr.splitlines()[-1] == f"  {shlex.join(process.arguments)}"  # to be copied
    assert [*tmp_path.rglob("checkpoint-*")]
    done = bisam("train", "demo/40%/bisam-log", "--set", "epochs=10", runs=tmp_path)
    assert "resumes at epoch" in done.stdout
    assert outcome(only_folder(tmp_path)) == outcome(uninterrupted)


def test_runs_trained_together_equal_runs_trained_alone(uninterrupted, tmp_path):
    bisam("train", "demo/40%", "--seeds", "0", "--together", "3", "--set", "epochs=10", runs=tmp_path)
    folders = sorted(path.parent.name for path in tmp_path.rglob("result.json"))
    assert folders == [f"noise40-{m}-seed0+epochs=10" for m in ("bisam-log", "bisam-tanh", "sam", "sgd")]
    assert outcome(tmp_path / "demo" / folders[0]) == outcome(uninterrupted)


def test_a_finished_run_is_skipped(uninterrupted):
    runs = uninterrupted.parent.parent
    written = (uninterrupted / "result.json").stat().st_mtime_ns
    done = bisam("train", "demo/40%/bisam-log", *SHORT, runs=runs)
    assert "1 of 1 runs are done already" in done.stdout
    assert (uninterrupted / "result.json").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "its result has the status None"),
        ('{"status": "running"}', "its result has the status 'running'"),
        ('{"status": "done"}', "its result has no test accuracy"),
        ('{"status": "done", "test_accuracy": 90.0}', "its result has no number of epochs"),
        ('{"status": "diverged"}', "its result has no number of epochs"),
        ("{", "cannot be read"),
    ],
)
def test_an_invalid_result_is_refused_and_no_checkpoint_is_removed(content, message, tmp_path):
    config = find_recipe("demo/40%/sgd").cells["40%", "sgd"]
    folder = tmp_path / "demo" / "noise40-sgd-seed0"
    with RunFolder.open(folder, config.as_dict()) as run:
        saved = checkpoint.save(run.checkpoints, 1, {"epoch": 0})
    (folder / "result.json").write_text(content)
    done = CliRunner().invoke(app, ["train", "demo/40%/sgd", "--device", "cpu", "--runs", str(tmp_path)])
    assert done.exit_code == 1
    assert message in done.stderr
    assert "done already" not in done.output
    assert saved.exists()
    assert (folder / "result.json").read_text() == content


def test_a_run_that_diverges_ends_with_a_record(tmp_path):
    done = bisam("train", "demo/40%/sam", "--set", "epochs=3", "--set", "lr=1000", "--set", "momentum=1", runs=tmp_path)
    assert "diverged" in done.stdout
    assert "Traceback" not in done.stderr
    folder = only_folder(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "diverged"
    assert result["epochs"] <= 3
    assert result["test_accuracy"] is None or all(
        t.isfinite().all() for t in load_file(folder / "best.safetensors").values()
    )
    assert "1 diverged" in done.stdout


def test_two_processes_share_the_runs_of_a_table(tmp_path):
    changed = ["--set", "epochs=4"]
    first = started("train", "demo/40%/sam", *changed, runs=tmp_path)
    try:
        first.until(partial(has_begun, tmp_path))
        first.send_signal(signal.SIGSTOP)  # its run stays unfinished until SIGCONT
        both = ["reproduce", "demo", "--methods", "sam,sgd", "--seeds", "0", *changed, "--runs", str(tmp_path)]
        second = CliRunner(env={"COLUMNS": "200"}).invoke(app, both)
        third = CliRunner().invoke(app, ["train", "demo/40%/sam", *changed, "--runs", str(tmp_path)])
        ended = [path.parent.name for path in tmp_path.rglob("result.json")]
        first.send_signal(signal.SIGCONT)
        first.wait()
    finally:
        first.kill()
    theirs = tmp_path / "demo" / "noise40-sam-seed0+epochs=4"
    in_use = f"the run in {theirs} is in use by process {first.pid}"
    assert second.exit_code == 0, second.stderr
    assert "1 run is still in training in another process: run the same command again" in second.stdout
    assert ended == ["noise40-sgd-seed0+epochs=4"]
    assert (third.exit_code, in_use in third.stderr) == (1, True)  # an error, for it has no other run
    assert first.returncode == 0, first.stderr
    assert outcome(theirs)[1]["status"] == "done"


def test_overlapping_parts_of_a_table_form_one_table_and_train_once(tmp_path):
    parts = ["demo/40%/sgd", "demo/40%/sam", "demo/40%/sgd"]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["train", *parts, "--set", "epochs=1", "--seeds", "0,1", "--together", "2", "--runs", str(tmp_path)]
    )
    assert done.exit_code == 0, done.stderr
    assert {path.parent.name for path in tmp_path.rglob("result.json")} == {
        f"noise40-{method}-seed{seed}+epochs=1" for method in ("sgd", "sam") for seed in (0, 1)
    }
    assert "run 3 of 4" in done.stdout
    assert " ".join(done.stdout.split()).count("test accuracy in per cent") == 1
    assert "40%: SAM − SGD" in done.stdout


def test_several_tables_are_reproduced_by_one_command(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(
        'title = "Our table"\nmethods = ["sgd"]\n[settings]\ndata = "digits"\nmodel = "digitsnet"\nbatch = 64\n'
        'padding = 0\nflip = false\nprecision = "fp32"\n[rows.clean]\n'
    )
    arguments = ["reproduce", "demo", own, "--methods", "sgd", "--seeds", "0", "--set", "epochs=1", "--runs", tmp_path]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*map(str, arguments)])
    assert done.exit_code == 0, done.stderr
    assert {path.parent.parent.name for path in tmp_path.rglob("result.json")} == {"demo", "own"}
    printed = " ".join(done.stdout.split())
    assert "Handwritten digits, 40 % of the labels wrong" in printed
    assert "Our table" in printed


def test_a_run_is_finished_though_its_stdout_is_closed(tmp_path):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe:
        process = started("train", "demo/40%/sam", "--set", "epochs=3", runs=tmp_path, stdout=pipe)
    with os.fdopen(reader) as lines:
        assert "begins: 3 epochs" in lines.readline()  # and no more, as `| head -1` does
    assert (process.wait(), process.stderr) == (0, "")
    assert outcome(only_folder(tmp_path))[1]["epochs"] == 3


def test_checkpoints_left_beside_a_result_by_a_kill_are_removed(uninterrupted, tmp_path):
    folder = shutil.copytree(uninterrupted, tmp_path / "demo" / uninterrupted.name)
    checkpoint.save(folder / "checkpoints", 7, {})
    done = CliRunner().invoke(app, ["train", "demo/40%/bisam-log", *SHORT, "--runs", str(tmp_path)])
    assert done.exit_code == 0, done.stderr
    assert not (folder / "checkpoints").exists()
    assert outcome(folder) == outcome(uninterrupted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "cifar11"], "unknown recipe 'cifar11': the nearest names are cifar10"),
        (["train", "cifar10/resnet57"], "unknown row 'resnet57' of cifar10: the nearest names are resnet56"),
        (["train", "demo/40%/bisam-lag"], "unknown method 'bisam-lag' of demo: the nearest names are bisam-log"),
        (["train", "demo", "--set", "epoch=3"], "unknown field 'epoch': the nearest names are epochs"),
        (["train", "demo", "--set", "epochs=many"], "epochs is a whole number, got 'many'"),
        (["train", "demo", "--set", "epochs"], "a change is field=value"),
        (["train", "demo", "--set", "noise=2"], "noise must lie between 0 and 1, got 2"),
        (["train", "demo", "--set", "model=resnet5"], "unknown model 'resnet5': the nearest names are resnet5"),
        (["train", "demo", "--set", "method=sam"], "method is part of a run's name: use table/row/method"),
        (["train", "demo", "--set", "seed=3"], "seed is part of a run's name: use --seeds"),
        (["train", "demo/40%/sam", "--set", "model=resnet20"], "resnet20 does not accept the images of digits, 1×8×8"),
        (["train", "demo", "--set", "data=digit"], "digits"),
        (["train", "demo/40%/sgd", "--set", "rho=0.3"], "sgd does not use rho: remove --set rho="),
        (["train", "demo/40%/sam", "--set", "mu=1"], "sam does not use mu: remove --set mu="),
        (["train", "demo", "--set", "batch=100000"], "larger than the training data"),
        (["reproduce", "cifar10", "--methods", "sgdd"], "unknown method 'sgdd' of cifar10"),
        (["train", "demo", "--track", "paper"], "wandb or trackio, got 'paper'"),
        (["reproduce", "demo", "--track", "wandb", "--workers", "2"], "one run at a time: remove --track, or"),
        (["train", "demo", "--device", "tpu"], "auto, cpu or cuda, got 'tpu'"),
    ],
)
def test_invalid_arguments_are_refused_with_a_remedy(arguments, message, tmp_path):
    done = CliRunner().invoke(app, [*arguments, "--runs", str(tmp_path)])
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())
    assert not [*tmp_path.rglob("result.json")]


def test_a_folder_that_cannot_be_written_is_an_error_without_a_traceback(tmp_path):
    (tmp_path / "file").write_text("")
    done = bisam("train", "demo/40%/sgd", "--set", "epochs=1", runs=tmp_path / "file", check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "file" in done.stderr


@pytest.mark.parametrize("is_first", [True, False])
def test_more_changes_than_the_name_of_a_folder_can_hold_are_an_error_with_a_remedy(is_first, tmp_path):
    numbers = ("lr", "momentum", "weight_decay", "label_smoothing", "rho", "mu", "alpha", "validation", "noise")
    changes = [*(f"{name}={1 / 3}" for name in numbers), "epochs=1", "warmup_epochs=1", "select=last", "cutout=1"]
    if not is_first:
        (tmp_path / "demo").mkdir()
    options = [part for change in changes for part in ("--set", change)]
    done = CliRunner().invoke(app, ["train", "demo/40%/bisam-tanh", *options, "--runs", str(tmp_path)])
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: cannot use {tmp_path / 'demo' / 'noise40-bisam-tanh-seed0+'}")
    assert "File name too long. Give a shorter one, or fewer changes, which are in the name of a run's folder." in line


def test_bisam_list_names_the_recipes():
    done = CliRunner(env=COLUMNS).invoke(app, ["list"])
    for name in ("demo", "cifar10", "cifar100", "imagenet", "adaptive", "efficient", "label_noise"):
        assert name in done.stdout


def test_recipes_have_the_numbers_of_the_paper():
    for name in ("cifar10", "cifar100"):
        for (_, method), config in find_recipe(name).cells.items():
            assert (config.epochs, config.batch, config.lr) == (400 if method == "sgd" else 200, 128, 0.1)
            assert (config.momentum, config.weight_decay) == (0.9, 5e-4)
            assert (config.rho, config.mu, config.alpha, config.validation) == (0.05, None, 0.1, 0.1)
    assert {config.rho for config in find_recipe("adaptive").cells.values()} == {2.0}
    noisy = {row: config for (row, method), config in find_recipe("label_noise").cells.items() if method == "sam"}
    assert [(c.noise, c.rho, c.model) for c in noisy.values()] == [
        *((noise, 0.05, "resnet32") for noise in (0.0, 0.2, 0.4, 0.6)), (0.8, 0.01, "resnet32"),
    ]  # fmt: skip
    imagenet = find_recipe("imagenet").cells["resnet50", "bisam-tanh"]
    assert (imagenet.epochs, imagenet.lr, imagenet.batch, imagenet.micro_batch, imagenet.mu) == (90, 0.2, 512, 128, 20)
    assert find_recipe("imagenet").cells["resnet50", "bisam-log"].mu == 5
    efficient = find_recipe("efficient").cells["resnet56", "ebisam-log"]
    assert (efficient.beta, efficient.gamma, efficient.epochs) == (0.5, 0.5, 200)


def test_two_processes_train_the_same_run_to_the_same_bits(tmp_path):
    changes = ["data=digits", "model=digitsnet", "epochs=1", "precision=fp32", "padding=0", "cutout=0"]
    found = []
    for number in (1, 2):
        sets = [part for change in changes for part in ("--set", change)]
        bisam("train", "efficient/resnet56/ebisam-log", *sets, runs=tmp_path / str(number))
        folder = only_folder(tmp_path / str(number))
        found.append((outcome(folder), (folder / "best.safetensors").read_bytes()))
    assert found[0] == found[1]


def test_a_result_of_another_configuration_is_refused(uninterrupted, tmp_path):
    bisam("train", "demo/40%/sgd", "--set", "epochs=1", runs=tmp_path)
    folder = only_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["config"]["lr"] = 0.07
    (folder / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(app, ["train", "demo/40%/sgd", "--set", "epochs=1", "--runs", str(tmp_path)])
    assert done.exit_code == 1
    assert "lr: 0.07 there, 0.05 now" in done.stderr


def test_a_finished_run_of_an_older_version_with_fewer_fields_is_skipped(uninterrupted, tmp_path):
    folder = shutil.copytree(uninterrupted, tmp_path / "demo" / uninterrupted.name)
    config = json.loads((folder / "config.json").read_text())
    del config["config"]["gamma"], config["config"]["warmup_epochs"]
    (folder / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(app, ["train", "demo/40%/bisam-log", *SHORT, "--runs", str(tmp_path)])
    assert done.exit_code == 0, done.stderr
    assert "1 of 1 runs are done already" in done.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has metrics.jsonl, result.json, receipt.json, best.safetensors but no config.json"),
        ('{"format": 1, "conf', "cannot be resumed: config.json: it is half-written or foreign"),
    ],
)
def test_a_missing_or_damaged_configuration_is_reported(uninterrupted, tmp_path, content, message):
    folder = shutil.copytree(uninterrupted, tmp_path / "demo" / uninterrupted.name)
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    done = CliRunner().invoke(app, ["train", "demo/40%/bisam-log", *SHORT, "--runs", str(tmp_path)])
    assert done.exit_code == 1
    assert f"{folder} {message}" in done.stderr
    assert "absent" not in done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's own
def test_tensorboard_gets_every_curve(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    bisam("train", "demo/40%/sam", "--set", "epochs=2", "--tensorboard", runs=tmp_path)
    (folder,) = (path.parent for path in (tmp_path / "tensorboard").rglob("events*"))  # one file for both epochs
    assert folder.name == "noise40-sam-seed0+epochs=2"
    curves = EventAccumulator(str(folder)).Reload()
    assert {"loss", "perturbed_loss", "validation_accuracy", "flips", "lr"} <= set(curves.Tags()["scalars"])
    assert [event.step for event in curves.Scalars("loss")] == [0, 1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's own
def test_tensorboard_has_each_epoch_once_after_a_run_was_killed_and_started_over(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ["train", "demo/40%/sam", "--set", "epochs=6", "--tensorboard"]  # it saves no checkpoint before the kill
    process = started(*options, runs=tmp_path)
    process.until(partial(has_epochs, tmp_path, 2)).kill()
    (folder,) = {path.parent for path in (tmp_path / "tensorboard").rglob("events*")}
    assert EventAccumulator(str(folder)).Reload().Scalars("loss")  # it had written some of its epochs
    time.sleep(1)  # files of curves are ordered by the seconds in their names
    done = CliRunner().invoke(app, [*options, "--runs", str(tmp_path)])
    assert done.exit_code == 0, done.stderr
    assert "starts over" in done.stdout
    curve = EventAccumulator(str(folder)).Reload().Scalars("loss")
    assert [event.step for event in curve] == [*range(6)]
    rows = [json.loads(line) for line in lines_of_metrics(tmp_path)]
    assert [event.value for event in curve] == pytest.approx([row["loss"] for row in rows])


def test_tensorboard_has_a_folder_for_each_run_with_every_metric_but_the_epoch(monkeypatch, tmp_path):
    """A module that records its calls replaces TensorBoard's, whose time of flushing cannot be predicted."""
    module, calls = ModuleType("torch.utils.tensorboard"), []

    class Writer:
        def __init__(self, folder, purge_step):
            self.folder = Path(folder).relative_to(tmp_path).as_posix()
            calls.append((self.folder, "from", purge_step))

        def add_scalar(self, *curve):
            calls.append((self.folder, *curve))

        def close(self):
            calls.append((self.folder, "closed"))

    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    (tracker,) = trackers(tmp_path, tensorboard=True, service=None, together=2)
    for name, epoch in (("a", 3), ("b", 0), ("a", 4)):
        tracker.log(tmp_path / "demo" / name, Config(), {"epoch": epoch, "loss": 0.5})
    tracker.close()
    a, b = "tensorboard/demo/a", "tensorboard/demo/b"
    assert calls == [
        *((a, "from", 3), (a, "loss", 0.5, 3), (b, "from", 0), (b, "loss", 0.5, 0), (a, "loss", 0.5, 4)),
        *((a, "closed"), (b, "closed")),
    ]


def test_tensorboard_that_is_not_installed_is_refused_with_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="--tensorboard needs the package tensorboard: pip install tensorboard"):
        trackers(tmp_path, tensorboard=True, service=None, together=1)


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_a_service_gets_every_epoch_as_a_step(service, tmp_path, monkeypatch):
    """A module that records its calls replaces the service, which needs a network and an account."""
    module, calls = ModuleType(service), []
    module.init = lambda **options: calls.append(("init", options["name"], options["resume"], "id" in options))
    module.log = lambda metrics, **options: calls.append(("log", metrics["epoch"], options))
    module.finish = lambda: calls.append(("finish",))
    monkeypatch.setitem(sys.modules, service, module)
    arguments = ["train", "demo/40%/sgd", "--set", "epochs=2", "--track", service, "--runs", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.stderr
    assert calls == [
        ("init", "demo-noise40-sgd-seed0+epochs=2", "allow", service == "wandb"),
        ("log", 0, {"step": 0}),
        ("log", 1, {"step": 1}),
        ("finish",),
    ]


def test_a_service_has_one_run_open_and_a_resumed_run_keeps_its_id(monkeypatch):
    module, calls = ModuleType("wandb"), []
    module.init = lambda **options: calls.append(options)
    module.log = lambda metrics, step: calls.append(step)
    module.finish = lambda: calls.append("finish")
    monkeypatch.setitem(sys.modules, "wandb", module)
    tracker = Service("wandb")
    for seed, epoch in ((0, 0), (1, 0), (0, 1)):
        tracker.log(Path(f"runs/demo/seed{seed}"), Config(seed=seed), {"epoch": epoch})
    tracker.close()
    tracker.close()  # a second time has no effect
    first, _, _, second, _, _, again, _, _ = calls
    assert [call for call in calls if not isinstance(call, dict)] == [0, "finish", 0, "finish", 1, "finish"]
    assert (first["project"], first["name"], first["config"]) == ("bisam", "demo-seed0", Config(seed=0).as_dict())
    assert first == again
    assert first["id"] != second["id"]


def test_two_runs_with_the_same_name_in_a_service_are_kept_apart(monkeypatch, tmp_path):
    module, calls = ModuleType("trackio"), []
    module.init = lambda **options: calls.append(options["name"])
    module.log, module.finish = lambda metrics, step: None, lambda: calls.append("finish")
    monkeypatch.setitem(sys.modules, "trackio", module)
    (tracker,) = trackers(tmp_path, tensorboard=False, service="trackio", together=1)
    for folder in (Path("a-b/c"), Path("a/b-c")):
        tracker.log(tmp_path / folder, Config(), {"epoch": 0})
    assert calls == ["a-b-c", "finish", "a-b-c"]


def test_a_run_of_the_same_name_in_another_folder_has_another_id_in_wandb(monkeypatch, tmp_path):
    """Under one id, wandb drops the epochs that it has already."""
    module, ids = ModuleType("wandb"), []
    module.init = lambda **options: ids.append(options["id"])
    module.log, module.finish = lambda metrics, step: None, lambda: None
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.chdir(tmp_path)
    for folder in (Path("a"), Path("b"), tmp_path / "a"):
        tracker = Service("wandb")
        tracker.log(folder / "demo/seed0", Config(), {"epoch": 0})
        tracker.close()
    assert ids[0] == ids[2] != ids[1]


@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_a_service_that_is_not_installed_is_refused_by_name(service, tmp_path):
    if importlib.util.find_spec(service) is not None:
        pytest.skip(f"{service} is installed here")
    done = CliRunner().invoke(app, ["train", "demo", "--track", service, "--runs", str(tmp_path)])
    assert done.exit_code == 1
    assert f"--track {service} needs the package {service}" in done.stderr


def test_a_run_that_is_not_counted_is_reported_with_how_to_train_it_again(uninterrupted, tmp_path):
    runs = tmp_path / "of [b] mine [/b]"
    folder = shutil.copytree(uninterrupted, runs / "demo" / uninterrupted.name)
    (folder / "not-counted.txt").write_text("The wrong labels, [see] the log [/]: :bug:")
    done = CliRunner(env={"COLUMNS": "60"}).invoke(app, ["train", "demo/40%/bisam-log", *SHORT, "--runs", str(runs)])
    assert done.exit_code == 0, done.exception
    reason = "The wrong labels, [see] the log [/]: :bug:"
    assert f"{folder} is not counted; move the folder elsewhere to train it again: {reason}\n" in done.stdout


def test_an_unfinished_run_that_is_not_counted_is_not_resumed(uninterrupted, tmp_path):
    folder = shutil.copytree(uninterrupted, tmp_path / "demo" / uninterrupted.name)
    (folder / "result.json").unlink()
    (folder / "not-counted.txt").write_text("The wrong labels.")
    before = (folder / "metrics.jsonl").read_text()
    done = bisam("train", "demo/40%/bisam-log", *SHORT, runs=tmp_path)
    assert f"{folder} is not counted; move the folder elsewhere to train it again: The wrong labels." in done.stdout
    assert "done already" not in done.stdout
    assert (folder / "metrics.jsonl").read_text() == before
    assert not (folder / "result.json").exists()


def test_a_run_with_an_equal_finished_one_is_not_reproduced_but_can_be_trained(tmp_path):
    own, computed = ("noise40-sgd-seed0+epochs=1" + more for more in ("", "+deterministic=True"))
    bisam("train", "demo/40%/sgd", "--set", "epochs=1", "--set", "deterministic=true", runs=tmp_path)
    part = ["--methods", "sgd", "--set", "epochs=1"]
    done = CliRunner().invoke(app, ["reproduce", "demo", "--seeds", "0,1", *part, "--runs", str(tmp_path)])
    finished = f"{tmp_path / 'demo' / computed} is finished and is the same training"
    message = f"{finished}, except for compile and deterministic"
    assert f"{message}: it counts\n" in done.stdout
    assert "1 of 2 runs are done already" in done.stdout
    assert "n = 2" in done.stdout
    assert not (tmp_path / "demo" / own).exists()
    done = CliRunner().invoke(app, ["train", "demo/40%/sgd", "--set", "epochs=1", "--runs", str(tmp_path)])
    assert f"{message}: reports count one of the two\n" in done.stdout
    assert (tmp_path / "demo" / own / "result.json").exists()
    done = CliRunner().invoke(app, ["train", "demo/40%/sgd", "--set", "epochs=1", "--runs", str(tmp_path)])
    assert "reports count" not in done.stdout


def test_only_a_finished_run_that_is_counted_replaces_an_equal_one(tmp_path):
    folder = tmp_path / "demo" / "noise40-sgd-seed0+epochs=1+deterministic=True"
    bisam("train", "demo/40%/sgd", "--set", "epochs=1", "--set", "deterministic=true", runs=tmp_path)
    (job,) = jobs_of(find_recipe("demo/40%/sgd"), [0], {"epochs": "1"}, tmp_path)
    assert equal_finished_runs([job])[job.folder].folder == folder
    (other,) = jobs_of(find_recipe("demo/40%/sgd"), [0], {"epochs": "1", "lr": "0.01"}, tmp_path)
    assert equal_finished_runs([other]) == {}
    (folder / "not-counted.txt").write_text("The wrong labels.")
    assert equal_finished_runs([job]) == {}
    (twin,) = jobs_of(find_recipe("demo/40%/sgd"), [0], {"epochs": "1", "deterministic": "true"}, tmp_path)
    bisam("train", "demo/40%/sgd", "--set", "epochs=1", runs=tmp_path)
    assert equal_finished_runs([twin]) == {}  # the run itself is finished, though it is not counted
    shutil.rmtree(job.folder)
    (folder / "not-counted.txt").unlink()
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"format": 1', '"format": 2'))
    assert equal_finished_runs([job]) == {}
    (folder / "config.json").write_text(config)
    assert equal_finished_runs([job]) != {}
    (folder / "result.json").unlink()
    assert equal_finished_runs([job]) == {}


def test_an_equal_run_of_another_row_of_the_table_does_not_replace_one(recorded, tmp_path):
    """With a noise rate that no row has, all rows have the same configuration."""
    jobs = jobs_of(find_recipe("label_noise"), [0], {"noise": "0.1", "compile": "true"}, tmp_path)
    others = jobs_of(find_recipe("label_noise"), [0], {"noise": "0.1"}, tmp_path)
    done = next(job for job in jobs if job.folder.name.startswith("noise20-sam"))
    done.folder.mkdir(parents=True)
    record = recorded("label_noise/20%/sam")
    (done.folder / "config.json").write_text(json.dumps({"format": 1, "config": done.config.as_dict()}))
    (done.folder / "result.json").write_text(json.dumps({**record.result, "epochs": 0}))
    assert {folder.name for folder in equal_finished_runs(others)} == {"noise20-sam-seed0+noise=0.1"}


def test_an_equal_run_of_another_table_is_not_trained_again(recorded, tmp_path):
    """`frontier` has cells of `label_noise` and `cifar10`: the same training under another name."""
    theirs = jobs_of(find_recipe("label_noise"), [0, 1], {"compile": "true"}, tmp_path)
    for job in theirs:
        job.folder.mkdir(parents=True)
        record = recorded("label_noise/0%/sam")
        (job.folder / "config.json").write_text(json.dumps({"format": 1, "config": job.config.as_dict()}))
        (job.folder / "result.json").write_text(json.dumps({**record.result, "epochs": 0}))
    jobs = jobs_of(find_recipe("frontier"), [1, 2], {}, tmp_path)
    assert {ours.name: twin.folder.name for ours, twin in equal_finished_runs(jobs).items()} == {
        f"resnet32{noise}-{method}-seed1": f"noise{rate}-{method}-seed1+compile=True"
        for noise, rate in (("", "0"), ("-noise40", "40"))
        for method in ("sgd", "sam", "bisam-log")
    }
    assert equal_finished_runs(jobs_of(find_recipe("frontier"), [1], {"epochs": "3"}, tmp_path)) == {}


def test_ctrl_c_ends_a_command_that_is_loading_data(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-00000-of-00001.parquet").write_bytes(b"")
    code = (
        "import time; from bisam.lab.data import cache; from bisam.__main__ import main\n"
        "cache._fingerprints = lambda files: (print('loading', flush=True), time.sleep(60))\n"
        "main()"
    )
    (tmp_path / "slow.py").write_text(code)
    arguments = ["train", "cifar10/resnet56/sam", "--data", tmp_path / "data", "--runs", tmp_path / "runs"]
    process = forked.Process(tmp_path / "slow.py", *arguments)
    try:
        process.until(lambda: process.stdout).send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stdout == "loading\n"
        assert "Traceback" not in process.stderr
    finally:
        process.kill()


def test_another_configuration_in_the_folder_of_a_run_is_refused_before_any_training(uninterrupted, tmp_path):
    first, second = (f"noise40-{method}-seed0+epochs=10" for method in ("sam", "bisam-log"))
    (tmp_path / "demo" / second).mkdir(parents=True)
    config = (uninterrupted / "config.json").read_text()
    (tmp_path / "demo" / second / "config.json").write_text(config.replace('"lr": 0.05', '"lr": 0.5'))
    done = bisam("train", "demo/40%", "--set", "epochs=10", runs=tmp_path, check=False)
    assert done.returncode != 0
    assert "lr: 0.5 there, 0.05 now" in done.stderr
    assert not (tmp_path / "demo" / first).exists()
