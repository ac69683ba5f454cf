"""The report in a real browser: Chromium, without a window."""

import csv
import io
import math
import random
import re
import statistics
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from scipy.stats import t
from typer.testing import CliRunner

from bisam.lab import records
from bisam.lab.cli import app
from bisam.lab.methods import METHODS, title_of
from bisam.lab.recipes import find_recipe
from bisam.lab.records import Record
from bisam.lab.report import report
from bisam.lab.tables import curves, exports, summary
from bisam.lab.tables.cells import collect

from browser import Opened, chromium, needs_a_browser

pytestmark = needs_a_browser

LEDGER = Path(__file__).parents[3] / "results"
LATER = {"more-seeds", "frontier_digits", "label_noise_digits", "rho-0.1", "rho-of-five-seeds"}
PART = [one for one in records.find_records(LEDGER) if LATER.isdisjoint(one.folder.parts)]
"""A part of the ledger: three seeds of the demo, which the page is compared with, and tables of CIFAR-10 and GLUE."""
COUNT = len(PART)
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def open_page(browser):
    opened = []

    def open_(path, *arguments, **options):
        opened.append(Opened(browser, path, *arguments, **options))
        return opened[-1]

    yield open_
    for one in opened:
        one.context.close()


@pytest.fixture(scope="module")
def ledger_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report.write(collect(PART), [Path("results")]))
    return path


@pytest.fixture(scope="module")
def wide(browser, ledger_page):
    """The ledger's page on a large screen, loaded once for the tests that leave it unchanged."""
    opened = Opened(browser, ledger_page, viewport={"width": 1440, "height": 900}, accept_downloads=True)
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.drawn()
    yield opened
    assert opened.is_quiet(), (opened.requests, opened.complaints)
    opened.context.close()


@pytest.fixture
def laptop(open_page, ledger_page):
    opened = open_page(ledger_page, viewport={"width": 1200, "height": 800})
    opened.drawn()
    return opened


@pytest.fixture(scope="module")
def phone(browser, ledger_page):
    opened = Opened(browser, ledger_page, **PHONE)
    opened.drawn()
    yield opened
    assert opened.is_quiet(), (opened.requests, opened.complaints)
    opened.context.close()


def made(row, method, seed, epochs=4, accuracy=None, recipe="label_noise"):
    """A record of an invented run."""
    config = replace(find_recipe(f"{recipe}/{row}/{method}").cells[row, method], seed=seed)
    metrics = [
        {"epoch": epoch, "lr": 0.1, "loss": 2.0 - 0.1 * epoch, "validation_accuracy": 50.0 + epoch + seed, "flips": 1.5,
         "perturbed_loss": 2.2 - 0.1 * epoch, "seconds": 1.0, "samples_per_second": 1000.0}
        for epoch in range(epochs)
    ]  # fmt: skip
    result = {
        "status": "done",
        "best_epoch": 3,
        "validation_accuracy": 53.0,
        "test_accuracy": 60.0 + 0.01 * seed * len(method) if accuracy is None else accuracy,
    }
    return Record(Path(f"runs/{row}-{method}-{seed}"), config.as_dict(), metrics, result, {"gpu": "none"})


def write(path, found):
    path.write_text(report.write(collect(found), [Path("runs")]))
    return path


# Verdicts.


def is_changed(config):
    """Whether the run is one of a changed recipe: of PART, those without cutout and with another network."""
    is_without_cutout = config["recipe"] in ("cifar10", "adaptive", "label_noise") and not config["cutout"]
    return is_without_cutout or config["model"].startswith("transformers:")


@pytest.mark.parametrize("part", ["as the recipes are", "changed recipes"])
def test_the_cards_count_the_differences_of_the_records(part, wide):
    """Compared with a count that uses no code of the tables."""
    values = defaultdict(dict)
    for record in PART:
        own = record.config
        if not record.not_counted and is_changed(own) == (part == "changed recipes"):
            place = [own[name] for name in ("recipe", "data", "model", "noise", "cutout", "label_smoothing", "lr")]
            measure = own.get("measures", "accuracy").split(",")[0]  # the other measures have the same pairs
            values[(*place, own["method"])][own["seed"]] = record.result[f"test_{measure}"]
    counts = defaultdict(lambda: {"all": 0, "resolved": 0, "above": 0, "below": 0})
    for (*cell, method), ours in values.items():
        baselines = [METHODS[method].baseline, *(["adamw"] if method == "sam" else [])]
        baseline = next((one for one in baselines if (*cell, one) in values), None)
        if baseline is None:
            continue
        theirs = values[(*cell, baseline)]
        gaps = [ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()]
        mean = statistics.fmean(gaps)
        half = t.ppf(0.975, len(gaps) - 1) * statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else math.inf
        found = counts["BiSAM vs SAM" if "bisam" in method else f"SAM vs {title_of(baseline)}"]
        found["all"] += 1
        found["resolved"] += abs(mean) > half
        if abs(mean) > 1e-9:
            found["above" if mean > 0 else "below"] += 1
    shown = wide.page.locator("details .card" if part == "changed recipes" else "section > .cards .card").all()
    cards = {card.locator("h3").text_content(): card.text_content() for card in shown}
    assert cards.keys() == counts.keys()
    for title, found in counts.items():
        several = "differences" if found["all"] != 1 else "difference"
        assert f"{found['resolved']} of {found['all']} {several} resolved" in cards[title]
        assert f"{found['above']} above, {found['below']} below" in cards[title]


