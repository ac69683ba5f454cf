"""Which run belongs to which cell of which table."""

import math
import shlex
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bisam.lab.cli import app
from bisam.lab.cli import runs as cli_runs
from bisam.lab.config import Config
from bisam.lab.methods import uses
from bisam.lab.recipes import RECIPES, find_recipe
from bisam.lab.records import Record
from bisam.lab.tables import cells
from bisam.lab.tables.cells import ResultTable, borrow, collect, fill, with_equal_runs
from bisam.lab.training.jobs import jobs_of

EVERY_CELL = [(name, *cell) for name, make in RECIPES.items() for cell in make().cells]
every_cell = st.sampled_from(EVERY_CELL)


def only_table(*records):
    found = collect(records)
    assert (found.others, found.unreadable) == ([], [])
    (table,) = found.tables
    return table


def only_cell(table):
    (cell,) = table.runs
    return cell


def short(value):
    return repr(value)[:12]


def why_unreadable(record):
    found = collect([record])
    ((unreadable, reason),) = found.unreadable
    assert unreadable is record
    assert not found.runs
    return reason


# The cell of a run.


@pytest.mark.parametrize("name", RECIPES)
def test_every_run_of_a_recipe_is_assigned_to_its_own_cell(name, recorded):
    recipe = find_recipe(name)
    runs = [recorded(f"{name}/{row}/{method}", seed) for row, method in recipe.cells for seed in (3, 0)]
    table = only_table(*runs)
    assert (table.name, table.title, table.changes) == (name, recipe.title, "")
    assert table.rows == recipe.rows
    assert {*table.runs} == {*recipe.cells}
    for (row, method), by_seed in table.runs.items():
        assert [*by_seed] == [0, 3]
        for seed, run in by_seed.items():
            assert run.config == replace(recipe.cells[row, method], seed=seed)


def test_tables_are_ordered_as_the_recipes_with_changed_tables_last(recorded):
    runs = [
        recorded("label_noise/20%/sam"),
        recorded("demo/40%/sam", lr=0.01),
        recorded("cifar10/resnet56/sam", rho=0.1),
        recorded("imagenet/resnet50/sam"),
        recorded("demo/40%/sgd"),
    ]
    names = [table.name for table in collect(runs).tables]
    assert names == ["demo", "imagenet", "label_noise", "demo, lr=0.01", "cifar10, rho=0.1"]


def test_a_table_returns_its_runs_by_row_and_by_method(recorded):
    runs = [recorded(f"label_noise/{row}/{method}") for row in ("20%", "80%") for method in ("sgd", "bisam-log")]
    table = only_table(*runs)
    assert table.rows == ["20%", "80%"]
    assert [run.config.method for run in table.of_row("80%")] == ["sgd", "bisam-log"]
    assert [run.config.noise for run in table.of_method("bisam-log")] == [0.2, 0.8]
    assert table.of("40%", "sgd") == table.of_row("40%") == table.of_method("sam") == []


def test_runs_of_a_cell_are_ordered_by_seed(recorded):
    table = only_table(*(recorded("demo/40%/sam", seed) for seed in (2, 0, 1)))
    assert [run.config.seed for run in table.of("40%", "sam")] == [0, 1, 2]


# Runs with changed settings.


def test_runs_with_changed_settings_form_a_separate_table_whose_title_lists_the_changes(recorded):
    found = collect([recorded("demo/40%/sam"), recorded("demo/40%/sam", lr=0.01, flip=True, mu=2.0)])
    plain, changed = found.tables
    assert plain.title == "Handwritten digits, 40 % of the labels wrong"
    assert changed.title == "Handwritten digits, 40 % of the labels wrong, with lr=0.01, mu=2, flip=true"
    assert changed.name == "demo, lr=0.01, mu=2, flip=true"
    assert [only_cell(table) for table in (plain, changed)] == [("40%", "sam")] * 2


def test_changes_that_agree_in_six_digits_still_form_two_tables(recorded):
    found = collect(recorded("demo/40%/sam", lr=lr) for lr in (0.0123456781, 0.0123456782))
    assert [table.changes for table in found.tables] == ["lr=0.0123456781", "lr=0.0123456782"]


