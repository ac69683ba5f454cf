"""`bisam predict` and `bisam.lab.load`: predictions of what `bisam fit` trained, for new samples of each kind."""

import csv
import json
import re
import shutil

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from bisam.lab import fit, load, records
from bisam.lab.data.preparation import Preparation
from bisam.lab.models import build
from bisam.lab.predicting.beside_weights import BesideWeights
from bisam.lab.predicting.predictor import Predictor
from bisam.lab.records.checkpoint import pack

SHORT = ["--methods", "sam", "--rho", 0.05, "--batch", 8, "--seeds", "0", "--device", "cpu"]
COLOURS = ("red", "blue", "green")
SORTED = ["apple", "pear", "quince"]
NET = """
from torch import nn
print("the file was run")
def net(classes):
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, classes))
"""


def table(count, seed):
    """Rows whose class is the column with the largest number; classes appear in another order than their names."""
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(count, 3)).astype(np.float32)
    names = np.array(["pear", "apple", "quince"])
    return pandas.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "fruit": names[x.argmax(1)]})


def write_rows(folder):
    folder.mkdir()
    for part, count in (("train", 120), ("test", 30)):
        table(count, count).to_csv(folder / f"{part}.csv", index=False)


def write_pictures(folder):
    """Images of several sizes with a channel of their class that is brighter, but not always."""
    draws = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 5)):
        for place, name in enumerate(COLOURS):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = draws.integers(0, 160, (10 + number % 3, 12, 3)).astype(np.uint8)
                pixels[:, :, place] += 30
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")


