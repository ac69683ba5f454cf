"""The frontier: accuracy from the ledger against time from benchmarks/results, as a table, a picture and advice.

What was not measured is shown as such: no sentence here is about a setting without records.

python docs/scripts/frontier.py    # draws docs/images/frontier.svg, once there is something to draw
"""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import altair as alt
import ledger
from ledger import markdown

from bisam.capture.steps import MOST_GRAPHS
from bisam.lab.config import Config
from bisam.lab.files import write_atomically
from bisam.lab.methods import passes, title_of
from bisam.lab.models import build
from bisam.lab.recipes import DIGITS_SETTINGS, FRONTIER_SETTINGS, find_recipe, frontier_row
from bisam.lab.report.charts import APART, COLOURS, svg
from bisam.lab.tables.cells import Collection, ResultTable, borrow
from bisam.lab.tables.statistics import Difference, difference, interval_of_mean, signed

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PICTURE = ROOT / "docs/images/frontier.svg"

EPOCHS = 200
"""Of the SGD training that times are relative to."""
EPOCHS_OF_DIGITS = 30
MODELS = {"resnet32": "ResNet-32", "vgg19bn": "VGG19-BN"}
PLACES = [(model, noise) for model in MODELS for noise in (0.0, 0.4)]
STEPS = {
    "": "all steps", "200epochs": "200 epochs", "every5": "every fifth step", "late50": "last 50 %",
    "late25": "last 25 %", "late14": "last 14 %", "late10": "last 10 %",
    "late50every5": "every fifth step of the last 50 %", "early50": "first 50 %", "early25": "first 25 %",
    "micro16": "micro-batches of 16",
}  # fmt: skip
"""What a setting changes, most of all which steps perturb; another ρ than usual follows its name."""
GOAL = 1.15
MARGIN = 1.0
"""Points below SAM that the whole interval of a difference may not exceed, to show that a setting is about as good."""
KINDS = {
    "SAM": ("square", COLOURS["sam"]),
    "above SAM": ("triangle-up", COLOURS["tanh"]),
    "not separated from SAM": ("circle", COLOURS["plain"]),
    "below SAM": ("triangle-down", "#c2255c"),
}
"""Shape and colour of the picture's marks: no two differ in colour alone."""
BUDGETS = (1.0, 1.1, GOAL, 1.25, 1.5, 2.1)

Timing = Mapping[str, Mapping[str, Any]]
"""Ratios to SGD by model, as benchmarks/bench_frontier.py writes them."""


@dataclass(frozen=True)
class Point:
    """One setting of one method, with one model and noise rate."""

    setting: str
    method: str
    config: Config
    time: float | None
    """Of a training, relative to SGD's of 200 epochs; None where it was not measured."""
    accuracies: Mapping[int, float]
    """Test accuracy in per cent, by seed."""
    of_sam: Mapping[int, float]
    under_way: int = 0

    @property
    def title(self) -> str:
        if self.method == "sgd":
            return f"SGD, {self.config.epochs} epochs"
        return f"{title_of(self.method)}, {kind_of(self.setting)}" if self.setting else title_of(self.method)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.accuracies.values()) if self.accuracies else None

    @cached_property
    def to_sam(self) -> Difference | None:
        """None for SAM itself, and where one of the two has no runs."""
        return None if self.is_sam else difference(self.accuracies, self.of_sam)

    @property
    def is_sam(self) -> bool:
        return (self.setting, self.method) == ("", "sam")

    @property
    def words(self) -> str:
        """Such as "94.20 (94.02 to 94.38), n = 3"."""
        if self.mean is None:
            return "under way" if self.under_way else "–"
        low, high = interval_of_mean([*self.accuracies.values()])
        interval = "" if low is None else f" ({low:.2f} to {high:.2f})"
        return f"{self.mean:.2f}{interval}, n = {len(self.accuracies)}{' ▼' * self.is_below_sam}"

    @property
    def is_below_sam(self) -> bool:
        """Whether it is resolved that SAM is better."""
        return self.to_sam is not None and self.to_sam.resolved and self.to_sam.mean < 0

    @property
    def keeps_up(self) -> bool:
        """Whether there is an interval of the difference to SAM, and it does not lie below 0."""
        return self.to_sam is not None and self.to_sam.high is not None and self.to_sam.high >= 0