@pytest.mark.parametrize("numerics", [{"compile": True}, {"deterministic": True}])
def test_compile_and_deterministic_do_not_make_a_separate_table(numerics, recorded):
    table = only_table(recorded("demo/40%/sam", 0), recorded("demo/40%/sam", 1, **numerics))
    assert table.changes == ""
    assert [*table.runs["40%", "sam"]] == [0, 1]


@pytest.mark.parametrize("rho", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("row", find_recipe("label_noise").rows)
def test_a_run_with_any_rho_stays_in_the_row_of_its_noise_rate(row, rho, recorded):
    """The recipe has another ρ at 80 %: a run with the ρ of other rows is still not assigned to them."""
    table = only_table(recorded(f"label_noise/{row}/sam", rho=rho))
    assert only_cell(table) == (row, "sam")
    own = 0.01 if row == "80%" else 0.05
    assert table.changes == ("" if rho == own else f"rho={rho}")


def test_a_run_with_the_model_of_another_row_is_assigned_to_that_row(recorded):
    table = only_table(recorded("cifar10/resnet56/sam", model="vgg19bn"))
    assert (only_cell(table), table.changes) == (("vgg19bn", "sam"), "")


@pytest.mark.parametrize("row", find_recipe("cifar10").rows)
@pytest.mark.parametrize(
    "changed", [{"model": "resnet20"}, {"data": "digits", "model": "digitsnet", "compile": "true"}]
)
def test_a_run_with_a_model_of_no_row_stays_in_the_row_it_was_trained_for(row, changed):
    (job,) = jobs_of(find_recipe(f"cifar10/{row}/sam"), [1], changed, Path("runs"))
    record = Record(job.folder, job.config.as_dict())
    table = only_table(record)
    assert only_cell(table) == (row, "sam")
    assert command_of(record).startswith(f"bisam train cifar10/{row}/sam --seeds 1 --set ")
    assert trained_by(command_of(record)) == [job.config]


def test_the_row_is_also_found_through_a_link_to_the_run_folder(tmp_path):
    (job,) = jobs_of(find_recipe("cifar10/vgg19bn/sam"), [1], {"model": "resnet20"}, tmp_path)
    (tmp_path / "stored").mkdir()
    job.folder.parent.mkdir()
    job.folder.symlink_to(tmp_path / "stored")
    (tmp_path / "link").symlink_to(job.folder)
    for folder in (job.folder, tmp_path / "link"):
        row = only_cell(only_table(Record(folder, job.config.as_dict())))[0]
        assert row == ("vgg19bn" if folder == job.folder else "densenet121")
    job.folder.unlink()
    (tmp_path / "stored").rename(job.folder)
    assert only_cell(only_table(Record(tmp_path / "link", job.config.as_dict())))[0] == "vgg19bn"


def test_sam_with_the_epochs_of_sgd_is_a_run_of_sam_with_changed_epochs(recorded):
    table = only_table(recorded("cifar10/resnet56/sam", epochs=400))
    assert (only_cell(table), table.changes) == (("resnet56", "sam"), "epochs=400")


numbers = {
    "epochs": st.integers(1, 100_000),
    "batch": st.integers(1, 1_000_000),
    "lr": st.floats(0, 1000),
    "schedule": st.sampled_from(["cosine", "linear"]),
    "warmup_epochs": st.integers(0, 1),  # the epochs may be 1
    "warmup": st.floats(0, 1),
    "epoch_steps": st.none() | st.integers(1, 1_000_000),
    "optimizer": st.sampled_from(["sgd", "adamw"]),
    "clip_norm": st.none() | st.floats(1e-9, 1e9),
    "measures": st.sampled_from(["accuracy", "mcc", "accuracy,balanced_accuracy,macro_f1"]),
    "size": st.integers(8, 1024),
    "pixels": st.sampled_from(["data", "imagenet", "half"]),
    "length": st.integers(2, 8192),
    "momentum": st.floats(0, 1),
    "weight_decay": st.floats(0, 10),
    "label_smoothing": st.floats(0, 0.999),
    "rho": st.floats(0, 1000),
    "mu": st.none() | st.floats(1e-6, 1e6),
    "alpha": st.floats(1e-6, 1e6),
    "eta": st.floats(0, 100),
    "beta": st.floats(1e-6, 1),
    "gamma": st.floats(1e-6, 1),
    "micro_batch": st.none() | st.integers(1, 1_000_000),
    "every": st.none() | st.integers(1, 1_000_000),
    "start": st.floats(0, 0.2),  # less than every stop, of a cell or drawn below
    "stop": st.floats(0.95, 1),
    "validation": st.floats(0.001, 0.9),
    "validation_noise": st.booleans(),
    "select": st.sampled_from(["best", "last"]),
    "padding": st.integers(0, 64),
    "flip": st.booleans(),
    "cutout": st.integers(0, 512),
    "cutout_probability": st.floats(0, 1),
    "partial_data": st.booleans(),
    "precision": st.sampled_from(["bf16", "fp32"]),
    "compile": st.booleans(),
    "deterministic": st.booleans(),
}
part_of_a_row = {"data": st.sampled_from(["cifar10", "digits"]), "model": st.sampled_from(["vgg19bn", "resnet32"])}
part_of_a_row["noise"] = st.sampled_from([0.0, 0.2, 0.35])


def changes(*, with_row):
    possible = {**numbers, **(part_of_a_row if with_row else {})}
    return st.fixed_dictionaries({}, optional=possible).filter(lambda found: len(found) < 6)


def test_the_generated_changes_cover_all_fields():
    assert {*numbers, *part_of_a_row, "recipe", "title", "row", "method", "seed"} == {
        field.name for field in fields(Config)
    }


@settings(max_examples=60)
@given(cell=every_cell, seed=st.integers(0, 2**31), changed=changes(with_row=False))
def test_a_run_with_any_changes_stays_in_its_cell_and_the_title_lists_each_change(cell, seed, changed):
    name, row, method = cell
    own = find_recipe(name).cells[row, method]
    config = replace(own, seed=seed, **changed)
    table = only_table(Record(Path("a"), config.as_dict()))
    assert only_cell(table) == (row, method)
    listed = dict(change.split("=") for change in table.changes.split(", ")) if table.changes else {}
    expected = {field for field in changed if getattr(own, field) != changed[field]} - {"compile", "deterministic"}
    assert {*listed} == expected
    assert table.title.endswith(table.changes)
    assert own.with_changes(listed) == replace(config, seed=0, compile=False, deterministic=False)


@settings(max_examples=60)
@given(cell=every_cell, seed=st.integers(0, 2**31), changed=changes(with_row=True))
@example(cell=("label_noise", "80%", "sgd"), seed=0, changed={"noise": 0.0})  # the ρ of another row, unused by SGD
def test_the_command_of_a_run_trains_the_same_configuration_again(cell, seed, changed):
    name, row, method = cell
    own = find_recipe(name).cells[row, method]
    config = replace(own, seed=seed, **changed)
    same = {field.name: getattr(own, field.name) for field in fields(Config) if not uses(method, field.name)}
    again = trained_by(command_of(Record(Path("a"), config.as_dict())))
    assert [replace(one, **same) for one in again] == [replace(config, **same)]


def command_of(record):
    (run,) = collect([record]).runs
    return cells.command(run)


def trained_by(command):
    """The configurations that the command line trains."""
    program, *arguments = shlex.split(command)
    assert program == "bisam"
    jobs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_runs.runs, "run", lambda found, *_, **__: jobs.extend(found))
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return [job.config for job in jobs]


