"""`bisam report`: what it prints, and the page that it writes, of valid and of damaged records."""

import errno
import json
import math
import os
import re
import shutil
import threading
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bisam.lab import records
from bisam.lab.cli import app
from bisam.lab.config import Config
from bisam.lab.methods import title_of
from bisam.lab.recipes import RECIPES, find_recipe
from bisam.lab.report import report as report_page
from bisam.lab.tables import curves, published
from bisam.lab.tables.cells import collect
from bisam.lab.tables.sheets import sheets

import forked

MEASURED = "validation_accuracy"
LEDGER = Path(__file__).parents[3] / "results"
VOID = {"meta", "link", "input", "br", "img"}


def report(*arguments, columns=300):
    return CliRunner().invoke(app, ["report", *map(str, arguments)], env={"COLUMNS": str(columns)})


class Page(HTMLParser):
    """A parsed page: tables by title, texts, elements with their attributes, and the data of the charts."""

    def __init__(self, path):
        super().__init__()
        self.tables, self.elements, self.words = {}, [], []
        self.inside = {"script": [], "style": []}
        self._open, self._title, self._row = [], "", None
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []
        (data,) = (text for attributes, text in self.inside["script"] if attributes.get("id") == "data")
        assert "<" not in data
        self.data = json.loads(data, parse_constant=refuse)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag in VOID:
            return
        self._open.append(tag)
        if tag in self.inside:
            self.inside[tag].append((dict(attributes), ""))
        elif tag == "h3":
            self._title = ""
        elif tag == "table":
            self.tables[self._title] = []
        elif tag == "tr":
            self.tables[self._title].append([])
        elif tag in ("th", "td"):
            self.tables[self._title][-1].append("")
        elif tag == "small":
            self.tables[self._title][-1][-1] += "\n"

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] in self.inside:
            attributes, text = self.inside[self._open[-1]].pop()
            self.inside[self._open[-1]].append((attributes, text + data))
            return
        self.words.append(data)
        if "td" in self._open or "th" in self._open:
            self.tables[self._title][-1][-1] += data.strip("\n")
        elif "h3" in self._open:
            self._title += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def runs(self):
        """The runs, each with the fields of its drawer by name."""
        return [
            {"run": name, **dict(run["result"]), **dict(run["receipt"]), "command": run["command"]}
            for name, run in self.data.get("runs", {}).items()
        ]

    @property
    def points(self):
        """The values of single runs at each epoch."""
        return [
            {"run": run["label"], "epoch": epoch, **{name: column[at] for name, column in run["values"].items()}}
            for series in self.data.get("series", [])
            for run in series["runs"]
            for at, epoch in enumerate(run["epoch"])
        ]


def refuse(constant):
    raise ValueError(f"{constant} is not JSON")


def write_raw(folder, config, result=None, lines=(), receipt=None):
    """Write a run's folder with any content, also an invalid one. A string is written as it is, the rest as JSON."""
    folder.mkdir(parents=True)
    parts = {"config.json": config if isinstance(config, str) else {"format": 1, "config": config}}
    parts |= {"result.json": result, "receipt.json": receipt}
    parts["metrics.jsonl"] = lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines)
    for name, part in parts.items():
        if part is not None:
            text = part if isinstance(part, str) else json.dumps(part)
            (folder / name).write_bytes(text.encode(errors="surrogatepass"))
    return folder


SAM = find_recipe("demo/40%/sam").cells["40%", "sam"].as_dict()
DONE = {"status": "done", "test_accuracy": 90.0}


# The ledger's page.


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    path = tmp_path_factory.mktemp("ledger") / "report.html"
    done = report(LEDGER / "demo", "--out", path)
    assert done.exit_code == 0, done.output
    return Page(path), done.output


def test_the_page_and_the_terminal_show_every_number_of_the_tables(ledger):
    page, output = ledger
    made = sheets(collect(records.find_records(LEDGER / "demo")).tables)
    assert len(made) == 2
    for sheet in made:
        short = sheet.title.removeprefix("Handwritten digits, 40 % of the labels wrong: ")
        head, *rows = page.tables[short[0].upper() + short[1:]]
        assert head == sheet.head
        assert rows == sheet.rows
        for note in sheet.notes:
            assert note in page.text
        for cell in (cell for row in sheet.rows for cell in row):
            assert cell in output


def test_the_page_begins_with_the_verdict_and_the_difference_with_its_interval(ledger):
    page, _ = ledger
    answer = "40%: SAM is better than SGD by 15.33 points, 95 % interval +11.34 to +19.33: resolved with 3 pairs."
    assert answer in page.text
    verdict = "SAM vs SGD ● 1 of 1 difference resolved"
    assert page.text.index(verdict) < page.text.index(answer) < page.text.index("95 % interval n sign resolved?")
    assert "BiSAM (tanh) is above SAM by 1.39" in page.text


def test_the_page_lists_every_run_with_its_receipt_and_its_command(ledger):
    page, _ = ledger
    by_name = {run["run"]: run for run in page.runs}
    found = records.find_records(LEDGER / "demo")
    assert {*by_name} == {f"demo/{record.folder.name}" for record in found}
    for record in found:
        run = by_name[f"demo/{record.folder.name}"]
        assert run["test, %"] == f"{record.result['test_accuracy']:.2f}"
        assert run["validation, %"] == f"{record.result['validation_accuracy']:.2f}"
        assert run["tested epoch"] == str(record.result["best_epoch"] + 1)
        assert run["training, s"] == f"{sum(row['seconds'] for row in record.metrics):.0f}"
        assert run["hardware"] == record.receipt["cpu"]
        assert (run["commit"], run["torch"]) == (record.receipt["commit"], record.receipt["torch"])
        assert run["data"] == record.receipt["data_checksum"][:12]
        assert run["command"] == f"bisam train demo/40%/{record.config['method']} --seeds {record.config['seed']}"


