"""What the ledger says, as README and docs show it: tables, differences, and in plain words what they settle."""

import json
import statistics
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise, product
from pathlib import Path

from bisam.lab import records
from bisam.lab.methods import title_of
from bisam.lab.recipes import RECIPES, Recipe
from bisam.lab.tables import published, summary
from bisam.lab.tables.cells import Collection, ResultTable, Run, collect, command
from bisam.lab.tables.levels import levels
from bisam.lab.tables.sheets import sheets
from bisam.lab.tables.statistics import LEVEL, Difference, holm, signed

ROOT = Path(__file__).parents[2]
NO_BREAK = "\u00a0"


@cache
def read() -> Collection:
    """The runs of results/."""
    return collect(records.find_records(ROOT / "results"))


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def demo_table(found: Collection) -> str:
    """The runs of the demo, a method a row, and how far each is above the one that it improves on."""
    (table,) = (table for table in found.tables if table.name == "demo")
    (row,) = table.rows
    gaps = {one.method: one for one in summary.comparisons(table)}
    rows = []
    for method in table.recipe.methods:
        runs, accuracies = table.of(row, method), table.measured(row, method).values()
        flips = [flips for run in runs if (flips := run.last("flips")) is not None]
        ms = statistics.mean(ms for run in runs if (ms := run.milliseconds) is not None)
        spread = f"{statistics.mean(accuracies):.1f} ± {statistics.stdev(accuracies):.1f}, n = {len(accuracies)}"
        gap = gaps.get(method)
        above = f"{gap.found.mean:+.1f} ({gap.found.low:+.1f} to {gap.found.high:+.1f})" if gap else "–"
        cells = [title_of(method), spread, above.replace("-", "−")]
        rows.append([*cells, f"{statistics.mean(flips):.1f}" if flips else "–", f"{ms:.1f}"])
    return markdown(["method", "test accuracy", "above its baseline", "flips per batch", "ms per step"], rows)


EVIDENCE = [
    ("Digits, clean labels", "label_noise_digits", "0%"),
    ("Digits, 20 % wrong labels", "label_noise_digits", "20%"),
    ("Digits, 40 %", "demo", "40%"),
    ("Digits, 60 %", "label_noise_digits", "60%"),
    ("Digits, 80 %", "label_noise_digits", "80%"),
    ("CIFAR-10, ResNet-32, clean labels", "label_noise", "0%"),
    ("CIFAR-10, ResNet-32, 20 % wrong labels", "label_noise", "20%"),
    ("CIFAR-10, ResNet-32, 40 %", "label_noise", "40%"),
    ("CIFAR-10, ResNet-32, 60 %", "label_noise", "60%"),
    ("CIFAR-10, ResNet-32, 80 %", "label_noise", "80%"),
    ("CIFAR-10, VGG19-BN", "cifar10", "vgg19bn"),
    ("CIFAR-10, ResNet-56", "cifar10", "resnet56"),
    ("Flowers-102, EfficientNet-Lite0", "flowers102-efficientnet_lite0+epochs=30", "efficientnet_lite0"),
    ("MRPC, MiniLM", "glue, model=transformers:minilm", "mrpc_acc"),
    ("MRPC, MiniLM, five times the learning rate", "glue, model=transformers:minilm, lr=0.0001", "mrpc_acc"),
    ("CoLA, MiniLM, Matthews correlation", "glue, model=transformers:minilm", "cola_mcc"),
    ("CoLA, MiniLM, five times the learning rate", "glue, model=transformers:minilm, lr=0.0001", "cola_mcc"),
    ("RTE, MiniLM", "glue, model=transformers:minilm", "rte_acc"),
    ("RTE, MiniLM, five times the learning rate", "glue, model=transformers:minilm, lr=0.0001", "rte_acc"),
]
"""Lines of the table of README: what is trained, and the table and row of its runs."""


EVIDENCE_METHODS = {"sam": "SAM − base", "bisam-log": "BiSAM (−log) − SAM", "bisam-tanh": "BiSAM (tanh) − SAM"}