def test_the_command_of_a_run_names_only_its_cell_seed_and_changes(recorded):
    assert command_of(recorded("demo/40%/sam", 3)) == "bisam train demo/40%/sam --seeds 3"
    changed = recorded("label_noise/80%/bisam-log", rho=0.05, compile=True, partial_data=True)
    words = "bisam train label_noise/80%/bisam-log --seeds 0 --set rho=0.05 --partial-data --set compile=true"
    assert command_of(changed) == words


def test_shell_syntax_in_a_name_is_quoted_in_the_command(recorded):
    command = command_of(recorded("demo/40%/sam", model="x; rm -rf ~ $(id)"))
    assert shlex.split(command)[-1] == "model=x; rm -rf ~ $(id)"


def test_runs_of_an_unregistered_recipe_have_no_command(recorded):
    assert command_of(recorded("demo/40%/sam", recipe="own")) == ""


# Runs that are not counted.


def test_a_second_run_of_the_same_cell_and_seed_is_not_counted(recorded):
    first, second = (recorded("demo/40%/sam", accuracy=a, folder=Path(f)) for f, a in [("a", 90.0), ("b", 80.0)])
    found = collect([first, second])
    (table,) = found.tables
    assert table.measured("40%", "sam") == {0: 90.0}
    assert [run.record for run in found.others] == [second]
    assert len(found.runs) == 2


