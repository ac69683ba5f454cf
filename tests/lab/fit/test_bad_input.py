"""Unusable input: a one-line error with the remedy, and no record of a run."""

import json
import logging
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bisam.lab import records


def table(path, columns):
    """A CSV of columns."""
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def refused(bisam, tmp_path):
    """Runs the command, which must fail with a one-line error and leave no record; returns that line."""

    def run(*arguments, options=()):
        done = bisam(
            "fit",
            *arguments,
            "--runs",
            tmp_path / "runs",
            "--device",
            "cpu",
            "--rho",
            0.05,
            "--epochs",
            1,
            "--seeds",
            0,
            *options,
        )
        assert done.exit_code == 1, done.output
        (line,) = (line for line in done.stderr.splitlines() if line.startswith("Error:"))
        if (tmp_path / "runs").exists():
            assert records.find_records(tmp_path / "runs") == []
        assert not [*tmp_path.rglob("plan.json")]
        return line

    return run


NUMBERS = [float(number) for number in range(12)]


def test_a_training_part_with_a_single_class_is_refused(refused, tmp_path):
    line = refused(table(tmp_path / "a.csv", {"x": NUMBERS, "label": ["yes"] * 12}))
    assert "the training part has 1 class: all labels are 'yes'. Two classes or more are needed" in line


@pytest.mark.parametrize("word", ["NA", "None", "null"])
def test_a_class_named_na_none_or_null_is_refused_as_missing_labels(word, refused, tmp_path):
    line = refused(table(tmp_path / "a.csv", {"x": NUMBERS, "label": [word, "yes"] * 6}))
    assert "the label is missing in 6 rows, the first is row 0 (counted from 0)" in line
    assert "the words NA, None and null are read as missing: write another word for such a class" in line


def test_a_class_with_one_sample_is_refused(refused, tmp_path):
    line = refused(table(tmp_path / "a.csv", {"x": NUMBERS, "label": ["a"] * 6 + ["b"] * 5 + ["c"]}))
    assert "class 'c' has one sample" in line
    assert "add samples, or remove the class" in line


def test_a_class_with_one_image_is_refused(refused, images):
    shutil.copytree(images / "red", images / "rare")
    for path in sorted((images / "rare").iterdir())[1:]:
        path.unlink()
    assert "class 'rare' has one sample" in refused(images)


def test_labels_with_many_fractional_values_are_refused_as_regression(refused, tmp_path):
    values = [number / 7 for number in range(40)]
    line = refused(table(tmp_path / "a.csv", {"x": range(40), "label": values}))
    assert "40 different values. That is regression" in line
    assert "--label" in line


def test_labels_of_mostly_unique_whole_numbers_are_refused_as_regression(refused, tmp_path):
    line = refused(table(tmp_path / "a.csv", {"x": range(40), "label": range(0, 120, 3)}))
    assert "the labels are numbers, most of which occur once. That is regression" in line


def test_a_few_fractional_label_values_are_accepted_as_classes(tmp_path):
    from bisam.lab.data.own import open_dataset

    dataset = open_dataset(str(table(tmp_path / "a.csv", {"x": NUMBERS * 2, "label": [0.5, 1.5] * 12})))
    assert dataset.classes == ["0.5", "1.5"]


def test_text_is_refused_for_models_without_a_tokenizer(refused, reviews, tmp_path):
    columns = (reviews, "--text", "review", "--label", "stars")
    assert "text needs a pretrained model: pip install 'bisam[transformers]'" in refused(*columns)
    assert "and resnet20 has none: give --model transformers:" in refused(*columns, "--model", "resnet20")
    empty = tmp_path / "empty"
    empty.mkdir()
    line = refused(*columns, "--model", f"transformers:{empty}")
    assert "transformers could not load" in line
    assert "give a folder with config.json" in line


