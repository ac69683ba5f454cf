"""Every example runs, as a user would run it."""

import re
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "examples").glob("*.py"))])
def test_the_example_runs_and_learns(name):
    if "timm" in name:
        reason = "timm cannot be imported here: it needs torchvision, which does not import beside a torch for CPUs"
        pytest.importorskip("timm", reason=reason, exc_type=Exception)
    done = forked.run(ROOT / "examples" / f"{name}.py")
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) > 1
    assert losses[-1] < losses[0]


def test_the_overhead_benchmark_runs():
    done = forked.run(
        ROOT / "benchmarks/bench_optimizer_overhead.py", "--repeats", "1", "--rounds", "1", "--batch", "2"
    )
    assert done.returncode == 0, done.stderr
    assert "160 parameter tensors" in done.stdout
    assert "bisam.BiSAM" in done.stdout
