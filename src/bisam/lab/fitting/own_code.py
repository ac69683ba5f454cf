"""Whether the code of a network from Python is as it was: with the same layers, it may compute something else."""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

from torch import nn

from bisam.lab.spec import digest_of_code

NOT_OWN = [Path(sysconfig.get_path("stdlib")).resolve(), Path(__file__).resolve().parents[2]]
"""Where Python's code is, and ours."""
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of libraries: another version of one does not make another network of one's own."""


def code_of_network(make: Callable[..., nn.Module], network: nn.Module) -> str:
    """A digest of the function that makes a network, and of the methods of its modules; empty if none can be read.

    A lambda does not count: its line may have more than the network in it.
    """
    functions = [make] if isinstance(make, FunctionType) and make.__name__ != "<lambda>" else []
    classes = dict.fromkeys(base for module in network.modules() for base in type(module).__mro__)
    functions += [one for kind in classes for one in vars(kind).values() if isinstance(one, FunctionType)]
    lines = [line for function in functions if _is_own(function) for line in _lines(function)]
    return digest_of_code(lines) if lines else ""


def _is_own(function: FunctionType) -> bool:
    path = Path(function.__code__.co_filename).resolve()
    return INSTALLED.isdisjoint(path.parts) and not any(map(path.is_relative_to, NOT_OWN))


def _lines(function: FunctionType) -> Iterator[bytes]:
    try:
        yield from inspect.getsource(function).encode().splitlines()
    except (OSError, TypeError):  # typed into a shell that keeps no source
        return