def test_several_undecodable_images_are_refused_with_their_names_and_number(refused, images):
    for name in ("3.png", "4.png"):
        (images / "red" / name).write_bytes(b"not an image")
    line = refused(images)
    assert "2 of 30 images do not decode: red/3.png (it is damaged" in line
    assert "red/4.png" in line
    assert "At most one is left out: repair or remove them" in line


def test_one_broken_image_among_many_is_excluded_with_a_note(tmp_path):
    from PIL import Image

    from bisam.lab.data.own import open_dataset

    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number in range(60):
            Image.new("RGB", (8, 8)).save(tmp_path / label / f"{number}.png")
    (tmp_path / "a" / "7.png").write_bytes(b"")
    dataset = open_dataset(str(tmp_path))
    assert len(dataset.train) + len(dataset.test) == 119
    assert any("1 of 120 images do not decode" in note and "a/7.png" in note for note in dataset.notes)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ("nn.Linear(30, 5)", ["returns (1, 5) for one sample", "has 2 classes: it must return logits (N, 2)"]),
        (
            "nn.Sequential(nn.Linear(30, 2), nn.Softmax(1))",
            ["net returns probabilities", "let it return what goes into its softmax"],
        ),
    ],
)
def test_a_network_that_does_not_return_logits_is_refused(network, words, refused, tmp_path, breast_cancer):
    nets = tmp_path / "nets.py"
    nets.write_text(f"from torch import nn\ndef net():\n    return {network}\n")
    line = refused(breast_cancer, "--model", f"{nets}:net")
    assert all(part in line for part in words)


@pytest.mark.parametrize(
    "network",
    [
        "nn.Sequential(nn.Linear(30, 2), nn.LogSoftmax(1))",
        "Half()",  # a head of zeros with a bias that looks like probabilities
    ],
)
def test_networks_whose_outputs_only_resemble_probabilities_are_accepted(network, bisam, tmp_path, breast_cancer):
    nets = tmp_path / "nets.py"
    nets.write_text(
        "import torch\nfrom torch import nn\nclass Half(nn.Linear):\n    def __init__(self):\n"
        "        super().__init__(30, 2)\n        nn.init.zeros_(self.weight)\n"
        "        nn.init.constant_(self.bias, 0.5)\n"
        f"def net():\n    return {network}\n"
    )
    done = bisam(
        "fit", breast_cancer, "--model", f"{nets}:net", "--epochs", 1, "--seeds", 0, "--rho", 0.05, "--methods", "sam",
        "--runs", tmp_path / "runs", "--device", "cpu",
    )  # fmt: skip
    assert done.exit_code == 0, done.output


def test_a_model_that_does_not_accept_the_inputs_is_refused(refused, breast_cancer):
    assert "resnet20 does not accept the inputs of" in refused(breast_cancer, "--model", "resnet20")


def test_a_batch_too_large_for_memory_is_refused_with_a_size_that_fits(refused, tmp_path, breast_cancer):
    """For more than ten samples the network allocates 64 TiB, which the real allocator refuses."""
    nets = tmp_path / "nets.py"
    nets.write_text(
        "import torch\nfrom torch import nn\n"
        "class Hungry(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if self.training and len(x) > 10:\n"
        "            torch.empty(2**46, dtype=torch.uint8)\n"
        "        return super().forward(x)\n"
        "def hungry(classes):\n    return Hungry(30, classes)\n"
    )
    line = refused(breast_cancer, "--model", f"{nets}:hungry", "--batch", 64)
    assert "a batch of 64 does not fit into memory, and one of 8 does: give --batch 8" in line


def test_a_class_with_too_few_samples_for_all_parts_is_refused(refused, tmp_path):
    line = refused(table(tmp_path / "a.csv", {"x": NUMBERS, "label": ["a"] * 10 + ["b"] * 2}))
    assert "of class 'b' no training sample is left beside those for validation and test" in line