def evidence_table(found: Collection) -> str:
    """A line for each experiment: SAM − its base optimizer and BiSAM − SAM, bold where the interval excludes 0.

    Below it stands how many of the intervals do so, and how many with a correction for their number.
    """
    gaps = {
        (result_table.name, one.row, one.method): one.found
        for result_table in found.tables
        for one in summary.comparisons(result_table)
    }
    rows = []
    compared: dict[str, list[tuple[str, Difference]]] = {"BiSAM with SAM": [], "SAM with its base": []}
    for title, table, row in EVIDENCE:
        of_row = {method: gaps[table, row, method] for method in EVIDENCE_METHODS if (table, row, method) in gaps}
        if of_row:
            for method, gap in of_row.items():
                pair = "SAM with its base" if method == "sam" else "BiSAM with SAM"
                compared[pair].append((f"{title}: {EVIDENCE_METHODS[method].split(' − ')[0]}", gap))
            few, many = (pick(gap.runs[0] for gap in of_row.values()) for pick in (min, max))
            cells = [_beside(of_row.get(method)) for method in EVIDENCE_METHODS]
            seeds = str(few) if few == many else f"{few} to {many}"
            rows.append([title.replace(" %", f"{NO_BREAK}%"), *cells, seeds])
    counts = "\n".join(_resolved_by_chance(pair, gaps) for pair, gaps in compared.items() if gaps)
    return f"{markdown(['trained on', *EVIDENCE_METHODS.values(), 'seeds'], rows)}\n\n{counts}"


def _resolved_by_chance(pair: str, gaps: list[tuple[str, Difference]]) -> str:
    """How many differences are resolved, how many would be if none existed, and which are with Holm's correction."""
    tested = [(title, gap, p) for title, gap in gaps if (p := gap.p_value) is not None]
    resolved = sum(gap.resolved for _, gap, _ in tested)
    survive = holm([p for _, _, p in tested])
    names = [
        f"{title} {'above' if gap.mean > 0 else 'below'}"
        for (title, gap, _), survives in zip(tested, survive, strict=True)
        if survives
    ]
    by_chance = len(tested) * (1 - LEVEL)
    return (
        f"- **{pair}**: {resolved} of {len(tested)} intervals exclude 0; if there were no differences, about "
        f"{by_chance:.1f} would by chance. With Holm's correction, which allows for that: {'; '.join(names) or 'none'}."
    )


def _beside(gap: Difference | None) -> str:
    """Such as "**+3.76** (+1.93 to +5.60)", bold where the interval excludes 0."""
    if gap is None:
        return "–"
    mean = f"**{signed(gap.mean)}**" if gap.resolved else signed(gap.mean)
    return f"{mean} ({gap.interval.replace(' ', NO_BREAK)})" if gap.interval else mean


def noise_rho_table(path: Path = ROOT / "benchmarks/results/digits_noise_rho.json") -> str:
    """Accuracies on digits by ρ, for each rate of wrong labels and method; bold is the best on validation data."""
    result = json.loads(path.read_text())
    rows = []
    for rate, methods in result["rates"].items():
        for method, by_rho in methods.items():
            counts = sorted({len(of["validation"]) for of in by_rho.values()}, reverse=True)
            best = chosen_rho(by_rho)
            cells = [", ".join(of_each_rho(by_rho, count, best)) + f" (n = {count})" for count in counts]
            rows.append([rate.replace("%", " %"), title_of(method), *cells])
    receipt = result["receipt"]
    head = ["wrong labels", "method", "ρ: validation (test) accuracy, the three best", "the others"]
    where = f"{receipt['cpu']}, torch {receipt['torch']}, {receipt['date']}, commit {receipt['commit']}"
    many = f"the runs are of {len(result['commits'])} commits, which the file lists"
    return f"{markdown(head, rows)}\n\nMeans over n seeds from 100 on, in per cent. {where}; {many}."


