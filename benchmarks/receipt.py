"""Where and when a benchmark ran, and its result as a file beside it."""

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def receipt() -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def save(name: str, result: dict[str, Any]) -> Path:
    """Write results/NAME.json whole or not at all."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps({"receipt": receipt(), **result}, indent=1) + "\n")
    draft.replace(path)
    return path


def _commit() -> str:
    if "BISAM_COMMIT" in os.environ:  # for a machine that has the files but not their history
        return os.environ["BISAM_COMMIT"]
    try:
        run = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
