"""Charts as files: `bisam figure`, and `bisam report --figures`."""

import io
import json
import math
import re
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from bisam import objectives
from bisam.lab import records
from bisam.lab.cli import app
from bisam.lab.recipes import RECIPES
from bisam.lab.report import figures, report
from bisam.lab.report.bounds import lower_bounds
from bisam.lab.report.charts import styles
from bisam.lab.report.curves import MEANS, RUNS
from bisam.lab.report.curves import drawn as drawn_curve
from bisam.lab.report.dots import dots, of_cells, of_row
from bisam.lab.report.forest import KINDS, forest
from bisam.lab.tables import curves
from bisam.lab.tables.cells import collect, with_equal_runs
from bisam.lab.tables.summary import sheet
from bisam.lab.tables.verdicts import verdicts

LEDGER = Path(__file__).parents[3] / "results" / "demo"
SVG = "{http://www.w3.org/2000/svg}"
THIN, THICK = "1", "2.5"


def bisam(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "300"})


def draw(*arguments):
    done = bisam(*arguments)
    assert done.exit_code == 0, done.output
    return done.output


class Drawing:
    """An SVG file as XML."""

    def __init__(self, path):
        self.root = ElementTree.parse(path).getroot()
        assert self.root.tag == f"{SVG}svg"
        self.texts = [element.text for element in self.root.iter(f"{SVG}text")]

    def marks(self, kind):
        """The marks of a kind, such as "line mark" or "point"; a mark represents data."""
        return [
            e for e in self.root.iter() if e.get("aria-roledescription") == kind and e.get("role") != "graphics-object"
        ]

    def lines(self, width):
        """Each line of that width with its points, in pixels."""
        return [(e, points(e)) for e in self.marks("line mark") if e.get("stroke-width") == width]


def points(path):
    return [tuple(map(float, pair.split(","))) for pair in re.split("[ML]", path.get("d").rstrip("Z"))[1:]]


def one_line_of_error(done):
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    return line.removeprefix("Error: ")


# File formats.


@pytest.mark.parametrize("name", ["a.svg", "a.SVG", "deep/er/a.svg"])
def test_svg_is_xml_with_a_line_for_each_curve(name, tmp_path):
    output = draw("figure", "lower-bounds", "--out", tmp_path / name)
    assert output == f"wrote {tmp_path / name}\n"
    drawing = Drawing(tmp_path / name)
    assert len(drawing.marks("line mark")) == 4
    assert {"0-1 loss", "φ = −log", "φ = tanh, α = 0.1", "cross entropy/log 2"} <= {*drawing.texts}


def test_png_is_an_image_that_is_not_blank(tmp_path):
    draw("figure", "lower-bounds", "--out", tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    image = Image.open(io.BytesIO(data)).convert("RGB")
    assert image.width >= 2 * figures.WIDTH
    assert image.getpixel((0, 0)) == (255, 255, 255)
    assert len(image.getcolors(image.width * image.height)) > 10


@pytest.mark.parametrize("name", ["a.html", "a.HTML"])
def test_html_is_a_page_with_one_interactive_chart_and_its_data(name, tmp_path):
    draw("figure", "flips", LEDGER, "--recipe", "demo/40%", "--out", tmp_path / name)
    text = (tmp_path / name).read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert text.rstrip().endswith("</html>")
    assert "<title>Flips per batch, demo/40%</title>" in text
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    contents = json.loads(data)
    assert contents["charts"] == []
    (series,) = contents["series"]
    assert [method["title"] for method in series["methods"]] == ["SAM", "BiSAM (-log)", "BiSAM (tanh)"]
    assert [*series["methods"][0]["values"]] == ["flips"]
    assert text.count("<figure ") == 1
    assert text.count("Flips per batch, demo/40%") == 2  # the heading of the page, and its title


@pytest.mark.parametrize("name", ["a.pdf", "a", ".svg", "a.svg.txt"])
def test_an_unknown_file_extension_is_refused_with_the_known_ones(name, tmp_path):
    done = bisam("figure", "lower-bounds", "--out", tmp_path / name)
    assert one_line_of_error(done) == f"a figure is written as svg, png, html, got the name {name!r}"
    assert [*tmp_path.iterdir()] == []


def test_without_a_path_the_file_has_the_name_of_the_figure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert draw("figure", "lower-bounds") == "wrote lower-bounds.svg\n"
    assert [path.name for path in tmp_path.iterdir()] == ["lower-bounds.svg"]


def test_an_output_path_that_cannot_be_written_is_a_one_line_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    done = bisam("figure", "lower-bounds", "--out", tmp_path / "file" / "a.svg")
    words = "File exists. A file is where a folder should be: move it away or give another folder."
    assert one_line_of_error(done) == f"cannot write {tmp_path / 'file' / 'a.svg'}: {words}"
    assert (tmp_path / "file").read_text() == "mine"


def test_without_the_plotting_library_a_one_line_error_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "bisam.lab.report.figures")
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    done = bisam("figure", "lower-bounds", "--out", tmp_path / "a.svg")
    assert one_line_of_error(done) == "charts need the library vl_convert: pip install 'bisam[lab]'"