def test_a_part_without_rows_for_validation_is_refused(refused, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    table(folder / "train.csv", {"x": NUMBERS, "label": [0, 1] * 6})
    table(folder / "test.csv", {"x": NUMBERS, "label": [0, 1] * 6})
    table(folder / "validation.csv", {"x": [], "label": []})
    assert "validation" in refused(folder)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"x": NUMBERS, "kind": [0, 1] * 6}, [], "name that of the classes by --label"),
        ({"x": NUMBERS, "label": [0, 1] * 6}, ["--label", "lable"], "no column 'lable': did you mean 'label'?"),
        ({"x": NUMBERS, "label": [0, 1] * 6}, ["--label", "kind"], "no column 'kind': it has x, label."),
        ({"x|label": ["1|0", "2|1"] * 6}, [], "has one column, 'x|label': separate its columns by commas or semico"),
        ({"x\tlabel": ["1\t0", "2\t1"] * 6}, [], "has one column, 'x\\tlabel': separate its columns by commas or"),
        (
            {"text": ["hello, world"] * 12, "label": [0, 1] * 6},
            [],
            "a.csv has rows with more fields than its header: put a field that has a comma in quotes",
        ),
        (
            {"text": ["hello", "hello, world"] * 6, "label": [0, 1] * 6},
            [],
            "Expected 2 fields in line 3, saw 3): put a field that has a comma in quotes",
        ),
        ({"x": ["1,5", "2,5"] * 6, "label": [0, 1] * 6}, [], "in quotes, write decimals with points, and name every"),
        ({"x": [], "label": []}, [], "has no rows below its header"),
        ({"x": NUMBERS, "label": [0, 1] * 6}, ["--model", "nets.py"], "nets.py is a Python file: name the function"),
        (
            {"x": NUMBERS, "label": ["a", "", "b"] * 4},
            [],
            "label is missing in 4 rows, the first is row 1 (counted from 0)",
        ),
        ({"x": [1.0, "inf"] * 6, "label": [0, 1] * 6}, [], "column 'x' has an infinite number in 6 rows"),
        ({"x": [1.0, "inf", *NUMBERS[:10]], "label": [0, 1] * 6}, [], "in row 1 (counted from 0): correct it, leave"),
        ({"x": NUMBERS, "label": ["a", "b"] * 6}, ["--text", "label"], "'label' is the label and cannot be an input"),
        (
            {"x": ["a", "b"] * 6, "y": [0, 1] * 6},
            ["--label", "y", "--text", "x,y"],
            "be an input: name another by --text",
        ),
        ({"x": ["a"] * 12, "label": [0, 1] * 6}, [], "no column can be an input: x (always 'a')."),
        ({"x": NUMBERS, "label": [0, 1] * 6}, ["--model", "resnet57"], "unknown model 'resnet57'"),
        ({"x": NUMBERS, "label": [0, 1] * 6}, ["--methods", "sma"], "unknown method 'sma'"),
        (
            {"x": NUMBERS, "label": [0, 1] * 6},
            ["--measure", "f2"],
            "unknown measure 'f2': choose from accuracy, ",
        ),
        ({"x": NUMBERS, "label": [0, 1] * 6}, ["--batch", 1], "batch norm of perceptron needs two samples"),
        ({"x": NUMBERS, "label": [0, 1] * 6}, ["--batch", 2, "--methods", "esam"], "of a batch of 2: give --batch 4"),
        ({"x": NUMBERS, "label": [0, 1] * 6}, ["--set", "rho=1"], "bisam fit sets rho by itself: use --rho instead"),
        ({"x": NUMBERS, "label": [0, 1] * 6}, ["--methods", "base"], "a comparison needs a method beside SGD"),
    ],
)
def test_unusable_columns_and_options_are_refused_with_a_remedy(columns, options, message, refused, tmp_path):
    assert message in refused(table(tmp_path / "a.csv", columns), *options)