def test_the_curves_show_the_recorded_values(ledger):
    page, _ = ledger
    shown = {(point["run"], point["epoch"]): point for point in page.points}
    found = records.find_records(LEDGER / "demo")
    assert len(shown) == sum(len(record.metrics) for record in found)
    for record in found:
        name = f"{title_of(record.config['method'])}, seed {record.config['seed']}"
        for row in record.metrics:
            point = shown[name, row["epoch"] + 1]
            for value in ("loss", "lr", "validation_accuracy"):
                assert point[value] == pytest.approx(row[value], rel=1e-4)
            assert (point.get("flips") is not None) == ("flips" in row)
            if "perturbed_loss" in row:
                gap = row["perturbed_loss"] - row["loss"]
                assert point["surrogate_gap"] == pytest.approx(gap, abs=1e-3)


def test_every_figure_has_a_chart_whose_data_is_in_the_page(ledger):
    page, _ = ledger
    numbers = [int(figure["data-chart"]) for figure in page.all("figure") if "data-chart" in figure]
    assert numbers == [*range(len(page.data["charts"]))]
    assert len(numbers) == 3  # two kinds of differences, and the dots of a row
    for chart in page.data["charts"]:
        for form in chart.values():
            names = {one["name"] for one in form["data"] if one["name"].startswith("data-")}
            assert names
            assert names <= {*page.data["datasets"]}
    panels = [element["data-series"] for element in page.all("div") if "data-series" in element]
    assert panels == ["0", ""]  # that of the row, and the one that drawers copy
    names = [figure["data-curve"] for figure in page.all("figure") if "data-curve" in figure]
    measured = [name for name in curves.CURVES if not name.startswith("validation_") or name == MEASURED]
    assert names == [*measured, *curves.CURVES]  # a drawer shows those that its run has


def test_figures_have_a_title_and_an_explanation(ledger):
    page, _ = ledger
    for words in (
        "BiSAM − SAM With 95 % intervals: one that excludes 0 is resolved.",
        "flips per batch, right to wrong Of 64 samples, those that the perturbation turns wrong.",
        "validation accuracy, per cent Its labels are as noisy as those of the training data.",
    ):
        assert words in page.text


def test_differences_without_intervals_are_in_the_table_and_drawn_hollow(tmp_path, recorded, write_run):
    for method in ("sgd", "sam"):
        write_run(tmp_path / method, recorded(f"demo/40%/{method}", trained=0))
    assert "SAM − SGD" in report(tmp_path).output
    page = Page(tmp_path / "report.html")
    assert "40%: SAM − SGD" in page.text
    kinds = [row["kind"] for rows in page.data["datasets"].values() for row in rows if "kind" in row]
    assert kinds == ["no interval: too few seeds"]


def test_every_link_of_the_page_leads_to_a_section_or_a_run(ledger):
    page, _ = ledger
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len({*ids})
    links = [link["href"] for link in page.all("a") if not link["href"].startswith("#run=")]
    assert links
    assert {link.removeprefix("#") for link in links} <= {*ids}
    of_runs = [unquote(link["href"].removeprefix("#run=")) for link in page.all("a") if "#run=" in link["href"]]
    assert of_runs == [*page.data["runs"]]


def test_the_page_makes_no_network_requests(ledger):
    page, _ = ledger
    policy = next(meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset", "formaction"):
            assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes)
    own_style, own_script = (page.inside[tag][-1][1] for tag in ("style", "script"))
    assert "url(" not in own_style
    assert "@import" not in own_style
    assert not re.search(r"https?:|\bimport\b|fetch\(|XMLHttpRequest|WebSocket|sendBeacon", own_script)
    assert len(page.inside["script"]) == 3


def test_tables_of_the_paper_without_own_runs_are_shown_as_published(ledger):
    page, _ = ledger
    for name, make in RECIPES.items():
        recipe = make()
        table = published.of(recipe)
        if table is not None:
            assert f"To run it: bisam reproduce {name}" in page.text
            for cells in [*table.cells.values(), table.average]:
                for cell in cells.values():
                    printed = f"{cell.mean:.2f}" if cell.std is None else f"{cell.mean:.2f} ± {cell.std:.2f}"
                    assert printed in page.text


# Folders.


