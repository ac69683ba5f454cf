"""Texts as the tokens of a model: through its own tokenizer."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bisam.lab import spec
from bisam.lab.data.images import DataError

PER_CALL = 1000
"""Texts that are tokenized at once."""


def tokenizer(model: str) -> Any:
    """The tokenizer of `transformers:NAME-OR-FOLDER`; DataError with the remedy where there is none."""
    source, name = spec.parse_model(model)
    if source != spec.TRANSFORMERS:
        raise DataError(
            f"text needs a model with a tokenizer, and {model} has none: give --model transformers:NAME-OR-FOLDER, "
            "such as transformers:google-bert/bert-base-uncased (pip install transformers). From Python give token "
            "ids, which the network gets as float32 and takes as x.long()"
        )
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise DataError(f"{model} needs the package transformers: pip install 'bisam[transformers]'") from None
    place = spec.folder_or_name(name)
    try:
        return transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # no such folder, no such name, no network, no tokenizer in it
        reason = next(iter(str(error).splitlines()), "")[:160]
        raise DataError(
            f"{place} has no tokenizer that can be loaded ({reason}): give a folder with tokenizer.json, or a name of "
            "the hub"
        ) from error


def tokenize(texts: Sequence[tuple[str, ...]], with_: Any, length: int) -> dict[str, Tensor]:
    """Tensors (N, longest text), at most `length` tokens, padded on the right."""
    pieces: list[dict[str, list[list[int]]]] = []
    for start in range(0, len(texts), PER_CALL):
        columns = [list(column) for column in zip(*texts[start : start + PER_CALL], strict=True)]
        pieces.append(dict(with_(*columns, truncation=True, max_length=length, padding=False)))
    lists = {name: [one for piece in pieces for one in piece[name]] for name in pieces[0]}
    longest = max(map(len, lists["input_ids"]))
    fill = {"input_ids": with_.pad_token_id or 0, "token_type_ids": getattr(with_, "pad_token_type_id", 0)}
    return {
        name: torch.tensor([one + [fill.get(name, 0)] * (longest - len(one)) for one in values])
        for name, values in lists.items()
    }