def write_texts(folder):
    folder.mkdir()
    for part, count in (("train", 40), ("test", 12)):
        with (folder / f"{part}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["said", "animal"])
            for number in range(count):
                animal = ["dog", "cat"][number % 3 % 2]
                writer.writerow([f"the {animal} sat " + "sat " * (number % 4), animal])


def fitted(bisam, folder, data, *options):
    done = bisam("fit", data, *SHORT, "--runs", folder.parent, "--name", folder.name, *options)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def rows(bisam, tmp_path_factory):
    """The folder of a fit, and that of its data."""
    root = tmp_path_factory.mktemp("rows")
    write_rows(root / "fruit")
    return fitted(bisam, root / "fit", root / "fruit", "--label", "fruit", "--epochs", 3), root / "fruit"


@pytest.fixture(scope="module")
def pictures(bisam, tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    write_pictures(root / "colours")
    return fitted(bisam, root / "fit", root / "colours", "--set", "size=8", "--epochs", 2), root / "colours"


@pytest.fixture(scope="module")
def texts(bisam, tiny_networks, tmp_path_factory):
    root = tmp_path_factory.mktemp("texts")
    write_texts(root / "said")
    options = ["--text", "said", "--label", "animal", "--model", f"transformers:{tiny_networks['glue']}"]
    return fitted(bisam, root / "fit", root / "said", *options, "--epochs", 1, "--set", "length=6"), root / "said"


@pytest.fixture
def predicted(bisam, tmp_path):
    """The rows of the table that a prediction writes, and what it prints."""

    def run(folder, data, *options):
        out = tmp_path / "out.csv"
        done = bisam("predict", folder, data, "--out", out, "--device", "cpu", *options)
        assert done.exit_code == 0, done.output
        with out.open(newline="") as file:
            return [*csv.DictReader(file)], done.output

    return run


def refused(bisam, *arguments):
    done = bisam("predict", *arguments, "--device", "cpu")
    assert done.exit_code == 1, done.output
    assert done.stderr.startswith("Error: ")
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


def best_run(folder):
    (found,) = (record for record in records.find_records(folder) if record.config["method"] == "sam")
    return found


@pytest.mark.parametrize("kind", ["rows", "pictures", "texts"])
@pytest.mark.parametrize("batch", [[], ["--batch", 4]])
def test_the_measures_of_the_test_part_agree_with_the_record(kind, batch, request, predicted):
    folder, data = request.getfixturevalue(kind)
    test = data / "test" if kind == "pictures" else data / "test.csv"
    _, output = predicted(folder, test, *batch)
    result = best_run(folder).result
    printed = dict(re.findall(r"(balanced accuracy|accuracy|macro F1) (\S+) %", output))
    names = {"accuracy": "test_accuracy", "balanced accuracy": "test_balanced_accuracy", "macro F1": "test_macro_f1"}
    assert printed == {title: f"{result[name]:.2f}" for title, name in names.items() if name in result}
    assert "accuracy" in printed


def test_predictions_of_rows_are_the_outputs_of_the_model(rows, predicted):
    folder, data = rows
    model = build("perceptron", 3, features=3).eval()
    model.load_state_dict(load_file(folder / "best.safetensors"))
    frame = pandas.read_csv(data / "test.csv")
    with torch.no_grad():
        expected = model(torch.tensor(frame[["a", "b", "c"]].values, dtype=torch.float32)).softmax(1)
    found, output = predicted(folder, data / "test.csv")
    assert [*found[0]] == ["sample", "predicted", "probability", *(f"probability of {name}" for name in SORTED)]
    assert [row["sample"] for row in found] == [str(number) for number in range(30)]
    for row, each in zip(found, expected.tolist(), strict=True):
        assert [float(row[f"probability of {name}"]) for name in SORTED] == pytest.approx(each, abs=1e-6)
        assert row["predicted"] == SORTED[each.index(max(each))]
        assert float(row["probability"]) == pytest.approx(max(each), abs=1e-6)
    counts = [sum(row["predicted"] == name for row in found) for name in SORTED]
    assert f"predicted: apple {counts[0]}, pear {counts[1]}, quince {counts[2]}" in output


def test_images_are_scaled_and_normalised_as_in_the_training(pictures, predicted):
    folder, data = pictures

    def squares(part):
        paths = sorted((data / part).rglob("*.png"))
        return paths, [square_by_hand(Image.open(path)) for path in paths]

    _, train = squares("train")
    values = torch.tensor(np.stack(train)).double() / 255
    mean, std = values.mean((0, 1, 2)), values.std((0, 1, 2))
    paths, test = squares("test")
    model = build("resnet20", 3).eval()
    model.load_state_dict(load_file(folder / "best.safetensors"))
    inputs = ((torch.tensor(np.stack(test)).double() / 255 - mean) / std).float().permute(0, 3, 1, 2)
    with torch.no_grad():
        expected = model(inputs).softmax(1)
    found, _ = predicted(folder, data / "test")
    assert [row["sample"] for row in found] == [str(path.relative_to(data / "test")) for path in paths]
    for row, each in zip(found, expected.tolist(), strict=True):
        # sums of another order in float32, through 20 layers
        assert [float(row[f"probability of {name}"]) for name in sorted(COLOURS)] == pytest.approx(each, abs=1e-4)


def square_by_hand(image):
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return np.asarray(image.resize((8, 8), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side)))


def test_texts_are_truncated_to_the_length_of_the_training(texts, tiny_networks):
    folder, data = texts
    sentences = pandas.read_csv(data / "test.csv")["said"].tolist()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_networks["glue"])
    expected = tokenizer(sentences, truncation=True, max_length=6, padding=True, return_tensors="pt")
    trained = load(folder)
    assert trained.classes == ["cat", "dog"]
    found = trained.beside.preparation.apply([(one,) for one in sentences], tokenizer, torch.device("cpu"))
    assert all(torch.equal(found[name], expected[name]) for name in ("input_ids", "attention_mask"))
    assert max(len(tokens) for tokens in tokenizer(sentences)["input_ids"]) > 6


def test_labels_extra_columns_and_column_order_do_not_change_the_predictions(rows, predicted, tmp_path):
    folder, data = rows
    expected, _ = predicted(folder, data / "test.csv")
    frame = pandas.read_csv(data / "test.csv").drop(columns="fruit")
    frame["note"] = "a text"
    frame[["c", "note", "a", "b"]].to_csv(tmp_path / "new.csv", index=False)
    pq.write_table(pa.Table.from_pandas(frame[["b", "c", "a"]]), tmp_path / "new.parquet")
    frame[["b", "c", "a"]].to_json(tmp_path / "new.jsonl", orient="records", lines=True, double_precision=15)
    for name in ("new.csv", "new.parquet", "new.jsonl"):
        found, output = predicted(folder, tmp_path / name)
        assert found == expected
        assert "accuracy" not in output
        assert "no labels" in output