def chosen_rho(by_rho: dict[str, dict[str, list[float]]]) -> str:
    """The best by validation accuracy of those with the most seeds; of equal ones the smallest."""
    most = max(len(of["validation"]) for of in by_rho.values())
    sums = {rho: round(sum(of["validation"]), 6) for rho, of in by_rho.items() if len(of["validation"]) == most}
    return min((rho for rho in sums if sums[rho] == max(sums.values())), key=float)


def of_each_rho(by_rho: dict[str, dict[str, list[float]]], seeds: int, best: str) -> Iterator[str]:
    """Validation and test accuracy of each ρ with that number of seeds, the best in bold."""
    for rho, of in by_rho.items():
        if len(of["validation"]) == seeds:
            cell = f"{rho}: {statistics.fmean(of['validation']):.1f} ({statistics.fmean(of['test']):.1f})"
            yield f"**{cell}**" if rho == best else cell


def paper_table(found: Collection) -> str:
    """The cells of the paper's tables that have runs, and how far each is above the one that it improves on."""
    head = ["table, row", "method", "test accuracy", "paper's", "above its baseline, 95 % interval", "paper's"]
    rows = []
    for table in _of_the_paper(found):
        printed = summary.published_of(table)
        gaps = {(one.row, one.method): one for one in summary.comparisons(table)}
        for label, row, name in table.recipe.lines:
            for method in table.recipe.methods:
                if any(run.record.result is not None for run in table.of(row, method)):
                    paper, gap = printed.cells[label].get(method), gaps.get((label, method))
                    rows.append([
                        f"{table.recipe.name}, {label}", title_of(method), summary.accuracy(table, row, method, name),
                        "–" if paper is None else summary.spread(*paper),
                        "–" if gap is None else f"{signed(gap.found.mean)} ({_interval(gap)})",
                        "–" if gap is None or gap.published is None else signed(gap.published),
                    ])  # fmt: skip
    return markdown(
        head, [[cell.replace(" ± ", "\u00a0±\u00a0").replace(" = ", "\u00a0=\u00a0") for cell in row] for row in rows]
    )


def verdicts(found: Collection) -> str:
    """What is confirmed of the paper's tables, what is not resolved, what was not run."""
    lists = {
        "Resolved, with the paper's sign": _differences(found, "confirmed"),
        "Resolved, with the other sign": _differences(found, "contradicted"),
        "Resolved, where the paper has no difference": _differences(found, "new"),
        "Not resolved at this n": _differences(found, "not resolved"),
    }
    lists["Diverged"] = [
        f"{table.recipe.name}, {row}: {words}"
        for table in _of_the_paper(found)
        for row in table.rows
        if (words := summary.diverged(table, row, table.recipe.methods))
    ]
    lists["Not counted"] = [words for run in found.others if (words := _not_counted(run))]
    lists["Unfinished"] = [words for table in _of_the_paper(found) for words in _not_finished(table)]
    recipes = [make() for make in RECIPES.values()]
    lists["Not run"] = [words for recipe in recipes if (words := _not_run(recipe, found.tables))]
    lists["Not run"] += [_number_not_run(recipes, found.tables)]
    lists["No recipe yet"] = sorted(_tables_of_accuracies() - {recipe.published for recipe in recipes})
    shown = {title: items for title, items in lists.items() if items or title.startswith("Resolved, with the")}
    return "\n".join(f"- **{title}**: {'; '.join(items) or 'nothing yet'}." for title, items in shown.items())


WITHOUT_CUTOUT = ", label_smoothing=0.1, cutout=0"
"""What follows the name of a table in the earlier recipe, whose initial weights were other ones too."""


def without_cutout_table(found: Collection) -> str:
    """The cells that were trained with the earlier recipe, beside today's runs and the paper's."""
    by_name = {table.name: table for table in found.tables}
    rows = []
    for name, earlier in by_name.items():
        if name.endswith(WITHOUT_CUTOUT):
            recipe = name.removesuffix(WITHOUT_CUTOUT)
            for row, method in product(earlier.rows, earlier.recipe.methods):
                if not earlier.measured(row, method):
                    continue
                measure = f"test_{earlier.recipe.cells[row, method].primary}"
                before, today = (
                    summary.accuracy(table, row, method, measure) if table else "–"
                    for table in (earlier, by_name.get(recipe))
                )
                printed = published.of(earlier.recipe).moments(row, method)
                paper = summary.spread(printed.mean, printed.deviation)
                rows.append([f"{recipe}, {row}", title_of(method), before, today, paper])
    head = ["table, row", "method", "without cutout, the earlier recipe", "today's recipe", "paper's"]
    return markdown(head, rows)