def test_named_columns_that_are_missing_or_cannot_be_inputs_are_refused(refused, tmp_path):
    columns = {
        "id": NUMBERS, "day": ["2020-01-01"] * 12, "age": [30, ""] * 6, "city": ["Bern", "Oslo"] * 6,
        "score": NUMBERS, "tier": ["gold", "silver"] * 6,
    }  # fmt: skip
    path = table(tmp_path / "a.csv", columns)
    assert "has the columns id, day, age, city, score, tier: name that" in refused(path)
    assert "no column 'skore': did you mean 'score'?" in refused(path, "--label", "tier", "--columns", "id,skore")
    assert "is the label and cannot be an input" in refused(path, "--label", "tier", "--columns", "score,tier")
    line = refused(path, "--label", "tier", "--columns", "score,day")
    assert "column 'day' cannot be an input (dates): remove it from --columns" in line
    assert "give --columns or --text" in refused(path, "--label", "tier", "--columns", "score", "--text", "city")


def test_of_many_columns_the_last_is_also_listed_because_it_may_be_the_label(refused, tmp_path):
    many = {f"c{number}": NUMBERS for number in range(60)}
    line = refused(table(tmp_path / "a.csv", {**many, "tier": ["gold", "silver"] * 6}))
    assert "c0, c1, c2" in line
    assert "c59, tier: name that of the classes by --label" in line


def test_missing_paths_unknown_file_types_and_folders_without_classes_are_refused(refused, tmp_path):
    assert "nowhere.csv does not exist: give a folder of class folders" in refused(tmp_path / "nowhere.csv")
    (tmp_path / "notes.log").touch()
    assert "notes.log is of a kind that cannot be read: give a folder of" in refused(tmp_path / "notes.log")
    (tmp_path / "empty").mkdir()
    assert "has no images: give a folder with a folder of images for each class" in refused(tmp_path / "empty")
    (tmp_path / "empty/1.jpg").touch()
    assert "the image 1.jpg is in no folder of a class: give a folder with a folder of" in refused(tmp_path / "empty")
    (tmp_path / "half.parquet").write_bytes(b"PAR1")
    assert "is not a complete Parquet file" in refused(tmp_path / "half.parquet")


def test_a_table_without_columns_is_refused(refused, tmp_path):
    pq.write_table(pa.table({}), tmp_path / "a.parquet")
    assert "a.parquet has no columns: give a column of labels" in refused(tmp_path / "a.parquet")


def test_a_text_file_in_another_encoding_is_refused(refused, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(logging.StreamHandler, "emit", lambda _, record: lines.append(record.getMessage()))
    (tmp_path / "a.csv").write_bytes("x,label\n1,grün\n2,rot\n".encode("latin1") * 6)
    assert "is not in UTF-8 (byte 0xfc): save it as UTF-8" in refused(tmp_path / "a.csv")
    assert lines == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "sma"], "unknown method 'sma'"),
        (["--epochs", "3", "--set", "epochs=5"], "--epochs 3 and --set epochs=5 set the same field: remove one"),
        (["--measure", "mcc", "--set", "measures=mcc"], "--measure mcc and --set measures=mcc set the same field"),
        (["--model", "perceptron", "--set", "model=resnet20"], "use --model instead of --set model="),
        (["--set", "title=x"], "sets title by itself: remove --set title="),
        (["--set", "lrr=1"], "unknown field 'lrr'"),
        (["--seeds", "a"], "seeds are numbers such as"),
        (["--rho", "x"], "--rho is auto or a number"),
        (["--rho", "-1"], "rho must lie between 0 and 1000, got -1.0"),
        (["--rho", "nan"], "rho must lie between 0 and 1000, got nan"),
    ],
)
def test_a_wrong_option_is_refused_before_the_data_are_read(options, message, refused, monkeypatch, breast_cancer):
    monkeypatch.setattr("bisam.lab.cli.fit.own_data", lambda _: pytest.fail("the data were read"))
    assert message in refused(breast_cancer, options=options)