@pytest.mark.parametrize("order", [1, -1])
def test_a_finished_run_counts_rather_than_an_unfinished_one(order, recorded):
    done, unfinished = recorded("demo/40%/sam", folder=Path("a")), recorded("demo/40%/sam", accuracy=None)
    found = collect([done, unfinished][::order])
    (table,) = found.tables
    assert table.measured("40%", "sam") == {0: 90.0}
    assert [run.record for run in found.others] == [unfinished]


def test_a_diverged_run_is_not_replaced_by_a_repetition_that_finished(recorded):
    """Repeating a run until it finishes does not hide its first outcome."""
    diverged = recorded("demo/40%/sam", status="diverged", folder=Path("a"))
    found = collect([diverged, recorded("demo/40%/sam")])
    assert found.tables[0].of("40%", "sam")[0].record is diverged


@pytest.mark.parametrize("order", [1, -1])
def test_a_run_marked_as_not_counted_is_in_no_table_and_another_run_takes_its_place(order, recorded):
    faulty = replace(recorded("demo/40%/sam", accuracy=99.0, folder=Path("a")), not_counted="it saw the test data")
    again = recorded("demo/40%/sam", accuracy=90.0)
    found = collect([faulty, again][::order])
    (table,) = found.tables
    assert table.measured("40%", "sam") == {0: 90.0}
    (run,) = found.others
    assert (run.record, run.status, run.measured()) == (faulty, "not counted", None)
    assert collect([faulty]).tables == []
    assert fill(find_recipe("demo"), [faulty]).runs == {}


@pytest.mark.parametrize("changed", [{"recipe": "own"}, {"recipe": "later"}, {"method": "asam"}, {"method": "new"}])
def test_a_run_that_belongs_to_no_table_is_listed_among_the_others(changed, recorded):
    found = collect([recorded("demo/40%/sam", **changed)])
    assert found.tables == found.unreadable == []
    (run,) = found.others
    assert cells.command(run) == ""


# Records of older versions, and invalid records.


def test_fields_missing_in_an_older_configuration_get_the_values_of_its_version(recorded):
    whole = recorded("cifar10/resnet56/sam")
    needed = {"recipe", "data", "model", "method", "seed", "epochs"}
    older = replace(whole, config={name: value for name, value in whole.config.items() if name in needed})
    table = only_table(older)
    assert (only_cell(table), table.changes) == (("resnet56", "sam"), "label_smoothing=0.1, cutout=0")
    expected = replace(Config.from_dict(whole.config), label_smoothing=0.1, cutout=0)
    assert table.of("resnet56", "sam")[0].config == expected


@pytest.mark.parametrize(("cutout", "changes"), [(16, "cutout_probability=1"), (0, "cutout=0")])
def test_a_configuration_without_a_cutout_probability_means_cutout_of_every_image_or_none(cutout, changes, recorded):
    record = recorded("cifar10/resnet56/sam", cutout=cutout)
    del record.config["cutout_probability"]
    assert only_table(record).changes == changes


@pytest.mark.parametrize("name", ["recipe", "data", "model", "method", "seed", "epochs"])
def test_a_configuration_that_lacks_a_required_field_is_unreadable(name, recorded):
    whole = recorded("demo/40%/sam")
    record = replace(whole, config={key: value for key, value in whole.config.items() if key != name})
    assert why_unreadable(record) == f"its configuration lacks {name}"


def test_an_unreadable_configuration_is_listed_with_the_reason():
    assert why_unreadable(Record(Path("a"), problems=["config.json: there is none"])) == "config.json: there is none"