def _differences(found: Collection, outcome: str) -> list[str]:
    """The differences that came out like this, those of a row together."""
    rows: dict[tuple[str, str], list[str]] = {}
    for table in _of_the_paper(found):
        for one in summary.comparisons(table):
            if _outcome(one) == outcome:
                runs = f"{one.found.n}; {one.diverged}" if one.diverged else one.found.n
                rows.setdefault((f"{table.recipe.name}, {one.row}", runs), []).append(one.label)
    return [f"{row}: {', '.join(labels)} ({runs})" for (row, runs), labels in rows.items()]


def levels_list(found: Collection) -> str:
    """Which accuracies are apart from the paper's, and which are not."""
    lists: dict[str, dict[str, list[str]]] = {"Apart from the paper": {}, "Not apart": {}, "One run, no interval": {}}
    for table in _of_the_paper(found):
        for one in levels(table):
            title = "Apart from the paper" if one.found.resolved else "Not apart"
            rows = lists["One run, no interval" if one.found.low is None else title]
            interval = f" ({one.found.interval})" if one.found.interval else ""
            text = f"{title_of(one.method)} {signed(one.found.mean)}{interval}"
            rows.setdefault(f"{table.recipe.name}, {one.row}", []).append(text)
    shown = {title: "; ".join(f"{row}: {', '.join(of)}" for row, of in rows.items()) for title, rows in lists.items()}
    return "\n".join(f"- **{title}**: {text}." for title, text in shown.items() if text)


def _outcome(one: summary.MethodDifference) -> str:
    if one.published is None:
        return "not in the paper"
    if not one.found.resolved:
        return "not resolved"
    if one.published == 0:
        return "new"
    return "confirmed" if one.found.mean * one.published > 0 else "contradicted"


def _not_counted(run: Run) -> str:
    """A run of a recipe that is excluded by hand, and the first sentence of the reason."""
    reason = run.record.not_counted.split(". ")[0].removesuffix(".")
    return f"`{command(run)}` ({reason})" if reason and command(run) else ""


def _not_finished(table: ResultTable) -> Iterator[str]:
    """A text for each row that has unfinished runs."""
    for row in table.rows:
        runs = [run for run in table.of_row(row) if run.record.result is None]
        if runs:
            methods = ", ".join(dict.fromkeys(title_of(run.config.method) for run in runs))
            furthest = max(runs, key=lambda run: len(run.record.metrics))
            count = f"{len(runs)} run{'s' * (len(runs) > 1)}"
            yield f"{table.recipe.name}, {row} with {methods}: {count}, up to {furthest.status}"


def _tables_of_accuracies() -> set[str]:
    """The others are of seconds."""
    return {name for name, table in published.tables().items() if "seconds" not in (table.get("metric") or "")}


def _number_not_run(recipes: Iterable[Recipe], tables: Iterable[ResultTable]) -> str:
    """Such as "together 96 of the 123 cells of the paper's tables"."""
    own = {table.name: table for table in tables}
    cells = [(recipe.name, *cell) for recipe in recipes if recipe.published for cell in recipe.cells]
    missing = sum(name not in own or not own[name].of(row, method) for name, row, method in cells)
    return f"together {missing} of the {len(cells)} cells of the paper's tables"