def kind_of(setting: str) -> str:
    """
    >>> kind_of("late10"), kind_of("late10rho0.4"), kind_of("rho1.2")
    ('last 10 %', 'last 10 %, ρ = 0.4', 'ρ = 1.2')
    """
    steps, _, rho = setting.partition("rho")
    return ", ".join([*([STEPS[steps]] if steps or not rho else []), *([f"ρ = {rho}"] if rho else [])])


def timing(path: Path = RESULTS / "frontier_h200.json") -> Timing:
    """Empty until it is measured."""
    return json.loads(path.read_text())["models"] if path.exists() else {}


def relative_time(config: Config, ratios: Mapping[str, Mapping[str, float]] | None) -> float | None:
    """The time of a training ÷ that of SGD's 200 epochs: that of its plain steps and of those that perturb."""
    if config.method == "sgd":
        return config.epochs / EPOCHS
    step = (ratios or {}).get(f"{config.method} every{config.every}" if config.every else config.method)
    if step is None:
        return None
    return config.epochs / EPOCHS * (1 + (config.stop - config.start) * (step["median"] - 1))


def filled(found: Collection, name: str = "frontier") -> ResultTable:
    """The recipe's table with its own runs, and with equal ones of other tables."""
    recipe = find_recipe(name)
    own = [
        result_table
        for result_table in found.tables
        if result_table.recipe.name == recipe.name and not result_table.changes
    ]
    result_table = ResultTable(recipe, "")
    for other in own:
        for cell, runs in other.runs.items():
            result_table.runs[cell].update(runs)
    borrow(result_table, found.runs)
    return result_table


def points(
    result_table: ResultTable,
    model: str,
    noise: float,
    time_of: Callable[[Config], float | None],
    settings: Iterable[str] = FRONTIER_SETTINGS,
) -> list[Point]:
    """All settings with a model and a noise rate."""
    sam = result_table.measured(frontier_row(model, noise), "sam")
    made = []
    for setting in settings:
        row = frontier_row(model, noise, setting)
        for method, config in ((m, config) for (r, m), config in result_table.recipe.cells.items() if r == row):
            under_way = sum(run.record.result is None for run in result_table.of(row, method))
            made.append(
                Point(setting, method, config, time_of(config), result_table.measured(row, method), sam, under_way)
            )
    return made


def by_place(found: Collection, times: Timing | None) -> dict[tuple[str, float], list[Point]]:
    """All settings, by model and noise rate; `times` are those of the benchmark where none are given."""
    result_table, times = filled(found), timing() if times is None else times
    return {
        (model, noise): points(
            result_table, model, noise, partial(relative_time, ratios=times.get(model, {}).get("ratio"))
        )
        for model, noise in PLACES
    }


def has_runs(settings: Iterable[Point]) -> bool:
    return any(one.accuracies or one.under_way for one in settings)


def place_name(model: str, noise: float) -> str:
    return f"{MODELS[model]}, {100 * noise:.0f} % wrong labels"


def counted() -> dict[str, dict[str, float]]:
    """FLOPs of a step ÷ those of SGD's, by model and setting."""
    return json.loads((RESULTS / "frontier_flops.json").read_text())["models"]


def table(found: Collection, times: Timing | None = None) -> str:
    """A line for each setting that any run has, cheapest first, with test accuracies; then the costs of the others."""
    work_of = {name: {"median": ratio} for name, ratio in counted()["resnet32"].items()}
    places = by_place(found, times)
    ran = [place for place, settings in places.items() if has_runs(settings)]
    head = ["setting", "FLOPs ÷ SGD, ResNet-32", *(f"time ÷ SGD, {title}" for title in MODELS.values())]
    rows, not_run = [], []
    in_order = sorted(zip(*places.values(), strict=True), key=lambda of: relative_time(of[0].config, work_of))
    for settings in in_order:
        one_of = dict(zip(places, settings, strict=True))
        title, work = settings[0].title, relative_time(settings[0].config, work_of)
        measured = [one_of[model, 0.0].time for model in MODELS]
        cost = [f"{work:.2f}", *("not measured" if time is None else f"{time:.2f}" for time in measured)]
        if has_runs(settings):
            rows.append([title, *cost, *(one_of[place].words for place in ran)])
        else:
            not_run.append([title, *cost])
    missing = "; ".join(place_name(*place) for place in places if place not in ran)
    without = f" Without any run: {missing}." if missing else ""
    parts = [markdown([*head, *(place_name(*place) for place in ran)], rows), f"– is not run yet.{without}"]
    if not_run:
        words = f"{len(not_run)} settings that have no run yet: what they cost"
        parts += [f"<details markdown><summary>{words}</summary>", markdown(head, not_run), "</details>"]
    return "\n\n".join(parts)


