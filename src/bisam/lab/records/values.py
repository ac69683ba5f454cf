"""Values as strict JSON: numbers that it lacks are the strings "nan", "inf" and "-inf"."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bisam.lab.files import read_file
from bisam.lab.records.layout import LARGEST_OBJECT

_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_ABSENT = object()


def plain(value: Any, place: tuple[str, ...]) -> Any:
    """The value with nothing in it that strict JSON lacks; TypeError names the place of what has no form there."""
    name = ".".join(place) or "the whole"
    if isinstance(value, str):
        if value in _NUMBERS:
            raise ValueError(f"{name} is the string {value!r}, which would be read as a number: use another word")
        return value
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, (list, tuple)):
        return [plain(part, (*place, str(i))) for i, part in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r}: JSON has keys of type str only")
        return {key: plain(part, (*place, key)) for key, part in value.items()}
    raise TypeError(f"{name} is a {type(value).__name__}, which JSON lacks: {value!r}")


def restored(plain: Any) -> Any:
    """The inverse of `plain`, with lists for tuples."""
    if isinstance(plain, dict):
        return {key: restored(part) for key, part in plain.items()}
    if isinstance(plain, list):
        return [restored(part) for part in plain]
    return _NUMBERS.get(plain, plain) if isinstance(plain, str) else plain


def encoded(value: Mapping[str, Any]) -> bytes:
    return json.dumps(plain(value, ()), ensure_ascii=False, allow_nan=False).encode()


def as_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(plain(value, ()), ensure_ascii=False, allow_nan=False, indent=1).encode() + b"\n"


def decoded(data: bytes) -> dict[str, Any]:
    """An object; ValueError for anything else."""
    try:
        value = restored(json.loads(data.decode(), object_pairs_hook=_object))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}, not an object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ: of two values of one key, readers of JSON take the first or the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has the key {next(key for key in keys if keys.count(key) > 1)!r:.60} twice")
    return found


def load_object(path: Path) -> dict[str, Any]:
    return decoded(read_file(path, LARGEST_OBJECT))


def read_object(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """As `load_object`; None if the file is not there, and None with a problem if it cannot be read."""
    try:
        return load_object(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path.name}: it cannot be read ({error.strerror})")
    except ValueError as error:
        problems.append(f"{path.name}: it is half-written or foreign ({error})")
    return None


def differences(there: Any, now: Any, place: str = "") -> list[str]:
    """A line for each field of two plain values that is not the same in both."""
    prefix = f"{place}." if place else ""
    if isinstance(there, dict) and isinstance(now, dict):
        keys = [*there, *(key for key in now if key not in there)]
        pairs = [(key, there.get(key, _ABSENT), now.get(key, _ABSENT)) for key in keys]
        return [line for key, a, b in pairs for line in differences(a, b, f"{prefix}{key}")]
    if isinstance(there, list) and isinstance(now, list) and len(there) == len(now):
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(there, now, strict=True))]
        return [line for i, a, b in pairs for line in differences(a, b, f"{prefix}{i}")]
    if there == now and isinstance(there, bool) == isinstance(now, bool):
        return []
    return [f"{place}: {_shown(there)} there, {_shown(now)} now"]


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(restored(value))