def test_a_folder_without_runs_is_refused_and_nothing_is_written(tmp_path):
    given = (tmp_path, "--out", tmp_path / "page.html", "--markdown", tmp_path / "tables.md")
    remedy = "Give the folder that has them; a first one takes two minutes, bisam demo"
    done = report(*given)
    assert (done.exit_code, done.stderr) == (1, f"Error: {tmp_path} has no runs. {remedy}\n")
    write_raw(tmp_path / "bert", '{"hidden_size": 768}')
    done = report(*given)
    others = f"1 folder has a config.json of another program: {tmp_path / 'bert'}"
    assert (done.exit_code, done.stderr) == (1, f"Error: {tmp_path} has no runs; {others}. {remedy}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


def test_a_folder_with_only_damaged_runs_has_a_page_that_lists_them(tmp_path):
    folder = write_raw(tmp_path / "a", "{")
    done = report(tmp_path)
    assert done.exit_code == 0, done.output
    named = f"{folder}: config.json: it is half-written or foreign"
    first, second = done.output.splitlines()[:2]
    assert first.startswith(named)
    assert second == f"{tmp_path} has no run that counts for a table"
    page = Page(tmp_path / "report.html")
    assert named in page.text
    assert f"No run in {tmp_path} can be read." in page.text
    assert page.data["charts"] == []


def test_config_files_of_other_programs_are_reported_in_one_line(tmp_path, recorded, write_run):
    write_run(tmp_path / "sam", recorded("demo/40%/sam"))
    for name in "abcde":
        write_raw(tmp_path / name, '{"hidden_size": 768}')
    damaged = write_raw(tmp_path / "damaged", "{}", DONE, receipt={"commit": "1"})
    first = ", ".join(str(tmp_path / name) for name in "abc")
    assert report(tmp_path).output.splitlines()[:2] == [
        f"{damaged}: config.json: it is not a run's configuration",
        f"5 folders have a config.json of another program: {first} and 2 more",
    ]


def test_a_missing_folder_is_a_one_line_error(tmp_path):
    done = report(tmp_path / "nothing", columns=40)
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        f"Error: {tmp_path / 'nothing'} is not a folder: give the one that has the runs, or a run itself"
    ]


def test_several_folders_are_combined_in_one_report_in_the_first_folder(tmp_path, recorded, write_run):
    for place, method in enumerate(("sgd", "sam")):
        for seed in (0, 1):
            write_run(tmp_path / f"{place}" / f"{seed}", recorded(f"demo/40%/{method}", seed, 90.0 + place, trained=0))
    done = report(tmp_path / "0", tmp_path / "1")
    assert done.exit_code == 0
    assert "40%: SAM − SGD" in done.output
    assert not (tmp_path / "1" / "report.html").exists()
    page = Page(tmp_path / "0" / "report.html")
    assert len(page.runs) == 4
    assert f"4 runs in {tmp_path / '0'}, {tmp_path / '1'}: 4 finished, 0 diverged, 0 not finished" in page.text


def test_a_folder_given_twice_is_counted_once(tmp_path, recorded, write_run):
    write_run(tmp_path / "demo" / "a", recorded("demo/40%/sam", trained=0))
    (tmp_path / "link").symlink_to(tmp_path / "demo")
    once = report(tmp_path / "demo", "--out", tmp_path / "page.html")
    for again in (tmp_path / "demo", tmp_path, tmp_path / "link", tmp_path / "demo" / ".." / "demo" / "a"):
        twice = report(tmp_path / "demo", again, "--out", tmp_path / "page.html")
        assert twice.output == once.output
    assert len(Page(tmp_path / "page.html").runs) == 1


def test_a_run_marked_as_not_counted_is_listed_with_the_reason(tmp_path, recorded, write_run):
    write_run(tmp_path / "good", recorded("demo/40%/sam", 0, 90.0))
    faulty = write_run(tmp_path / "faulty", recorded("demo/40%/sam", 1, 99.0))
    (faulty / "not-counted.txt").write_text("It saw the <test> data.")
    done = report(tmp_path)
    assert f"{faulty}: not counted: It saw the <test> data." in done.output
    assert "90.00, n = 1" in done.output
    page = Page(tmp_path / "report.html")
    assert "1 finished, 0 diverged, 0 not finished, 1 not counted" in page.text
    assert "not counted: It saw the <test> data." in page.text
    assert "99.00" not in page.text + done.output


def test_if_no_run_counts_the_runs_are_listed_with_the_reasons(tmp_path, recorded, write_run):
    faulty = write_run(tmp_path / "faulty", recorded("demo/40%/sam", 1, 99.0))
    (faulty / "not-counted.txt").write_text("It saw the test data.")
    done = report(tmp_path)
    lines = [f"{faulty}: not counted: It saw the test data.", f"{tmp_path} has no run that counts for a table"]
    assert done.output.splitlines()[:2] == lines
    (listed,) = Page(tmp_path / "report.html").runs
    assert listed["status"] == "not counted"


def test_of_a_sweep_only_the_run_with_the_recipes_value_is_listed_with_its_test_accuracy(tmp_path, recorded, write_run):
    for rho, accuracy in ((0.05, 91.25), (0.07, 90.0), (0.2, 93.75)):
        write_run(tmp_path / f"rho{rho}", recorded("demo/40%/sam", 0, accuracy, trained=0, rho=rho))
    write_run(tmp_path / "sgd", recorded("demo/40%/sgd", 0, 88.0, trained=0, epochs=30))
    done = report(tmp_path)
    page = Page(tmp_path / "report.html")
    tested = {run["run"]: (run["validation, %"], run["test, %"]) for run in page.runs}
    assert tested == {
        "demo/rho0.05": ("55.50", "–"),
        "demo/rho0.07": ("55.50", "90.00"),
        "demo/rho0.2": ("55.50", "–"),
        "demo/sgd": ("55.50", "88.00"),
    }
    for accuracy in ("91.25", "93.75"):
        assert accuracy not in page.text + done.output


