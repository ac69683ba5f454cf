"""Checkpoints that a kill at any moment leaves whole, and that hold data only: no pickle, so loading runs no code.

A checkpoint is one safetensors file; the one before it stays beside it. One process at a time writes to a folder, which
`RunFolder` ensures.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from bisam.lab.files import explained, read_file, write_atomically
from bisam.lab.records.layout import LARGEST_STATE

FORMAT = 1
DEEPEST = 64
"""Limit on the nesting of a state, to detect one that contains itself."""

DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8}
    | {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
)
"""The dtypes that safetensors both writes and reads."""

StatePath = tuple[str | int, ...]
"""The keys and indices that lead to a value in a state."""

_NAME = re.compile(r"checkpoint-(\d{9,})\.safetensors")
_KEY, _BLANK = b'"sha256":"', b"0" * 64
_RESERVED = "__metadata__"


class CheckpointError(RuntimeError):
    """No checkpoint could be written, or none of those that there are can be read."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint; `notes` has a line for each newer one that was skipped."""

    step: int
    state: dict[Any, Any]
    path: Path
    notes: list[str] = field(default_factory=list)


def save(folder: Path, step: int, state: Mapping[Any, Any]) -> Path:
    """Write `checkpoint-<step>.safetensors`, then remove all but it and the newest whole one before it.

    `state` is any nesting of dict (keys: str, int), list, tuple, Tensor, int, float, bool, None and str; TypeError
    names the place of anything else. Types and values come back as they were, with these exceptions: an OrderedDict is
    a dict, a Parameter a Tensor without a gradient, every tensor contiguous (a channels_last one too), on the CPU and
    in memory of its own.

    Checkpoints of later steps are removed as well: the run was resumed from an earlier one, since they were damaged.
    """
    if step < 0:
        raise ValueError(f"a step cannot be negative, got {step}")
    tensors: dict[str, Tensor] = {}
    skeleton = _taken_apart(dict(state), (), tensors)
    metadata = {"format": str(FORMAT), "step": str(step), "state": json.dumps(skeleton, allow_nan=False)}
    parts = pack(tensors, metadata)
    path = folder / f"checkpoint-{step:09d}.safetensors"
    _refuse_link(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for draft in folder.glob("checkpoint-*.safetensors*.tmp"):  # of processes that were killed
            with suppress(OSError):
                draft.unlink()
        write_atomically(path, *parts, follow_links=False)
    except OSError as error:
        raise CheckpointError(f"{explained(error, f'cannot write {path}')} Earlier ones are intact.") from error
    _remove_others(path)
    return path


def load(folder: Path, lacks: Callable[[dict[Any, Any]], str] | None = None) -> Loaded | None:
    """The newest checkpoint that is whole, with its tensors on the CPU; None if there is none at all.

    `lacks` returns what a state needs and is missing, as text; then an older one that lacks nothing is used, if any.
    It raises ValueError for a state that is not a checkpoint of this program; that one is skipped.
    """
    _refuse_link(folder)
    skipped: dict[str, str] = {}
    newest: Loaded | None = None
    for path in _newest_first(folder):
        try:
            step, state = _read(path)
            missing = lacks(state) if lacks is not None else ""
        except OSError as error:
            skipped[path.name] = f"it cannot be read ({error.strerror})"
            continue
        except (ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
            skipped[path.name] = str(error)
            continue
        notes = [f"{name} is skipped: {why}. {path.name} is used instead" for name, why in skipped.items()]
        if not missing:
            return Loaded(step, state, path, notes)
        skipped[path.name] = missing
        newest = newest or Loaded(step, state, path, [*notes, f"{path.name} is used although {missing}"])
    if newest is not None:
        return newest
    if skipped:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise CheckpointError(f"no checkpoint in {folder} is usable ({reasons}). Remove {folder} to start over.")
    return None


# Tensors and strings as one safetensors file with a digest.


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, memoryview]:
    """Header and body of the safetensors file of tensors that `portable` gave.

    The metadata get `sha256`, of the whole file with the digits of that digest as zeros.
    """
    try:
        file = safetensors.torch.save(_disjoint(tensors), {**metadata, "sha256": _BLANK.decode()})
    except SafetensorError as error:
        raise ValueError(f"{error}: the header holds all that is not a tensor. Put long lists into tensors.") from error
    if len(file) > LARGEST_STATE:
        raise ValueError(f"it would have {len(file):,} bytes, and at most {LARGEST_STATE:,} can be read again")
    end = _header_end(file)
    header, body = _in_order(file[8:end]), memoryview(file)[end:]
    # quotes inside of strings are escaped in JSON, so the key can be nowhere else
    return header.replace(_KEY + _BLANK, _KEY + _digest(header, body)), body


def unpack(file: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file that `pack` made; ValueError if a bit of it has changed."""
    metadata = _verified(file)
    return safetensors.torch.load(file), metadata


def head_of(path: Path) -> bytes:
    """The first bytes of a file that `pack` made, with the header: they have the digest of the whole."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), LARGEST_STATE))


def portable(tensor: Any, path: StatePath) -> Tensor:
    """The same values on the CPU, one after the other; TypeError for what safetensors cannot hold."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise TypeError(f"{_dotted(path)} is of type {_type(tensor)}, not a plain tensor")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.device.type == "meta":
        raise TypeError(f"{_dotted(path)} is a tensor without plain data ({tensor.layout}, on {tensor.device})")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{_dotted(path)} is a tensor of {tensor.dtype}, which safetensors cannot hold")
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _disjoint(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of those that share memory with an earlier one, which safetensors refuses."""
    seen: set[int] = set()
    disjoint = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        disjoint[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return disjoint


def _verified(file: bytes) -> dict[str, str]:
    """The metadata, if the digest is right."""
    end = _header_end(file)
    if not 8 < end <= len(file):
        raise ValueError("it is cut off or damaged")
    header, body = file[8:end], memoryview(file)[end:]
    try:
        metadata = json.loads(header.decode())[_RESERVED]
        digest = metadata["sha256"].encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is damaged: its header cannot be read") from None
    if _digest(file[:8] + header.replace(_KEY + digest, _KEY + _BLANK), body) != digest:
        raise ValueError("it is cut off or damaged: its digest is another one")
    return metadata


def _digest(header: bytes, body: memoryview) -> bytes:
    digest = hashlib.sha256(header)
    digest.update(body)
    return digest.hexdigest().encode()


def _in_order(header: bytes) -> bytes:
    """A header with its length before it. The library writes metadata in any order; equal runs have equal files."""
    found = json.loads(header)
    found[_RESERVED] = dict(sorted(found[_RESERVED].items()))
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _header_end(file: bytes) -> int:
    return 8 + int.from_bytes(file[:8], "little")


# A state as tensors and a skeleton of JSON that refers to them by name, and back.


def _taken_apart(value: Any, path: StatePath, tensors: dict[str, Tensor]) -> Any:
    """The skeleton of a state; its tensors are added to `tensors`. What JSON lacks is an object with one key."""
    kind = type(value)
    if len(path) > DEEPEST:
        raise TypeError(
            f"the state is nested more than {DEEPEST} deep at {_dotted(path[:4])}…: does it contain itself?"
        )
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if value.bit_length() <= 64 else {"int": hex(value)}  # python limits decimal digits, not these
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind in (list, tuple):
        parts = [_taken_apart(part, (*path, i), tensors) for i, part in enumerate(value)]
        return parts if kind is list else {"tuple": parts}
    if kind in (dict, OrderedDict):
        return {"dict": [[_key(key, path), _taken_apart(part, (*path, key), tensors)] for key, part in value.items()]}
    if isinstance(value, Tensor):
        name = _free_name(path, tensors)
        tensors[name] = portable(value, path)
        return {"tensor": name}
    raise TypeError(
        f"{_dotted(path)} is of type {_type(value)}, which a checkpoint cannot hold: "
        "only dict, list, tuple, Tensor, int, float, bool, None and str"
    )


def _put_together(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(skeleton, list):
        return [_put_together(part, tensors) for part in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, content),) = skeleton.items()
    if kind == "dict":
        return {key: _put_together(part, tensors) for key, part in content}
    if kind == "tuple":
        return tuple(_put_together(part, tensors) for part in content)
    if kind == "tensor":
        return tensors[content]
    return int(content, 16) if kind == "int" else float(content)


def _key(key: Any, path: StatePath) -> str | int:
    if type(key) not in (str, int):
        raise TypeError(f"{_dotted(path)} has a key of type {_type(key)}, {key!r}: a key must be a str or an int")
    return key


def _free_name(path: StatePath, taken: Mapping[str, Tensor]) -> str:
    """The path with dots; with a number where two paths would read the same, as of keys 1 and "1"."""
    plain = name = ".".join(map(str, path)).encode(errors="backslashreplace").decode()
    count = 1
    while name in taken or name == _RESERVED:
        count += 1
        name = f"{plain}#{count}"
    return name


def _dotted(path: StatePath) -> str:
    return ".".join(map(str, path)) or "the state"


def _type(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# The files of a folder.


def _read(path: Path) -> tuple[int, dict[Any, Any]]:
    tensors, metadata = unpack(read_file(path, LARGEST_STATE))
    if metadata.get("format") != str(FORMAT):
        raise ValueError(f"it is of format {metadata.get('format')}, and this version reads format {FORMAT}")
    if metadata["step"] != str(_step(path)):
        raise ValueError(f"it was renamed: it is of step {metadata['step']}")
    state = _put_together(json.loads(metadata["state"]), tensors)
    if not isinstance(state, dict):
        raise ValueError(f"its state is a {type(state).__name__}, not a dict")
    return _step(path), state


def _refuse_link(folder: Path) -> None:
    """Checkpoints are written and removed: a link may lead to those of another run."""
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a link, which is not followed: remove it, or put a folder in its place")


def _newest_first(folder: Path) -> list[Path]:
    try:
        paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(explained(error, f"cannot look for checkpoints in {folder}")) from error
    return sorted(paths, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.split("-")[1].split(".")[0])


def _remove_others(saved: Path) -> None:
    """Remove every checkpoint but this one and the newest whole one before it."""
    previous = None
    for path in _newest_first(saved.parent):
        if path == saved:
            continue
        if previous is None and _step(path) < _step(saved) and is_whole(path):
            previous = path
            continue
        with suppress(OSError):  # the new one is safe, and the next save tries again
            path.unlink()


def is_whole(path: Path) -> bool:
    """Whether a file of `pack` can be read and has its own digest."""
    try:
        _verified(read_file(path, LARGEST_STATE))
    except (OSError, ValueError):
        return False
    return True
