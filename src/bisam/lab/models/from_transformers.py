"""Pretrained networks of transformers, from a folder, an installed package or the hub."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from bisam.lab import spec


def build(name: str, classes: int, pretrained: bool = True) -> nn.Module:
    """With a new head of that many classes: for images if the network reads them, else for texts."""
    transformers = _package()
    place = spec.folder_or_name(name)
    try:
        with _quiet(transformers):
            # without code of the folder or the hub, for which transformers would prompt in the middle of a display
            config = transformers.AutoConfig.from_pretrained(place, num_labels=classes, trust_remote_code=False)
            reads_images = type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
            kind = "ImageClassification" if reads_images else "SequenceClassification"
            auto = getattr(transformers, f"AutoModelFor{kind}")
            if pretrained:
                model = auto.from_pretrained(place, config=config, ignore_mismatched_sizes=True)
            else:
                model = auto.from_config(config)
    except Exception as error:  # no such folder, no such name, no network, no such head
        reason = next(iter(str(error).splitlines()), "")[:160]
        raise ValueError(
            f"transformers could not load {place!r} ({type(error).__name__}: {reason}): give a folder with config.json "
            "and its weights, or check the name and the connection"
        ) from error
    return model.float()  # half-precision weights are for inference: small updates would be lost in them


def _package() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise ValueError("transformers:NAME needs the package: pip install 'bisam[transformers]'") from None


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without its notes that the head is new, which is the purpose here."""
    logging = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