def test_an_unknown_field_of_a_configuration_is_named(recorded):
    record = recorded("demo/40%/sam")
    record.config["nesterov"] = True
    assert "'nesterov'" in why_unreadable(record)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("recipe", ["demo"]),
        ("recipe", None),
        ("data", {"a": 1}),
        ("model", 56),
        ("model", "resnet\n56"),
        ("model", "\x1b[31mresnet56"),
        ("model", "\ud800"),
        ("method", None),
        ("seed", "0"),
        ("seed", True),
        ("seed", 0.0),
        ("seed", None),
        ("epochs", 3.0),
        ("epochs", "x"),
        ("lr", "0.1"),
        ("lr", None),
        ("lr", False),
        ("mu", "none"),
        ("micro_batch", 2.0),
        ("flip", 1),
        ("compile", "yes"),
    ],
)
def test_a_field_with_an_unsupported_value_is_named(name, value, recorded):
    record = recorded("demo/40%/sam")
    record.config[name] = value
    why = why_unreadable(record)
    assert f"values that this version does not support: '{name}' is " in why
    assert why.isprintable()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        pytest.param("seed", 10**400, id="seed-huge"),
        ("epochs", 0),
        ("lr", math.nan),
        ("lr", -math.inf),
        ("noise", 1.5),
        ("select", ""),
    ],
)
def test_a_field_out_of_its_range_is_named(name, value, recorded):
    record = recorded("demo/40%/sam")
    record.config[name] = value
    assert why_unreadable(record).startswith(f"its configuration is not valid: {name} must ")


def test_an_integer_is_accepted_for_a_float_field(recorded):
    record = recorded("adaptive/resnet56/asam")
    record.config.update(rho=2, noise=0, eta=0)
    table = only_table(record)
    assert (only_cell(table), table.changes) == (("resnet56", "asam"), "")


# The status and the results of a run.


def run_of(record):
    (run,) = collect([record]).runs
    return run


def test_an_unfinished_run_reports_its_progress(recorded):
    run = run_of(recorded("demo/40%/sam", accuracy=None, trained=2))
    assert run.status == "2 of 30 epochs"
    assert run.measured() is None


def test_a_diverged_run_has_no_accuracy_even_if_its_result_contains_one(recorded):
    run = run_of(recorded("demo/40%/sam", accuracy=93.0, status="diverged"))
    assert run.status == "diverged"
    assert run.measured() is None
    assert only_table(run.record).measured("40%", "sam") == {}


@pytest.mark.parametrize(
    "value", [None, "93", True, math.nan, math.inf, -0.1, 100.1, 1e300, 10**400, [93.0]], ids=short
)
def test_a_value_that_is_not_an_accuracy_in_per_cent_is_rejected(value, recorded):
    finished = recorded("demo/40%/sam", result={"test_accuracy": value})
    assert why_unreadable(finished) == "its result has no test accuracy"
    other = run_of(recorded("demo/40%/sam", result={"validation_accuracy": value}))
    assert other.measured("validation_accuracy") is None
    assert other.measured() == 90.0


@pytest.mark.parametrize("status", ["stopped", None, 3, ["done"]])
def test_a_result_with_an_unknown_status_is_unreadable(status, recorded):
    record = recorded("demo/40%/sam", result={"status": status})
    assert why_unreadable(record) == f"its result has the status {status!r}"
    record.result["status"] = "x" * 1000
    assert len(why_unreadable(record)) < 100


@pytest.mark.parametrize("value", [0, 100, 93.5])
def test_accuracies_from_0_to_100_are_accepted(value, recorded):
    assert run_of(recorded("demo/40%/sam", accuracy=value)).measured() == value


def test_the_time_of_a_step_is_divided_by_the_number_of_runs_that_share_the_device(recorded):
    record = recorded("demo/40%/sam")  # 64 samples in a step, 1000 in a second
    assert run_of(record).milliseconds == pytest.approx(64.0)
    record.metrics[-1]["together"] = 4
    assert run_of(record).milliseconds == pytest.approx(16.0)
    record.metrics[-1]["alike"] = True
    assert run_of(record).milliseconds == pytest.approx(16.0)
    record.metrics[-1]["alike"] = False  # SGD beside SAM: their shares of the device are unknown
    assert run_of(record).milliseconds is None


