"""Digests of the files of a run, in its receipt: they show a change that leaves a file readable."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bisam.lab.files import open_file
from bisam.lab.records.layout import CONFIG, LARGEST_STATE, METRICS, PREDICT, RECEIPT, RESULT

KEY = "sha256"
"""Where a receipt has the digests, by the names of the files."""

SMALL = (CONFIG, METRICS, RESULT, PREDICT)
"""Files that are verified whenever a finished run is read; weights take longer."""


def listed(receipt: Mapping[str, Any] | None) -> dict[str, str]:
    """The digests in a receipt; those of older versions have none."""
    found = (receipt or {}).get(KEY)
    return {name: str(digest) for name, digest in found.items()} if isinstance(found, dict) else {}


def sha256_of(path: Path) -> str:
    """Of a plain file, in hexadecimal; UnreadableError for anything else."""
    digest = hashlib.sha256()
    with open_file(path, LARGEST_STATE) as (file, size):
        while chunk := file.read(min(size, 2**20)):
            digest.update(chunk)
            size -= len(chunk)
    return digest.hexdigest()


def mismatches(folder: Path, receipt: Mapping[str, Any] | None, names: Iterable[str] = SMALL) -> list[str]:
    """A line for each of these files that is not the one that the receipt lists."""
    found, problems = listed(receipt), []
    for name in names:
        if name not in found:
            continue
        try:
            if sha256_of(folder / name) != found[name]:
                problems.append(f"{name}: it was changed, its sha256 is not the one in {RECEIPT}")
        except FileNotFoundError:
            problems.append(f"{name}: it is missing, and {RECEIPT} lists it")
        except OSError as error:
            problems.append(f"{name}: it cannot be read ({error.strerror})")
    return problems
