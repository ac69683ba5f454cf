"""Writes the tables of docs/variants.md: words from the docstrings of `bisam.variants`, numbers from results/.

python benchmarks/tables.py    # rewrites the page; a test fails when it would change
"""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import bisam
from bisam import variants

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/variants.md"
RESULTS = ROOT / "benchmarks/results"

# Where the paper of each variant reports gains over what it compares with; facts from those papers.
GAINS = {
    "SAM": "over SGD: CIFAR, ImageNet, label noise, fine-tuning",
    "ASAM": "over SAM: CIFAR, ImageNet, translation",
    "BiSAM": "over SAM: CIFAR-10/100, ImageNet, fine-tuning ViT and BERT",
    "ABiSAM": "over ASAM: CIFAR-10",
    "ESAM": "SAM's accuracy in less time: CIFAR, ImageNet",
    "EBiSAM": "over ESAM: CIFAR-10",
    "KSAM": "over SGD at little more than its cost: CIFAR, ImageNet, GLUE",
    "RSAM": "over SAM: CIFAR, ImageNet with ResNet and ViT",
    "GSAM": "over SAM: ImageNet with ResNet, ViT, Mixer",
    "LookSAM": "SAM's accuracy in less time: ImageNet with ViT, large batches",
    "FriendlySAM": "over SAM: CIFAR, ImageNet",
}


# Options that make a variant of any other: the name of its row, what was measured, whose idea it is.
EXTRAS = [
    ("mSAM", "Each micro-batch climbs by itself, gradients are averaged: `micro_batch=16` of 128", "Foret et al. 2021"),
    ("every=5", "Perturb in every fifth step, `every=5`", "–"),
]


def family() -> list[type]:
    return [
        value for value in vars(variants).values() if isinstance(value, type) and value.__module__ == variants.__name__
    ]


def costs(result: str = "variants_h200") -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in json.loads((RESULTS / f"{result}.json").read_text())["table"]}


def variant_table() -> str:
    known = costs()
    head = [
        "variant",
        "what it changes",
        "paper",
        "defaults",
        "FLOPs",
        "FLOPs, Q",
        "memory",
        "where gains are reported",
    ]
    rows = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    for cls in family():
        name, bilevel = cls.__name__, {"BiSAM", "ABiSAM", "EBiSAM"}
        plain = known[name] if name not in bilevel else None
        climbing = known[name] if name in bilevel else known.get(f"{name} · Q")
        memory = (plain or climbing or {})["memory"]
        flops = [f"{row['flops']:.2f}" if row else "–" for row in (plain, climbing)]
        cells = [f"`{name}`", summary(cls), paper(cls), defaults(cls), *flops, f"{memory:.1f}", GAINS[name]]
        rows.append(f"| {' | '.join(cells)} |")
    for name, words, reference in EXTRAS:
        plain, climbing = known[name], known[f"{name} · Q"]
        numbers = f"{plain['flops']:.2f} | {climbing['flops']:.2f} | {plain['memory']:.1f}"
        rows.append(f"| {name} | {words} | {reference} | | {numbers} | |")
    return "\n".join(rows)


def summary(cls: type) -> str:
    return " ".join(inspect.getdoc(cls).split("\n\n")[0].split()).replace("|w|", "abs(w)")


def defaults(cls: type) -> str:
    own = [p for p in inspect.signature(cls).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return ", ".join(f"{p.name} {p.default}" for p in own)


def wall_table() -> str:
    known, wide = costs(), costs("variants_h200_wide")
    names = ["SAM", "BiSAM", "ESAM", "EBiSAM", "KSAM", "LookSAM", "every=5", "mSAM", "GSAM", "GSAM · Q", "FriendlySAM"]
    rows = ["| variant | FLOPs ÷ SGD | time ÷ SGD, wide net | time ÷ SGD, narrow net |", "| --- | --- | --- | --- |"]
    rows += [
        f"| {name} | {known[name]['flops']:.2f} | {wide[name]['wall']:.2f} | {known[name]['wall']:.2f} |"
        for name in names
    ]
    return "\n".join(rows)


def paper(cls: type) -> str:
    """First author and year, from the docstring, or that of the variant it is named after."""
    text = " ".join((inspect.getdoc(cls) or "").split())
    found = re.search(r"([A-Z][a-z]+)(?:, [A-Z][a-z]+)+: .*?, (20\d\d)\.", text)
    return f"{found[1]} et al. {found[2]}" if found else paper(bisam.BiSAM)


def micro_table() -> str:
    gpu, cpu = (json.loads((RESULTS / f"micro_batches_{name}.json").read_text())["table"] for name in ("h200", "cpu"))
    rows = ["| net | batch, micro-batch | loop, ms | vectorized, ms | ratio | memory, ratio | two CPU cores, ratio |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row, slow in zip(gpu, cpu, strict=True):
        times = f"{row['loop ms']:.1f} | {row['batched ms']:.1f} | {row['ratio']:.2f}"
        memory = f"{row['batched memory'] / row['loop memory']:.1f} | {slow['ratio']:.2f}"
        rows.append(f"| {row['case']} | {row['batch']}, {row['micro_batch']} | {times} | {memory} |")
    return "\n".join(rows)


def where() -> str:
    receipt = json.loads((RESULTS / "variants_h200.json").read_text())["receipt"]
    return f"Measured on {receipt['gpu']}, torch {receipt['torch']}, {receipt['date']}, commit {receipt['commit']}."


def page() -> str:
    """The page with every block between `<!-- NAME -->` and `<!-- end -->` made anew."""
    text = PAGE.read_text()
    for name, make in {"variants": variant_table, "wall": wall_table, "micro": micro_table, "where": where}.items():
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, make=make: m[1] + make() + "\n" + m[2], text, flags=re.S
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)} for bisam {bisam.__version__}")