def test_a_data_set_of_the_hub_is_refused_without_a_connection(refused, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    line = refused("owner/nothing")
    assert "is neither a file nor a folder here, and as a data set of the hub it could not be loaded" in line
    assert "check the path, or the name and the connection" in line


def test_labels_of_several_numbers_per_sample_are_refused(refused, tmp_path):
    x = np.random.default_rng(0).normal(size=(12, 2))
    np.savez(tmp_path / "a.npz", x=x, y=np.eye(2)[np.arange(12) % 2])
    assert "labels of shape (12, 2), and each sample has one class: of one-hot labels give y.argmax(1)" in refused(
        tmp_path / "a.npz"
    )
    rows = [{"x": number, "label": [number % 2, 0]} for number in range(12)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert "a label is [0, 0], and each sample has one class" in refused(tmp_path / "a.jsonl")


def test_labels_of_shape_n_by_1_are_accepted(tmp_path):
    from bisam.lab.data.own import open_dataset

    np.savez(tmp_path / "a.npz", x=np.ones((12, 2)), y=np.arange(12).reshape(12, 1) % 2)
    assert open_dataset(str(tmp_path / "a.npz")).classes == ["0", "1"]


def test_failing_user_code_is_a_one_line_error_with_file_and_line_number(refused, tmp_path, breast_cancer):
    code = tmp_path / "own.py"
    code.write_text("def data():\n    return {}['train']\n\ndef net(classes):\n    return undefined\n")
    assert f"{code}:data failed, in line 2 (KeyError: 'train'): correct it first" in refused(f"{code}:data")
    line = refused(breast_cancer, "--model", f"{code}:net")
    assert f"{code}:net failed, in line 5 (NameError: name 'undefined' is not defined): correct it first" in line
    assert f"{code} is a Python file: name the function in it that returns the data, as in {code}:data" in refused(code)


def test_an_npz_with_objects_is_not_unpickled(refused, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{"a": 1}] * 4, dtype=object), y=np.arange(4) % 2)
    assert "cannot be read as .npz" in refused(tmp_path / "a.npz")


def test_timm_that_cannot_be_imported_is_refused_with_a_remedy(refused, images):
    try:
        import timm  # noqa: F401
    except (ImportError, RuntimeError):
        line = refused(images, "--model", "timm:resnet18")
        assert "timm" in line
        assert "install" in line.lower()
    else:
        pytest.skip("timm imports here")


def test_a_damaged_plan_is_refused_with_a_remedy(bisam, breast_cancer, tmp_path):
    (tmp_path / "cancer").mkdir()
    (tmp_path / "cancer" / "plan.json").write_text(json.dumps({"format": 1}))
    done = bisam("fit", breast_cancer, "--runs", tmp_path, "--name", "cancer", "--device", "cpu")
    assert done.exit_code == 1
    assert "plan.json cannot be read" in done.stderr
    assert "remove it" in done.stderr


@pytest.mark.parametrize("kept", [0, 300])
def test_a_truncated_npz_is_refused(kept, refused, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones((12, 20)), y=np.arange(12) % 2)
    path.write_bytes(path.read_bytes()[:kept])
    assert "cannot be read as .npz" in refused(path)


def test_an_npy_renamed_to_npz_is_refused(refused, tmp_path):
    np.save(tmp_path / "a.npy", np.ones((12, 2)))
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    assert "cannot be read as .npz (it has one array without a name)" in refused(tmp_path / "a.npz")


def test_parts_with_samples_of_different_shapes_are_refused(refused, tmp_path):
    y = np.arange(12) % 2
    np.savez(tmp_path / "a.npz", x_train=np.ones((12, 4)), y_train=y, x_test=np.ones((12, 3)), y_test=y)
    assert "samples of different shapes, 4 in train, 3 in test: give the same inputs" in refused(tmp_path / "a.npz")