def test_the_number_of_runs_that_share_the_device_is_given_as_a_range(recorded):
    record = recorded("demo/40%/sam", trained=3)
    assert run_of(record).together == "1"
    for row, count in zip(record.metrics, [8, 7, 1], strict=True):
        row["together"] = count
    assert run_of(record).together == "1 to 8"
    assert run_of(recorded("demo/40%/sam", trained=0)).together == "1"


@pytest.mark.parametrize("value", [None, "x", 0, 0.0, math.nan, math.inf, 1e-320, 10**400, True, {}], ids=short)
def test_an_invalid_speed_gives_no_time_per_step(value, recorded):
    record = recorded("demo/40%/sam")
    record.metrics[-1]["samples_per_second"] = value
    assert run_of(record).milliseconds is None


def test_a_run_without_a_finished_epoch_has_no_values_of_a_last_epoch(recorded):
    run = run_of(recorded("demo/40%/sam", accuracy=None, trained=0))
    assert (run.last("flips"), run.milliseconds, run.status) == (None, None, "0 of 30 epochs")


# The table that `bisam train` shows when it is done.


def test_trained_runs_fill_their_cells_and_the_title_lists_their_changes(recorded):
    runs = [recorded("demo/40%/sgd", lr=0.01), recorded("demo/40%/sam", lr=0.01)]
    table = fill(find_recipe("demo"), runs)
    assert table.title.endswith(", with lr=0.01")
    assert {*table.runs} == {("40%", "sgd"), ("40%", "sam")}


@pytest.mark.parametrize(
    ("part", "changed"),
    [("label_noise/80%/sam", {"rho": 0.05}), ("cifar10/resnet56/sam", {"model": "vgg19bn"}), ("demo", {"noise": 0.2})],
)
def test_trained_runs_are_in_the_requested_part_of_the_table(part, changed, recorded):
    recipe = find_recipe(part).only(methods=["sam"])
    table = fill(recipe, [recorded(f"{recipe.name}/{recipe.rows[0]}/sam", **changed)])
    assert table.rows == recipe.rows
    assert table.measured(recipe.rows[0], "sam") == {0: 90.0}
    assert table.changes == "".join(f"{name}={value}" for name, value in changed.items())


def test_unreadable_records_and_those_of_no_cell_fill_nothing(recorded):
    table = fill(find_recipe("demo"), [Record(Path("a")), recorded("demo/40%/sam", method="asam")])
    assert not table.runs
    assert not table.changes


def test_a_changed_table_includes_unchanged_runs_that_already_have_the_changed_value(recorded):
    """`--set epochs=200` changes SGD only: the other methods of this recipe have 200 epochs anyway."""
    runs = [recorded("cifar10/resnet56/sgd", epochs=200), recorded("cifar10/resnet56/sam")]
    found = collect([*runs, recorded("cifar10/resnet56/sgd", 1)])
    assert [(table.changes, [method for _, method in table.runs]) for table in found.tables] == [
        ("", ["sam", "sgd"]),
        ("epochs=200", ["sgd", "sam"]),
    ]
    assert len(found.runs) == 3


def test_a_changed_table_includes_no_unchanged_runs_of_other_rows(recorded):
    """The recipe's ρ at 80 % is 0.01: that row is not shown beside a 40 % row whose ρ was changed to 0.01."""
    found = collect([recorded("label_noise/40%/sam", rho=0.01), recorded("label_noise/80%/sam")])
    assert [(table.changes, [*table.runs]) for table in found.tables] == [
        ("", [("80%", "sam")]),
        ("rho=0.01", [("40%", "sam")]),
    ]


# Settings that a method does not use.