def _not_run(recipe: Recipe, tables: Iterable[ResultTable]) -> str:
    """The cells of a table of the paper without a run, in as few words as it takes."""
    if recipe.published is None:
        return ""
    own = next((table for table in tables if table.name == recipe.name), ResultTable(recipe, ""))
    missing = {row: [m for r, m in recipe.cells if r == row and not own.of(row, m)] for row in recipe.rows}
    if all(missing[row] == recipe.methods for row in recipe.rows):
        return f"{recipe.name}, all of it"
    parts = [
        row if missing[row] == recipe.methods else f"{row} with {', '.join(title_of(m) for m in missing[row])}"
        for row in recipe.rows
        if missing[row]
    ]
    return f"{recipe.name}, {', '.join(parts)}" if parts else ""


def all_tables(found: Collection) -> str:
    """Each table that has runs, with its differences."""
    return "\n\n".join(sheet.markdown() for sheet in sheets(found.tables, found.runs))


def all_runs(found: Collection) -> str:
    """Each run below its table, with its first measure in per cent, and the commands that run them again."""
    by_table: dict[str, list[Run]] = {}
    for run in found.runs:
        by_table.setdefault(run.config.recipe, []).append(run)
    return "\n\n".join(_runs_of(table, runs) for table, runs in sorted(by_table.items()))


def _runs_of(table: str, runs: Iterable[Run]) -> str:
    head = ["run", "status", "validation", "test", "seconds", "at once", "hardware", "commit"]
    rows = []
    seeds_of: dict[str, set[int]] = {}
    for run in runs:
        result = run.record.result or {}
        values = [run.measured(f"{part}_{run.config.primary}") for part in ("validation", "test")]
        rows.append([
            _folder(run), run.status, *("–" if value is None else f"{value:.2f}" for value in values),
            f"{result['seconds']:.0f}" if result else "–", run.together, run.record.hardware or "–",
            run.record.commits or "–",
        ])  # fmt: skip
        if command(run):
            again = command(run).replace(f"--seeds {run.config.seed}", "--seeds {}")
            seeds_of.setdefault(again, set()).add(run.config.seed)
    commands = "".join(f"    {again.format(_ranges(seeds))}\n" for again, seeds in seeds_of.items())
    again_with = f"\n\nAgain with:\n\n{commands.rstrip()}" if commands else ""
    return f"## {table}\n\n{markdown(head, rows)}{again_with}"


def _folder(run: Run) -> str:
    """The name of a run's folder, with those above it if it is not `results/TABLE`: runs there have the same names."""
    folder = run.record.folder
    above = folder.parent.relative_to(ROOT / "results") if folder.is_relative_to(ROOT) else Path(run.config.recipe)
    return folder.name if len(above.parts) == 1 else str(above / folder.name)


def _ranges(seeds: Iterable[int]) -> str:
    """
    >>> _ranges([3, 0, 1, 2, 7])
    '0-3,7'
    """
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        parts[-1:] = [[parts[-1][0], seed]] if parts and seed == parts[-1][-1] + 1 else [*parts[-1:], [seed, seed]]
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)


def flips_table(found: Collection) -> str:
    """Mean flips per batch in each quarter of the training on CIFAR-10."""
    recipe = RECIPES["cifar10"]()
    table = next((table for table in _of_the_paper(found) if table.recipe.name == recipe.name), ResultTable(recipe, ""))
    whole = recipe.cells["vgg19bn", "sam"].epochs
    rows, ends = [], [whole * quarter // 4 for quarter in range(5)]
    for model, method in product(recipe.rows, recipe.methods):
        done = [run for run in table.of(model, method) if run.status == "done" and run.last("flips") is not None]
        runs = [[row["flips"] for row in run.record.metrics] for run in done]
        if runs:
            means = [statistics.fmean(x for flips in runs for x in flips[a:b]) for a, b in pairwise(ends)]
            rows.append([model, title_of(method), *(f"{mean:.2f}" for mean in means), str(len(runs))])
    return markdown(["model", "method", *(f"epochs {a + 1} to {b}" for a, b in pairwise(ends)), "n"], rows)


def _of_the_paper(found: Collection) -> list[ResultTable]:
    return [table for table in found.tables if table.recipe.published and not table.changes]


def _interval(gap: summary.MethodDifference) -> str:
    return gap.found.interval or "no interval"
