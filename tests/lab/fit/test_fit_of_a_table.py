"""`bisam fit` on an ordinary table: numbers, categories, gaps, names and an identifier for each row."""

import csv
import json
import random
from collections import defaultdict

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bisam.lab import fit, load, records
from bisam.lab.data.own import open_dataset
from bisam.lab.models import build
from bisam.lab.predicting.predictions import predictions
from bisam.lab.report.runs import listing
from bisam.lab.tables import cells

HEAD = ["PassengerId", "Survived", "Pclass", "Name", "Sex", "Age", "Fare", "Cabin", "Embarked", "Boarded", "Ship"]
OPTIONS = ["--epochs", 15, "--rho", 0.05, "--seeds", "0", "--device", "cpu", "--methods", "sam", "--name", "ship"]


@pytest.fixture(scope="module")
def passengers(tmp_path_factory):
    """Invented rows in the form of a well-known list of passengers: survival depends on sex, with 5 % exceptions."""
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
                [3 * row + 1, int(survived), first, name, sex, age, fare, cabin, port, "10.04.1912", "Invented"]
            )
    return path


@pytest.fixture(scope="module")
def fitted(bisam, passengers, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    done = bisam("fit", passengers, "--label", "Survived", "--runs", root, *OPTIONS)
    assert done.exit_code == 0, done.output
    return root / "ship", done.output


def test_a_fit_learns_from_a_category(fitted):
    folder, _ = fitted
    found = records.find_records(folder)
    assert [records.verify(record) for record in found] == [[], []]
    assert all(record.result["test_accuracy"] > 80 for record in found)  # guessing gives about 50


def test_notes_on_the_columns_are_printed_once_and_kept_in_plan_receipts_and_report(fitted):
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
    for record in records.find_records(folder):
        assert {inputs, missing, left, identifier} <= {*record.receipt["data_notes"]} & {*plan["data"]}
    shown = listing(cells.collect(records.find_records(folder)).runs, defaultdict(str), lambda run: {}, ()).runs
    assert [left in dict(run["receipt"])["data notes"] for run in shown] == [True, True]


def test_repeating_the_command_trains_nothing_and_other_columns_are_other_data(fitted, bisam, passengers):
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


def inputs_by_hand(rows, train):
    """The 11 inputs of rows of texts: a missing age is the median of the training rows, a missing port a category."""
    median = np.median([float(row["Age"]) for row in train if row["Age"]])
    found = []
    for row in rows:
        sexes = [row["Sex"] == one for one in ("female", "male")]
        ports = [row["Embarked"] == one for one in ("C", "Q", "S", "")]
        age = [row["Age"] or median, not row["Age"]]
        found.append([row["PassengerId"], row["Pclass"], *sexes, *age, row["Fare"], *ports])
    return torch.tensor([[float(value) for value in row] for row in found])


def test_predictions_for_new_rows_equal_the_model_applied_by_hand(fitted, bisam, passengers, tmp_path):
    folder, _ = fitted
    with passengers.open(newline="") as file:
        old = [*csv.DictReader(file)]
    held_out = {*open_dataset(f"{passengers}?label=Survived").test.inputs[:, 0].tolist()}
    train = [row for row in old if float(row["PassengerId"]) not in held_out]
    assert len(train) == 240
    new = [{**row} for row in old[:30]]
    new[0]["Embarked"], new[1]["Age"], new[2]["Age"] = "X", "", "35"
    order = ["Deck", "Embarked", "Survived", "Fare", "Sex", "PassengerId", "Age", "Pclass"]
    with (tmp_path / "new.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, order, restval="upper", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(new)
    model = build("perceptron", classes=2, features=11).eval()
    model.load_state_dict(load_file(folder / "best.safetensors"))
    with torch.no_grad():
        expected = model(inputs_by_hand(new, train)).softmax(1)

    done = bisam("predict", folder, tmp_path / "new.csv", "--out", tmp_path / "out.csv", "--device", "cpu")
    assert done.exit_code == 0, done.output
    with (tmp_path / "out.csv").open(newline="") as file:
        found = [*csv.DictReader(file)]
    assert [row["predicted"] for row in found] == [str(number) for number in expected.argmax(1).tolist()]
    for row, each in zip(found, expected.tolist(), strict=True):
        assert [float(row[f"probability of {name}"]) for name in "01"] == pytest.approx(each, abs=1e-6)
    right = sum(row["predicted"] == one["Survived"] for row, one in zip(found, new, strict=True))
    assert f"accuracy {100 * right / 30:.2f} %" in done.output
    assert "of 30 samples with labels" in done.output

    trained, frame = load(folder), pandas.read_csv(tmp_path / "new.csv")
    frame.index = [f"row {number}" for number in range(30)]
    for rows in (frame, frame.drop(columns=["Survived", "Deck"]), pa.table(frame)):
        assert torch.allclose(trained.probabilities(rows), expected, atol=1e-6)


def test_columns_that_are_missing_or_of_another_type_are_refused_in_predictions(fitted, passengers):
    trained, frame = load(fitted[0]), pandas.read_csv(passengers)
    with pytest.raises(ValueError, match="the data has no columns 'Age', 'Embarked', which the model was trained with"):
        trained.predict(frame.drop(columns=["Age", "Embarked"]))
    with pytest.raises(ValueError, match="column 'Age' has texts, and numbers in the training part: correct it"):
        trained.predict(frame.assign(Age="old"))
    with pytest.raises(ValueError, match="column 'Sex' has numbers, and texts in the training part: correct it"):
        trained.predict(frame.assign(Sex=1))
    with pytest.raises(ValueError, match="is an array, and the model was trained on columns with categories"):
        trained.predict(np.zeros((2, 11)))
    with pytest.raises(ValueError, match="give numbers, uint8 images, or a list of texts"):
        trained.predict(frame["Sex"])


def test_a_data_frame_from_python_gets_the_same_inputs_as_the_csv_of_the_command(fitted, passengers, tmp_path, capsys):
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
    trained = load(found.folder, lambda classes: nn.Linear(11, classes))
    assert torch.equal(trained.probabilities(frame), trained.probabilities(x))
    saved = predictions(trained, str(passengers))
    assert torch.equal(saved.logits.softmax(1), trained.probabilities(x))
    assert saved.samples.labels is None  # they were given separately, so no column is recorded as the label
