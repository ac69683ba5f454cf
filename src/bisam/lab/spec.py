"""The text that names data or a model of one's own: a place with options, `timm:NAME`, `file.py:function`."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote

OURS, TIMM, TRANSFORMERS, PYTHON = "ours", "timm", "transformers", "python"


class DataName(NamedTuple):
    """A place, and which columns of it are read."""

    place: str
    options: dict[str, str]


def parse_data(text: str) -> DataName:
    """
    >>> parse_data("reviews.csv?label=stars&text=title,body")
    DataName(place='reviews.csv', options={'label': 'stars', 'text': 'title,body'})
    """
    place, _, query = text.partition("?")
    return DataName(place, dict(parse_qsl(query, keep_blank_values=True)))


def data_name(place: str, options: Mapping[str, str]) -> str:
    """The inverse of `parse_data`, without empty options.

    >>> data_name("reviews.csv", {"label": "stars", "text": "", "image": "the picture"})
    'reviews.csv?label=stars&image=the%20picture'
    """
    if "?" in place:
        raise ValueError(f"a path to data must not have a question mark, got {place!r}: rename it")
    given = [f"{quote(name)}={quote(value, safe=',/')}" for name, value in options.items() if value]
    return f"{place}?{'&'.join(given)}" if given else place


class ModelName(NamedTuple):
    """Where a model comes from, one of `OURS`, `TIMM`, `TRANSFORMERS` and `PYTHON`, and its name there."""

    source: str
    name: str


def parse_model(text: str) -> ModelName:
    """
    >>> parse_model("timm:resnet18"), parse_model("my/nets.py:small").source, parse_model("resnet20").source
    (ModelName(source='timm', name='resnet18'), 'python', 'ours')
    """
    if is_function(text):
        return ModelName(PYTHON, text)
    source, colon, name = text.partition(":")
    if not colon:
        return ModelName(OURS, text)
    if source not in (TIMM, TRANSFORMERS) or not name:
        raise ValueError(
            f"a model is one of ours, timm:NAME, transformers:NAME-OR-FOLDER or file.py:function, got {text!r}"
        )
    return ModelName(source, name)


def is_function(text: str) -> bool:
    """Whether it names a function of a Python file."""
    path, colon, _ = text.rpartition(":")
    return bool(colon) and path.endswith(".py")


def function(text: str) -> Callable[..., Any]:
    """The function that `file.py:function` names. Runs the file."""
    path, _, name = text.rpartition(":")
    module = run_file(Path(path))
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{path} has no function {name!r}: define it there, or name another as in {path}:function")
    return found


def code_of(text: str) -> str:
    """A digest of the file that `file.py:function` names; empty for other texts.

    Two networks with the same layers may differ in what their code does with them.
    """
    if not is_function(text):
        return ""
    return digest_of_code(Path(text.rpartition(":")[0]).expanduser().read_bytes().splitlines())


def digest_of_code(lines: Iterable[bytes]) -> str:
    """Of lines of Python. Empty ones and those that are comments do not count."""
    code = [line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith(b"#")]
    return hashlib.sha256(b"\n".join(code)).hexdigest()[:16]


@contextmanager
def calling(text: str) -> Iterator[None]:
    """Around a call of what `file.py:function` names: ValueError with the line of the file where it fails."""
    try:
        yield
    except Exception as error:
        path = Path(text.rpartition(":")[0]).expanduser().resolve()
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == path
        ]
        line = f", in line {frames[-1].lineno}" if frames else ""
        raise ValueError(f"{text} failed{line} ({type(error).__name__}: {error}): correct it first") from error


def run_file(path: Path) -> Any:
    """The module that a Python file is; modules beside it can be imported by it."""
    path = path.expanduser()
    if not path.is_file():
        raise ValueError(f"{path} is not a file: give the path of a Python file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} cannot be run ({type(error).__name__}: {error}): correct it first") from error
    finally:
        sys.path.remove(folder)
    return module


def folder_or_name(name: str) -> str:
    """A folder, or one inside of an installed package as in `package/model`; else the name, for the hub."""
    place = Path(name).expanduser()
    if place.is_dir():
        return str(place)
    package, slash, rest = name.partition("/")
    if slash and package.isidentifier():
        try:
            found = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            found = None
        for root in (found.submodule_search_locations or []) if found else []:
            if (Path(root) / rest).is_dir():
                return str(Path(root) / rest)
    return name
