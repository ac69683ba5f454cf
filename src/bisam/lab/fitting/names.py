"""Names of a fit: of its folder, and short ones of its data and model."""

from __future__ import annotations

import hashlib
import re

from bisam.lab import spec


def short_name(text: str) -> str:
    """The last part of a path, without its ending; of a function its name.

    >>> short_name("data/reviews.csv"), short_name("transformers:minilm/model"), short_name("nets.py:small")
    ('reviews', 'minilm', 'small')
    """
    if spec.is_function(text):
        return text.rpartition(":")[2]
    parts = [part for part in re.split(r"[/:]", text) if part not in ("", ".", "..", "model")]
    return re.sub(r"\.(csv|tsv|jsonl?|ndjson|parquet|npz)$", "", parts[-1]) if parts else "data"


def as_folder_name(text: str) -> str:
    """A name for a folder. What is left out of a long one is in a digest, so that no two choices have the same.

    >>> as_folder_name("my data-resnet20+lr=0.1"), len(as_folder_name("x" * 200))
    ('my-data-resnet20+lr=0.1', 120)
    """
    name = re.sub(r"[^\w.+=-]+", "-", text)
    return name if len(name) <= 120 else f"{name[:111]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
