"""Every example runs, as a user would run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ARGUMENTS = {"noisy_digits": ["--seeds", "1", "--epochs", "2"]}


def run(command):
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # tests run beside each other
    return subprocess.run(command, capture_output=True, text=True, check=False, env=one_thread)


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "examples").glob("*.py"))])
def test_the_example_runs(name, tmp_path):
    command = [sys.executable, ROOT / "examples" / f"{name}.py", *ARGUMENTS.get(name, [])]
    done = run([*command, "--json", tmp_path / "out.json"])
    assert done.returncode == 0, done.stderr
    methods = [row["method"] for row in json.loads((tmp_path / "out.json").read_text())["table"]]
    assert all(method in done.stdout for method in methods)


def test_the_overhead_benchmark_runs():
    command = [sys.executable, ROOT / "benchmarks/bench_optimizer_overhead.py", "--repeats", "1", "--rounds", "1"]
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert "160 parameter tensors" in done.stdout
    assert "bisam.BiSAM" in done.stdout