def test_images_outside_class_folders_are_predicted_without_an_accuracy(pictures, predicted, tmp_path):
    folder, data = pictures
    expected, _ = predicted(folder, data / "test")
    flat = tmp_path / "flat"
    flat.mkdir()
    for row in expected:
        (flat / row["sample"].replace("/", "-")).write_bytes((data / "test" / row["sample"]).read_bytes())
    found, output = predicted(folder, flat)
    assert [{**row, "sample": ""} for row in found] == [{**row, "sample": ""} for row in expected]
    assert found[0]["sample"] == expected[0]["sample"].replace("/", "-")
    assert "accuracy" not in output
    (single,), _ = predicted(folder, flat / found[3]["sample"])
    assert single["predicted"] == found[3]["predicted"]


def test_missing_labels_and_unknown_classes_are_excluded_from_the_accuracy(rows, predicted, tmp_path):
    folder, data = rows
    expected, _ = predicted(folder, data / "test.csv")
    frame = pandas.read_csv(data / "test.csv")
    frame.loc[:3, "fruit"] = None
    frame.loc[4:6, "fruit"] = "plum"
    frame.to_csv(tmp_path / "some.csv", index=False)
    found, output = predicted(folder, tmp_path / "some.csv")
    assert found == expected
    right = sum(row["predicted"] == name for row, name in zip(found[7:], frame["fruit"][7:], strict=True))
    assert f"accuracy {100 * right / 23:.2f} %" in output
    assert "of 23 samples with labels" in output
    assert "labels that are no classes of the model are not counted: the first is 'plum'" in output


def test_the_file_beside_the_weights_has_the_preparation_and_no_samples(rows, pictures, texts):
    for folder, _ in (rows, pictures, texts):
        content = (folder / "predict.json").read_bytes()
        assert content == (best_run(folder).folder / "predict.json").read_bytes()
        assert len(content) < 1000
    frame = pandas.read_csv(rows[1] / "train.csv", dtype=np.float32, usecols=["a", "b", "c"])
    columns = {name: {"median": float(np.median(frame[name])), "is_marked": False} for name in "abc"}
    assert json.loads((rows[0] / "predict.json").read_text())["inputs"] == {
        "kind": "rows", "classes": SORTED, "columns": {"inputs": columns, "label": "fruit"}, "features": 3,
        "shape": [], "size": None, "mean": [], "std": [], "length": None,
    }  # fmt: skip


def test_a_single_run_predicts_as_the_fit_does_and_its_files_are_in_the_receipt(rows, predicted):
    folder, data = rows
    run = best_run(folder)
    assert predicted(run.folder, data / "test.csv") == predicted(folder, data / "test.csv")
    assert {"predict.json", "best.safetensors"} <= {*run.receipt["sha256"]}
    assert records.verify(run) == []


def test_runs_of_a_recipe_file_of_the_user_can_predict(bisam, rows, predicted, tmp_path):
    _, data = rows
    (tmp_path / "my.toml").write_text(
        f'title = "Fruit"\nmethods = ["sgd"]\n[settings]\ndata = "{data}?label=fruit"\nmodel = "perceptron"\n'
        'epochs = 1\nbatch = 8\nlr = 0.05\npadding = 0\nflip = false\nprecision = "fp32"\n[rows.all]\n'
    )
    done = bisam("train", tmp_path / "my.toml", "--runs", tmp_path / "runs", "--device", "cpu")
    assert done.exit_code == 0, done.output
    (run,) = records.find_records(tmp_path / "runs")
    _, output = predicted(run.folder, data / "test.csv")
    assert f"accuracy {run.result['test_accuracy']:.2f} %" in output


