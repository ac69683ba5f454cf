"""Writes the tables of README and docs: words from docstrings, numbers from benchmarks/results and the ledger.

python docs/scripts/tables.py    # rewrites the pages; a test fails when one would change
"""

import inspect
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import frontier
import ledger
import sentences
import your_data
from ledger import markdown

import bisam
from bisam import variants
from bisam.lab import records
from bisam.lab.tables.cells import Collection
from bisam.lab.tables.statistics import difference

ROOT = Path(__file__).parents[2]
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
    "VaSSO": "over SAM: CIFAR, ImageNet, translation, label noise",
    "FisherSAM": "over SAM: fine-tuning ViT on CIFAR-100, cars, flowers",
    "MSAM": "over SGD and Adam at their cost: CIFAR, ImageNet",
    "WSAM": "over SAM: CIFAR, ImageNet, label noise",
}


# Options that make a variant of any other: the name of its row, what was measured, whose idea it is.
EXTRAS = [
    ("mSAM", "Each micro-batch has its own ε, gradients are averaged: `micro_batch=16` of 128", "Foret et al. 2021"),
    ("every=5", "Perturb in every fifth step, `every=5`", "–"),
]


def family() -> list[type]:
    return [
        value for value in vars(variants).values() if isinstance(value, type) and value.__module__ == variants.__name__
    ]


def costs(result: str = "variants_h200") -> dict[str, dict[str, Any]]:
    """What was measured of each variant on a GPU; of those that came later, what can be counted on a CPU."""
    return {row["variant"]: row for name in ("variants_flops", result) for row in measured(name)["table"]}


def shown(value: float | None, digits: int) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"


def variant_table() -> str:
    """What each variant changes, its paper and its defaults."""
    head = ["variant", "what it changes", "paper", "defaults", "where gains are reported"]
    rows = [
        [f"`{cls.__name__}`", first_sentence(cls), paper(cls), defaults(cls), GAINS[cls.__name__]] for cls in family()
    ]
    return markdown(head, [*rows, *([name, words, reference, "", ""] for name, words, reference in EXTRAS)])


def first_sentence(cls: type) -> str:
    return " ".join(inspect.getdoc(cls).split("\n\n")[0].split()).replace("|w|", "abs(w)")


