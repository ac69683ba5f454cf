"""Irregular files (pipes, devices, huge files) in place of records and data: they are reported, and nothing blocks."""

import os
import signal

import pytest
from typer.testing import CliRunner

from bisam.lab.cli import app
from bisam.lab.data import DataError, load

RECORDS = ["config.json", "metrics.jsonl", "result.json", "receipt.json", "not-counted.txt"]
HUGE = 2**40


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def sparse(path):
    whole = path.with_name("sparse")
    with whole.open("wb") as file:
        file.truncate(HUGE)
    path.symlink_to(whole)


KINDS = [(pipe, "it is a named pipe, not a file"), (device, "it is a device, not a file"), (sparse, f"{HUGE:,} bytes")]


@pytest.fixture(autouse=True)
def alarm():
    """Raises if a test blocks on a pipe."""

    def stop(*_):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def bisam(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "300"})


@pytest.mark.parametrize(("make", "message"), KINDS)
def test_a_report_lists_irregular_files_of_records_and_shows_the_rest(make, message, tmp_path, recorded, write_run):
    write_run(tmp_path / "good", recorded("demo/40%/sam", trained=1))
    for seed, name in enumerate(RECORDS):
        folder = write_run(tmp_path / name, recorded("demo/40%/sgd", seed, trained=1, receipt={"commit": "abc"}))
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
    done = bisam("report", tmp_path)
    assert done.exit_code == 0, done.stderr
    assert "90.00, n = 1" in done.stdout
    for name in RECORDS:
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"{tmp_path / name}: ")]
        assert any(message in line or "not-counted.txt: it is a link" in line for line in lines), name


@pytest.mark.parametrize(("make", "message"), KINDS)
@pytest.mark.parametrize("name", ["best.safetensors", "receipt.json"])
def test_a_comparison_reports_irregular_files_of_records(name, make, message, tmp_path, recorded, write_run):
    runs = [write_run(tmp_path / f"{seed}", recorded("demo/40%/sam", seed, trained=1)) for seed in range(2)]
    make(runs[0] / name)
    done = bisam("compare", *runs, "--device", "cpu", "--samples", "2", "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.stderr
    assert message in done.stdout


@pytest.mark.parametrize(("make", "message"), KINDS)
def test_a_report_is_not_written_into_a_pipe_device_or_link(make, message, tmp_path, recorded, write_run):
    write_run(tmp_path / "a", recorded("demo/40%/sam", trained=1))
    make(tmp_path / "report.html")
    done = bisam("report", tmp_path)
    assert done.exit_code == 1
    assert "is not written to" in done.stderr


@pytest.mark.parametrize(("make", "message"), KINDS)
@pytest.mark.parametrize("name", ["config.json", "lock", "metrics.jsonl", "result.json", "checkpoints"])
def test_a_training_refuses_a_run_with_irregular_files(name, make, message, tmp_path, recorded, write_run):
    write_run(tmp_path / "demo" / "noise40-sgd-seed0+epochs=1", recorded("demo/40%/sgd", epochs=1, accuracy=None))
    path = tmp_path / "demo" / "noise40-sgd-seed0+epochs=1" / name
    if name == "checkpoints":
        path = path / "checkpoint-000000001.safetensors"
        path.parent.mkdir()
    path.unlink(missing_ok=True)
    make(path)
    done = bisam("train", "demo/40%/sgd", "--set", "epochs=1", "--device", "cpu", "--runs", tmp_path)
    assert done.exit_code == 1
    assert "Traceback" not in done.stderr
    assert message in done.stderr or "is not written to" in done.stderr


@pytest.mark.parametrize(("make", "message"), KINDS)
@pytest.mark.parametrize("name", ["test-00000-of-00001.parquet", "test.json", "test.safetensors"])
def test_irregular_data_files_are_refused_and_an_irregular_cache_is_rebuilt(name, make, message, tiny, tmp_path):
    cache, lines = tmp_path / "cache", []
    load("tiny", tiny, cache, lines.append)
    path = tiny / name if name.endswith("parquet") else cache / "tiny" / name
    path.unlink()
    make(path)
    if name.endswith("parquet"):
        with pytest.raises(DataError, match=message):
            load("tiny", tiny, cache, lines.append)
    else:
        assert len(load("tiny", tiny, cache, lines.append).test) == 8
        assert any(message in line for line in lines)
