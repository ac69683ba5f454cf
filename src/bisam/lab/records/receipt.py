"""Receipts: the versions, hardware and commit of a measurement."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import bisam
from bisam.lab.files import write_atomically

ROOT = Path(__file__).resolve().parents[4]
"""Root of the repository, if this is not an installed copy."""


def receipt() -> dict[str, Any]:
    has_gpu = torch.cuda.is_available()
    return {
        "date": timestamp(),
        "commit": _commit(),
        "bisam": bisam.__version__,
        "torch": str(torch.__version__),
        "triton": _triton(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "driver": _driver() if has_gpu else None,
        "cuda": torch.version.cuda,
    }


def timestamp() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write it as JSON, whole or not at all."""
    write_atomically(path, (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())


def _commit() -> str:
    if "BISAM_COMMIT" in os.environ:  # for a machine that has the files but not their history
        return os.environ["BISAM_COMMIT"]
    if not (ROOT / ".git").exists():  # an installed copy may lie inside of another repository
        return "unknown"
    return _output("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "unknown"


def _driver() -> str | None:
    versions = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.splitlines()[0] if versions else None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