# The two bounds.


def bounds(alpha):
    (rows,) = lower_bounds(alpha).to_dict()["datasets"].values()
    by_name = defaultdict(dict)
    for row in rows:
        by_name[row["curve"]].setdefault(row["x"], row["value"])
    step = [(row["x"], row["value"]) for row in rows if row["curve"] == "0-1 loss"]
    return by_name["φ = −log"], by_name[f"φ = tanh, α = {alpha:g}"], step


@pytest.mark.parametrize("alpha", [0.1, 2.0])
def test_the_curves_equal_the_objectives_at_every_point(alpha):
    log, tanh, _ = bounds(alpha)
    x = torch.tensor([*log], dtype=torch.float64)
    assert len(x) > 300
    assert x[0] == -10
    assert x[-1] == 10
    torch.testing.assert_close(torch.tensor([*log.values()], dtype=x.dtype), objectives.log_phi(x))
    torch.testing.assert_close(torch.tensor([*tanh.values()], dtype=x.dtype), objectives.tanh_phi(x, alpha))
    gamma = math.log(math.e - 1)
    for at in (-10.0, -1.0, 0.0, 2.5, 10.0):
        assert log[at] == pytest.approx(1 - math.log(1 + math.exp(gamma - at)))
        assert tanh[at] == pytest.approx(math.tanh(alpha * at))


@pytest.mark.parametrize("alpha", [0.1, 2.0])
def test_neither_lower_bound_exceeds_the_step(alpha):
    *both, step = bounds(alpha)
    assert step == [(-10, 0), (0, 0), (0, 1), (10, 1)]
    for curve in both:
        for x, value in curve.items():
            assert value <= (1 if x > 0 else 0)


def test_the_step_is_drawn_vertically_and_lies_between_its_lower_and_upper_bounds(tmp_path):
    draw("figure", "lower-bounds", "--out", tmp_path / "a.svg")
    lines = [points(path) for path in Drawing(tmp_path / "a.svg").marks("line mark")]
    (step,) = (line for line in lines if len(line) == 4)
    (left, zero), (middle, also_zero), (still, one), (right, also_one) = step
    assert left < middle == still < right
    assert zero == also_zero > one == also_one  # pixels count downwards
    log, tanh, upper = (line for line in lines if line is not step)
    for line in (log, tanh):
        assert all(y >= (one if x > middle else zero) - 1e-3 for x, y in line)
    assert all(y <= (one if x >= middle else zero) + 1e-3 for x, y in upper)


# Flips.


@pytest.fixture(scope="module")
def flips(tmp_path_factory):
    path = tmp_path_factory.mktemp("flips") / "a.svg"
    draw("figure", "flips", LEDGER, "--recipe", "demo", "--out", path)
    return Drawing(path)


def test_flips_have_a_line_and_a_band_for_each_method_that_perturbs(flips):
    assert flips.lines(THIN) == []
    assert len(flips.lines(THICK)) == 3
    assert len(flips.marks("area mark")) == 3
    assert all(len(line) == 30 for _, line in flips.lines(THICK))
    assert {"SAM", "BiSAM (-log)", "BiSAM (tanh)"} <= {*flips.texts}
    assert "SGD" not in flips.texts


