"""A checkpoint into a base optimizer: the whole of it, or an error that leaves the optimizer as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def load(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a checkpoint, and refuse one of another kind of optimizer, which torch would notice in the next step."""
    needed = _needed(optimizer)
    with unchanged_on_error([optimizer]):
        try:
            optimizer.load_state_dict(state_dict)
        except KeyError:  # torch's may name nothing but an entry of the state
            _refuse_other_kind(optimizer, state_dict["param_groups"], needed)
            raise
        _refuse_other_kind(optimizer, optimizer.param_groups, needed)


@contextmanager
def unchanged_on_error(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Give optimizers their groups and state back if loading fails. A load replaces both, and changes neither."""
    before = [(one.param_groups, one.state) for one in optimizers]
    try:
        yield
    except BaseException:
        for one, (groups, state) in zip(optimizers, before, strict=True):
            one.param_groups, one.state = groups, state
        raise


def _needed(optimizer: torch.optim.Optimizer) -> set[str]:
    """Options that a checkpoint of this kind of optimizer has.

    An older version may lack options. torch adds them while it loads; other optimizers may take them as optional, and
    have None or False for their default.
    """
    needed = {name for name, default in optimizer.defaults.items() if default is not None and default is not False}
    return needed.intersection(*(group.keys() for group in optimizer.param_groups))


def _refuse_other_kind(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], needed: set[str]) -> None:
    """A state dict does not name its optimizer, but its groups have the optimizer's options."""
    for group in groups:
        missing = sorted(needed - group.keys())
        if missing:
            options = ", ".join(sorted(group.keys() - {"params"}))
            raise ValueError(
                f"the checkpoint is of another kind of optimizer than {type(optimizer).__name__}: a parameter group "
                f"has no {', '.join(missing)}, got {options}. Build the base optimizer as it was when the checkpoint "
                "was saved, and several of them in the same order"
            )
