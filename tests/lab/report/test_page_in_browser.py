"""The page in a real browser: Chromium, without a window."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bisam.lab import records
from bisam.lab.cli import app
from bisam.lab.methods import title_of
from bisam.lab.recipes import find
from bisam.lab.records import Record
from bisam.lab.report import report
from bisam.lab.tables.cells import collect

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

LEDGER = Path(__file__).parents[3] / "results"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here: apt install chromium"),
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        sandbox = [] if os.getuid() else ["--no-sandbox"]  # which root has to do without
        opened = started.chromium.launch(executable_path=BROWSER, args=sandbox)
        yield opened
        opened.close()


class Opened:
    """A page, with all that it asked for and all that it complained about."""

    def __init__(self, browser, path, **options):
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.page = self.context.new_page()
        self.requests, self.complaints = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(path.as_uri())

    def drawn(self, number):
        self.page.wait_for_function("n => document.querySelectorAll('figure[data-drawn=yes]').length === n", arg=number)
        return self.page.query_selector_all("figure")


@pytest.fixture
def open_page(browser):
    opened = []

    def open_(path, **options):
        opened.append(Opened(browser, path, **options))
        return opened[-1]

    yield open_
    for one in opened:
        one.context.close()


@pytest.fixture(scope="module")
def ledger_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(report.write(collect(records.find(LEDGER / "demo")), [LEDGER]))
    return path


def made(row, method, seed, epochs=4):
    """A record of a run that nobody trained."""
    config = replace(find(f"label_noise/{row}/{method}").cells[row, method], seed=seed)
    metrics = [
        {"epoch": epoch, "lr": 0.1, "loss": 2.0 - 0.1 * epoch, "validation_accuracy": 50.0 + epoch + seed, "flips": 1.5,
         "perturbed_loss": 2.2 - 0.1 * epoch, "seconds": 1.0, "samples_per_second": 1000.0}
        for epoch in range(epochs)
    ]  # fmt: skip
    result = {
        "status": "done",
        "best_epoch": 3,
        "validation_accuracy": 53.0,
        "test_accuracy": 60.0 + 0.01 * seed * len(method),
    }
    return Record(Path(f"runs/{row}-{method}-{seed}"), config.as_dict(), metrics, result, {"gpu": "none"})


def write(path, records):
    path.write_text(report.write(collect(records), [Path("runs")]))
    return path


def test_all_charts_are_drawn_without_a_request_or_a_word_on_the_console(open_page, ledger_page):
    opened = open_page(ledger_page)
    figures = opened.drawn(6)
    for figure in figures:
        assert figure.query_selector("svg .mark-line path, svg .mark-rule line").bounding_box()["width"] > 0
        assert figure.get_attribute("aria-label")
    assert opened.requests == [ledger_page.as_uri()]
    assert opened.complaints == []


def test_the_chart_has_a_line_for_each_run_and_each_mean(open_page, ledger_page):
    opened = open_page(ledger_page)
    loss = opened.drawn(6)[1]
    assert [len(group.query_selector_all("path")) for group in loss.query_selector_all(".mark-line")] == [1] * 16


def test_the_pointer_tells_run_epoch_and_value(open_page, ledger_page):
    opened = open_page(ledger_page)
    accuracy = opened.drawn(6)[2]
    accuracy.scroll_into_view_if_needed()
    box = accuracy.query_selector(".chart svg").bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.page.mouse.move(box["x"] + box["width"] / 2 + 2, box["y"] + box["height"] / 2)
    told = opened.page.wait_for_selector("#vg-tooltip-element.visible").inner_text()
    lines = dict(line.split("\t") for line in told.replace("\t\n", "\t").splitlines() if line)
    assert lines.keys() == {"run", "epoch", "method", "value"}
    method, _, seed = lines["run"].partition(", seed ")
    assert method == lines["method"]
    (record,) = [
        one for one in records.find(LEDGER / "demo")
        if title_of(one.config["method"]) == method and one.config["seed"] == int(seed)
    ]  # fmt: skip
    shown = record.metrics[int(lines["epoch"]) - 1]["validation_accuracy"]
    assert float(lines["value"]) == pytest.approx(shown, rel=1e-4)


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_light_or_dark_as_the_system_is_and_the_button_changes_it_for_good(scheme, open_page, ledger_page):
    opened = open_page(ledger_page, color_scheme=scheme)
    opened.drawn(6)
    paper, ink, text = colours(opened)
    assert (paper > ink) == (scheme == "light")
    assert contrast(paper, ink) > 7
    assert contrast(paper, text) > 4.5
    opened.page.click("#theme")
    paper, ink, text = colours(opened)
    assert (paper > ink) == (scheme == "dark")
    assert contrast(paper, text) > 4.5
    opened.page.reload()
    opened.drawn(6)
    assert (colours(opened)[0] > 0.5) == (scheme == "dark")
    assert opened.complaints == []


def domain(opened, figure):
    return opened.page.evaluate("figure => views.get(figure).scale('x').domain()", figure)


def test_a_chart_zooms_by_button_and_key_and_its_neighbours_follow(open_page, ledger_page):
    opened = open_page(ledger_page)
    _, loss, accuracy, *_ = opened.drawn(6)
    whole = domain(opened, loss)
    loss.query_selector("button[aria-label^='Zoom in: ']").click()
    half = domain(opened, loss)
    assert half[1] - half[0] == pytest.approx((whole[1] - whole[0]) / 2)
    opened.page.wait_for_function(
        "([figure, to]) => String(views.get(figure).scale('x').domain()) === String(to)", arg=[accuracy, half]
    )
    accuracy.focus()
    opened.page.keyboard.press("ArrowRight")
    moved = domain(opened, accuracy)
    assert moved[0] > half[0]
    assert moved[1] - moved[0] == pytest.approx(half[1] - half[0])
    opened.page.keyboard.press("0")
    assert domain(opened, accuracy) == whole
    for key in ("-", "ArrowLeft", "ArrowRight"):  # there is nothing beyond the first and the last epoch
        opened.page.keyboard.press(key)
        assert domain(opened, accuracy) == whole
    assert opened.complaints == []


def test_everything_is_reached_by_the_tab_key(open_page, ledger_page):
    opened = open_page(ledger_page)
    opened.drawn(6)
    reached = set()
    for _ in range(80):
        opened.page.keyboard.press("Tab")
        what = "(({tagName: tag, id, className: name}) => tag + (id ? '#' + id : '') + (name ? '.' + name : ''))"
        reached.add(opened.page.evaluate(f"{what}(document.activeElement)"))
    for wanted in ("A.skip", "BUTTON#theme", "A", "DIV.scroll", "FIGURE", "BUTTON", "INPUT", "SUMMARY"):
        assert wanted in reached


def test_enter_on_the_theme_button_switches(open_page, ledger_page):
    opened = open_page(ledger_page)
    opened.page.focus("#theme")
    opened.page.keyboard.press("Enter")
    assert opened.page.get_attribute("html", "data-theme") == "dark"
    assert opened.page.inner_text("#theme") == "Light theme"


def test_a_phone_scrolls_tables_but_not_the_page(open_page, ledger_page):
    opened = open_page(ledger_page, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    opened.drawn(6)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    for figure in opened.page.query_selector_all("figure svg.marks"):
        assert figure.bounding_box()["width"] <= 360


def test_the_filter_keeps_the_rows_that_have_all_words(open_page, ledger_page):
    opened = open_page(ledger_page)
    opened.page.fill(".search input", "tanh seed1")
    visible = opened.page.locator(".grid:has(.search) tbody tr:visible")
    assert visible.count() == 1
    assert "noise40-bisam-tanh-seed1" in visible.inner_text()
    assert opened.page.inner_text(".search output") == "1 of 12"


def test_a_choice_shows_the_curves_of_one_row_at_a_time(open_page, tmp_path):
    runs = [made(row, method, seed) for row in ("40%", "80%") for method in ("sam", "bisam-log") for seed in (0, 1)]
    opened = open_page(write(tmp_path / "page.html", runs))
    opened.drawn(6)
    shown = opened.page.locator(".choice figure:visible figcaption strong")
    assert {text.split(":")[0] for text in shown.all_inner_texts()} == {"40%"}
    opened.page.select_option(".choice select", "80%")
    opened.drawn(11)
    assert {text.split(":")[0] for text in shown.all_inner_texts()} == {"80%"}
    assert opened.complaints == []


def test_five_hundred_runs_are_drawn(open_page, tmp_path):
    runs = [made("40%", method, seed, epochs=200) for method in ("sam", "bisam-log") for seed in range(250)]
    path = write(tmp_path / "page.html", runs)
    assert path.stat().st_size < 8e6
    opened = open_page(path)
    opened.drawn(6)
    assert opened.page.locator(".grid:has(.search) tbody tr").count() == 500
    assert opened.complaints == []


def test_a_comparison_is_drawn_and_its_planes_tell_what_is_under_the_pointer(open_page, tmp_path):
    for method in ("sam", "sgd"):
        changes = ["--set", "epochs=1", "--runs", str(tmp_path), "--device", "cpu"]
        assert CliRunner().invoke(app, ["train", f"demo/40%/{method}", *changes]).exit_code == 0
    runs = sorted(str(path.parent) for path in tmp_path.rglob("config.json"))
    path = tmp_path / "compare.html"
    done = CliRunner().invoke(app, ["compare", *runs, "--samples", "16", "--device", "cpu", "--out", str(path)])
    assert done.exit_code == 0, done.output
    opened = open_page(path)
    figures = opened.drawn(10)
    figures[-1].query_selector(".mark-rect path").hover()
    told = opened.page.wait_for_selector("#vg-tooltip-element.visible").inner_text()
    assert "loss" in told
    assert "error" in told
    assert len(opened.requests) == 1
    assert opened.complaints == []


def test_a_sweep_among_the_runs_is_drawn_with_its_choice(open_page, tmp_path):
    runs = []
    for rho, accuracy in ((0.02, 51.0), (0.05, 52.0), (0.1, 55.0)):
        for seed in (0, 1):
            record = made("40%", "sam", seed)
            result = {**record.result, "validation_accuracy": accuracy + seed}
            runs.append(replace(record, config={**record.config, "rho": rho}, result=result))
    opened = open_page(write(tmp_path / "page.html", runs))
    figure = opened.page.wait_for_selector("figure[aria-label='label_noise/40%/sam: rho'][data-drawn=yes]")
    assert len(figure.query_selector_all(".mark-symbol.role-mark path")) == 6
    assert "Chosen: rho = 0.1. " in opened.page.inner_text("main")
    assert opened.complaints == []


def test_a_page_without_runs_says_how_to_begin(open_page, tmp_path):
    opened = open_page(write(tmp_path / "page.html", []))
    assert "bisam demo" in opened.page.inner_text("main")
    assert opened.complaints == []


def test_names_from_records_are_text_and_run_nothing(open_page, tmp_path):
    record = made("40%", "sam", 0)
    evil = "<img src=x onerror=alert(1)></script><script>window.evil = true</script>"
    record = replace(record, folder=Path("runs") / evil.replace("/", "∕"), receipt={"gpu": evil}, problems=[evil])
    opened = open_page(write(tmp_path / "page.html", [record]))
    opened.drawn(5)
    assert evil in opened.page.inner_text("main")
    assert opened.page.evaluate("window.evil") is None
    assert len(opened.requests) == 1
    assert opened.complaints == []


def test_on_paper_it_is_light_and_whole(open_page, ledger_page):
    opened = open_page(ledger_page, color_scheme="dark")
    opened.drawn(6)
    opened.page.emulate_media(media="print")
    paper, _, text = colours(opened)
    assert paper == 1
    assert contrast(paper, text) > 7
    assert not opened.page.is_visible("#theme")
    assert opened.page.pdf().startswith(b"%PDF")