def test_lines_are_the_means_and_bands_the_ranges_of_the_records(flips):
    """The vertical position is linear in the flips: two values of a method give the scale, all others must fit."""
    found = {}
    for method in ("sam", "bisam-log", "bisam-tanh"):
        runs = [
            [row["flips"] for row in records.read(LEDGER / f"noise40-{method}-seed{seed}").metrics] for seed in range(3)
        ]
        found[method] = [(fmean(values), min(values), max(values)) for values in zip(*runs, strict=True)]
    drawn_lines, areas = [line for _, line in flips.lines(THICK)], [points(path) for path in flips.marks("area mark")]
    heights = [y for _, y in drawn_lines[0]]
    means = [mean for mean, _, _ in found["sam"]]
    slope = (heights[0] - heights[-1]) / (means[0] - means[-1])
    for (method, values), line, area in zip(found.items(), drawn_lines, areas, strict=True):
        for (_, y), (mean, _, _) in zip(line, values, strict=True):
            assert y == pytest.approx(heights[0] + slope * (mean - means[0]), abs=0.1), method
        edges = [(y, other) for (_, y), (_, other) in zip(area[:30], reversed(area[30:]), strict=True)]
        for (first, second), (_, low, high) in zip(edges, values, strict=True):
            expected = sorted(heights[0] + slope * (value - means[0]) for value in (low, high))
            assert sorted((first, second)) == pytest.approx(expected, abs=0.1), method


def test_methods_differ_in_colour_and_in_dashes(flips):
    paths = [path for path, _ in flips.lines(THICK)]
    assert len({path.get("stroke") for path in paths}) == 3
    assert len({path.get("stroke-dasharray") for path in paths}) == 3


@pytest.mark.parametrize("recipe", ["cifar10/resnet56", "cifar10/resnet56/sam"])
def test_flips_without_runs_are_an_error_that_names_what_to_train(recipe, tmp_path):
    done = bisam("figure", "flips", LEDGER, "--recipe", recipe, "--out", tmp_path / "a.svg")
    expected = (
        f"{LEDGER} has no unchanged run of {recipe} with flips: train one, as in bisam train {recipe}, or name another"
    )
    assert one_line_of_error(done).startswith(expected)
    assert [*tmp_path.iterdir()] == []


def test_flips_of_a_method_that_does_not_perturb_are_refused_and_its_row_is_suggested(tmp_path):
    done = bisam("figure", "flips", LEDGER, "--recipe", "demo/40%/sgd", "--out", tmp_path / "a.svg")
    words = "flips are of methods that perturb, and demo/40%/sgd has none: name the row, as in --recipe demo/40%"
    assert one_line_of_error(done) == words


def test_flips_of_a_custom_table_are_drawn_by_its_name_or_its_file(tmp_path, recorded, write_run):
    own = {"recipe": "mine", "title": "Mine", "row": "net"}
    for method in ("sgd", "sam"):
        write_run(tmp_path / "runs" / method, recorded(f"demo/40%/{method}", **own))
    (tmp_path / "mine.toml").write_text('methods = ["sgd", "sam"]\n[rows.net]\ndata = "digits"\n')
    for recipe in ("mine", "mine/net", tmp_path / "mine.toml"):
        draw("figure", "flips", tmp_path / "runs", "--recipe", recipe, "--out", tmp_path / "a.svg")
        assert "SAM" in Drawing(tmp_path / "a.svg").texts


def test_runs_with_changed_settings_are_not_drawn_as_flips_of_the_recipe(tmp_path, recorded, write_run):
    write_run(tmp_path / "runs", recorded("demo/40%/sam", lr=0.01))
    done = bisam("figure", "flips", tmp_path / "runs", "--recipe", "demo", "--out", tmp_path / "a.svg")
    assert "has no unchanged run of demo with flips" in one_line_of_error(done)


