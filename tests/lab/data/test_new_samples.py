"""New samples for a trained model: their names and labels, from each form of data."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from bisam.lab.data.images import DataError
from bisam.lab.data.new_samples import open_new
from bisam.lab.data.preparation import Preparation
from bisam.lab.data.table_columns import CategoryColumn, NumberColumn, TableInputs
from bisam.lab.data.table_reading import TableReading

PIXELS = {"size": 8, "mean": (0.5,) * 3, "std": (0.25,) * 3}
COLUMNS = TableReading(TableInputs((NumberColumn("x", 0.0, is_marked=False),)), "label")
PETS = Preparation("rows", ("cat", "dog"), COLUMNS, features=1)


def test_numbered_labels_with_class_names_in_the_file_are_matched_by_name(tmp_path):
    """Files of the hub number the classes in their own order."""
    features = {"label": {"names": ["dog", "horse", "cat"], "_type": "ClassLabel"}}
    table = pa.table({"x": [1.0, 2.0, 3.0], "label": [0, 2, 1]})
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "pets.parquet")
    found = open_new(str(tmp_path / "pets.parquet"), PETS)
    assert (found.labels.tolist(), found.unknown) == ([1, 0, -1], ("horse",))


def test_whole_numbers_stored_as_floats_match_the_integer_class_names(tmp_path):
    pq.write_table(pa.table({"x": [1.0, 2.0, 3.0], "label": [3.0, None, 7.0]}), tmp_path / "t.parquet")
    found = open_new(str(tmp_path / "t.parquet"), Preparation("rows", ("3", "7"), COLUMNS, features=1))
    assert (found.labels.tolist(), found.unknown, found.names) == ([0, -1, 1], (), ["0", "1", "2"])


def test_a_label_column_without_values_gives_no_labels(tmp_path):
    pq.write_table(pa.table({"x": [1.0], "label": pa.array([None], pa.string())}), tmp_path / "t.parquet")
    assert open_new(str(tmp_path / "t.parquet"), PETS).labels is None


def test_image_paths_of_a_table_are_relative_to_it_and_broken_images_are_reported(tmp_path):
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "one.png")
    like = Preparation("image", ("cat", "dog"), TableReading(("path",), "label"), **PIXELS)
    (tmp_path / "t.jsonl").write_text('{"path": "one.png", "label": "dog"}\n')
    found = open_new(str(tmp_path / "t.jsonl"), like)
    assert (found.names, found.labels.tolist()) == (["0"], [1])
    (tmp_path / "t.jsonl").write_text('{"path": "one.png"}\n{"path": "two.png"}\n')
    found = open_new(str(tmp_path / "t.jsonl"), like)
    assert (found.names, found.unread) == (["0"], {1: "1"})
    (tmp_path / "t.jsonl").write_text('{"path": "two.png"}\n')
    with pytest.raises(DataError, match=r"t\.jsonl: 1 of 1 images do not decode: two\.png"):
        open_new(str(tmp_path / "t.jsonl"), like)
    (tmp_path / "t.jsonl").write_text('{"path": 3}\n')
    with pytest.raises(DataError, match=r"has int64, not images or paths: give what it had in the training$"):
        open_new(str(tmp_path / "t.jsonl"), like)


def test_numbers_in_a_text_column_are_refused_with_a_remedy_for_predictions(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"said": 3}\n')
    like = Preparation("text", ("cat", "dog"), TableReading(("said",), "label"), length=6)
    with pytest.raises(DataError, match=r"has int64, not texts: give what it had in the training$"):
        open_new(str(tmp_path / "t.jsonl"), like)


@pytest.mark.parametrize("part", ["", "_test", "_train"])
def test_the_arrays_of_a_part_are_paired_with_the_labels_of_that_part(tmp_path, part):
    arrays = {"x_train": np.zeros((2, 1)), "y_train": ["cat", "cat"], f"x{part}": np.ones((2, 1))}
    np.savez(tmp_path / "a.npz", **{**arrays, f"y{part}": ["dog", "cat"]})
    found = open_new(str(tmp_path / "a.npz"), Preparation("rows", ("cat", "dog"), features=1))
    assert (found.labels.tolist(), found.inputs.tolist()) == ([1, 0], [[1.0], [1.0]])


def test_missing_values_and_categories_unseen_in_training_are_counted_in_the_notes(tmp_path):
    age, city = NumberColumn("age", 39.6, is_marked=False), CategoryColumn("city", ("Bern", "Oslo"))
    port, code = CategoryColumn("port", ("C", "S", None)), CategoryColumn("code", ("007", "x"))
    like = Preparation("rows", ("cat", "dog"), TableReading(TableInputs((age, city, port, code)), "label"), features=8)
    table = {"age": [None, 3.0, float("nan")], "city": ["Paris", "Bern", "Rome"], "port": [None, "S", "C"]}
    pq.write_table(pa.table({**table, "code": [7, 8, 7]}), tmp_path / "t.parquet")
    assert open_new(str(tmp_path / "t.parquet"), like).notes == [
        "age: missing in 2 of 3 rows (filled with the median 39.6)",
        "city: 2 of 3 rows have a category that fewer than 3 training rows had ('Paris', 'Rome'): 0 in all inputs",
        "port: missing in 1 of 3 rows (a category of its own)",
        "code: 1 of 3 rows have a category that fewer than 3 training rows had (8): 0 in all inputs",
    ]
    table = {name: pa.nulls(2) for name in ("age", "city", "port", "code")}
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    assert "city: missing in 2 of 2 rows (0 in all inputs)" in open_new(str(tmp_path / "t.parquet"), like).notes
    table = {"age": [1.0], "city": ["Oslo"], "port": ["S"], "code": ["x"]}
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    assert open_new(str(tmp_path / "t.parquet"), like).notes == []


def test_part_folders_and_folders_within_class_folders_are_not_classes(tmp_path):
    for place in ("test/cat/indoors", "test/dog", "other"):
        (tmp_path / place).mkdir(parents=True)
        Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / place / "1.png")
    found = open_new(str(tmp_path), Preparation("image", ("cat", "dog"), **PIXELS))
    assert dict(zip(found.names, found.labels.tolist(), strict=True)) == {
        "other/1.png": -1, "test/cat/indoors/1.png": 0, "test/dog/1.png": 1,
    }  # fmt: skip