def defaults(cls: type) -> str:
    own = [p for p in inspect.signature(cls).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return ", ".join(f"{p.name} {p.default}" for p in own)


def cost_table() -> str:
    """What a step of each variant costs: FLOPs, memory, and time on two nets; with Q where that changes the FLOPs."""
    known, wide = costs(), costs("variants_h200_wide")
    names = [cls.__name__ for cls in family()] + [name for name, _, _ in EXTRAS]
    names += [name for name in known if name.endswith(" · Q") and known[name]["flops"] != known[name[:-4]]["flops"]]
    head = ["variant", "FLOPs ÷ SGD", "time ÷ SGD, wide net", "time ÷ SGD, narrow net", "memory, copies of the weights"]
    rows = [
        [
            name.replace(" · Q", " with Q"), shown(known[name]["flops"], 2), shown(wide[name]["wall"], 2),
            shown(known[name]["wall"], 2), shown(known[name]["memory"], 1),
        ]
        for name in sorted(names, key=lambda name: known[name]["flops"])
    ]  # fmt: skip
    return markdown(head, rows)


def paper(cls: type) -> str:
    """Authors and year, from the docstring, or those of the variant it is named after."""
    text = " ".join((inspect.getdoc(cls) or "").split())
    found = re.search(r"([A-Z][a-z]+(?:, [A-Z][a-z]+)+): .*?, (20\d\d)\.", text)
    if found is None:
        return paper(bisam.BiSAM)
    first, *others = found[1].split(", ")
    return f"{first} {f'and {others[0]}' if len(others) == 1 else 'et al.'} {found[2]}"


def micro_table() -> str:
    gpu, cpu = (json.loads((RESULTS / f"micro_batches_{name}.json").read_text())["table"] for name in ("h200", "cpu"))
    rows = ["| net | batch, micro-batch | loop, ms | vectorized, ms | ratio | memory, ratio | two CPU cores, ratio |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- |")
    for row, slow in zip(gpu, cpu, strict=True):
        times = f"{row['loop ms']:.1f} | {row['batched ms']:.1f} | {row['ratio']:.2f}"
        memory = f"{row['batched memory'] / row['loop memory']:.1f} | {slow['ratio']:.2f}"
        rows.append(f"| {row['case']} | {row['batch']}, {row['micro_batch']} | {times} | {memory} |")
    return "\n".join(rows)


def where(result: str = "variants_h200") -> str:
    receipt = measured(result)["receipt"]
    return f"Measured on {receipt['gpu']}, torch {receipt['torch']}, {receipt['date']}, commit {receipt['commit']}."


def measured(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def epoch_table() -> str:
    """Seconds per epoch and milliseconds per step of the paper's five models."""
    head = ["model", "SAM, s per epoch", "BiSAM", "BiSAM ÷ SAM", "paper", "ms per BiSAM step", "eager", "authors' code",
            "faster", "compiled"]  # fmt: skip
    rows = []
    for name, entry in measured("bench_h200")["epoch"].items():
        seconds, paper = entry["seconds_of_epoch"], entry["paper"]["seconds_of_epoch"]
        rows.append([
            name, f"{seconds['sam']:.2f}", f"{seconds['bisam-log']:.2f}", f"{entry['ratio']['bisam-log/sam']:.3f}",
            f"{paper['sam']:.0f} → {paper['bisam']:.0f} s, {entry['paper']['ratio']:.2f}",
            f"{entry['ms']['bisam-log']:.2f}", f"{entry['ms']['eager']:.1f}",
            f"{entry['ms']['bisam-log'] * entry['speed_up_over_authors']:.1f}",
            f"{entry['speed_up_over_authors']:.1f} ×", "yes" if entry["compiled"] else "no",
        ])  # fmt: skip
    return markdown(head, rows)


def together_table() -> str:
    head = ["trainings in one graph", "ms per model and step", "minutes of 200 epochs of all, extrapolated"]
    rows = [
        [
            f"{entry['count']} × {entry['model']}",
            f"{entry['ms_per_model_and_step']:.2f}",
            f"{entry['extrapolated_minutes_of_200_epochs']:.1f}",
        ]
        for entry in measured("bench_h200")["together"].values()
    ]
    return markdown(head, rows)


def profile_table() -> str:
    """Kernels of a captured step of one compiled ResNet-32, by what they do."""
    alone = measured("step_profile_h200")["compiled"]["one"]["by_kind_each"]
    rows = [[kind, f"{found['kernels']:.0f}", f"{found['us']:.0f}"] for kind, found in alone.items()]
    return markdown(["one ResNet-32, torch.compile", "kernels", "µs"], rows)


def fused_table() -> str:
    """Trainings in one graph by torch.compile and by kernels of their own."""
    head = ["trainings in one graph", "torch.compile, ms for each", "own kernels", "ratio", "kernels of each", "own"]
    rows = []
    for row in measured("fused_h200")["rows"]:
        compiled, own = (row["kinds"][kind] for kind in ("compiled", "fused"))
        ratio = own["ms_per_model_and_step"] / compiled["ms_per_model_and_step"]
        rows.append([
            f"{row['count']} × {row['model']}", f"{compiled['ms_per_model_and_step']:.2f}",
            f"{own['ms_per_model_and_step']:.2f}", f"{ratio:.2f}",
            f"{compiled['kernels']:.0f}", f"{own['kernels']:.0f}",
        ])  # fmt: skip
    return markdown(head, rows) + "\n\n" + where("fused_h200") + " " + _with_the_labs_batches()


def _with_the_labs_batches() -> str:
    found = {step["what"]: step["ms_each"] for step in measured("fused_launches_h200")["steps"]}
    times = ", ".join(
        f"{found[f'six {name}, fused']['step_lab_batches']:.2f} ms for each {name}" for name in ("resnet32", "resnet56")
    )
    return f"With the lab's own batches, which are cropped, flipped and cut out anew in every step, it was {times}."


CURVES = {
    "loss": "loss at w",
    "perturbed_loss": "loss at w + ε",
    "error": "training error",
    "flips": "flips per batch",
    "ascent_norm": "norm of the ascent's gradient",
    "validation_accuracy": "validation accuracy, %",
}


def curves_table() -> str:
    """Means over the same epochs of the same runs, by torch.compile (the ledger) and by the ResNet's own kernels."""
    again = measured("fused_curves_h200")["runs"]
    epochs = range(1, min(len(run["loss"]) for run in again.values()))  # the first one falls from the initial weights
    rows = []
    for name, title in CURVES.items():
        own = {run: statistics.fmean(curves[name][epoch] for epoch in epochs) for run, curves in again.items()}
        compiled = {
            run: statistics.fmean(records.read(ROOT / "results" / run).metrics[e][name] for e in epochs)
            for run in again
        }
        found = difference(own, compiled)
        assert found.low is not None
        assert found.high is not None
        rows.append([
            title, f"{statistics.fmean(compiled.values()):.4f}", f"{statistics.fmean(own.values()):.4f}",
            f"{found.low:+.4f} to {found.high:+.4f}".replace("-", "−"),
        ])  # fmt: skip
    head = [f"mean of epochs 2 to {len(epochs) + 1}", "torch.compile", "own kernels", "difference, 95 % interval"]
    return markdown(head, rows) + "\n\n" + where("fused_curves_h200")


def loss_table() -> str:
    gpu, cpu = measured("bench_h200")["loss"], measured("bench_cpu")["loss"]
    columns = [(size, "device", gpu[size]) for size in gpu] + [(size, "eager", cpu[size]) for size in cpu]
    names = {"cross_entropy": "cross entropy", "log": "Q, −log", "tanh": "Q, tanh", "plain_log": "Q, −log, plain torch"}
    head = ["", *(f"{size.replace('x', '×')}, {'H200' if kind == 'device' else 'CPU'}" for size, kind, _ in columns)]
    rows = []
    for key, title in names.items():
        cells = []
        for _, kind, entry in columns:
            times, reference = entry[f"{kind}_us"], entry[f"{kind}_us"]["cross_entropy"]
            ratio = "" if key == "cross_entropy" else f" ({times[key] / reference:.2f})"
            cells.append(f"{times[key]:.1f}{ratio}" if key in times else "–")
        rows.append([title, *cells])
    return markdown(head, rows)


def ten_thousand_table() -> str:
    """The paper's table of 10 000 forward and backward passes at 128×100, in seconds."""
    entries = {name: measured(f"bench_{name}")["loss"]["128x100"] for name in ("h200", "cpu")}
    paper = entries["h200"]["paper_seconds_of_10k"]
    titles = {
        "cross_entropy": "cross entropy",
        "log": "Q, −log, fused",
        "plain_log": "Q, −log, plain torch",
        "loop_log": "Q, −log, a loop over samples",
    }
    rows = []
    for key, title in titles.items():
        column = "cross_entropy" if key == "cross_entropy" else "q"
        printed = [f"{paper[name][column]:.2f}" if key in ("cross_entropy", "plain_log") else "" for name in paper]
        rows.append([title, *(f"{entry['seconds_of_10k'][key]:.2f}" for entry in entries.values()), *printed])
    return markdown(["", "H200, eager", "CPU", "paper, PyTorch", "paper, TensorFlow"], rows)


def memory_table() -> str:
    head = ["model", "weights", "peak of SGD", "of SAM", "of BiSAM", "BiSAM beyond SGD, in copies of the weights"]
    rows = []
    for name, entry in measured("bench_h200")["memory"].items():
        peaks = [f"{entry['peak_mib'][method]:.0f} MiB" for method in ("sgd", "sam", "bisam-log")]
        rows.append([name, f"{entry['weights_mib']:.0f} MiB", *peaks, f"{entry['copies_beyond_sgd']['bisam-log']:.2f}"])
    return markdown(head, rows)


def bar_table() -> str:
    rows = [
        [
            bar["name"],
            f"{bar['comparison']} {bar['limit']:g}{slack(bar)}",
            f"{bar['measured']:.3g}",
            "met" if bar["met"] else "**missed**",
        ]
        for result in ("bench_h200", "bench_cpu")
        for bar in measured(result)["bars"]
        if bar["measured"] is not None
    ]
    return markdown(["promise", "limit", "measured", ""], rows)


def slack(bar: dict[str, Any]) -> str:
    sign = "+" if bar["comparison"] == "≤" else "−"
    return f" ({sign}{100 * bar['tolerance']:g} %)" if bar["tolerance"] else ""


def lab_on_a_gpu() -> str:
    """What trainings through the command line took, from their records."""
    timed, whole, cut = (records.read(RESULTS / "lab_h200" / name) for name in ("time", "whole", "cut"))
    first, *others = (row["seconds"] for row in timed.metrics)
    weights = "equal bit for bit" if measured("lab_h200/weights")["bitwise_equal"] else "not equal"
    resumed = "the same" if _learnt(whole) == _learnt(cut) else "other"
    return (
        f"On {timed.receipt['gpu']}, an epoch of ResNet-56 with BiSAM (−log), by torch.compile, takes "
        f"{statistics.median(others):.2f} s (the first {first:.0f} s, with compiling); with `deterministic=true` and "
        f"not compiled {whole.metrics[-1]['seconds']:.1f} s. There a run that SIGTERM stopped within its first epoch, "
        f"and the same command resumed, had {resumed} losses, norms and accuracies as an undisturbed one to the last "
        f"digit, and the weights were {weights} (commits {whole.receipt['commit']} and, resumed, "
        f"{cut.receipt['commit']}; records in benchmarks/results/lab_h200)."
    )


def _learnt(record: records.Record) -> list[dict[str, Any]]:
    """The metrics without what a clock says."""
    return [{k: v for k, v in row.items() if k not in ("seconds", "samples_per_second")} for row in record.metrics]


def bench_where() -> str:
    cpu = measured("bench_cpu")["receipt"]
    return f"{where('bench_h200')} CPU: {cpu['cpu']}, {cpu['threads']} threads, torch {cpu['torch']}, {cpu['date']}."


def traffic_table() -> str:
    """Bytes that a process sends in a step, beside plain SGD in the same way."""
    titles = {
        "sgd": "DDP: plain SGD", "local": "DDP: BiSAM, per rank", "global": "DDP: BiSAM, global",
        "fsdp sgd": "FSDP2: plain SGD", "fsdp global": "FSDP2: BiSAM, global",
    }  # fmt: skip
    rows = []
    for entry in _scaled("weak"):
        for name, found in entry["methods"].items():
            plain = entry["methods"]["fsdp sgd" if name.startswith("fsdp") else "sgd"]
            ratios = [f"{found[key] / plain[key]:.4f}" for key in ("sent in a ring", "sent by sockets")]
            sent = [f"{found[key] / 1e6:.3f}" for key in ("sent in a ring", "sent by sockets")]
            cells = [titles[name], sent[0], ratios[0], sent[1], ratios[1]]
            rows.append([entry["net"], str(entry["processes"]), *cells])
    head = ["net", "processes", "step", "collectives, MB", "÷ SGD", "sockets, MB", "÷ SGD"]
    return markdown(head, rows)


def step_table() -> str:
    """Time of a step over processes that share two cores."""
    rows = []
    for kind in ("weak", "strong"):
        for entry in _scaled(kind, fewest=1):
            ms = {name: entry["methods"][name]["ms"] for name in ("sgd", "local", "global")}
            ratios = [f"{ms[name] / ms['sgd']:.2f}" for name in ("local", "global")]
            rows.append([entry["net"], kind, str(entry["processes"]), str(entry["batch of a process"]),
                         f"{ms['sgd']:.0f}", *ratios])  # fmt: skip
    return markdown(["net", "scaling", "processes", "batch of each", "SGD, ms", "per rank ÷ SGD", "global ÷ SGD"], rows)


def _scaled(kind: str, fewest: int = 2) -> list[dict[str, Any]]:
    found = measured("scaling_cpu")["table"]
    return [entry for entry in found if entry["scaling"] == kind and entry["processes"] >= fewest]


def model_table() -> str:
    """The model of many GPUs: milliseconds of a step."""
    rows = []
    for name, model in measured("scaling_cpu")["model"]["models"].items():
        for kind in ("weak", "strong"):
            for row in model[kind] if kind == "strong" else (model[kind][0], model[kind][-1]):
                ms = row["ms"]
                ratios = [f"{ms[method]:.2f} ({ms[method] / ms['sgd']:.2f})" for method in ("local", "global")]
                images = f"{row['images']:g}"
                rows.append([name, kind, str(row["gpus"]), images, f"{ms['sgd']:.2f}", *ratios])
    head = ["network", "scaling", "GPUs", "images of each", "SGD, ms", "per rank, ms (÷ SGD)", "global, ms (÷ SGD)"]
    return markdown(head, rows)


def model_rates() -> str:
    rates, models = (measured("scaling_cpu")["model"][key] for key in ("rates", "models"))
    counted = [
        f"{name}: {model['work']['flops_per_image'] / 1e9:.1f} GFLOP for an image, "
        f"{model['work']['gradient_bytes'] / 1e6:.0f} MB of gradients"
        for name, model in models.items()
    ]
    return (
        f"Counted: {'; '.join(counted)}. Assumed for each GPU: {rates['flops'] / 1e12:.0f} TFLOP/s, which the measured "
        f"plain step of WRN-28-10 on an H200 reaches, {rates['nvlink'] / 1e9:.0f} GB/s inside of a node of 8, "
        f"{rates['network'] / 1e9:.0f} GB/s between nodes, {rates['latency'] * 1e6:.0f} µs for a hop."
    )


def scaling_where() -> str:
    result = measured("scaling_cpu")
    receipt = result["receipt"]
    return (
        f"Measured on {receipt['cpu']} with {result['cores']} cores, gloo, one thread in each process, torch "
        f"{receipt['torch']}, {receipt['date']}, commit {receipt['commit']}."
    )


def ties_table() -> str:
    """Test accuracy by the way in which a tie is counted."""
    head = ["weights", "any class of a tie is right", "the first", "the first, in fp32"]
    rows = [
        [f"{name}, epoch {entry['epoch'] + 1}", *(f"{entry['test'][way]:.2f}" for way in ("any", "first", "fp32"))]
        for name, entry in measured("ties")["table"].items()
    ]
    return markdown(head, rows)


def of_ledger(**blocks: Callable[[Collection], str]) -> dict[str, Callable[[], str]]:
    return {name: lambda make=make: make(ledger.read()) for name, make in blocks.items()}


PAGES = {
    ROOT / "README.md": of_ledger(demo=ledger.demo_table, evidence=ledger.evidence_table),
    ROOT / "docs/index.md": of_ledger(paper=ledger.paper_table),
    ROOT / "docs/results.md": {
        **of_ledger(
            evidence=ledger.evidence_table, tables=ledger.all_tables, verdicts=ledger.verdicts,
            flips=ledger.flips_table, levels=ledger.levels_list, cutout=ledger.without_cutout_table,
        ),
        "ties": ties_table, "noise_rho": ledger.noise_rho_table,
    },
    ROOT / "docs/runs.md": of_ledger(runs=ledger.all_runs),
    ROOT / "docs/lab.md": {"gpu": lab_on_a_gpu},
    ROOT / "docs/your-data.md": {"ending": your_data.ending, "ten_seeds": your_data.with_ten_seeds},
    ROOT / "docs/choosing-rho.md": {},
    ROOT / "docs/variants.md": {
        "variants": variant_table, "cost": cost_table, "micro": micro_table, "where": where,
        **of_ledger(
            frontier=frontier.table, picture=frontier.shown, advice=frontier.advice, goal=frontier.goal,
            digits=frontier.digits,
        ),
        "times": frontier.where, "efficient": frontier.efficient, "pool": frontier.pool,
        "digits_rho": frontier.digits_rho,
    },
    ROOT / "docs/speed.md": {
        "epoch": epoch_table, "together": together_table, "profile": profile_table, "fused": fused_table,
        "curves": curves_table,
        "loss": loss_table, "ten_thousand": ten_thousand_table, "memory": memory_table,
        "bars": bar_table, "where": bench_where,
    },
    ROOT / "docs/scaling.md": {
        "traffic": traffic_table, "step": step_table, "rates": model_rates, "model": model_table,
        "where": scaling_where,
    },
}  # fmt: skip


def page(path: Path) -> str:
    """The page with every block between `<!-- NAME -->` and `<!-- end -->` made anew, and the numbers in sentences."""
    text, makers = path.read_text(), PAGES[path]
    found = re.findall(r"<!-- (?!end )(\w+) -->\n", text)
    if sorted(found) != sorted(makers):
        raise ValueError(
            f"{path.name} has the blocks {sorted(found)}, and {sorted(makers)} are made: make them the same"
        )
    for name, make in makers.items():
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, make=make: m[1] + make() + "\n" + m[2], text, flags=re.S
        )
    return sentences.fill(text, sentences.of_page(path), ledger.read())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path))
        print(f"wrote {path.relative_to(ROOT)} for bisam {bisam.__version__}")