def test_flips_of_several_rows_are_refused_because_their_lines_would_be_merged(tmp_path):
    done = bisam("figure", "flips", LEDGER, "--recipe", "label_noise", "--out", tmp_path / "a.svg")
    words = "flips are drawn of one row of a table, got label_noise: name one, as in --recipe label_noise/0%"
    assert one_line_of_error(done) == words


def test_a_curve_has_means_while_all_runs_last_then_single_runs_and_no_methods_without_values():
    flips = {("SAM", "a"): [4.0, 2.0, 1.0], ("SAM", "b"): [6.0, 5.0], ("SGD", "c"): [None, None]}
    rows = curves.mark_whole([
        {"method": method, "run": run, "epoch": epoch, "gradients": 2 * epoch} | ({"flips": value} if value else {})
        for (method, run), values in flips.items()
        for epoch, value in enumerate(values, start=1)
    ])  # fmt: skip
    chart = drawn_curve(rows, "flips", ["sgd", "sam"])
    means = [[row[name] for name in ("epoch", "value", "least", "most")] for row in chart.data[MEANS]]
    assert means == [[1, 5.0, 4.0, 6.0], [2, 3.5, 2.0, 5.0]]
    assert [(row["run"], row["epoch"], row["value"]) for row in chart.data[RUNS]] == [("a", 3, 1.0)]
    assert len(chart.drawn.layer) == 3  # the band, its mean, and the single run
    assert {*re.findall(r'"domain": (\[.*?\])', json.dumps(chart.to_dict()))} == {'["SAM"]'}
    alone = drawn_curve([row for row in rows if row["epoch"] == 3], "flips", ["sam"])  # a line needs two epochs
    assert [row["value"] for row in alone.data[RUNS]] == [1.0]
    unfinished = drawn_curve([{**row, "run": "d"} for row in rows if "whole" not in row], "flips", ["sam"])
    assert (len(unfinished.data[MEANS]), len(unfinished.drawn.layer)) == (0, 1)


def test_flips_of_a_row_exclude_the_other_rows(tmp_path, recorded, write_run):
    for row in ("20%", "40%"):
        write_run(tmp_path / row, recorded(f"label_noise/{row}/sam"))
    draw("figure", "flips", tmp_path, "--recipe", "label_noise/40%", "--out", tmp_path / "a.svg")
    assert len(Drawing(tmp_path / "a.svg").lines(THICK)) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["flips", LEDGER, "--recipe", "cifer10"], "unknown recipe 'cifer10': the nearest names are cifar10"),
        (["flips", LEDGER, "--recipe", "demo/50%"], "unknown row '50%' of demo"),
        (["flips", LEDGER / "nothing"], "nothing is not a folder"),
    ],
)
def test_an_unknown_recipe_row_or_folder_is_named_in_the_error(arguments, words, tmp_path):
    assert words in one_line_of_error(bisam("figure", *arguments, "--out", tmp_path / "a.svg"))


# Every chart of a report.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    output = draw("report", LEDGER, "--out", folder / "page.html", "--figures", folder / "figures")
    assert output.endswith(f"wrote 8 figures to {folder / 'figures'}\n")
    return folder / "figures"


@pytest.mark.parametrize(
    ("name", "methods"), [("loss", 4), ("validation_accuracy", 4), ("lr", 4), ("flips", 3), ("surrogate_gap", 3)]
)
def test_a_report_writes_each_of_its_charts(name, methods, folder):
    assert len([*folder.iterdir()]) == 8
    drawing = Drawing(folder / f"demo-40-{name}.svg")
    assert len(drawing.lines(THICK)) == len(drawing.marks("area mark")) == methods
    assert curves.CURVES[name] in drawing.texts
    for _, line in drawing.lines(THICK):
        assert all(before < after for (before, _), (after, _) in pairwise(line))