def test_arrays_with_classes_named_inf_or_10_can_be_predicted(bisam, predicted, tmp_path):
    frame = table(60, 0)
    x = frame[["a", "b", "c"]].to_numpy()
    y = np.array(["inf", "été", "10"])[x.argmax(1)]
    np.savez(tmp_path / "all.npz", x=x, y=y)
    np.savez(tmp_path / "new.npz", x=x)
    folder = fitted(bisam, tmp_path / "fit", tmp_path / "all.npz", "--epochs", 1)
    labelled, output = predicted(folder, tmp_path / "all.npz")
    assert [*labelled[0]][3:] == ["probability of 10", "probability of inf", "probability of été"]
    assert "of 60 samples with labels" in output
    assert predicted(folder, tmp_path / "new.npz")[0] == labelled
    np.savez(tmp_path / "wide.npz", x=np.zeros((4, 5)))
    message = refused(bisam, folder, tmp_path / "wide.npz")
    assert "has 5 numbers in a row, and the model was trained on 3: give the same columns" in message
    assert "is a table, and the model was not trained on columns: give an .npz" in refused(
        bisam, folder, write_csv(tmp_path / "t.csv")
    )


def write_csv(path, text="a,b,c\n1,2,3\n"):
    path.write_text(text)
    return path


def test_code_named_in_the_folder_is_run_only_with_the_run_code_or_model_option(bisam, rows, predicted, tmp_path):
    _, data = rows
    (tmp_path / "net.py").write_text(NET)
    name = f"{tmp_path / 'net.py'}:net"
    folder = fitted(bisam, tmp_path / "fit", data, "--label", "fruit", "--epochs", 1, "--model", name)
    done = bisam("predict", folder, data / "test.csv", "--out", tmp_path / "out.csv")
    assert done.exit_code == 1
    assert f"its model is {name}, code that is not run because a record names it: allow it by --run-code" in done.stderr
    assert "the file was run" not in done.output
    allowed = predicted(folder, data / "test.csv", "--run-code")
    assert "the file was run" in allowed[1]
    (tmp_path / "net.py").rename(tmp_path / "moved.py")
    assert "net.py is not a file" in (gone := refused(bisam, folder, data / "test.csv", "--run-code"))
    assert "If it is elsewhere, name it by --model" in gone
    assert predicted(folder, data / "test.csv", "--model", f"{tmp_path / 'moved.py'}:net")[0] == allowed[0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "new.csv",
            "a,c\n1,2\n",
            "new.csv has no column 'b', which the model was trained with: it has a, c. Add or rename columns",
        ),
        ("new.csv", "a,b,c\n1,2,x\n", "new.csv: column 'c' has texts, and numbers in the training part: correct it"),
        ("new.csv", "a,b,c\n1,inf,2\n3,4,5\n", "column 'b' has an infinite number in row 0"),
        ("new.csv", "a,b,c\n", "has no rows"),
        ("new.txt", "a,b,c\n", "new.txt is of a kind that cannot be read, and the model was trained on rows"),
        ("gone.csv", None, "gone.csv does not exist: give a CSV, Parquet or JSONL file"),
    ],
)
def test_tables_that_do_not_match_the_training_are_refused(rows, bisam, tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert message in refused(bisam, rows[0], tmp_path / name)


def test_a_broken_image_is_reported_and_has_no_prediction(pictures, bisam, predicted, tmp_path):
    folder, data = pictures
    (tmp_path / "new").mkdir()
    assert "has no samples: give an image, a folder of images" in refused(bisam, folder, tmp_path / "new")
    good = (data / "test/red/0.png").read_bytes()
    for name, content in {"a.png": good, "torn.png": good[:60], "z.png": good}.items():
        (tmp_path / "new" / name).write_bytes(content)
    found, output = predicted(folder, tmp_path / "new")
    assert "1 of 3 images do not decode: torn.png (" in output
    assert [row["sample"] for row in found] == ["a.png", "torn.png", "z.png"]
    assert [bool(row["predicted"]) for row in found] == [True, False, True]
    assert {*found[1].values()} == {"torn.png", ""}
    assert "is a table, and the model was not trained on columns" in refused(
        bisam, folder, write_csv(tmp_path / "t.csv")
    )


def write_weights(folder, state):
    (folder / "best.safetensors").write_bytes(b"".join(pack(state, {"format": "pt"})))


def copied(folder, to):
    to.mkdir()
    for name in ("best.safetensors", "predict.json"):
        (to / name).write_bytes((folder / name).read_bytes())
    return to


def test_folders_that_cannot_be_loaded_are_refused(rows, bisam, tmp_path):
    folder, data = rows
    test, broken = data / "test.csv", copied(folder, tmp_path / "broken")
    no_weights = "it has no best.safetensors: give the folder of a bisam fit that is finished, or of one of its runs"
    assert f"{data}: {no_weights}" in refused(bisam, data, test)
    assert f"{test}: {no_weights}" in refused(bisam, test, test)
    weights = load_file(folder / "best.safetensors")
    write_weights(broken, {**weights, "classifier.weight": torch.zeros(4, 64)})
    message = refused(bisam, broken, test)
    assert "its weights are not those of perceptron: size mismatch for classifier.weight" in message
    (broken / "best.safetensors").write_bytes(b"no tensors")
    assert "its best.safetensors cannot be used" in refused(bisam, broken, test)
    values = json.loads((folder / "predict.json").read_text())
    for wrong in (
        {}, [], {**values, "format": 2}, {**values, "measures": ["speed"]}, {**values, "model": 3},
        {**values, "inputs": {**values["inputs"], "classes": ["one"]}},
        {**values, "inputs": {**values["inputs"], "features": -1}},
        {**values, "inputs": {**values["inputs"], "kind": "sound"}},
        {**values, "inputs": {**values["inputs"], "columns": {"inputs": "a"}}},
        {**values, "inputs": {**values["inputs"], "columns": {"inputs": ["a", "b", "c"], "label": "fruit"}}},
        {**values, "inputs": {**values["inputs"], "features": 4}},
        {**values, "inputs": 7},
    ):  # fmt: skip
        (broken / "predict.json").write_text(json.dumps(wrong))
        (broken / "best.safetensors").write_bytes((folder / "best.safetensors").read_bytes())
        assert "its predict.json cannot be used" in refused(bisam, broken, test), wrong


def test_repeating_a_fit_of_an_older_version_adds_the_missing_predict_json(rows, bisam):
    folder, data = rows
    before = (folder / "predict.json").read_bytes()
    (folder / "predict.json").unlink()
    assert "it has no predict.json" in refused(bisam, folder, data / "test.csv")
    done = bisam("fit", data, *SHORT, "--runs", folder.parent, "--name", folder.name, "--label", "fruit", "--epochs", 3)
    assert "2 of 2 runs are done already" in done.output
    assert (folder / "predict.json").read_bytes() == before
    assert f"to predict with them: bisam predict {folder} DATA" in done.output


def test_a_missing_text_model_is_reported_and_can_be_named(texts, bisam, predicted, tiny_networks, tmp_path):
    folder, data = texts
    place = tiny_networks["glue"]
    expected, _ = predicted(folder, data / "test.csv")
    moved = copied(folder, tmp_path / "moved")
    values = json.loads((moved / "predict.json").read_text())
    gone = tmp_path / "networks" / "gone"
    (moved / "predict.json").write_text(json.dumps({**values, "model": f"transformers:{gone}"}))
    message = refused(bisam, moved, data / "test.csv")
    assert f"its model cannot be made: transformers could not load '{gone}'" in message
    assert "If it is elsewhere, name it by --model" in message
    assert predicted(moved, data / "test.csv", "--model", f"transformers:{place}")[0] == expected


def test_predictions_from_python_equal_those_of_the_command(rows, pictures, texts, predicted):
    folder, data = rows
    frame, trained = pandas.read_csv(data / "test.csv"), load(folder)
    expected = [row["predicted"] for row in predicted(folder, data / "test.csv")[0]]
    assert trained.classes == SORTED
    numbers = frame[["a", "b", "c"]].to_numpy()
    for inputs in (numbers, torch.tensor(numbers), frame[["c", "b", "a"]]):
        assert trained.predict(inputs) == expected
    probabilities = trained.probabilities(numbers)
    assert (probabilities.shape, probabilities.sum(1).allclose(torch.ones(30))) == ((30, 3), True)
    assert not trained.model.training
    assert (trained.predict(numbers[:0]), trained.probabilities(numbers[:0]).shape) == ([], (0, 3))
    with pytest.raises(ValueError, match="the data has 2 numbers in a row, and the model was trained on 3"):
        trained.predict(numbers[:, :2])
    with pytest.raises(ValueError, match="the data has no columns 'b', 'c'"):
        trained.predict(frame[["a"]])
    folder, data = texts
    sentences = pandas.read_csv(data / "test.csv")["said"].tolist()
    assert load(folder).predict(sentences) == [row["predicted"] for row in predicted(folder, data / "test.csv")[0]]
    with pytest.raises(ValueError, match="the data has rows, and the model was trained on texts"):
        load(folder).predict(numbers)
    with pytest.raises(ValueError, match="a sample has 2 texts, and the model was trained on 1"):
        load(folder).predict([("the cat", "sat")])
    pixels = np.zeros((2, 9, 9, 3), np.uint8)
    assert load(pictures[0]).probabilities(pixels).shape == (2, 3)


def test_load_builds_the_model_with_the_function_that_fit_was_given(tmp_path):
    def network(classes):
        return nn.Linear(3, classes)

    frame = table(60, 0)
    x, y = frame[["a", "b", "c"]].to_numpy(), frame["fruit"].tolist()
    found = fit(network, (x, y), methods="sam", rho=0.05, seeds=1, epochs=2, runs=tmp_path, quiet=True)
    expected = (torch.tensor(x) @ found.weights["weight"].T + found.weights["bias"]).softmax(1)
    assert torch.allclose(load(found.folder, network).probabilities(x), expected, atol=1e-6)
    with pytest.raises(ValueError, match="the data is a data frame, and the model was not trained on columns"):
        load(found.folder, network).predict(frame)
    with pytest.raises(ValueError, match=r"unknown model 'network'.*load\(folder, model\) also takes the function"):
        load(found.folder)
    with pytest.raises(ValueError, match="its weights are not those of network: size mismatch"):
        load(found.folder, lambda: nn.Linear(3, 4))


@pytest.mark.parametrize(("count", "columns"), [(20, 23), (21, 3)])
def test_up_to_twenty_classes_have_a_column_each(bisam, tmp_path, count, columns):
    beside = {"format": 1, "model": "perceptron", "measures": ["accuracy"]}
    classes = [f"class {number}" for number in range(count)]
    inputs = Preparation("rows", tuple(classes), features=2)
    (tmp_path / "predict.json").write_text(json.dumps({**beside, "inputs": inputs.as_dict()}))
    write_weights(tmp_path, build("perceptron", count, features=2).state_dict())
    np.savez(tmp_path / "new.npz", x=np.ones((3, 2)))
    done = bisam("predict", tmp_path, tmp_path / "new.npz", "--out", tmp_path / "out.csv", "--device", "cpu")
    assert done.exit_code == 0, done.output
    head, *found = csv.reader((tmp_path / "out.csv").read_text().splitlines())
    assert (len(head), len(found)) == (columns, 3)
    assert "3 samples (rows)" in done.output


def test_equal_probabilities_predict_the_class_with_the_larger_logit():
    """Softmax in float32 rounds 1e-8 away; the accuracy of a run does not."""

    class Nearly(nn.Module):
        def forward(self, x):
            return torch.tensor([[1e-9, 2e-9]]).expand(len(x), 2)

    beside = BesideWeights("nearly", ("accuracy",), Preparation("rows", ("a", "b"), features=1))
    predictor = Predictor(Nearly(), beside, torch.device("cpu"))
    assert predictor.probabilities(torch.zeros(1, 1)).tolist() == [[0.5, 0.5]]
    assert predictor.predict(torch.zeros(1, 1)) == ["b"]


def test_predictions_never_overwrite_their_input_file(bisam, rows, tmp_path):
    folder, data = rows
    new = tmp_path / "predictions.csv"
    shutil.copy(data / "test.csv", new)
    before = new.read_bytes()
    assert "give another --out" in refused(bisam, folder, new, "--out", new)
    assert new.read_bytes() == before
