"""`bisam fit` on an ordinary table: numbers, categories, gaps, names and a number for each row."""

import csv
import json
import random
from collections import defaultdict

import pandas
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bisam.lab import fit, records
from bisam.lab.data.table_columns import TableInputs
from bisam.lab.models import build
from bisam.lab.report.runs import listing
from bisam.lab.tables import cells

HEAD = ["PassengerId", "Survived", "Pclass", "Name", "Sex", "Age", "Fare", "Cabin", "Embarked", "Boarded", "Ship"]
OPTIONS = ["--epochs", 15, "--rho", 0.05, "--seeds", "0", "--device", "cpu", "--methods", "sam", "--name", "ship"]


@pytest.fixture(scope="module")
def passengers(tmp_path_factory):
    """Invented rows in the form of a well-known list of passengers: who survives depends on sex, class and gaps."""
    draws, path = random.Random(0), tmp_path_factory.mktemp("table") / "passengers.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEAD)
        for row in range(300):
            sex, first = draws.choice(["male", "female"]), draws.choice([1, 2, 3])
            survived = (sex == "female") != (draws.random() < 0.05)
            age = "" if draws.random() < 0.2 else draws.randrange(1, 80)
            cabin = f"C{row}" if draws.random() < 0.3 else ""
            port = draws.choice(["S", "C", "Q", "S", ""])
            name = f"Person, No. {row}"
            fare = round(draws.uniform(5, 90), 2)
            writer.writerow(
                [row + 1, int(survived), first, name, sex, age, fare, cabin, port, "10.04.1912", "Invented"]
            )
    return path


@pytest.fixture(scope="module")
def fitted(bisam, passengers, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    done = bisam("fit", passengers, "--label", "Survived", "--runs", root, *OPTIONS)
    assert done.exit_code == 0, done.output
    return root / "ship", done.output


def test_it_trains_and_learns_from_a_category(fitted):
    folder, _ = fitted
    found = records.find(folder)
    assert [records.verify(record) for record in found] == [[], []]
    assert all(record.result["test_accuracy"] > 80 for record in found)  # the larger class has about half of the rows


def test_what_was_read_is_printed_once_and_kept_in_plan_receipts_and_page(fitted):
    folder, output = fitted
    lines = output.splitlines()
    (inputs,) = (line for line in lines if line.startswith("11 inputs: "))
    assert inputs == "11 inputs: numbers PassengerId, Pclass, Age, Fare; categories Sex, Embarked"
    (missing,) = (line for line in lines if line.startswith("missing in training rows: "))
    assert "Age in " in missing
    assert "Embarked in " in missing
    (left,) = (line for line in lines if line.startswith("left out: "))
    assert all(name in left for name in ("Name (", "Cabin (", "Boarded (dates)", "Ship (always 'Invented')"))
    (identifier,) = (line for line in lines if "looks like an identifier" in line)
    assert "PassengerId" in identifier
    assert "--columns Pclass,Sex,Age,Fare,Embarked" in identifier
    plan = json.loads((folder / "plan.json").read_text())
    for record in records.find(folder):
        assert {inputs, missing, left, identifier} <= {*record.receipt["data_notes"]} & {*plan["data"]}
    shown = listing(cells.collect(records.find(folder)).runs, defaultdict(str), lambda run: {}, ()).runs
    assert [left in dict(run["receipt"])["data notes"] for run in shown] == [True, True]


def test_the_same_command_resumes_and_other_columns_are_other_data(fitted, bisam, passengers):
    folder, output = fitted
    again = bisam("fit", passengers, "--label", "Survived", "--runs", folder.parent, *OPTIONS)
    assert "2 of 2 runs are done already" in again.output
    assert again.output.splitlines()[-1] == output.splitlines()[-1]
    columns = ["--columns", "Sex,Age"]
    other = bisam("fit", passengers, "--label", "Survived", *columns, "--runs", folder.parent, *OPTIONS)
    assert "was trained with other data: give another --name" in other.output
    own = bisam("fit", passengers, "--label", "Survived", *columns, "--runs", folder.parent, *OPTIONS[:-2])
    assert own.exit_code == 0, own.output
    assert "results: " in own.output
    assert "+columns=Sex-Age" in own.output


def test_the_inputs_that_were_written_predict_for_new_rows(fitted, passengers):
    folder, _ = fitted
    inputs = TableInputs.from_dict(json.loads((folder / "inputs.json").read_text()))
    model = build("perceptron", classes=2, features=len(inputs.names)).eval()
    model.load_state_dict(load_file(folder / "best.safetensors"))
    frame = pandas.read_csv(passengers)
    predicted = model(inputs.read(frame)).argmax(1)
    assert (predicted == torch.tensor(frame["Survived"].values)).float().mean() > 0.8
    alone = {"PassengerId": [1], "Pclass": [2], "Age": [None], "Fare": [8.0], "Sex": ["female"], "Embarked": ["X"]}
    assert model(inputs.read(pa.table(alone))).argmax(1).item() == 1


def test_a_data_frame_from_python_has_the_inputs_of_the_command(fitted, passengers, tmp_path, capsys):
    folder, _ = fitted
    frame = pandas.read_csv(passengers)
    x, y = frame.drop(columns="Survived"), frame["Survived"]
    found = fit(
        lambda classes: nn.Linear(11, classes), (x, y), methods="sam", rho=0.05, seeds=1, epochs=1, runs=tmp_path
    )
    plan = json.loads((folder / "plan.json").read_text())
    assert found.plan.data_checksum == plan["data_checksum"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "11 inputs: numbers PassengerId, Pclass, Age, Fare; categories Sex, Embarked" in printed
    assert "PassengerId looks like an identifier: to leave it out, drop it from the data frame" in printed