def test_the_dot_plot_has_a_dot_at_the_recorded_accuracy_of_each_seed(folder):
    drawing = Drawing(folder / "demo-40-seeds.svg")
    dots = [x_of(mark) for mark in drawing.marks("point")]
    values = [
        records.read(LEDGER / f"noise40-{method}-seed{seed}").result["test_accuracy"]
        for method in ("sgd", "sam", "bisam-log", "bisam-tanh")
        for seed in range(3)
    ]
    assert len(dots) == 12
    slope = (dots[0] - dots[-1]) / (values[0] - values[-1])
    assert dots == pytest.approx([dots[0] + slope * (value - values[0]) for value in values], abs=0.1)
    assert len(drawing.marks("tick")) == 4  # the means
    assert len(drawing.marks("rule mark")) == 4  # their intervals
    assert len(drawing.lines("1")) == 3  # of each seed, across methods
    assert all(len(line) == 4 for _, line in drawing.lines("1"))


def test_differences_are_drawn_to_scale_with_their_intervals(folder):
    found = {one.title: one for one in verdicts(collect(records.find_records(LEDGER)).tables)}
    for name, title in (("bisam-vs-sam", "BiSAM vs SAM"), ("sam-vs-sgd", "SAM vs SGD")):
        (path,) = (path for path in folder.iterdir() if path.stem.lower() == f"differences-{name}")
        drawing, differences = Drawing(path), found[title].differences
        spans = [e for e in drawing.marks("rule mark") if e.get("stroke-dasharray") is None]
        (zero,) = (e for e in drawing.root.iter(f"{SVG}line") if e.get("stroke-dasharray") is not None)
        assert abs(float(zero.get("y2"))) >= 22 * len(differences)  # from top to bottom
        shown = [e for e in drawing.marks("point") if e.get("opacity") != "0"]
        assert len(spans) == len(shown) == len(differences)
        scale = abs(float(spans[0].get("x2"))) / (differences[0].found.high - differences[0].found.low)
        for span, mark, one in zip(spans, shown, differences, strict=True):
            assert x_of(mark) - x_of(zero) == pytest.approx(scale * one.found.mean, abs=0.2)
            assert x_of(span) - x_of(zero) == pytest.approx(scale * one.found.low, abs=0.2)
            assert float(span.get("x2")) == pytest.approx(scale * (one.found.high - one.found.low), abs=0.2)
            assert f"{one.row}: {one.label}" in drawing.texts


def x_of(mark):
    """The horizontal position of a mark, in pixels."""
    return float(re.match(r"translate\(([-\d.]+),", mark.get("transform"))[1])


def test_the_papers_differences_are_drawn_with_their_intervals_beside_ours(tmp_path, recorded):
    runs = [
        recorded(f"cifar10/resnet56/{method}", seed, 90 + place + seed / 10 + place * seed**2 / 10)
        for place, method in enumerate(("sgd", "sam", "bisam-log"))
        for seed in (0, 1)
    ]
    for verdict in verdicts(collect(runs).tables):
        chart = forest(verdict)
        figures.save(chart, tmp_path / "a.svg")
        (rows,) = chart.data.values()
        ours, paper = (row for row in rows if "kind" in row)
        assert ours["kind"] != paper["kind"] == "the paper's"
        assert paper["low"] < paper["at"] < paper["high"]
        assert len([e for e in Drawing(tmp_path / "a.svg").marks("point") if e.get("opacity") != "0"]) == 2


def test_an_interval_beyond_the_plot_is_clipped_with_arrows_so_that_the_others_stay_readable(recorded):
    runs = []
    for row, noise in (("0%", 0.01), ("20%", 0.01), ("40%", 0.01), ("60%", 30.0)):
        for seed in (0, 1):
            runs.append(recorded(f"label_noise/{row}/sgd", seed, 50.0))
            runs.append(recorded(f"label_noise/{row}/sam", seed, 50.2 + noise * seed))
    (verdict,) = verdicts(collect(runs).tables)
    (rows,) = forest(verdict).data.values()
    ours = [row for row in rows if row.get("kind", "the paper's") != "the paper's"]
    assert [("left" in row, "right_end" in row) for row in ours] == [(False, False)] * 3 + [(True, True)]
    assert ours[-1]["low"] < -15
    assert ours[-1]["high"] < 30  # and not 394