def of_digits(found: Collection) -> list[Point]:
    """All settings on the demo's digits, with the cost in FLOPs, of a captured step, as their time."""
    result_table = filled(found, "frontier_digits")

    def cost(config: Config) -> float:
        return passes(config) * config.epochs / EPOCHS_OF_DIGITS

    return points(result_table, "digitsnet", 0.4, cost, DIGITS_SETTINGS)


def digits(found: Collection) -> str:
    """A line for each setting on the demo's digits, cheapest first: cost, accuracy, differences to SAM with two ρ."""
    made = sorted(of_digits(found), key=lambda one: one.time)
    (larger_rho,) = (one for one in found.tables if one.name == "demo, rho=0.1")
    sam = larger_rho.measured("40%", "sam")
    rows = [
        [one.title, _rho(one), f"{one.time:.2f}", one.words, _gap(one.to_sam), _gap(difference(one.accuracies, sam))]
        for one in made
    ]
    head = ["setting", "ρ", "FLOPs ÷ SGD", "test accuracy", "− SAM", f"− SAM, ρ = 0.1, n = {len(sam)}"]
    return markdown(head, rows)


def digits_rho(path: Path = RESULTS / "digits_rho.json") -> str:
    """Accuracies by ρ, on other seeds than the table's; bold is the recipe's ρ."""
    result = json.loads(path.read_text())
    rows = []
    for name, by_rho in result["cells"].items():
        title = f"SAM, {kind_of(name)}" if name in STEPS else title_of(name)
        row = frontier_row("digitsnet", 0.4, name if name in STEPS else "")
        (config,) = find_recipe("frontier_digits").only([row], ["sam" if name in STEPS else name]).cells.values()
        rows.append([title, ", ".join(ledger.of_each_rho(by_rho, len(result["seeds"]), f"{config.rho:g}"))])
    receipt = result["receipt"]
    table = markdown(["setting", "ρ: validation (test) accuracy"], rows)
    where = f"{receipt['cpu']}, torch {receipt['torch']}, {receipt['date']}, commits {', '.join(result['commits'])}"
    return f"{table}\n\nMeans over the seeds {result['seeds'][0]} to {result['seeds'][-1]}, in per cent. {where}."


def _rho(one: Point) -> str:
    return "–" if one.method == "sgd" else f"{one.config.rho:g}"


def _gap(gap: Difference | None) -> str:
    return "–" if gap is None or not gap.interval else f"{signed(gap.mean)} ({gap.interval})"


def advice(found: Collection, times: Timing | None = None) -> str:
    """For each budget the setting with the best accuracy that was measured within it, by times as they are shown.

    Models and noise rates of which no setting cheaper than SAM was measured are left out.
    """
    places = {place: settings for place, settings in by_place(found, times).items() if _has_cheap(settings)}
    rows = [[f"{budget:g} × SGD", *(_best(settings, budget) for settings in places.values())] for budget in BUDGETS]
    return markdown(["to pay at most", *(place_name(*place) for place in places)], rows)


def _has_cheap(settings: Iterable[Point]) -> bool:
    return any(one.mean is not None and one.time is not None and one.time <= BUDGETS[-2] for one in settings)


def _best(settings: Iterable[Point], budget: float) -> str:
    within = [one for one in settings if one.time is not None and round(one.time, 2) <= budget and one.mean is not None]
    if not within:
        return "not measured"
    best = max(within, key=lambda one: (one.mean, -one.time))
    gap = _gap(best.to_sam)
    return f"{best.title}: {best.mean:.2f}, n = {len(best.accuracies)}{'' if gap == '–' else f'; − SAM: {gap}'}"