def test_cards_with_and_without_resolved_differences_differ_in_text_and_colour(open_page, tmp_path):
    runs = [made("40%", "sgd", seed, accuracy=50 + seed) for seed in range(3)]
    runs += [made("40%", "sam", seed, accuracy=60.1 + seed + seed**2 / 50) for seed in range(3)]
    runs += [made("40%", "bisam-log", seed, accuracy=60 + (-1) ** seed) for seed in range(3)]
    page = open_page(write(tmp_path / "page.html", runs)).page
    texts = [card.inner_text() for card in page.locator(".card").all()]
    assert "○ 0 of 1 difference resolved" in texts[0]
    assert "BiSAM and SAM cannot be separated yet." in texts[0]
    assert "● 1 of 1 difference resolved" in texts[1]
    assert "1 in favour of SAM, 0 of SGD." in texts[1]
    colours = page.eval_on_selector_all(".card .big", "cards => cards.map((card) => getComputedStyle(card).color)")
    assert colours[0] != colours[1]


def test_the_first_screen_shows_the_verdict_and_the_whole_forest_plot_but_no_differences_in_words(wide):
    boxes = [wide.page.locator(selector).first.bounding_box() for selector in (".card", "figure svg.marks")]
    assert boxes[0]["y"] < boxes[1]["y"]
    assert boxes[1]["y"] + boxes[1]["height"] <= wide.page.viewport_size["height"]
    assert not wide.page.locator(".words li").first.is_visible()  # folded
    assert wide.page.locator("summary", has_text="differences in words").first.is_visible()


def overlap(first, second):
    return first["x"] < second["x"] + second["width"] - 1 and second["x"] < first["x"] + first["width"] - 1


def boxes_of(texts):
    """Text and bounding box of all texts that are not empty, in one call of the browser."""
    return texts.evaluate_all(
        "texts => texts.filter((one) => one.textContent).map((one) => [one.textContent, one.getBoundingClientRect()])"
    )


@pytest.mark.parametrize("screen", ["wide", "laptop", "phone"])
def test_no_label_of_the_forest_plot_is_cut_off_and_no_tick_labels_overlap(screen, request):
    page = request.getfixturevalue(screen).page
    for figure in page.locator(".forest figure").filter(visible=True).all():
        frame = figure.locator(".chart").bounding_box()
        for text, box in boxes_of(figure.locator("svg text")):
            assert frame["x"] - 1 <= box["x"], text
            assert box["x"] + box["width"] <= frame["x"] + frame["width"] + 1, text
        axis = figure.locator("svg .role-axis").filter(has_text="points of")
        shown = [box for _, box in boxes_of(axis.locator(".role-axis-label text:not([opacity='0'])"))]
        assert len(shown) > 3
        assert not any(overlap(one, other) for one, other in pairwise(shown))


def test_the_forest_plot_shows_every_difference_of_every_table_in_its_first_measure(wide):
    tables = collect(PART).tables
    expected = [
        f"{one.row}: {one.label}"
        for table in tables
        for one in summary.comparisons(table)
        if one.row in table.recipe.first_lines
    ]
    fold = wide.page.locator("summary", has_text="differences of changed recipes")
    fold.click()
    wide.drawn()
    texts = wide.page.locator(".forest svg text").all_text_contents()
    fold.click()
    assert len(expected) > 15
    assert sorted(text for text in texts if " − " in text) == sorted(expected)
    compared = [table for table in tables if summary.comparisons(table)]
    assert {table.recipe.title for table in compared} <= {re.sub(r", with .*|…", "", text) for text in texts}


# Curves.


def panel_of(page):
    return page.locator("main .curves").first


def domains(page, name="loss", panel=0):
    """The ends of both axes of a curve."""
    return page.evaluate(
        """([name, panel]) => {
            const figure = document.querySelectorAll('main .curves')[panel].querySelector(`[data-curve=${name}]`);
            return ['x', 'y'].map((axis) => views.get(figure).scale(axis).domain());
        }""",
        [name, panel],
    )


def show_all(page):
    panel_of(page).get_by_role("button", name="Show all epochs").click()