def test_beside_one_large_difference_small_ones_stay_distinguishable_on_a_symmetric_log_scale(recorded, tmp_path):
    runs = []
    for row, gain in (("0%", 0.2), ("20%", 0.3), ("40%", -0.25), ("80%", 30.0)):
        for seed in (0, 1, 2):
            runs.append(recorded(f"label_noise/{row}/sgd", seed, 50.0 + seed / 10))
            runs.append(recorded(f"label_noise/{row}/sam", seed, 50.0 + seed / 10 + gain + seed / 100))
    (verdict,) = verdicts(collect(runs).tables)
    figures.save(forest(verdict), tmp_path / "a.svg")
    drawing = Drawing(tmp_path / "a.svg")
    assert "points of test accuracy, symmetric log scale" in drawing.texts
    (zero,) = (e for e in drawing.root.iter(f"{SVG}line") if e.get("stroke-dasharray") is not None)
    ours = [x_of(mark) for mark in drawing.marks("point") if mark.get("opacity") != "0"][:4]
    places = dict(zip(("0%", "20%", "40%", "80%"), [place - x_of(zero) for place in ours], strict=True))
    assert places["40%"] < -20 < 20 < places["0%"] < places["20%"] < places["80%"]  # pixels: 3 with a linear scale


def test_in_a_narrow_plot_the_numbers_of_a_long_label_have_a_separate_line(recorded):
    """A phone has room for about 60 characters of this size in a line."""
    for row, place in (("vgg19bn", 0), ("resnet32-noise40-late50every5", 1)):
        runs = [
            recorded(f"frontier/{row}/{method}", seed, 90 + seed * len(method))
            for method in ("sam", "bisam-log")
            for seed in (0, 1)
        ]
        (verdict,) = verdicts(collect(runs).tables)
        (rows,) = forest(verdict).data.values()
        (label,) = (one for one in rows if " − " in one.get("text", ""))
        (numbers,) = (one for one in rows if "right" in one)
        assert (label["line"], numbers["line"]) == ("l0", ("l0", "n0")[place])


def test_a_difference_of_single_runs_is_drawn_hollow(recorded):
    (verdict,) = verdicts(collect([recorded("demo/40%/sam"), recorded("demo/40%/sgd")]).tables)
    (rows,) = forest(verdict).data.values()
    assert [row["kind"] for row in rows if "kind" in row] == ["no interval: too few seeds"]
    assert KINDS["no interval: too few seeds"][1] == "#00000000"


def test_a_report_writes_its_charts_as_png_if_requested(tmp_path, recorded, write_run):
    write_run(tmp_path / "runs", recorded("demo/40%/sam", trained=1))
    draw("report", tmp_path / "runs", "--figures", tmp_path, "--format", "png")
    names = {"loss", "validation_accuracy", "flips", "surrogate_gap", "lr", "seeds"}
    assert {path.name for path in tmp_path.glob("*.*")} == {f"demo-40-{name}.png" for name in names}
    with Image.open(tmp_path / "demo-40-lr.png") as image:
        assert image.format == "PNG"


CHANGES = [
    {},
    {"mu": 1e6},
    {"mu": 1e-6},  # differs from the former only in a sign
    {"model": "a b"},
    {"model": "a/b"},
    {"model": "../../a.b"},
    {"model": "a" * 300},
    {"model": "α" * 300},
    {"model": "<svg onload=x>"},
]


def test_figures_of_all_tables_have_unique_file_names_that_any_file_system_accepts(recorded):
    found = collect([recorded("demo/40%/sam", **changes) for changes in CHANGES])
    made = report.figures(found)
    assert len(made) == 6 * len(CHANGES)  # SAM does not use mu, so there is no chart of a sweep
    for name in made:
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,200}", name)
        assert name.startswith("demo-")


def test_figures_of_names_with_characters_that_xml_escapes_are_valid(tmp_path, recorded, write_run):
    write_run(tmp_path / "runs", recorded("demo/40%/sam", trained=1, model="<b>&'\" ]]>"))
    draw("report", tmp_path / "runs", "--figures", tmp_path / "figures")
    assert len([Drawing(path) for path in (tmp_path / "figures").iterdir()]) == 6


def test_runs_without_epochs_have_no_figures(tmp_path, recorded, write_run):
    write_run(tmp_path / "runs", recorded("demo/40%/sam", accuracy=None, trained=0))
    assert "wrote 0 figures" in draw("report", tmp_path / "runs", "--figures", tmp_path / "figures")