def goal(found: Collection, times: Timing | None = None) -> str:
    """Whether a setting within 1.15 × SGD's time keeps up with SAM, with each model and noise rate."""
    lines = [
        f"Goal: a setting within {GOAL} × SGD's time whose accuracy is not resolved to be below SAM's. Few seeds make "
        f"that easy. It is *shown* to be about as good if its whole interval lies above −{MARGIN:g} point.",
        "",
    ]
    lines += [f"- {place_name(*place)}: {_reached(settings)}." for place, settings in by_place(found, times).items()]
    return "\n".join(lines)


def _reached(settings: list[Point]) -> str:
    sam = next(one for one in settings if one.is_sam)
    if not sam.accuracies:
        return "not measured, SAM has no finished runs"
    cheap = [one for one in settings if one.time is not None and one.time <= GOAL]
    known = [one for one in cheap if one.to_sam is not None and one.to_sam.high is not None]
    if not known:
        return f"not measured, no setting within {GOAL} × SGD has both a time and two seeds or more"
    keeping = [one for one in known if one.keeps_up]
    if not keeping:
        below = ", ".join(f"{one.title} {signed(one.to_sam.mean)} ({one.to_sam.interval})" for one in known)
        return f"not reached: {below}"
    reached = ", ".join(
        f"{one.title} at {one.time:.2f} × SGD, {signed(one.to_sam.mean)} ({one.to_sam.interval}, {one.to_sam.n})"
        for one in keeping
    )
    shown = ", ".join(one.title for one in keeping if one.to_sam.low >= -MARGIN)
    return f"reached by {reached}. Shown to be about as good: {shown or 'none'}"


def where(path: Path = RESULTS / "frontier_h200.json") -> str:
    """Where the times are from."""
    if not path.exists():
        return "Times: not measured yet."
    result = json.loads(path.read_text())
    receipt = result["receipt"]
    rounds = {entry["rounds"] for entry in result["models"].values()}
    widths = [
        100 * (ratio["most"] - ratio["least"]) / ratio["median"]
        for entry in result["models"].values()
        for ratio in entry["ratio"].values()
    ]
    return (
        f"Times: {receipt['gpu']}, torch {receipt['torch']}, {receipt['date']}, commit {receipt['commit']}; the median "
        f"of {', '.join(map(str, sorted(rounds)))} rounds, whose ratios spread over {statistics.median(widths):.1f} % "
        f"in the median setting and {max(widths):.1f} % at most."
    )


FORMS = {
    "sam": "SAM",
    "esam": "ESAM, eager",
    "esam captured": "ESAM, captured or compiled",
    "esam beta=1": "ESAM, choice of samples alone (β = 1)",
    "esam gamma=1": "ESAM, choice of tensors alone (γ = 1)",
}
TIMED = {
    "sam": "SAM, captured and compiled",
    "esam": "ESAM, captured and compiled",
    "esam uncompiled": "ESAM, captured, not compiled",
    "esam uncompiled, fixed tensors": "the same with one choice of tensors for all steps, whose gradients are saved",
}


def efficient(times: Timing | None = None) -> str:
    """What each form of ESAM's step costs: FLOPs, and time where it was measured."""
    times, work = timing() if times is None else times, counted()
    rows = [[f"FLOPs: {title}", *(f"{work[model][name]:.2f}" for model in MODELS)] for name, title in FORMS.items()]
    for name, title in TIMED.items():
        ratios = [times.get(model, {}).get("ratio", {}).get(name) for model in MODELS]
        rows.append([f"time: {title}", *("not measured" if one is None else f"{one['median']:.2f}" for one in ratios)])
    return markdown(["a step, ÷ SGD's", *MODELS.values()], rows)


def pool() -> str:
    """What a pool of captured choices would be, in numbers."""
    work = counted()["resnet32"]
    tensors = len([*build("resnet32", 10).parameters()])
    never = 1 - (1 - 0.5**MOST_GRAPHS) ** tensors
    setups = [entry["setup_s"] for entry in json.loads((RESULTS / "bench_h200.json").read_text())["epoch"].values()
              if entry["compiled"]]  # fmt: skip
    compiling = [setup["sgd"] for setup in setups]
    recording = [seconds for setup in setups for name, seconds in setup.items() if name != "sgd"]
    saved = work["esam captured"] - work["esam"]
    share = 100 * saved / work["esam captured"]
    return (
        f"On ResNet-32 that is {saved:.2f} of SGD's step, {share:.0f} % of ESAM's. A pool of {MOST_GRAPHS} graphs, "
        f"each with a choice drawn up front, would leave at least one of its {tensors} tensors unperturbed in a whole "
        f"training with probability {never:.2f}. To draw a new choice is to record a new graph, {min(recording):.1f} "
        f"to {max(recording):.1f} s for the compiled models of [speed](speed.md), and to compile the model for it, "
        f"{min(compiling):.0f} to {max(compiling):.0f} s."
    )


