"""Thread counts of commands, failed downloads, and suggestions for unknown names."""

import json
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from bisam.lab.cli import app
from bisam.lab.cli.options import threads_for
from bisam.lab.compare import comparison
from bisam.lab.models import build


def bisam(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_a_small_model_trains_with_one_thread(two_threads, tmp_path):
    done = bisam("train", "demo/40%/sgd", "--set", "epochs=1", "--device", "cpu", "--runs", tmp_path)
    assert done.exit_code == 0, done.output
    (receipt,) = tmp_path.rglob("receipt.json")
    assert json.loads(receipt.read_text())["threads"] == 1


@pytest.mark.parametrize(("model", "threads"), [("digitsnet", 1), ("resnet56", 2), ("mynet", 2)])
def test_small_models_are_compared_with_one_thread(
    model, threads, two_threads, tmp_path, recorded, write_run, monkeypatch
):
    runs = [write_run(tmp_path / f"{seed}", recorded("demo/40%/sam", seed, model=model)) for seed in range(2)]

    def fail_with_the_thread_count(*_, **options):
        raise ValueError(f"{torch.get_num_threads()} threads")

    monkeypatch.setattr(comparison, "compare", fail_with_the_thread_count)
    assert bisam("compare", *runs, "--device", "cpu").stderr == f"Error: {threads} threads\n"


def test_the_thread_count_is_unchanged_if_omp_num_threads_is_set_or_on_cuda(two_threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with threads_for(torch.device("cpu"), ["digitsnet"]):
        assert torch.get_num_threads() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    with threads_for(torch.device("cuda"), ["digitsnet"]):
        assert torch.get_num_threads() == 2


def test_a_failed_download_is_a_one_line_error_that_names_the_data_option(tmp_path, monkeypatch):
    seen, logger = [], logging.getLogger("huggingface_hub.utils._http")
    handler = logging.Handler()
    handler.emit = seen.append
    logger.addHandler(handler)

    def fail(name):
        logger.warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("no route\nand more")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset_builder=fail))
    monkeypatch.setenv("BISAM_CACHE", str(tmp_path))
    before = logging.getLogger("huggingface_hub").level
    try:
        done = bisam("data", "cifar10")
    finally:
        logger.removeHandler(handler)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith("or give a folder with its files, train-*.parquet, by --data")
    assert seen == []
    assert logging.getLogger("huggingface_hub").level == before


def test_an_unknown_model_is_refused_with_similar_names_or_else_with_all_names():
    with pytest.raises(ValueError, match="unknown model 'mynet': choose from densenet121, "):
        build("mynet", 10)
    with pytest.raises(ValueError, match="unknown model 'resnet5': the nearest names are resnet56, resnet50"):
        build("resnet5", 10)