def test_runs_of_methods_that_do_not_use_a_changed_setting_are_unaffected():
    changes = {"rho": "0.3", "lr": "0.01"}
    own, rho, both = (
        {job.config.method: job for job in jobs_of(find_recipe("demo"), [0], some, Path("runs"))}
        for some in ({}, {"rho": "0.3"}, changes)
    )
    assert rho["sgd"] == own["sgd"]
    assert {method: job.folder.name for method, job in rho.items() if method != "sgd"} == {
        method: f"noise40-{method}-seed0+rho=0.3" for method in own if method != "sgd"
    }
    assert both["sgd"].folder.name == "noise40-sgd-seed0+lr=0.01"
    assert (both["sgd"].config.rho, both["sam"].config.rho) == (own["sgd"].config.rho, 0.3)


@pytest.mark.parametrize(
    ("part", "name"), [("demo/40%/sgd", "rho"), ("demo/40%/sam", "alpha"), ("cifar10/resnet56/bisam-log", "beta")]
)
def test_a_change_that_no_method_uses_is_refused(part, name):
    with pytest.raises(ValueError, match=rf"{part.split('/')[-1]} does not use {name}: remove --set {name}="):
        jobs_of(find_recipe(part), [0], {"epochs": "3", name: "1"}, Path("runs"))


def test_a_table_with_another_rho_includes_the_unchanged_sgd_runs_for_comparison(recorded):
    runs = [recorded(f"label_noise/{row}/sgd") for row in ("20%", "40%")]
    runs += [recorded("label_noise/40%/sam"), recorded("label_noise/40%/sam", rho=0.3)]
    plain, changed = collect(runs).tables
    assert {*plain.runs} == {("20%", "sgd"), ("40%", "sgd"), ("40%", "sam")}
    assert changed.changes == "rho=0.3"
    assert {*changed.runs} == {("40%", "sgd"), ("40%", "sam")}
    assert changed.of("40%", "sgd")[0].record is runs[1]
    assert changed.of("40%", "sam")[0].config.rho == 0.3


def test_a_table_with_two_changes_includes_the_sgd_runs_with_the_change_that_sgd_uses(recorded):
    runs = [recorded("demo/40%/sgd", epochs=3), recorded("demo/40%/sam", rho=0.3, epochs=3)]
    of_sgd, of_both = collect([*runs, recorded("demo/40%/sgd", epochs=3, lr=0.3)]).tables[::2]
    assert of_sgd.changes == "epochs=3"
    assert {*of_sgd.runs} == {("40%", "sgd")}
    assert of_both.changes == "epochs=3, rho=0.3"
    assert [run.record for run in of_both.of_row("40%")] == runs
    assert [run.record for run in of_both.borrowed] == runs[:1]


def test_a_changed_table_includes_no_runs_of_another_recipe(recorded):
    """Even if the row has the same name and the run has the changed value."""
    of_both = recorded("cifar10/resnet56/sam", rho=0.3, epochs=3)
    table = collect([of_both, recorded("cifar100/resnet56/sgd", epochs=3)]).tables[0]
    assert (table.name, table.borrowed) == ("cifar10, epochs=3, rho=0.3", [])
    assert [run.record for run in table.of_row("resnet56")] == [of_both]


def test_a_custom_table_is_built_from_the_unchanged_run_in_any_order_of_records(recorded):
    own = {"recipe": "mine", "title": "Mine", "row": "net"}
    changed = recorded("demo/40%/sam", 0, folder=Path("net-sam-seed0+lr=0.3"), lr=0.3, **own)
    plain = recorded("demo/40%/sam", 1, folder=Path("net-sam-seed1"), lr=0.2, compile=True, **own)
    for order in ([changed, plain], [plain, changed]):
        tables = collect(order).tables
        assert [table.name for table in tables] == ["mine", "mine, lr=0.3"]
        (made,) = {id(table.recipe): table.recipe for table in tables}.values()
        config = made.cells["net", "sam"]
        assert (config.lr, config.seed, config.compile, made.seeds) == (0.2, 0, False, 2)


def test_a_custom_table_lists_registered_methods_in_their_order_then_unregistered_ones(recorded):
    records = [recorded(f"demo/40%/{method}", recipe="mine", title="Mine", row="a") for method in ("sam", "sgd")]
    foreign = recorded("demo/40%/sam", recipe="mine", title="Mine", row="a")
    foreign.config["method"] = "other"
    found = collect([foreign, *records])
    assert [table.recipe.methods for table in found.tables] == [["sgd", "sam", "other"]]
    assert [table.measured("a", "other") for table in found.tables] == [{0: 90.0}]
    assert found.others == []