# Which epochs, runs and methods a chart shows.


@pytest.mark.parametrize(("epochs", "every"), [(1, 3), (2, 3), (9, 3), (10, 3), (11, 3), (200, 7), (5, 1)])
def test_the_first_and_the_last_epoch_are_always_drawn_and_no_epoch_twice(epochs, every, recorded):
    (run,) = collect([recorded("demo/40%/sam", trained=epochs)]).runs
    shown = [point["epoch"] for point in curves.points([run], every)]
    assert shown == sorted({*range(1, epochs + 1, every), epochs})


def test_of_many_runs_only_every_nth_epoch_is_drawn(recorded, monkeypatch):
    runs = collect([recorded("demo/40%/sam", seed, trained=30) for seed in range(10)]).runs
    assert curves.stride(runs) == 1
    monkeypatch.setattr(curves, "MOST_POINTS", 100)
    assert curves.stride(runs) == 3
    assert len(curves.points(runs, curves.stride(runs))) == 110  # and the last ones


def test_differences_of_changed_recipes_have_a_separate_figure(recorded):
    both = [
        recorded(f"cifar10/vgg19bn/{method}", seed, 94.0 + seed) for method in ("sam", "bisam-log") for seed in (0, 1)
    ]
    changed = [recorded(f"cifar10/resnet56/{method}", cutout=0) for method in ("sam", "bisam-log")]
    own, of_changed = "differences-BiSAM-vs-SAM", "differences-of-changed-recipes-BiSAM-vs-SAM"
    made = report.figures(collect(both + changed))
    texts = {name: str(made[name].to_dict()["datasets"]) for name in (own, of_changed)}
    models = {name: [model for model in ("vgg19bn", "resnet56") if model in text] for name, text in texts.items()}
    assert models == {own: ["vgg19bn"], of_changed: ["resnet56"]}
    assert {own, of_changed} & {*report.figures(collect(changed))} == {own}


def test_rows_without_runs_have_no_figures(recorded):
    names = [*report.figures(collect([recorded("label_noise/40%/sam")]))]
    assert len(names) == 6
    assert all(name.startswith("label_noise-40-") for name in names)


def test_a_mean_is_drawn_only_at_epochs_that_all_runs_of_a_method_have(recorded):
    found = [recorded("demo/40%/sam", seed, trained=2 + seed) for seed in (0, 1)]
    rows = curves.points(collect(found).runs)
    assert {(row["run"], row["epoch"]) for row in rows if "whole" in row} == {
        (f"SAM, seed {seed}", epoch) for seed in (0, 1) for epoch in (1, 2)
    }
    assert len(rows) == 5


def test_the_huge_loss_of_a_diverged_run_is_not_drawn(recorded):
    calm = recorded("demo/40%/sam", 0, trained=3)
    wild = recorded("demo/40%/sam", 1, trained=3, status="diverged")
    wild.metrics[-1]["loss"] = 1e12
    rows = curves.points(collect([calm, wild]).runs)
    assert max(row["loss"] for row in rows if "loss" in row) < 10
    assert sum("loss" in row for row in rows) == 5


def test_a_diverged_run_neither_shortens_nor_enters_the_mean_of_its_method(recorded):
    calm = [recorded("demo/40%/sam", seed, trained=3) for seed in (0, 1)]
    wild = [recorded(f"demo/40%/{method}", 2, trained=1, status="diverged") for method in ("sam", "bisam-log")]
    rows = curves.points(collect([*calm, *wild]).runs)
    assert {(row["run"], row["epoch"]) for row in rows if "whole" in row} == {
        (f"SAM, seed {seed}", epoch) for seed in (0, 1) for epoch in (1, 2, 3)
    }
    assert len(rows) == 8  # the others are thin lines


def test_the_first_loss_of_a_finished_run_is_drawn_however_far_above_the_others(recorded):
    run = recorded("demo/40%/sam", trained=9)
    for row in run.metrics[1:]:
        row["loss"] = 1e-6
    assert curves.points(collect([run]).runs)[0]["loss"] == 2.0