def test_a_second_run_of_the_same_cell_and_seed_is_reported_and_not_counted(tmp_path, recorded, write_run):
    for name in ("a", "b"):
        write_run(tmp_path / name / "noise40-sam-seed0", recorded("demo/40%/sam", trained=0))
    done = report(tmp_path / "a", tmp_path / "b")
    assert "90.00, n = 1" in done.output
    assert f"{tmp_path / 'b' / 'noise40-sam-seed0'}: a second run of this cell and seed 0: not counted" in done.output


def test_a_custom_table_shows_its_custom_method_even_if_that_is_not_registered(tmp_path, recorded, write_run):
    for seed in range(2):
        for method in ("gbisam", "sam", "sgd"):
            record = recorded("demo/40%/sam", seed, method=method, recipe="mine", title="Mine", row="net")
            write_run(tmp_path / f"net-{method}-seed{seed}", record)
    done = report(tmp_path)
    assert "not counted" not in done.output
    page = Page(tmp_path / "report.html")
    table = page.tables["Test accuracy in per cent"]
    assert [*table[0]][-1] == "gbisam"
    assert "90.00 ± 0.00, n = 2" in table[1][-1]
    drawn = {row["method"] for rows in page.data["datasets"].values() for row in rows if "method" in row}
    assert "gbisam" in drawn


def test_runs_with_the_same_folder_name_are_listed_by_their_full_paths(tmp_path, recorded, write_run):
    for seed, name in enumerate(("a", "b")):
        write_run(tmp_path / name / "mine", recorded("demo/40%/sam", seed, trained=0))
    write_run(tmp_path / "a" / "other", recorded("demo/40%/sam", 2, trained=0))
    assert report(tmp_path).exit_code == 0
    listed = Page(tmp_path / "report.html").runs
    assert [run["run"] for run in listed] == [str(tmp_path / "a" / "mine"), str(tmp_path / "b" / "mine"), "demo/other"]
    assert [run["validation, %"] for run in listed] == ["55.50"] * 3  # of the result, not of the last epoch


def test_unfinished_and_diverged_runs_are_listed_with_their_status(tmp_path, recorded, write_run):
    write_run(tmp_path / "a", recorded("demo/40%/sam", 0, None, trained=3))
    write_run(tmp_path / "b", recorded("demo/40%/sam", 1, status="diverged"))
    done = report(tmp_path)
    assert "–, 1 diverged, 1 not finished" in done.output
    page = Page(tmp_path / "report.html")
    assert [run["status"] for run in page.runs] == ["3 of 30 epochs", "diverged"]
    assert [run["test, %"] for run in page.runs] == ["–", "–"]
    assert "2 runs in" in page.text
    assert "0 finished, 1 diverged, 1 not finished; 5 seconds of training" in page.text
    assert "no comparison is possible" in page.text


def test_total_training_time_is_divided_by_the_number_of_runs_that_share_a_device(tmp_path, recorded, write_run):
    for seed in range(4):
        record = recorded("demo/40%/sam", seed, trained=3)
        rows = [{"epoch": row["epoch"], "seconds": 3600.0, "together": 2} for row in record.metrics]
        write_run(tmp_path / str(seed), replace(record, metrics=rows))
    assert report(tmp_path).exit_code == 0
    page = Page(tmp_path / "report.html")
    assert "4 finished, 0 diverged, 0 not finished; 6.0 hours of training" in page.text
    assert [(run["training, s"], run["s per epoch"], run["runs at once"]) for run in page.runs] == [
        ("10800", "3600.00", "2")
    ] * 4


def test_a_long_list_of_differences_in_words_is_folded(tmp_path, recorded, write_run):
    for row in find_recipe("label_noise").rows:
        for method in find_recipe("label_noise").methods:
            write_run(tmp_path / f"{row}-{method}", recorded(f"label_noise/{row}/{method}", trained=0))
    assert report(tmp_path).exit_code == 0
    page = Page(tmp_path / "report.html")
    assert "The 15 differences in words" in page.text  # of 5 rows × 3 differences
    assert page.text.count("the scatter cannot be estimated from") == 15