def test_testing_the_training_part_is_refused(refused, tmp_path):
    columns = {"x": NUMBERS, "label": ["a", "b"] * 6}
    line = refused(table(tmp_path / "a.csv", columns), "--test", "train")
    assert "trains on its part 'train', which cannot be tested: remove --test, to hold out a fifth" in line
    folder = tmp_path / "parts"
    folder.mkdir()
    for part in ("train", "test"):
        table(folder / f"{part}.csv", columns)
    assert "which cannot be tested: give --test test" in refused(folder, "--test", "train")


def test_a_parquet_file_without_rows_or_with_a_repeated_column_name_is_refused(refused, tmp_path):
    pq.write_table(
        pa.table({"x": pa.array([], pa.float32()), "label": pa.array([], pa.string())}), tmp_path / "a.parquet"
    )
    assert "the training part has no samples: add some" in refused(tmp_path / "a.parquet", "--label", "label")
    twice = pa.Table.from_arrays([pa.array(NUMBERS), pa.array(NUMBERS), pa.array(["a", "b"] * 6)], ["x", "x", "label"])
    pq.write_table(twice, tmp_path / "b.parquet")
    assert "has two columns of the name 'x': rename or remove one" in refused(tmp_path / "b.parquet")


def test_a_folder_of_unrelated_tables_or_of_mixed_formats_is_refused(refused, tmp_path):
    columns = {"x": NUMBERS, "label": ["a", "b"] * 6}
    folder = tmp_path / "tables"
    folder.mkdir()
    table(folder / "data.csv", columns)
    table(folder / "more.csv", columns)
    line = refused(folder)
    assert "has the tables data.csv, more.csv: name them train and test, or give one of them" in line
    (folder / "data.csv").rename(folder / "train.csv")
    (folder / "more.csv").unlink()
    pq.write_table(pa.table(columns), folder / "test.parquet")
    assert "has the tables test.parquet, train.csv: write all of them in one format" in refused(folder)


def test_the_config_option_is_refused_for_data_that_are_not_from_the_hub(refused, tmp_path):
    path = table(tmp_path / "a.csv", {"x": NUMBERS, "label": ["a", "b"] * 6})
    assert "is no data set of the hub, of which --config chooses" in refused(path, "--config", "english")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "mu=5", "--methods", "base,sam"], "sgd, sam do not use mu: remove --set mu="),
        (["--set", "warmup=0.2"], "warmup has no effect with schedule=cosine: use warmup_epochs"),
        (
            ["--set", "schedule=linear", "--set", "warmup_epochs=2", "--epochs", 4],
            "warmup_epochs has no effect with schedule=linear",
        ),
        (["--set", "optimizer=adamw", "--set", "momentum=0.1"], "momentum has no effect with optimizer=adamw"),
    ],
)
def test_settings_without_an_effect_are_refused(options, message, refused, breast_cancer):
    assert message in refused(breast_cancer, options=options)


INTERRUPTED = """
from torch import nn


class Net(nn.Sequential):
    def forward(self, x):
        if self.training:
            raise KeyboardInterrupt
        return super().forward(x)


def net(classes):
    return Net(nn.Flatten(), nn.LazyLinear(classes))
"""


@pytest.mark.parametrize(
    ("rho", "line"),
    [
        ("0.05", "stopped before the first run: the same command starts over"),
        ("auto", "stopped in the search of ρ: the same command repeats the search for this method, and resumes"),
    ],
)
def test_ctrl_c_before_the_first_run_names_what_was_stopped(rho, line, bisam, tmp_path, breast_cancer):
    (tmp_path / "net.py").write_text(INTERRUPTED)
    model = ["--model", f"{tmp_path / 'net.py'}:net", "--device", "cpu", "--runs", tmp_path / "runs"]
    done = bisam("fit", breast_cancer, *model, "--rho", rho)
    assert done.exit_code != 0
    assert line in done.output.splitlines()