def test_a_surrogate_gap_much_smaller_than_the_losses_keeps_its_precision():
    found = curves.numbers({"epoch": 0, "loss": 2.30258, "perturbed_loss": 2.302621})
    assert found["surrogate_gap"] == pytest.approx(4.1e-5, rel=1e-3)


def test_a_single_epoch_is_drawn_as_points(tmp_path, recorded):
    rows = curves.points(collect([recorded("demo/40%/sam", seed, trained=1) for seed in (0, 1)]).runs)
    figures.save(drawn_curve(rows, "loss", ["sam"]), tmp_path / "loss.svg")
    assert len(Drawing(tmp_path / "loss.svg").marks("point")) == 2


def test_each_method_has_one_unique_colour_in_all_rows_of_a_table(recorded):
    cells = {"resnet32": ["sam", "msam", "esam"], "resnet32-late10": ["sam", "bisam-log"]}
    cells |= {"resnet32-noise40": ["msam"], "vgg19bn": ["looksam", "ksam", "ebisam-log", "sgd"]}
    runs = [recorded(f"frontier/{row}/{method}", 0) for row, methods in cells.items() for method in methods]
    (table,) = collect(runs).tables
    colours = defaultdict(set)
    for row in cells:
        spec = dots(of_row(table, row), table.recipe.methods).to_dict()
        scale = next(layer["encoding"]["color"]["scale"] for layer in spec["layer"] if "color" in layer["encoding"])
        for title, colour in zip(scale["domain"], scale["range"], strict=True):
            colours[title].add(colour)
    assert len(colours) == 8
    assert all(len(each) == 1 for each in colours.values())
    assert len({*map(min, colours.values())}) == 8


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_two_methods_of_a_table_share_both_colour_and_dashes(recipe):
    methods = RECIPES[recipe]().methods
    assert len({(style.colour, *style.dash) for style in styles(methods)}) == len(methods)


def test_a_table_with_different_methods_in_each_row_has_all_seeds_in_one_plot(tmp_path, recorded):
    runs = [
        recorded(f"frontier/resnet32-{row}/sam", seed, 80 + seed) for row in ("late10", "early25") for seed in (0, 1)
    ]
    runs += [recorded("label_noise/0%/sam", seed, 90 + seed) for seed in (0, 1, 2)]  # the same training as resnet32's
    found = report.figures(collect(runs))
    (name,) = (name for name in found if name.startswith("frontier") and name.endswith("seeds"))
    figures.save(found[name], tmp_path / "seeds.svg")
    seen = Drawing(tmp_path / "seeds.svg")
    assert [text for text in seen.texts if ": SAM" in text] == [
        "resnet32: SAM", "resnet32-late10: SAM", "resnet32-early25: SAM",
    ]  # fmt: skip
    assert len(seen.marks("point")) == 7
    assert not seen.marks("line mark")  # seeds of different settings are not joined by lines


def test_an_unfinished_custom_table_has_a_plot_for_each_row_and_no_runs_of_other_tables(recorded):
    own = {"recipe": "mine", "title": "My table"}
    runs = [
        recorded(f"demo/40%/{method}", row=row, **own) for row, method in (("a", "sgd"), ("a", "sam"), ("b", "sgd"))
    ]
    runs.append(recorded("demo/40%/bisam-log", 1))
    found = report.figures(collect(runs))
    assert [name for name in found if name.startswith("mine") and name.endswith("seeds")] == [
        "mine-a-seeds",
        "mine-b-seeds",
    ]
    (mine,) = (table for table in collect(runs).tables if table.recipe.name == "mine")
    assert with_equal_runs(mine, collect(runs).runs) is mine
    assert sheet(mine).head == ["", "SGD", "SAM"]  # as when it is finished


def test_a_plot_of_all_cells_omits_cells_without_results(recorded):
    unfinished = recorded("frontier/resnet32/esam", accuracy=None)
    (table,) = collect([recorded("frontier/resnet32-late10/sam"), unfinished]).tables
    assert [line.title for line in of_cells(table)] == ["resnet32-late10: SAM"]
