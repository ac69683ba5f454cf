"""A table of one's own, from a TOML or Python file: rows, methods and settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from bisam.lab import methods as known_methods
from bisam.lab import spec
from bisam.lab.config import Config, suggestion
from bisam.lab.recipes import RECIPES, Recipe, table

KEYS = ("title", "methods", "seeds", "settings", "rows", "method")
"""What a TOML file may have; `rows` and `method` are tables of tables."""

NOT_SET = ("recipe", "title", "row", "method", "seed", "partial_data")
"""Fields that a file does not set: they follow from its tables or from options."""


def is_file(name: str) -> bool:
    """Whether a recipe is named by a file, alone or with a row and a method behind it."""
    return any(part.endswith((".toml", ".py")) for part in name.split("/"))


def find_recipe(name: str) -> Recipe:
    """The recipe of a file; `file.toml/row/method` is a part of it."""
    path, rest = split(name)
    if len(rest) > 2:
        raise ValueError(f"a recipe is {path}, {path}/row or {path}/row/method, got {name!r}")
    return read(Path(path)).only(rest[:1], rest[1:])


def split(name: str) -> tuple[str, list[str]]:
    """The file, and the row and method behind it.

    >>> split("tables/mine.toml/clean/sam")
    ('tables/mine.toml', ['clean', 'sam'])
    """
    parts = name.split("/")
    last = next(place for place, part in enumerate(parts) if part.endswith((".toml", ".py")))
    return "/".join(parts[: last + 1]), parts[last + 1 :]


def read(path: Path) -> Recipe:
    """The table that a file describes. Its name is the file's, and its title is recorded, so that reports have it."""
    if not path.expanduser().is_file():
        raise ValueError(f"{path} is not a file: give a TOML or Python file with a recipe, or see bisam list")
    name = re.sub(r"\W+", "_", path.stem)
    if name in RECIPES:
        raise ValueError(f"{name} is a recipe of the lab: give the file {path} another name")
    made = _from_python(path) if path.suffix == ".py" else _from_toml(path, name)
    cells = {
        (row, method): replace(config, recipe=name, title=made.title, row=row, method=method)
        for (row, method), config in made.cells.items()
    }
    return replace(made, name=name, cells=cells)


def _from_python(path: Path) -> Recipe:
    """What the function `recipe` of the file returns: see `bisam.lab.recipes.table`."""
    make = getattr(spec.run_file(path), "recipe", None)
    made = make() if callable(make) else None
    if not isinstance(made, Recipe):
        raise ValueError(f"{path} needs a function recipe() that returns a table: see bisam.lab.recipes.table")
    return made


def _from_toml(path: Path, name: str) -> Recipe:
    content = _parsed(path)
    unknown = [key for key in content if key not in KEYS]
    if unknown:
        raise ValueError(f"{path} has the unknown key {unknown[0]!r}: {suggestion(unknown[0], KEYS)}")
    rows, of_methods = content.get("rows", {}), content.get("method", {})
    wanted = content.get("methods")
    if not isinstance(rows, Mapping) or not rows or not isinstance(wanted, list) or not wanted:
        raise ValueError(f'{path} needs methods = ["sgd", "sam"] and a table [rows.NAME] for each row')
    if not isinstance(of_methods, Mapping):
        raise ValueError(f"{path}: method must be tables [method.NAME], got {of_methods!r}")
    for method in (*wanted, *of_methods):
        known_methods.find_method(str(method))
    unused = [method for method in of_methods if method not in wanted]
    if unused:
        raise ValueError(
            f"{path} has [method.{unused[0]}], which is not among its methods: add it to them, or remove its settings"
        )
    shared = content.get("settings", {})
    for where, settings in {"settings": shared, **_named("rows", rows), **_named("method", of_methods)}.items():
        _check(path, where, settings)

    def config(row: str, method: str) -> Config:
        return _configured(path, row, {**shared, **rows[row], **of_methods.get(method, {})})

    seeds = content.get("seeds", 3)
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise ValueError(f"{path}: seeds is how many there are, such as 3, got {seeds!r}")
    return table(name, str(content.get("title") or name), list(rows), wanted, config, seeds=seeds)


def _named(kind: str, tables: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{kind}.{name}": values for name, values in tables.items()}


def _check(path: Path, where: str, settings: Any) -> None:
    if not isinstance(settings, Mapping):
        raise ValueError(f"{path}: {where} must be a table of settings, got {settings!r}")
    names = [field.name for field in fields(Config) if field.name not in NOT_SET]
    for name in settings:
        if name not in names:
            raise ValueError(f"{path}: {where} has {name!r}, which is no setting: {suggestion(name, names, 0.4)}")


def _configured(path: Path, row: str, values: Mapping[str, Any]) -> Config:
    """Values as text are read as after --set; lists, such as measures, have commas between."""
    texts = {
        name: ",".join(map(str, value)) if isinstance(value, list) else str(value) for name, value in values.items()
    }
    try:
        return Config().with_changes(texts)
    except ValueError as error:
        raise ValueError(f"{path}, row {row}: {error}") from None


def _parsed(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[no-redef,import-not-found,unused-ignore]
        except ImportError:
            raise ValueError("a recipe in TOML needs Python 3.11 or the package tomli: pip install tomli") from None
    try:
        return tomllib.loads(path.expanduser().read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not TOML ({error}): correct it") from None