def test_a_page_of_500_runs_is_below_6_megabytes_and_has_their_first_and_last_epochs(tmp_path):
    cells = [*find_recipe("label_noise").only(["20%", "40%"]).cells.values()]
    row = {"lr": 0.04986304, "perturbed_loss": 2.3684489727020264, "flips": 1.4375, "seconds": 0.18987724899852765}
    rest = json.dumps({**row, "validation_accuracy": 26.666666666666668})[1:]
    for number in range(500):
        loss = 2.322951078414917 + number / 1000
        lines = "".join(f'{{"epoch": {epoch}, "loss": {loss}, {rest}\n' for epoch in range(90))
        config = replace(cells[number % 8], seed=number // 8)
        write_raw(tmp_path / str(number), config.as_dict(), {"status": "done", "test_accuracy": 90.0}, lines)
    assert curves.MOST_POINTS < 500 * 90
    done = report(tmp_path)
    assert done.exit_code == 0, done.output
    assert "n = 63" in done.output
    path = tmp_path / "report.html"
    assert path.stat().st_size < 6e6
    page = Page(path)
    assert len(page.runs) == 500
    assert len(page.points) < curves.MOST_POINTS
    ends = [point for point in page.points if point["epoch"] in (1, 90)]
    assert len(ends) == 2 * 500


# Records that are damaged, foreign or half-written.


@pytest.mark.parametrize(
    ("config", "result", "line"),
    [
        ({"epochs": "x"}, DONE, {"epoch": 0}),
        ({"recipe": "cifar10"}, DONE, {"epoch": 0, "samples_per_second": 3.0}),
        ({**SAM, "seed": 1}, {"status": "done", "test_accuracy": "93"}, {"epoch": 0}),
        ({**SAM, "seed": 1}, {"status": "done"}, {"epoch": 0}),
        ({**SAM, "seed": 1}, {"test_accuracy": 93.0}, {"epoch": 0}),
        ({**SAM, "seed": 1, "later": 1}, DONE, {"epoch": 0}),
        ("{", DONE, {"epoch": 0}),
        ("[]", DONE, {"epoch": 0}),
        ("", DONE, {"epoch": 0}),
        ('{"format": 1, "config": 3}', DONE, {"epoch": 0}),
    ],
)
def test_an_unreadable_run_is_omitted_and_reported_while_the_others_are_shown(config, result, line, tmp_path):
    write_raw(tmp_path / "good", SAM, DONE, [{"epoch": 0}])
    write_raw(tmp_path / "bad", config, result, [line])
    done = report(tmp_path)
    assert done.exit_code == 0, done.output
    assert "90.00, n = 1" in done.output
    (reported,) = (text for text in done.output.splitlines() if text.startswith(f"{tmp_path / 'bad'}: "))
    page = Page(tmp_path / "report.html")
    assert reported in page.text
    assert [run["run"] for run in page.runs] == ["demo/good"]


@pytest.mark.parametrize("line", [{"epoch": 0, "flips": "x"}, {"epoch": 0, "loss": None}, {"epoch": 0, "lr": [1]}])
def test_an_invalid_number_is_omitted_and_the_rest_of_its_run_is_shown(line, tmp_path):
    write_raw(tmp_path / "a", SAM, DONE, [{"epoch": 0, "validation_accuracy": 50.0, **line}])
    done = report(tmp_path)
    assert "90.00, n = 1" in done.output
    (point,) = Page(tmp_path / "report.html").points
    assert point == {"run": "SAM, seed 0", "epoch": 1, "validation_accuracy": 50.0}


def test_a_half_written_line_is_reported_and_the_other_lines_are_drawn(tmp_path, recorded, write_run):
    folder = write_run(tmp_path / "a", recorded("demo/40%/sam", accuracy=None, trained=3))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "los')
    done = report(tmp_path)
    assert f"{folder}: metrics.jsonl: the last line is half-written" in done.output
    page = Page(tmp_path / "report.html")
    assert [point["epoch"] for point in page.points] == [1, 2, 3]
    assert page.runs[0]["status"] == "3 of 30 epochs"


def test_many_invalid_lines_of_a_log_are_reported_in_one_line(tmp_path):
    write_raw(tmp_path / "a", SAM, DONE, [{"step": number} for number in range(1000)])
    write_raw(tmp_path / "b", '{"hidden_size": 768}', None, [{"step": number} for number in range(1000)])
    done = report(tmp_path)
    lines = "metrics.jsonl: line 1 has no epoch; metrics.jsonl: line 2 has no epoch; "
    assert f"{tmp_path / 'a'}: {lines}metrics.jsonl: line 3 has no epoch; 997 more\n" in done.output
    assert f"1 folder has a config.json of another program: {tmp_path / 'b'}\n" in done.output


def test_a_half_written_result_is_reported_and_its_run_is_not_finished(tmp_path, recorded, write_run):
    folder = write_run(tmp_path / "a", recorded("demo/40%/sam"))
    (folder / "result.json").write_text('{"status": "done", "test_acc')
    done = report(tmp_path)
    assert f"{folder}: result.json: it is half-written or foreign" in done.output
    assert "–, 1 not finished" in done.output


@pytest.mark.parametrize("lost", ["config.json", "result.json"])
def test_a_run_without_its_configuration_is_reported(lost, tmp_path, recorded, write_run):
    folder = write_run(tmp_path / "a", recorded("demo/40%/sam"))
    for name in ("config.json", lost):
        (folder / name).unlink(missing_ok=True)
    reported = f"{folder}: config.json: it is missing, so the run cannot be identified"
    assert reported in report(tmp_path).output
    assert reported in Page(tmp_path / "report.html").text


def test_a_folder_that_cannot_be_read_is_reported_and_the_others_are_shown(tmp_path, recorded, write_run, monkeypatch):
    for seed in (0, 1):
        write_run(tmp_path / f"{seed}" / "run", recorded("demo/40%/sam", seed, trained=0))
    own = os.scandir

    def scandir(place):
        if Path(place) == tmp_path / "1":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        return own(place)

    monkeypatch.setattr(os, "scandir", scandir)  # permissions would not stop root
    done = report(tmp_path)
    reported = f"{tmp_path / '1'}: it cannot be read (Permission denied)"
    assert done.exit_code == 0, done.output
    assert reported in done.output
    assert "90.00, n = 1" in done.output
    assert reported in Page(tmp_path / "report.html").text


def test_a_record_of_a_later_format_is_reported(tmp_path):
    later = json.dumps({"format": 2, "config": SAM})
    folder = write_raw(tmp_path / "a", later, DONE, [{"epoch": 0}])
    done = report(tmp_path)
    assert done.exit_code == 0
    assert f"{folder}: config.json: it has format 2, and this version reads format 1" in done.output


@pytest.mark.parametrize("depth", [150, 450, 600, 990, 5000])
def test_a_file_that_is_nested_too_deeply_to_be_read_is_reported(depth, tmp_path):
    write_raw(tmp_path / "good", {**SAM, "seed": 1}, DONE)
    folder = write_raw(tmp_path / "a", SAM, DONE, [{"epoch": 0}], "[" * depth + "]" * depth)
    lists = '{"cpu": ' + "[" * depth + "]" * depth + "}"
    folder = write_raw(tmp_path / "b", {**SAM, "seed": 2}, DONE, [{"epoch": 0}], lists)
    done = report(tmp_path)
    assert done.exit_code == 0, done.exception
    assert f"{tmp_path / 'a'}: receipt.json: it is half-written or foreign" in done.output
    if depth > 500:
        assert f"{folder}: receipt.json: it is half-written or foreign (it is nested too deeply)" in done.output
    assert len(Page(tmp_path / "report.html").runs) == 3


STRANGE_NUMBERS = [math.nan, math.inf, -math.inf, None, "x", "nan", "inf", True, -1, 0, 1e308, 1.7976931348623157e308]
STRANGE_NUMBERS += [-1e308, 5e-324, 10**400, -(10**400), 10**4000, [], {}, ""]


@pytest.mark.parametrize("value", STRANGE_NUMBERS, ids=lambda value: repr(value)[:12])
def test_an_invalid_or_extreme_value_in_any_field_leaves_a_valid_page(value, tmp_path):
    names = [
        "lr",
        "loss",
        "perturbed_loss",
        "flips",
        "validation_accuracy",
        "seconds",
        "together",
        "samples_per_second",
    ]
    line = {"epoch": 0, **dict.fromkeys(names, value)}
    lines = [{"epoch": 0}, line, {"epoch": value}, {"epoch": 10**400}, {**line, "epoch": 7}]
    result = dict.fromkeys(("best_epoch", "validation_accuracy", "seconds", "epochs", "test_top5_accuracy"), value)
    receipt = dict.fromkeys(("gpu", "cpu", "commit", "date", "torch", "data_checksum", "seconds"), value)
    for seed in (0, 1):  # two seeds, so that means are computed
        for method in ("sgd", "sam"):
            config = replace(find_recipe("demo").cells["40%", method], seed=seed).as_dict()
            write_raw(tmp_path / f"{method}{seed}", config, {**result, **DONE}, lines, receipt)
    write_raw(tmp_path / "no accuracy", {**SAM, "seed": 2}, {**DONE, "test_accuracy": value}, lines, receipt)
    done = report(tmp_path, "--markdown", tmp_path / "tables.md")
    assert done.exit_code == 0, done.exception
    assert "90.00 ± 0.00, n = 2" in done.output or value in (0, True)
    assert not re.search(r"\b(nan|inf)\b", done.output.replace("'nan'", "").replace("'inf'", ""))
    page = Page(tmp_path / "report.html")
    assert len(page.runs) >= 4
    for run in page.runs:
        for column in ("validation, %", "test, %", "tested epoch", "training, s", "s per epoch", "runs at once"):
            assert re.fullmatch(r"–|-?\d+(\.\d+)?", run[column])
    for point in page.points:
        for number in (value for value in point.values() if value is not None and not isinstance(value, str)):
            assert abs(number) < 1e101


# Foreign text.


HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "\"' onmouseover='alert(1)' x=\"",
    "<img src=x onerror=alert(1)>",
    "<!-- <script>",
    "--> ]]> &lt;b&gt; &amp;",
    "{{ 7 * 7 }} {% raw %} {# x #}",
    "a\u2028b\u2029c",
    "javascript:alert(1)",
    "[/red] [bold]",
    "\\u003cscript\\u003e",
    "\x00\x1b[31m\x07",
    "‮txt.exe",
    "$& $1 \\1",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_any_text_of_a_record_is_text_on_the_page_and_never_markup_or_code(text, tmp_path):
    root = tmp_path / f"runs {text.replace('/', '').replace(chr(0), '')}"
    printable = "".join(letter for letter in text if letter.isprintable())
    receipt = dict.fromkeys(("gpu", "commit", "date", "torch", "data_checksum"), text)
    line = {"epoch": 0, "loss": 1.0, text: text}
    write_raw(root / "run", {**SAM, "model": printable}, {**DONE, text: text}, [line], receipt)
    write_raw(root / "other", {**SAM, "recipe": printable}, DONE, [line], receipt)
    write_raw(root / "status", {**SAM, "seed": 1}, {**DONE, "status": text}, [line], {text: text})
    write_raw(root / "field", {**SAM, "seed": 2, text: 1}, DONE, [line])
    write_raw(root / "method", {**SAM, "seed": 3, "method": text}, DONE, [line])
    write_raw(root / "json", text, text, text, text)
    done = report(root, "--markdown", root / "tables.md")
    assert done.exit_code == 0, done.exception
    assert "\x1b[31m" not in done.output
    assert "\x07" not in done.output
    page = Page(root / "report.html")
    assert len(page.all("script")) == 3
    assert not page.all("img")
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
    shown = " ".join(text.split())
    written = " ".join([page.text, *(" ".join(value.split()) for run in page.runs for value in run.values())])
    assert written.count(shown) >= 4
    run = next(run for run in page.runs if run["run"] == "demo/run")
    assert run["hardware"] == run["commit"] == text.strip("\n")
    assert run["command"].startswith("bisam train demo/40%/sam --seeds 0 --set ")
    assert " ".join(printable.split()) in page.text


def test_a_name_that_is_not_valid_unicode_is_shown_escaped(tmp_path, recorded, write_run):
    root = tmp_path / os.fsdecode(b"runs-\xff")
    try:
        write_run(root / os.fsdecode(b"a\xfe"), recorded("demo/40%/sam"))
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    folder = write_raw(root / os.fsdecode(b"b\xfe"), {**SAM, "seed": 1}, {"status": "\ud800"}, (), {"cpu": "\ud800"})
    write_raw(root / "c", {**SAM, "seed": 2}, DONE, [{"epoch": 0, "\ud800": "\ud800"}], {"cpu": "\ud800"})
    done = report(root, "--markdown", root / "tables.md")
    assert done.exit_code == 0, done.output
    assert "runs-\\udcff/b\\udcfe: its result has the status" in done.output
    assert "wrote " in done.output
    page = Page(root / "report.html")
    assert "runs-\\udcff" in page.text
    assert [run["run"] for run in page.runs] == ["demo/a\\udcfe", "demo/c"]
    assert page.runs[1]["hardware"] == "\\ud800"
    assert folder.exists()


# Random content.


words = st.sampled_from(
    ["nan", "inf", "-inf", "done", "diverged", "demo", "sam", "own", "</script>", "\ud800", "|", "[/]"]
)
simple = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | words
simple |= st.sampled_from([10**400, -(10**400), 1e308, -1e308, 5e-324, 0, 1, 100, 2**31])
anything = st.recursive(
    simple,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=3), part, max_size=3),
    max_leaves=5,
)
names_of = {
    "config": [*Config().as_dict(), "later"],
    "result": ["status", "test_accuracy", "validation_accuracy", "best_epoch", "epochs", "seconds"],
    "receipt": ["gpu", "cpu", "commit", "date", "torch", "data_checksum"],
    "line": ["epoch", "lr", "loss", "perturbed_loss", "flips", "validation_accuracy", "seconds", "together"],
}
names_of["line"] += ["samples_per_second", "surrogate_gap", "run", "method"]