def test_a_table_with_another_rho_excludes_sgd_runs_with_changed_epochs(recorded):
    found = collect([recorded("cifar10/resnet56/sam", rho=0.1), recorded("cifar10/resnet56/sgd", epochs=200)])
    (table,) = (table for table in found.tables if table.changes == "rho=0.1")
    assert table.of("resnet56", "sgd") == []


def test_a_table_with_changed_epochs_excludes_the_unchanged_sgd_runs(recorded):
    runs = [recorded("demo/40%/sgd"), recorded("demo/40%/sam", rho=0.3, epochs=90)]
    assert [[*table.runs] for table in collect(runs).tables] == [[("40%", "sgd")], [("40%", "sam")]]


def test_the_command_of_a_run_omits_settings_that_its_method_does_not_use(recorded):
    """Older versions recorded the ρ of a changed table in its SGD runs too."""
    changed = recorded("demo/40%/sgd", rho=0.3, epochs=3)
    assert command_of(changed) == "bisam train demo/40%/sgd --seeds 0 --set epochs=3"


def test_a_table_borrows_runs_with_equal_settings_from_another_table_and_keeps_its_own(recorded):
    own = recorded("frontier/resnet32/sam", 0, 90.0)
    theirs = [recorded("label_noise/0%/sam", seed, 80.0 + seed, compile=True) for seed in (0, 1)]
    others = [recorded("label_noise/0%/sam", 2, 70.0, rho=0.1), recorded("label_noise/20%/sam", 3, 70.0)]
    uncounted = replace(recorded("label_noise/0%/sam", 4, 70.0), not_counted="The wrong labels.")
    table = fill(find_recipe("frontier"), [own, *theirs, *others, uncounted])
    assert table.measured("resnet32", "sam") == {0: 90.0, 1: 81.0}
    assert [run.record for run in table.borrowed] == theirs[1:]
    assert {cell for cell, runs in table.runs.items() if runs} == {("resnet32", "sam")}
    borrowing = ResultTable(find_recipe("frontier"), "")
    borrow(borrowing, collect([*theirs, *others, uncounted]).runs)
    assert {cell: [*runs] for cell, runs in borrowing.runs.items() if runs} == {("resnet32", "sam"): [0, 1]}


def test_a_borrowed_finished_run_counts_rather_than_one_in_progress(recorded):
    running = replace(recorded("label_noise/0%/sam", 0), result=None)
    done = recorded("label_noise/0%/sam", 0, 80.0, compile=True)
    for order in ([running, done], [done, running]):
        assert fill(find_recipe("frontier"), order).measured("resnet32", "sam") == {0: 80.0}


def test_only_a_table_whose_rows_have_different_methods_is_shown_with_equal_runs_of_others(recorded):
    runs = collect([recorded("frontier/resnet32-late10/sam"), recorded("label_noise/0%/sam", 1, 80.0)]).runs
    noise, frontier = (collect([run.record]).tables[0] for run in runs)
    shown = with_equal_runs(frontier, runs)
    assert {cell: [*of] for cell, of in shown.runs.items() if of} == {
        ("resnet32-late10", "sam"): [0], ("resnet32", "sam"): [1],
    }  # fmt: skip
    assert [*frontier.runs] == [("resnet32-late10", "sam")]
    assert with_equal_runs(noise, runs) is noise
    (changed,) = collect([recorded("frontier/resnet32-late10/sam", epochs=3)]).tables
    assert with_equal_runs(changed, runs) is changed


def test_custom_tables_with_the_same_title_are_distinguished_by_their_folders(recorded):
    names = {"first": "Mine", "second": "Mine", "third": "Another"}
    records = [
        recorded("demo/40%/sam", seed, recipe=name, title=title, row="a", folder=Path("runs") / name / "a")
        for seed, (name, title) in enumerate(names.items())
    ]
    titles = {table.recipe.name: table.title for table in collect(records).tables}
    assert titles == {"first": "Mine (first)", "second": "Mine (second)", "third": "Another"}