def shown(found: Collection, times: Timing | None = None) -> str:
    """The picture's line, where it has anything to show."""
    if not panels(found, times):
        return "There is no picture yet: no setting that is cheaper than SAM has both a cost and runs."
    return (
        "![Test accuracy of each setting with its 95 % interval, cheapest first, beside SAM's: a panel for each data "
        "set](images/frontier.svg)"
    )


def panels(found: Collection, times: Timing | None = None) -> dict[str, list[Point]]:
    """The settings that can be drawn, cheapest first: those of each place of which a cheap one was measured."""
    places = {f"CIFAR-10, {place_name(*place)}": settings for place, settings in by_place(found, times).items()}
    places["Digits, small network, 40 % wrong labels"] = of_digits(found)
    drawn = {name: [one for one in settings if None not in (one.mean, one.time)] for name, settings in places.items()}
    return {name: sorted(of, key=lambda one: one.time) for name, of in drawn.items() if _has_cheap(of)}


def _row(one: Point) -> dict[str, Any]:
    low, high = interval_of_mean([*one.accuracies.values()])
    span = {} if low is None else {"low": max(low, 0.0), "high": min(high, 100.0)}
    gap = one.to_sam
    kind = "SAM" if one.is_sam else "not separated from SAM"
    if gap is not None and gap.resolved:
        kind = "below SAM" if gap.mean < 0 else "above SAM"
    return {"setting": f"{one.title}: {one.time:.2f} ×", "mean": one.mean, "kind": kind, **span}


def picture(found: Collection, times: Timing | None = None) -> bytes | None:
    """The picture as SVG, a panel for each place; None where there is nothing to show."""
    made = [_panel(settings, name) for name, settings in panels(found, times).items()]
    if not made:
        return None
    return svg(alt.vconcat(*made).properties(background="white").to_dict())


def _panel(settings: list[Point], name: str) -> alt.LayerChart:
    rows = [_row(one) for one in settings]
    counts = sorted({len(one.accuracies) for one in settings})
    seeds = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    base = alt.Chart(alt.Data(values=rows))
    order = [row["setting"] for row in rows]
    axis = alt.Axis(tickCount=6, labelOverlap="greedy", labelSeparation=APART)
    x = {"title": "test accuracy, per cent", "scale": alt.Scale(zero=False, nice=False, padding=8), "axis": axis}
    y = alt.Y("setting:N", sort=order, title=None, axis=alt.Axis(labelLimit=0, grid=True, ticks=False, domain=False))
    scales = [alt.Scale(domain=[*KINDS], range=[kind[place] for kind in KINDS.values()]) for place in range(2)]
    legend = alt.Legend(title=None, orient="top", columns=4, labelLimit=0)
    colour = alt.Color("kind:N", scale=scales[1], legend=legend)
    shape = alt.Shape("kind:N", scale=scales[0], legend=legend)
    sam = base.transform_filter("datum.kind === 'SAM'").mark_rule(strokeDash=[3, 3], color=COLOURS["sam"])
    intervals = base.transform_filter("isValid(datum.low)").mark_rule(strokeWidth=2)
    layers = alt.layer(
        sam.encode(x=alt.X("mean:Q", **x)),
        intervals.encode(x=alt.X("low:Q", **x), x2="high:Q", y=y, color=colour),
        base.mark_point(size=90, filled=True, opacity=1).encode(x=alt.X("mean:Q", **x), y=y, color=colour, shape=shape),
    )
    return layers.properties(title=f"{name}, {seeds}", width=400, height=20 * len(rows))


if __name__ == "__main__":
    drawn = picture(ledger.read())
    if drawn is None:
        print("no cheap setting of the frontier has both a cost and runs: there is nothing to draw yet")
    else:
        write_atomically(PICTURE, drawn)
        print(f"wrote {PICTURE.relative_to(ROOT)}")