def objects(kind, **always):
    """Any object, mostly with names of fields that are read."""
    keys = st.sampled_from(names_of[kind]) | st.text(max_size=3)
    return st.dictionaries(keys, anything, max_size=4).map(lambda found: {**always, **found})


metrics = st.lists(objects("line") | st.integers(0, 9).flatmap(lambda epoch: objects("line", epoch=epoch)), max_size=4)
configs = objects("config", **SAM, ) | objects("config")  # fmt: skip
results = objects("result", **DONE) | objects("result") | st.none()
foreign = st.tuples(configs | anything, results | anything, metrics, objects("receipt") | anything)


@settings(max_examples=30)
@given(st.lists(foreign, min_size=1, max_size=3))
def test_any_content_of_the_files_yields_a_report_that_names_every_run(tmp_path_factory, found):
    root = tmp_path_factory.mktemp("any")
    write_raw(root / "good", {**SAM, "seed": 5}, DONE)
    for number, parts in enumerate(found):
        write_raw(root / str(number), *parts)
    done = report(root, "--markdown", root / "tables.md")
    assert done.exit_code == 0, done.exception
    page = Page(root / "report.html")
    assert "demo/good" in [run["run"] for run in page.runs]
    for number in range(len(found)):  # none is lost
        is_named = str(root / str(number)) in page.text
        assert is_named or any(run["run"].endswith(f"/{number}") for run in page.runs)


