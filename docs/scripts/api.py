"""The page docs/api.md: every public name, with its first paragraph, arguments, fields and methods, from docstrings."""

import ast
import inspect
import re
import textwrap
from operator import attrgetter

from ledger import markdown

import bisam
from bisam import SharpnessAware, variants

SECTIONS = {
    "Optimizers": [n for n, v in vars(variants).items() if isinstance(v, type) and issubclass(v, SharpnessAware)],
    "What a step measures": ["Telemetry", "Criterion"],
    "Captured steps": ["capture", "capture_together"],
    "Objectives": ["objectives", "LowerBound", "CrossEntropy", "lower_bound", "bound", "zero_one_error"],
    "Parts of a variant": ["Perturbation", "Ball", "Around", "Plan", "Merge", "Batch", "Bucket", "Memory"],
    "Choosing ρ": ["find_rho", "RhoSweep"],
    "Diagnostics": ["diagnostics", *(f"diagnostics.{name}" for name in bisam.diagnostics.__all__)],
    "For code of the two-step class": ["compat", "compat.SAM"],
}
NOT_CALLED = [
    "Telemetry", "Criterion", "Perturbation", "Plan", "Bucket", "RhoSweep", "Estimate", "Sharpness", "Surface",
]  # fmt: skip
STEPS = ["step", "minimize", "ascend", "descend", "restore", "criterion", "phase", "perturbed", "telemetry"]
USED = {"SharpnessAware": STEPS, "Criterion": ["phase", "objective"]}  # the rest is the engine's


def page() -> str:
    return "\n\n".join(part for title in SECTIONS for part in [f"## {title}", *map(entry, SECTIONS[title])])


def entry(name: str) -> str:
    value = attrgetter(name)(bisam)
    if inspect.ismodule(value):
        return f"### bisam.{name}\n\n{inspect.getdoc(value)}"
    line = textwrap.fill(call(value.__name__, value), 120, initial_indent=" " * 4, subsequent_indent=" " * 8)
    parts = [f"### bisam.{name}", *([] if value.__name__ in NOT_CALLED else [line]), first_paragraph(value)]
    tables = [(["argument", "default", ""], arguments(value))]
    tables += [(["field or method", ""], members(value))] if inspect.isclass(value) else []
    return "\n\n".join([*parts, *(markdown(head, rows) for head, rows in tables if rows)])


def call(name: str, value: object) -> str:
    bare = [p.replace(annotation=p.empty) for p in inspect.signature(value).parameters.values() if p.name != "self"]
    return f"{name}{inspect.Signature(bare)}"


def first_paragraph(value: object) -> str:
    return (inspect.getdoc(value) or "").split("\n\n")[0]


def arguments(value: object) -> list[list[str]]:
    """What the docstring's section `Args:` has, with the defaults of the signature."""
    section = re.search(r"^Args:\n((?: .*\n?)+)", inspect.getdoc(value) or "", re.M)
    found = re.findall(r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", section[1], re.M) if section else []
    known = {name: p.default for name, p in inspect.signature(value).parameters.items()} if found else {}
    given = [[f"`{known[n]!r}`" for n in names.split(", ") if known[n] is not inspect._empty] for names, _ in found]
    return [[f"`{names}`", ", ".join(d), cell(words)] for (names, words), d in zip(found, given, strict=True)]


def members(cls: type) -> list[list[str]]:
    """What has words of its own, and of a class that is not called all fields, with their types."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # torch adds methods to the class itself
    rows = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and (isinstance(after, ast.Expr) or cls.__name__ in NOT_CALLED):
            said = isinstance(after, ast.Expr)
            rows[node.target.id] = after.value.value if said else f"`{ast.unparse(node.annotation)}`"
        elif isinstance(node, ast.Assign) and isinstance(after, ast.Expr):
            rows[node.targets[0].id] = after.value.value
    own = [node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    for name in USED.get(cls.__name__, own):
        value = bisam.Criterion if name == "criterion" else inspect.getattr_static(cls, name)
        if value.__doc__:
            rows[call(name, value) if inspect.isfunction(value) else name] = first_paragraph(value)
    return [[f"`{title}`", cell(words)] for title, words in rows.items()]


def cell(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")