def recorded_values(name, first, passes=True):
    """Values of the demo's runs from `first` on, which is in passes over the data or in epochs."""
    return [
        row[name]
        for record in records.find_records(LEDGER / "demo")
        for row in record.metrics
        if name in row and (row["epoch"] + 1) * (METHODS[record.config["method"]].passes if passes else 1) >= first
    ]


def test_zooming_rescales_the_y_axis_and_zooms_the_other_charts_of_the_row(wide):
    page = wide.page
    whole_x, whole_y = domains(page, "validation_accuracy")
    assert whole_x == [1, 60]  # SGD has twice the epochs: by gradient evaluations all end together
    panel_of(page).get_by_role("button", name="Last fifth").click()
    (low, high), y = domains(page, "validation_accuracy")
    assert high == 60
    assert low == pytest.approx(60 - 59 / 5)
    values = recorded_values("validation_accuracy", low)
    assert y[0] <= min(values) <= max(values) <= y[1]
    assert y[1] - y[0] < 1.5 * (max(values) - min(values)) < whole_y[1] - whole_y[0]
    assert domains(page, "flips")[0] == [low, high]
    show_all(page)
    assert domains(page, "validation_accuracy") == [whole_x, whole_y]


def test_a_drag_zooms_to_its_range_and_keys_and_wheel_never_leave_the_range_of_the_data(wide):
    page = wide.page
    chart = panel_of(page).locator("[data-curve=loss] .chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 90, steps=3)
    page.mouse.up()
    (low, high), _ = domains(page)
    assert 10 < low < high < 50
    figure = panel_of(page).locator("[data-curve=loss]")
    figure.focus()
    page.keyboard.press("ArrowRight")
    moved = domains(page)[0]
    assert moved[0] > low
    assert moved[1] - moved[0] == pytest.approx(high - low)
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    at_the_end = domains(page)[0]
    assert at_the_end[1] == 60
    assert at_the_end[1] - at_the_end[0] == pytest.approx(high - low)
    for key in ("-", "-", "-", "-", "ArrowLeft", "0", "-"):
        page.keyboard.press(key)
    assert domains(page)[0] == [1, 60]
    chart.dispatch_event("wheel", {"deltaY": -100, "ctrlKey": True, "clientX": box["x"] + box["width"] / 2})
    assert domains(page)[0] != [1, 60]
    page.keyboard.press("0")


def test_the_x_axis_can_show_epochs_gradient_evaluations_or_seconds(wide):
    page = wide.page
    spent = {
        method: statistics.fmean(
            sum(row["seconds"] for row in records.read(LEDGER / f"demo/noise40-{method}-seed{seed}").metrics)
            for seed in range(3)
        )
        for method in ("sgd", "sam", "bisam-log", "bisam-tanh")
    }
    for axis, last in (("epoch", 60), ("seconds", max(spent.values())), ("gradients", 60)):
        panel_of(page).locator("select.axis").select_option(axis)
        page.wait_for_function("() => [...views.keys()].length > 0")
        wide.drawn()
        assert domains(page)[0][1] == pytest.approx(last, rel=1e-3)
    button = panel_of(page).get_by_role("button", name="SGD")
    button.click()
    assert domains(page)[0] == [2, 60]  # SAM's 30 epochs of two gradients a step
    button.click()


def test_the_log_scale_option_applies_only_to_losses(wide):
    page = wide.page
    panel_of(page).get_by_label("log scale for losses").check()
    wide.drawn()
    kind = "name => views.get(document.querySelector(`main [data-curve=${name}]`)).scale('y').type"
    kinds = [page.evaluate(kind, name) for name in ("loss", "flips")]
    panel_of(page).get_by_label("log scale for losses").uncheck()
    wide.drawn()
    assert kinds == ["log", "linear"]


def test_a_click_on_the_legend_hides_a_method_and_rescales_the_y_axis(wide):
    page = wide.page
    before = domains(page, "loss")[1]
    lines = panel_of(page).locator("[data-curve=loss] .mark-line path[stroke-width='2.5']")
    assert lines.count() == 4
    button = panel_of(page).get_by_role("button", name="SGD")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert lines.count() == 3
    low, _ = domains(page, "loss")[1]
    assert low > before[0]  # SGD has memorised the noisy labels: its loss is the lowest
    button.click()
    assert domains(page, "loss")[1] == before


def test_curves_show_a_band_around_the_mean_instead_of_single_runs(wide):
    loss = panel_of(wide.page).locator("[data-curve=loss]")
    assert loss.locator(".mark-area path").count() == 4
    assert loss.locator(".mark-line path[stroke-width='1']").count() == 0


def test_the_tooltip_of_a_curve_lists_all_methods_with_their_recorded_means_and_ranges(wide):
    page = wide.page
    chart = panel_of(page).locator("[data-curve=validation_accuracy] .chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 60, box["y"] + 60)
    page.mouse.move(box["x"] + box["width"] - 5, box["y"] + 60)
    lines = [[cell.text_content() for cell in row.locator("th, td").all()] for row in page.locator("#tip tr").all()[1:]]
    assert [line[1] for line in lines] == ["SGD", "SAM", "BiSAM (-log)", "BiSAM (tanh)"]
    for _, title, value, band, where in lines:
        (method,) = (name for name in METHODS if title_of(name) == title)
        epoch = int(where.removeprefix("epoch "))
        found = [
            records.read(LEDGER / f"demo/noise40-{method}-seed{seed}").metrics[epoch - 1]["validation_accuracy"]
            for seed in range(3)
        ]
        assert float(value) == pytest.approx(statistics.fmean(found), rel=1e-4)
        assert [float(end) for end in band.split(" to ")] == pytest.approx([min(found), max(found)], rel=1e-4)
        assert epoch == (60 if method == "sgd" else 30)
    page.mouse.move(5, 5)
    assert not page.locator("#tip").is_visible()


def test_the_curves_of_one_row_are_shown_at_a_time_as_selected_in_a_list(open_page, tmp_path):
    runs = [made(row, method, seed) for row in ("40%", "80%") for method in ("sam", "bisam-log") for seed in (0, 1)]
    opened = open_page(write(tmp_path / "page.html", runs))
    opened.drawn()
    assert [panel.is_visible() for panel in opened.page.locator("main .curves").all()] == [True, False]
    opened.page.select_option(".choice .chooser", "80%")
    opened.drawn()
    assert [panel.is_visible() for panel in opened.page.locator("main .curves").all()] == [False, True]
    assert opened.page.locator("main .curves").nth(1).locator("svg.marks").count() == 5
    assert opened.is_quiet()


# Dots.


def test_the_dot_plot_has_a_dot_for_each_seed_with_its_method_and_accuracy_as_tooltip(wide):
    figure = wide.page.locator("figure[aria-label='40%: test accuracy']").first
    figure.scroll_into_view_if_needed()
    dots = figure.locator(".mark-symbol.role-mark path")
    assert dots.count() == 12
    dots.first.hover()
    record = records.read(LEDGER / "demo/noise40-sgd-seed0")
    tooltip = wide.page.locator("#tip").text_content()
    assert "SGD" in tooltip
    assert f"{record.result['test_accuracy']:.2f}" in tooltip


# Runs.


def rows_of(page):
    return page.locator(".runs tbody tr:visible")


def test_a_click_on_a_column_sorts_the_runs_in_either_direction(wide):
    page = wide.page
    head = page.locator(".runs th", has_text="test, %")
    names = [row.locator("th").inner_text() for row in rows_of(page).all()]
    for expected, sign in (("ascending", 1), ("descending", -1)):
        head.locator("button").press("Enter")
        assert head.get_attribute("aria-sort") == expected
        texts = [row.locator("[data-label='test, %']").inner_text() for row in rows_of(page).all()]
        values = [float(text) for text in texts if text != "–"]
        assert values == sorted(values, key=lambda value: sign * value)
        assert texts[-1] == "–"  # the run that does not count is last either way
        assert len(texts) == COUNT
    page.locator(".runs th", has_text="run").first.locator("button").click()
    again = [row.locator("th").inner_text() for row in rows_of(page).all()]
    assert sorted(again) == sorted(names)


@pytest.mark.parametrize(
    ("field", "value", "matches"),
    [
        ("recipe", "cifar10", lambda run: run.config.recipe == "cifar10"),
        ("row", "80%", lambda run: run.config.noise == 0.8),
        ("method", "BiSAM (tanh)", lambda run: run.config.method == "bisam-tanh"),
        ("seed", "2", lambda run: run.config.seed == 2),
        ("status", "not counted", lambda run: run.status == "not counted"),
    ],
)
def test_runs_can_be_filtered_by_recipe_row_method_seed_and_status(field, value, matches, wide):
    page = wide.page
    page.select_option(f"[data-filter={field}]", value)
    expected = sum(map(matches, collect(PART).runs))
    assert 0 < expected < COUNT
    assert rows_of(page).count() == expected
    assert page.locator(".filters output").inner_text() == f"{expected} of {COUNT}"
    page.select_option(f"[data-filter={field}]", "")
    assert rows_of(page).count() == COUNT


def test_filters_and_search_words_are_combined(wide):
    page = wide.page
    page.select_option("[data-filter=recipe]", "demo")
    page.fill(".filters [type=search]", "TANH seed1")
    assert rows_of(page).locator("th").all_inner_texts() == ["demo/noise40-bisam-tanh-seed1"]
    page.fill(".filters [type=search]", "")
    page.select_option("[data-filter=recipe]", "")


def test_a_ticked_run_is_drawn_as_a_line_in_the_curves_of_its_row_only(wide):
    page = wide.page
    thin = panel_of(page).locator("[data-curve=loss] .mark-line path[stroke-width='1']")
    tick = page.get_by_label("Show demo/noise40-sam-seed1 in the curves")
    tick.check()
    wide.drawn()
    assert thin.count() == 1
    other = page.locator("main .curves").nth(1).locator("[data-curve=loss] .mark-line path[stroke-width='1']")
    assert other.count() == 0
    tick.uncheck()
    wide.drawn()
    assert thin.count() == 0


def test_a_link_to_a_run_opens_its_drawer_with_configuration_results_curves_and_command(open_page, ledger_page):
    opened = open_page(ledger_page, "#run=demo/noise40-sam-seed0")
    page, record = opened.page, records.read(LEDGER / "demo/noise40-sam-seed0")
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    drawer = page.locator("#drawer")
    assert drawer.is_visible()
    assert drawer.locator("h2").inner_text() == "demo/noise40-sam-seed0"
    names, texts = (drawer.locator(tag).all_text_contents() for tag in ("dt", "dd"))
    shown = {name: " ".join(text for one, text in zip(names, texts, strict=True) if one == name) for name in names}
    for name, value in record.config.items():
        assert name in shown
        if isinstance(value, str):
            assert value in shown[name]
    assert shown["rho"] == "0.07"
    assert shown["test, %"] == f"{record.result['test_accuracy']:.2f}"
    assert shown["commit"] == record.receipt["commit"]
    assert shown["data"] == f"digits {record.receipt['data_checksum'][:12]}"  # its name, and the receipt's checksum
    page.wait_for_function("() => document.querySelectorAll('#drawer figure[data-drawn=yes]').length === 5")
    assert drawer.locator("[data-curve=loss] .mark-line path[stroke-width='1']").count() == 1
    drawer.get_by_role("button", name="Copy").click()
    assert page.evaluate("navigator.clipboard.readText()") == "bisam train demo/40%/sam --seeds 0"
    page.keyboard.press("Escape")
    assert not drawer.is_visible()
    page.wait_for_function("() => !location.hash")
    link = page.get_by_role("link", name="vgg19bn-sam-seed1").first
    link.click()
    assert "vgg19bn-sam-seed1" in drawer.locator("h2").inner_text()
    assert drawer.locator("dd", has_text="(not the recipe's)").all_inner_texts() == [
        "true (not the recipe's)"
    ]  # of the field compile
    page.go_back()
    page.wait_for_function("() => !document.getElementById('drawer').open")
    assert opened.is_quiet()


# Export.


def test_buttons_copy_a_table_in_the_same_format_as_exported_files(wide):
    page = wide.page
    table = next(table for table in collect(PART).tables if table.name == "demo")
    sheet = summary.sheet(table)
    for form, text in (
        ("LaTeX", exports.latex(sheet)),
        ("Markdown", sheet.markdown()),
        ("CSV", exports.csv_text(sheet)),
    ):
        button = page.get_by_role("button", name=f"Copy {form}: {sheet.title}")
        button.click()
        page.wait_for_function("button => button.textContent === 'Copied'", arg=button.element_handle())
        assert page.evaluate("navigator.clipboard.readText()") == text


def test_if_the_clipboard_api_fails_copying_uses_a_fallback(open_page, ledger_page):
    broken = "navigator.clipboard.writeText = () => Promise.reject(new Error('no'));"
    opened = open_page(ledger_page, script=broken)
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened.page.get_by_role("button", name=f"Copy CSV: {COUNT} runs").click()
    opened.page.wait_for_function(
        "() => [...document.querySelectorAll('button')].some((one) => one.textContent === 'Copied')"
    )
    rows = [*csv.DictReader(io.StringIO(opened.page.evaluate("navigator.clipboard.readText()")))]
    assert len(rows) == COUNT
    assert rows[0]["command"].startswith("bisam train demo/40%/")


@pytest.mark.parametrize("selector", [".forest figure", "main .curves figure"])
def test_figures_can_be_saved_as_svg_and_as_png(selector, wide, tmp_path):
    figure = wide.page.locator(selector).first
    for form in ("SVG", "PNG"):
        with wide.page.expect_download() as waited:
            figure.get_by_role("button", name=f"Save as {form}").click()
        path = tmp_path / waited.value.suggested_filename
        waited.value.save_as(path)
        if form == "PNG":
            with Image.open(path) as image:
                assert image.format == "PNG"
                assert image.width >= 1440  # twice 720 and the space beside the axes
        else:
            text = path.read_text()
            assert text.startswith("<svg")
            assert figure.get_attribute("aria-label") in text  # its title
            assert "SAM" in text


def test_the_table_of_seeds_needed_shows_gpu_hours_and_a_command_to_copy(wide):
    table = wide.page.locator(".grid", has_text="Seeds needed to resolve the paper's effect").first
    row = table.locator("tbody tr", has_text="cifar10, vgg19bn").first
    assert "bisam reproduce cifar10/vgg19bn --methods sam,bisam-log --seeds 0-" in row.inner_text()
    assert float(row.locator("[data-label='GPU hours']").inner_text()) >= 0
    row.get_by_role("button", name="Copy").click()
    assert wide.page.evaluate("navigator.clipboard.readText()").startswith("bisam reproduce cifar10/vgg19bn")


# Screens, paper, keyboard.


@pytest.mark.parametrize("width", [390, 800])
def test_the_page_does_not_scroll_horizontally_on_narrow_screens(width, phone, open_page, ledger_page):
    page = phone.page if width == 390 else open_page(ledger_page, viewport={"width": width, "height": 900}).drawn()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for svg in page.locator("main svg.marks").all():
        box = svg.bounding_box()
        assert box is None or box["x"] + box["width"] <= width + 1


TITLES_CUT = """() => [...document.querySelectorAll(".chart")].flatMap((chart) => {
    const frame = chart.getBoundingClientRect();
    return [...chart.querySelectorAll(".role-axis-title text")].filter((one) => {
        const box = one.getBoundingClientRect();
        return box.left < frame.left - 1 || box.right > frame.right + 1;
    }).map((one) => one.textContent);
})"""
LABELS_TOUCH = """() => [...document.querySelectorAll(".role-axis-label")].flatMap((labels) => {
    const boxes = [...labels.querySelectorAll("text")].filter((one) => one.getAttribute("opacity") !== "0")
        .map((one) => [one.textContent, one.getBoundingClientRect()]).filter(([_, box]) => box.width)
        .sort(([_, a], [__, b]) => a.left - b.left);
    const pairs = boxes.slice(1).map(([text, box], place) => [`${boxes[place][0]} ${text}`, boxes[place][1], box]);
    return pairs.filter(([_, a, b]) => b.left < a.right + 2 && Math.abs(a.top - b.top) < 2).map(([text]) => text);
})"""


@pytest.mark.parametrize("axis", ["epoch", "gradients", "seconds"])
def test_on_a_phone_axis_titles_are_not_cut_off_and_axis_labels_do_not_overlap(axis, phone):
    page = phone.page
    axes = page.locator(".curves .axis").first
    before = axes.input_value()
    axes.select_option(axis)
    phone.drawn()
    assert page.evaluate(TITLES_CUT) == []
    assert page.evaluate(LABELS_TOUCH) == []
    axes.select_option(before)
    phone.drawn()


BOXES = """all => all.filter((one) => one.offsetParent !== null).map((one) =>
    [one.querySelectorAll('tbody tr').length, one.clientHeight, one.scrollHeight])"""


def test_on_a_phone_a_long_table_scrolls_in_its_own_box_and_a_short_one_does_not(phone):
    boxes = phone.page.eval_on_selector_all("main .grid .scroll", BOXES)
    assert {rows > 8 for rows, _, _ in boxes} == {False, True}
    for rows, shown, whole in boxes:
        assert shown <= 844 if rows > 8 else shown == whole, rows


def test_a_list_of_a_few_runs_is_shown_without_scrolling_on_a_laptop(open_page, tmp_path):
    runs = [made("40%", method, seed) for method in ("sgd", "sam", "bisam-log") for seed in range(6)]
    path = tmp_path / "report.html"
    write(path, runs)
    page = open_page(path, viewport={"width": 1400, "height": 900}).drawn()
    fits = "one => one.scrollHeight === one.clientHeight && one.scrollWidth === one.clientWidth"
    assert page.locator(".runs .scroll").evaluate(fits)


def test_labels_of_a_forest_plot_have_an_outline_that_hides_the_zero_line_behind_them(phone):
    label = phone.page.locator(".forest svg .role-mark text").first
    order, stroke = label.evaluate("one => [getComputedStyle(one).paintOrder, getComputedStyle(one).stroke]")
    assert (order.split()[0], stroke) == ("stroke", "rgb(255, 255, 255)")  # the colour of the page, around the letters


def test_no_option_of_a_command_is_broken_across_lines(wide):
    script = """() => [...document.querySelectorAll("td.command code")].flatMap((code) => {
        const range = document.createRange(), broken = [];
        const walk = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
        while (walk.nextNode()) for (const word of walk.currentNode.data.matchAll(/\\S+/g)) {
            range.setStart(walk.currentNode, word.index);
            range.setEnd(walk.currentNode, word.index + word[0].length);
            if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) broken.push(word[0]);
        }
        return broken;
    })"""
    assert wide.page.evaluate(script) == []
    assert wide.page.locator("td.command code").first.inner_text().startswith("bisam reproduce cifar10/")


def test_a_phone_shows_all_methods_of_a_table(phone):
    page = phone.page
    table = page.locator("#section-2 table").first
    cells = table.locator("tbody tr").first.locator("td").all()
    labels = [cell.get_attribute("data-label") for cell in cells]
    assert labels == ["SGD", "SAM", "BiSAM (-log)", "BiSAM (tanh)"]
    for cell in cells:
        box = cell.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        shown = page.evaluate("cell => getComputedStyle(cell, '::before').content", cell.element_handle())
        assert shown == f'"{cell.get_attribute("data-label")}"'


def test_a_drag_on_a_phone_does_not_zoom_the_chart(phone):
    page = phone.page
    chart = panel_of(page).locator("[data-curve=loss] .chart")
    chart.scroll_into_view_if_needed()
    before, box = domains(page), chart.bounding_box()
    session = phone.context.new_cdp_session(page)
    y = box["y"] + 60
    for kind, x in (("touchStart", 300), ("touchMove", 200), ("touchMove", 60), ("touchEnd", None)):
        points = [] if x is None else [{"x": x, "y": y}]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    assert domains(page) == before
    assert chart.evaluate("chart => getComputedStyle(chart).touchAction") == "pan-y pinch-zoom"


def test_a_list_that_can_be_scrolled_has_a_shadow_at_its_edge(wide):
    style = wide.page.locator(".runs .scroll").evaluate(
        "one => [getComputedStyle(one).backgroundImage, one.scrollHeight > one.clientHeight]"
    )
    assert style[0].count("linear-gradient") == 7
    assert style[1]


def test_a_page_printed_right_after_loading_has_all_charts_and_light_colours(open_page, ledger_page):
    """A dark page that was not scrolled: before printing, nothing below the first screen is drawn."""
    script = """addEventListener('afterprint', () => {
        const shown = [...document.querySelectorAll('main figure')].filter((one) => one.offsetParent !== null);
        window.printed = [shown.length, shown.filter((one) => one.querySelector('svg.marks path')).length];
    });
    window.IntersectionObserver = class { observe() {} unobserve() {} };"""
    opened = open_page(ledger_page, script=script, wait_until="domcontentloaded", color_scheme="dark")
    assert opened.page.pdf().startswith(b"%PDF")
    count, drawn = opened.page.evaluate("window.printed")
    assert count == drawn > 30  # those of folded sections too
    opened.page.emulate_media(media="print")
    paper, _, text = colours(opened)
    assert paper == 1
    assert contrast(paper, text) > 7
    assert not opened.page.is_visible("#theme")
    assert not opened.page.is_visible("text=in the curves")
    assert opened.is_quiet()


def colours(opened):
    style = "element => [getComputedStyle(element).backgroundColor, getComputedStyle(element).color]"
    paper, ink = opened.page.eval_on_selector("body", style)
    text = opened.page.eval_on_selector("figure svg text", "element => getComputedStyle(element).fill")
    return [luminance(colour) for colour in (paper, ink, text)]


def luminance(colour):
    red, green, blue = (int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, second):
    return (max(first, second) + 0.05) / (min(first, second) + 0.05)


READ = """() => [".card .big", ".card .note", ".note", "td small", "a", "button", ".legend button"].map((selector) => {
    const element = document.querySelector(`main ${selector}`);
    let behind = element;
    while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
    return [selector, getComputedStyle(element).color, getComputedStyle(behind).backgroundColor];
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_uses_the_system_colour_scheme_until_the_button_permanently_changes_it(scheme, open_page, ledger_page):
    opened = open_page(ledger_page, color_scheme=scheme)
    opened.page.wait_for_selector("figure svg text")
    for wanted in (scheme, {"light": "dark", "dark": "light"}[scheme]):
        paper, ink, text = colours(opened)
        assert (paper > ink) == (wanted == "light")
        assert contrast(paper, ink) > 7
        assert contrast(paper, text) > 4.5
        for selector, front, behind in opened.page.evaluate(READ):
            assert contrast(luminance(front), luminance(behind)) > 4.5, (wanted, selector)
        opened.page.click("#theme")
    opened.page.click("#theme")
    opened.page.reload()
    opened.page.wait_for_selector("figure svg text")
    assert (colours(opened)[0] > 0.5) == (scheme == "dark")
    assert opened.complaints == []


def test_all_controls_are_reachable_with_the_tab_key_and_reduced_motion_is_respected(open_page, ledger_page):
    opened = open_page(ledger_page, reduced_motion="reduce")
    opened.drawn()
    reached = set()
    for _ in range(140):
        opened.page.keyboard.press("Tab")
        what = "(({tagName: tag, id, className: name}) => tag + (id ? '#' + id : '') + (name ? '.' + name : ''))"
        reached.add(opened.page.evaluate(f"{what}(document.activeElement)"))
    wanted = ["A.skip", "BUTTON#theme", "A", "DIV.scroll", "FIGURE", "BUTTON", "BUTTON.copy", "SUMMARY", "SELECT.axis"]
    assert {*wanted, "INPUT.log"} <= reached
    assert opened.page.eval_on_selector_all("main figure", "figures => figures.every((one) => one.tabIndex === 0)")
    opened.page.focus("#theme")
    opened.page.keyboard.press("Enter")
    assert opened.page.get_attribute("html", "data-theme") == "dark"
    assert opened.page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


# Other records.


def test_a_page_of_100_runs_is_below_3_megabytes_and_is_drawn(open_page, tmp_path):
    draw = random.Random(0)
    found = []
    for number in range(100):
        row, method = (
            ["20%", "40%", "60%", "80%", "0%"][number % 5],
            ["sgd", "sam", "bisam-log", "bisam-tanh"][number // 5 % 4],
        )
        record = made(row, method, number // 20, epochs=200)
        for line in record.metrics:
            line |= {name: line[name] * draw.uniform(0.9, 1.1) for name in line if name != "epoch"}
        found.append(record)
    path = write(tmp_path / "page.html", found)
    assert path.stat().st_size < 3e6
    opened = open_page(path)
    opened.drawn()
    assert rows_of(opened.page).count() == 100
    assert opened.is_quiet()


def test_a_sweep_among_the_runs_is_drawn_with_the_chosen_value(open_page, tmp_path):
    runs = []
    for rho, accuracy in ((0.02, 51.0), (0.05, 52.0), (0.1, 55.0)):
        for seed in (0, 1):
            record = made("40%", "sam", seed)
            result = {**record.result, "validation_accuracy": accuracy + seed}
            runs.append(
                replace(record, config={**record.config, "rho": rho}, result=result, folder=Path(f"{rho}-{seed}"))
            )
    opened = open_page(write(tmp_path / "page.html", runs))
    figure = opened.page.wait_for_selector("figure[aria-label='label_noise/40%/sam: rho'][data-drawn=yes]")
    assert len(figure.query_selector_all(".mark-symbol.role-mark path")) == 6
    assert "Chosen: rho = 0.1. " in opened.page.inner_text("main")
    assert opened.is_quiet()


def test_a_page_without_runs_suggests_the_demo_command(open_page, tmp_path):
    opened = open_page(write(tmp_path / "page.html", []))
    assert "bisam demo" in opened.page.inner_text("main")
    assert opened.is_quiet()


def test_diverged_runs_and_runs_of_one_epoch_are_drawn_without_console_messages(open_page, tmp_path):
    runs = [made("40%", "sam", 0, epochs=1), made("40%", "sgd", 0, epochs=1), made("60%", "sam", 0)]
    runs += [
        replace(made("40%", "bisam-log", 0), result={"status": "diverged"}),
        replace(made("80%", "sgd", 1), metrics=[]),
    ]
    opened = open_page(write(tmp_path / "page.html", runs))
    page = opened.drawn()
    assert panel_of(page).locator("[data-curve=loss] .mark-symbol path").count() == 2 + 4
    for button in panel_of(page).locator(".legend button").all():  # until all methods are hidden
        button.click()
    assert opened.is_quiet(), opened.complaints


def test_names_from_records_are_shown_as_text_and_execute_no_script(open_page, tmp_path):
    record = made("40%", "sam", 0)
    evil = "<img src=x onerror=alert(1)></script><script>window.evil = true</script>"
    record = replace(record, folder=Path("runs") / evil.replace("/", "∕"), receipt={"gpu": evil}, problems=[evil])
    opened = open_page(write(tmp_path / "page.html", [record]))
    opened.drawn()
    assert evil in opened.page.inner_text("main")
    opened.page.locator(".runs tbody a").click()
    assert evil in opened.page.locator("#drawer").inner_text()
    assert opened.page.evaluate("window.evil") is None
    assert opened.is_quiet()


def test_the_page_contains_the_curves_of_every_run(ledger_page):
    text = ledger_page.read_text()
    for run in collect(PART).runs:
        assert f'"label":"{curves.label(run)}"' in text


# A figure's own page.


@pytest.mark.parametrize("which", [["lower-bounds"], ["flips", str(LEDGER), "--recipe", "demo/40%"]])
def test_the_page_of_a_figure_has_one_title_and_fills_the_window(which, open_page, tmp_path):
    path = tmp_path / "figure.html"
    assert CliRunner().invoke(app, ["figure", *which, "--out", str(path)]).exit_code == 0
    opened = open_page(path)
    page = opened.drawn()
    title = page.locator("h1").inner_text()
    shown = page.locator("h1, h2, h3, figcaption strong, svg text").all()
    assert [one.text_content() for one in shown if one.text_content() == title and is_on_screen(one)] == [title]
    box = page.locator("svg.marks").bounding_box()
    assert box["height"] > 600
    assert page.evaluate("document.documentElement.scrollHeight") <= 900
    assert opened.is_quiet(), opened.complaints


def is_on_screen(element):
    return element.bounding_box()["x"] >= 0