@settings(max_examples=15)
@given(st.sampled_from(["config.json", "result.json", "receipt.json", "metrics.jsonl"]), st.data())
def test_a_file_truncated_at_any_byte_affects_only_its_own_run(tmp_path_factory, name, data):
    root = tmp_path_factory.mktemp("cut")
    for seed in (0, 1):
        shutil.copytree(LEDGER / "demo" / f"noise40-sam-seed{seed}", root / str(seed))
        (root / str(seed) / "metrics.jsonl").write_text('{"epoch": 0, "seconds": 1.5}\n{"epoch": 1, "seconds": 2}\n')
        result, receipt = (root / str(seed) / f"{name}.json" for name in ("result", "receipt"))
        result.write_text(result.read_text().replace('"epochs": 30', '"epochs": 2'))
        digests = {"sha256": {}}  # the digests of the files that are changed here would be wrong
        receipt.write_text(json.dumps({**json.loads(receipt.read_text()), **digests}) + "\n")
    whole = (root / "1" / name).read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 2))  # the last byte is only the end of a line
    (root / "1" / name).write_bytes(whole[:cut])
    done = report(root)
    assert done.exit_code == 0, done.exception
    assert f"{root / '1'}: {name}: " in done.output
    assert f"{root / '0'}: " not in done.output
    ours = {"config.json": "n = 1", "result.json": "n = 1, 1 not finished"}.get(name, "n = 2")
    assert ours in done.output
    assert "demo/0" in [run["run"] for run in Page(root / "report.html").runs]


def test_a_changed_value_that_contains_a_comma_and_an_equals_sign_is_one_change(tmp_path):
    for number, fields in enumerate([{"model": "a, b=c"}, {"model": "a, rho=0.2"}, {"model": "a", "rho": 0.2}]):
        write_raw(tmp_path / str(number), {**SAM, **fields}, DONE)
    done = report(tmp_path)
    assert done.exit_code == 0, done.exception
    found = collect(records.find_records(tmp_path)).tables
    assert sorted(table.fields for table in found) == [("model",), ("model",), ("model", "rho")]
    assert all(len(table.of_method("sam")) == 1 for table in found)


@pytest.mark.parametrize("epoch", [10**90, 2**64, 2**53])
def test_an_epoch_that_is_too_large_to_draw_is_omitted(epoch, tmp_path):
    lines = [{"epoch": number, "loss": 1.0, "validation_accuracy": 50.0} for number in (0, 1, epoch)]
    folders = [write_raw(tmp_path / "runs" / name, SAM, DONE, lines) for name in "ab"]
    done = report(tmp_path / "runs", "--figures", tmp_path / "figures")
    assert done.exit_code == 0, done.exception
    assert {point["epoch"] for point in Page(tmp_path / "runs" / "report.html").points} == {1, 2}
    out = ["--no-weights", "--out", str(tmp_path / "compare.html")]
    done = CliRunner().invoke(app, ["compare", *map(str, folders), *out])
    assert done.exit_code == 0, done.exception
    assert {point["epoch"] for point in Page(tmp_path / "compare.html").points} == {1, 2}


# Where it is written.


def test_the_page_and_the_tables_are_written_to_the_requested_paths(tmp_path):
    new, before = tmp_path / "new" / "folder", sorted((LEDGER / "demo").iterdir())
    done = report(LEDGER / "demo", "--out", new / "page.html", "--markdown", new / "t" / "tables.md")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-2:] == [f"wrote {new / 't' / 'tables.md'}", f"wrote {new / 'page.html'}"]
    assert (new / "t" / "tables.md").read_text().count("\n| --- |") == 2
    assert sorted(path.name for path in new.rglob("*") if path.is_file()) == ["page.html", "tables.md"]
    assert sorted((LEDGER / "demo").iterdir()) == before


def test_a_page_path_that_is_a_link_or_a_pipe_is_written_through_and_not_replaced(tmp_path, recorded, write_run):
    write_run(tmp_path / "runs" / "a", recorded("demo/40%/sam", trained=0))
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "link.html").symlink_to("page.html")
    os.mkfifo(tmp_path / "pipe")
    assert report(tmp_path / "runs", "--out", tmp_path / "link.html").exit_code == 0
    assert os.readlink(tmp_path / "link.html") == "page.html"
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text(encoding="utf-8")), daemon=True)
    reader.start()
    assert report(tmp_path / "runs", "--out", tmp_path / "pipe").exit_code == 0
    reader.join(120)
    assert (tmp_path / "pipe").is_fifo()
    assert got == [(tmp_path / "page.html").read_text(encoding="utf-8")]


def test_the_page_is_written_even_if_stdout_is_closed(tmp_path, recorded, write_run):
    write_run(tmp_path / "a", recorded("demo/40%/sam", trained=0))
    reader, writer = os.pipe()
    os.close(reader)  # as `| head -1` does once it has its line
    with os.fdopen(writer, "w") as pipe:
        done = forked.run("bisam", "report", tmp_path, "--markdown", tmp_path / "tables.md", stdout=pipe)
    assert done.stderr == ""
    assert len(Page(tmp_path / "report.html").runs) == 1
    assert "90.00, n = 1" in (tmp_path / "tables.md").read_text()


@pytest.mark.parametrize("option", ["--out", "--markdown", "--figures"])
@pytest.mark.parametrize(
    ("name", "words"),
    [("file/x", "A file is where a folder should be"), ("folder", "cannot write"), ("file/x/y/z", "cannot write")],
)
def test_an_output_path_that_cannot_be_written_is_a_one_line_error(option, name, words, tmp_path, recorded, write_run):
    write_run(tmp_path / "runs" / "a", recorded("demo/40%/sam", trained=int(option == "--figures")))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    if option == "--figures" and name == "folder":
        (tmp_path / "folder" / "demo-40-loss.svg").mkdir()  # a folder is where a figure should be
    done = report(tmp_path / "runs", option, tmp_path / name)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: cannot write {tmp_path / name}")
    assert words in line
    assert "90.00, n = 1" in done.output  # the tables are still printed
    assert (tmp_path / "file").read_text() == "mine"
    assert not [*tmp_path.rglob("*.tmp")]


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "Free some space"), (errno.EACCES, "Make it writable"), (errno.EROFS, "Make it")],
)
def test_if_a_page_cannot_be_written_the_previous_one_stays(number, words, tmp_path, recorded, write_run, monkeypatch):
    write_run(tmp_path / "a", recorded("demo/40%/sam", trained=0))
    assert report(tmp_path).exit_code == 0
    before = (tmp_path / "report.html").read_bytes()
    write_run(tmp_path / "b", recorded("demo/40%/sam", 1, trained=0))

    def fail(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    done = report(tmp_path)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: cannot write {tmp_path / 'report.html'}: {os.strerror(number)}. {words}")
    assert (tmp_path / "report.html").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "report.html"]


def test_the_folders_of_the_runs_are_not_modified(tmp_path, recorded, write_run):
    folder = write_run(tmp_path / "runs" / "a", recorded("demo/40%/sam", trained=0))
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert report(tmp_path / "runs", "--out", tmp_path / "page.html").exit_code == 0
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]


def test_a_report_of_custom_data_alone_omits_the_tables_of_the_paper():
    own = collect(records.find_records(LEDGER.parent / "benchmarks/results/your_data"))
    assert own.tables
    assert report_page._open_tables(own) == []
    both = collect(
        [*records.find_records(LEDGER / "demo"), *records.find_records(LEDGER.parent / "benchmarks/results/your_data")]
    )
    assert len(report_page._open_tables(both)) > 5
