"""Columns of an ordinary table as inputs: numbers, categories, missing values and excluded columns."""

import json
from urllib.parse import urlencode

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from bisam.lab.config import Config
from bisam.lab.data.images import DataError
from bisam.lab.data.new_samples import open_new
from bisam.lab.data.own import from_parts, open_dataset
from bisam.lab.data.own_source import OwnData
from bisam.lab.data.table_columns import CategoryColumn, column_of
from bisam.lab.data.table_reading import TableReading

CITIES = ["Bern", "Oslo", "Rome"]


def parts(folder, **tables):
    """A Parquet file for each part; without a label, the classes alternate."""
    folder.mkdir(exist_ok=True)
    for part, columns in tables.items():
        count = len(next(iter(columns.values())))
        table = pa.table({**columns, **({} if "label" in columns else {"label": [0, 1] * (count // 2)})})
        pq.write_table(table, folder / f"{part}.parquet")
    return str(folder)


def csv(path, columns):
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def summary_of(dataset):
    return "\n".join(OwnData(dataset).described())


def test_a_text_column_gets_one_input_for_each_category_of_the_training_part(tmp_path):
    train = {"x": range(0, 24, 2), "city": CITIES * 4}
    dataset = open_dataset(
        parts(tmp_path, train=train, test={"x": [1, 2, 3, 4], "city": ["Rome", "Bern", "Paris", None]})
    )
    assert dataset.train.inputs[:3].tolist() == [[0, 1, 0, 0], [2, 0, 1, 0], [4, 0, 0, 1]]
    assert dataset.test.inputs.tolist() == [[1, 0, 0, 1], [2, 1, 0, 0], [3, 0, 0, 0], [4, 0, 0, 0]]
    assert dataset.columns.inputs.names == ["x", "city=Bern", "city=Oslo", "city=Rome"]
    assert dataset.features == 4


def test_missing_categories_become_a_category_of_their_own(tmp_path):
    city = ["Bern", None, "Oslo", None] * 3
    dataset = open_dataset(parts(tmp_path, train={"city": city}, test={"city": [None, "Oslo"]}))
    assert dataset.columns.inputs.names == ["city=Bern", "city=Oslo", "city missing"]
    assert dataset.test.inputs.tolist() == [[0, 0, 1], [0, 1, 0]]
    assert "missing in training rows: city in 6 (a category of its own)" in summary_of(dataset)


def test_a_missing_number_becomes_the_training_median_with_an_indicator_input(tmp_path):
    age = [10.0, 20.0, 90.0, None, 20.0, float("nan"), None, 20.0]
    dataset = open_dataset(parts(tmp_path, train={"age": age}, test={"age": [None, 500.0]}))
    assert dataset.columns.inputs.names == ["age", "age missing"]
    assert dataset.train.inputs.tolist() == [[10, 0], [20, 0], [90, 0], [20, 1], [20, 0], [20, 1], [20, 1], [20, 0]]
    assert dataset.test.inputs.tolist() == [[20, 1], [500, 0]]
    assert "missing in training rows: age in 3 (filled with the median 20, and marked)" in summary_of(dataset)


def test_a_number_missing_only_in_test_data_is_filled_without_an_indicator_input(tmp_path):
    """An indicator that is 0 in all training rows would be an input with untrained weights."""
    dataset = open_dataset(parts(tmp_path, train={"age": [1.0, 2.0, 6.0, 2.0]}, test={"age": [None, 5.0]}))
    assert dataset.columns.inputs.names == ["age"]
    assert dataset.test.inputs.tolist() == [[2], [5]]


def test_categories_and_gaps_in_fewer_than_three_training_rows_get_no_input(tmp_path):
    """With some seeds all of these rows are validation rows: the weights of the input would remain untrained."""
    age, city = [1.0, 2.0, 6.0, 2.0] * 4, ["Bern", "Oslo"] * 8
    age[3:5], city[0], city[1:3] = [None, None], "Rome", [None, None]
    dataset = open_dataset(
        parts(tmp_path, train={"age": age, "city": city}, test={"age": [None, 5], "city": ["Rome", None]})
    )
    assert dataset.columns.inputs.names == ["age", "city=Bern", "city=Oslo"]
    assert dataset.test.inputs.tolist() == [[2, 0, 0], [5, 0, 0]]
    assert "age in 2 (filled with the median 2), city in 2 (0 in all inputs)" in summary_of(dataset)


def test_booleans_and_whole_numbers_may_have_missing_values(tmp_path):
    columns = {"b": ["True", "", "False", "True", "False", "True"], "n": [1, 2, "", 4, 5, 7], "label": list("xyxyxy")}
    dataset = open_dataset(csv(tmp_path / "t.csv", columns))
    assert {"b", "n"} <= {*dataset.columns.inputs.names}
    assert "numbers b, n" in summary_of(dataset)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (["2020-01-01", "2020-01-02"] * 6, "dates"),
        (["31.12.2020 10:00", "1.1.2021 11:30"] * 6, "dates"),
        (["12/31/20", None] * 6, "dates"),
        (pa.array([1, 2] * 6, pa.timestamp("s")), "dates"),
        (pa.array([1, 2] * 6, pa.date32()), "dates"),
        (pa.array([1, 2] * 6, pa.time32("s")), "times"),
        ([f"note {number}" for number in range(12)], "12 different texts in 12 rows"),
        ([f"note {number // 2}" for number in range(12)], "6 different texts in 12 rows"),
        ([*map(str, range(11)), "?"], "numbers mixed with texts such as '?': leave these empty"),
        ([f"{number},5 %" for number in range(12)], "numbers written as texts, such as '0,5 %': write plain numbers"),
        ([7.0] * 12, "always 7"),
        (["CH"] * 12, "always 'CH'"),
        ([None] * 12, "empty"),
        ([[1, 2]] * 12, "list<element: int64>"),
        ([b"x", b"y"] * 6, "binary"),
    ],
)
def test_columns_that_cannot_be_inputs_are_excluded_with_the_reason(values, why, tmp_path):
    dataset = open_dataset(
        parts(tmp_path, train={"x": [1, 3] * 6, "other": values}, test={"x": [1, 2], "other": values[:2]})
    )
    assert dataset.columns.inputs.names == ["x"]
    assert f"left out: other ({why})" in summary_of(dataset)


def test_a_column_of_50_categories_is_an_input_and_one_of_51_is_excluded(tmp_path):
    fifty = [f"c{number % 50}" for number in range(300)]
    one_more = [f"c{number % 51}" for number in range(300)]
    dataset = open_dataset(parts(tmp_path, train={"a": fifty, "b": one_more}, test={"a": ["c1"] * 2, "b": ["c1"] * 2}))
    assert len(dataset.columns.inputs.names) == 50
    assert "left out: b (51 different texts in 300 rows)" in summary_of(dataset)


def test_dictionary_encoded_texts_are_categories_and_decimals_are_numbers(tmp_path):
    import decimal

    columns = {
        "city": pa.array(CITIES * 4).dictionary_encode(),
        "price": [decimal.Decimal("1.50"), decimal.Decimal("2.25")] * 6,
    }
    dataset = open_dataset(parts(tmp_path, train=columns, test={name: values[:2] for name, values in columns.items()}))
    assert dataset.test.inputs.tolist() == [[1, 0, 0, 1.5], [0, 1, 0, 2.25]]


@pytest.mark.parametrize(
    ("name", "values", "noted"),
    [
        ("PassengerId", [*range(0, 120, 10)], True),
        ("customer_id", [*range(0, 120, 10)], True),
        ("id", [number % 5 for number in range(12)], True),
        ("Index", [*range(0, 120, 10)], True),
        ("row", [*range(0, 120, 10)], False),
        ("paid", [*range(0, 120, 10)], False),
        ("body_mass_index", [*range(0, 120, 10)], False),
        ("valid", [0, 1] * 6, False),
    ],
)
def test_a_column_that_looks_like_an_identifier_is_used_with_a_note_on_how_to_exclude_it(name, values, noted, tmp_path):
    columns = {name: values, "x": [0.5, 1.5, 2.5] * 4, "the city": ["Bern", "Oslo"] * 6, "label": [0, 0, 1] * 4}
    dataset = open_dataset(csv(tmp_path / "t.csv", columns))
    assert name in dataset.columns.inputs.names
    assert ("looks like an identifier" in summary_of(dataset)) == noted
    if noted:
        assert f"{name} looks like an identifier: to leave it out, give --columns 'x,the city'" in summary_of(dataset)
        assert name not in open_dataset(f"{tmp_path / 't.csv'}?columns=x,the city").columns.inputs.names


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("row", [*range(5, 17)], "numbers the rows"),
        ("PassengerId", [*range(1, 13)], "numbers the rows"),
        ("shuffled", [*range(11, 2, -2), *range(0, 11, 2), 1], "numbers the rows"),
        ("Unnamed: 0", [*range(0, 120, 10)], "an index of pandas"),
        ("Unnamed: 0.1", [*range(6), *range(6)], "an index of pandas"),
        ("one gap", [*range(11), 12], None),
        ("one twice", [*range(11), 10], None),
        ("as float", [float(row) for row in range(12)], None),
    ],
)
def test_a_column_of_row_numbers_is_excluded_unless_it_is_named(name, values, why, in_memory, tmp_path):
    """In a sorted table it reveals the classes. Rows that are held out leave gaps in the training part."""
    columns = {name: values, "x": [0.5, 1.5, 2.5] * 4}
    frame = pandas.DataFrame({**columns, "label": [0, 0, 1] * 4})
    if in_memory:
        dataset = from_parts("x", {"train": (frame.drop(columns="label"), frame["label"])}, "x")
    else:
        frame.to_csv(tmp_path / "t.csv", index=False)
        dataset = open_dataset(str(tmp_path / "t.csv"))
        named = f"{tmp_path / 't.csv'}?" + urlencode({"columns": f"{name},x"})
        assert open_dataset(named).columns.inputs.names == [name, "x"]
    assert dataset.columns.inputs.names == (["x"] if why else [name, "x"])
    remedy = "give it as float" if in_memory else "name it in --columns"
    assert (f"left out: {name} ({why}: to use it, {remedy})" in summary_of(dataset)) == bool(why)


def leaking(path, rows, held):
    """A table whose held-out rows have other numbers and categories: if these were learnt, the inputs would change."""
    x = [row / 2 if row % 3 else "" for row in range(rows)]
    city = [CITIES[row % 3] for row in range(rows)]
    for row in held:
        x[row], city[row] = 1e6, "only here"
    return csv(path, {"x": x, "city": city, "label": [row % 2 for row in range(rows)]})


def test_held_out_test_rows_do_not_affect_how_columns_are_encoded(tmp_path):
    from bisam.lab.data.held_out import TEST, stratified_split

    _, held = stratified_split(torch.arange(60) % 2, TEST)
    plain, other = (
        open_dataset(leaking(tmp_path / f"{name}.csv", 60, rows))
        for name, rows in {"a": [], "b": held.tolist()}.items()
    )
    assert torch.equal(plain.train.inputs, other.train.inputs)
    assert plain.columns == other.columns
    assert other.test.inputs[:, other.columns.inputs.names.index("x")].tolist() == [1e6] * len(held)
    cities = [place for place, name in enumerate(other.columns.inputs.names) if name.startswith("city=")]
    assert other.test.inputs[:, cities].abs().sum() == 0


def test_test_and_validation_parts_do_not_affect_how_columns_are_encoded(tmp_path):
    train = {"x": [1.0, None, 3.0] * 4, "city": CITIES * 4}
    strange = {"x": [1e6, None] * 4, "city": ["Paris", None] * 4}
    alike = {"x": [1.0, 2.0] * 4, "city": ["Bern", "Oslo"] * 4}
    found = [
        open_dataset(parts(tmp_path / str(number), train=train, validation=other, test=other))
        for number, other in enumerate((strange, alike))
    ]
    assert torch.equal(found[0].train.inputs, found[1].train.inputs)
    assert found[0].columns == found[1].columns
    assert torch.equal(found[0].validation.inputs, found[0].test.inputs)


def test_the_checksum_depends_on_the_values_and_the_chosen_columns(tmp_path):
    columns = {"x": [1, "", 3] * 8, "city": CITIES * 8, "label": [0, 1] * 12}
    path = csv(tmp_path / "t.csv", columns)
    first, again = open_dataset(path), open_dataset(path)
    assert first.checksum == again.checksum
    assert first.checksum != open_dataset(f"{path}?columns=x").checksum
    columns["city"][0] = "Rome"
    assert first.checksum != open_dataset(csv(tmp_path / "u.csv", columns)).checksum


def test_a_table_is_read_alike_from_csv_jsonl_and_parquet(tmp_path):
    columns = {
        "a": [0.5, 1.5, 2.5, 4.0] * 6,
        "city": [*CITIES, None] * 6,
        "n": [1, 2, None, 4] * 6,
        "label": [0, 1] * 12,
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    csv(tmp_path / "t.csv", {name: ["" if v is None else v for v in values] for name, values in columns.items()})
    found = [open_dataset(str(tmp_path / f"t.{ending}")) for ending in ("parquet", "jsonl", "csv")]
    assert len({dataset.checksum for dataset in found}) == 1
    assert found[0].columns == found[1].columns == found[2].columns


def test_the_summary_lists_numbers_categories_gaps_and_excluded_columns_once(tmp_path):
    columns = {
        "age": [20, 30, ""] * 8, "city": CITIES * 8, "name": [f"n{row}" for row in range(24)],
        "day": ["2020-01-01"] * 24, "tier": ["gold", "silver"] * 12,
    }  # fmt: skip
    lines = OwnData(open_dataset(csv(tmp_path / "t.csv", columns) + "?label=tier")).described()
    assert lines.count("5 inputs: numbers age; categories city") == 1
    assert any(line.startswith("missing in training rows: age in ") for line in lines)
    (left,) = (line for line in lines if line.startswith("left out: "))
    assert "name (" in left
    assert "day (dates)" in left


def test_named_columns_may_be_categories_and_those_that_cannot_be_inputs_are_refused(tmp_path):
    columns = {"x": range(12), "city": CITIES * 4, "day": ["2020-01-01"] * 12, "label": [0, 1] * 6}
    path = csv(tmp_path / "t.csv", columns)
    dataset = open_dataset(f"{path}?columns=city,x")
    assert dataset.columns.inputs.names == ["city=Bern", "city=Oslo", "city=Rome", "x"]
    with pytest.raises(DataError, match="column 'day' cannot be an input \\(dates\\): remove it from --columns"):
        open_dataset(f"{path}?columns=x,day")


def test_a_table_without_usable_input_columns_is_refused_with_a_remedy(tmp_path):
    path = csv(tmp_path / "t.csv", {"review": [f"text {row}" for row in range(12)], "label": [0, 1] * 6})
    with pytest.raises(DataError, match=r"no column can be an input: review .* name a column of texts by --text"):
        open_dataset(path)
    with pytest.raises(DataError, match="has no column beside the label"):
        open_dataset(csv(tmp_path / "u.csv", {"label": [0, 1] * 6}))


def test_a_part_with_a_missing_column_or_one_of_another_type_is_refused(tmp_path):
    train = {"x": range(0, 24, 2), "city": CITIES * 4}
    with pytest.raises(DataError, match="test: there is no column 'city', which the training part has"):
        open_dataset(parts(tmp_path / "a", train=train, test={"x": [1, 2]}))
    with pytest.raises(DataError, match="test: column 'x' has texts, and numbers in the training part"):
        open_dataset(parts(tmp_path / "b", train=train, test={"x": ["one", "two"], "city": CITIES[:2]}))
    folder = parts(tmp_path / "c", train=train)
    pq.write_table(pa.table(train), tmp_path / "c" / "test.parquet")
    with pytest.raises(DataError, match="test: there is no column 'label', which the training part has"):
        open_dataset(folder)


def test_an_infinite_number_is_refused(tmp_path):
    with pytest.raises(DataError, match="column 'x' has an infinite number in row 3"):
        open_dataset(parts(tmp_path, train={"x": [0.0, 1.0, 2.0, float("inf")]}, test={"x": [1.0, 2.0]}))


def test_a_data_frame_in_memory_is_read_like_the_same_table_in_a_file(tmp_path):
    columns = {"age": [20.0, 30.0, None, 50.0] * 6, "city": [*CITIES, None] * 6, "label": [0, 1] * 12}
    frame = pandas.DataFrame(columns)
    frame.to_csv(tmp_path / "t.csv", index=False)
    mixed = frame.sample(frac=1, random_state=0).sort_index()
    inputs = mixed.drop(columns="label")
    inputs.index = [f"row {row}" for row in range(24)]  # what pandas would add as a column
    in_memory = from_parts("data", {"train": (inputs, mixed["label"].to_numpy())}, "the data")
    in_a_file = open_dataset(str(tmp_path / "t.csv"))
    assert in_memory.checksum == in_a_file.checksum
    assert in_memory.columns.inputs == in_a_file.columns.inputs
    assert (in_memory.columns.label, in_a_file.columns.label) == (None, "label")
    with pytest.raises(DataError, match="some parts are data frames and some are arrays"):
        from_parts("data", {"train": (inputs, [0, 1] * 12), "test": (np.ones((2, 3)), [0, 1])}, "the data")


def test_a_saved_table_reading_encodes_new_rows_in_the_same_way(tmp_path):
    train = {"age": [1.0, None, 3.0] * 4, "city": [*CITIES, None] * 3}
    test = {"age": [None, 7.0], "city": ["Oslo", "Paris"]}
    dataset = open_dataset(parts(tmp_path, train=train, test=test))
    again = TableReading.from_dict(json.loads(json.dumps(dataset.columns.as_dict())))
    assert again == dataset.columns
    assert torch.equal(again.inputs.read(pa.table(test)), dataset.test.inputs)
    assert np.isfinite(again.inputs.read(pa.table(test)).numpy()).all()


def test_categories_that_look_like_numbers_match_columns_that_were_read_as_numbers():
    """Readers of CSV files turn such a column into numbers, and 007 into 7."""
    column = CategoryColumn("code", ("007", "12", "A3", None))
    expected = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    for values in (["007", "12", "5", None], [7, 12, 5, None], [7.0, 12.0, 5.0, float("nan")]):
        assert column.read(pa.chunked_array([values]), "new").tolist() == expected
    truths = CategoryColumn("paid", ("False", "True", "unknown"))
    assert truths.read(pa.chunked_array([[True, None, False]]), "new").tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 0]]
    assert column.read(pa.chunked_array([[float("nan")]]), "new").tolist() == [[0, 0, 0, 1]]


def test_numbers_in_place_of_texts_or_of_ambiguous_categories_are_refused():
    with pytest.raises(DataError, match="new: column 'city' has numbers, and texts in the training part: correct it"):
        CategoryColumn("city", ("Bern", "Oslo")).read(pa.chunked_array([[1, 2]]), "new")
    with pytest.raises(DataError, match="some of which are the same number: give texts"):
        CategoryColumn("code", ("07", "7", "x")).read(pa.chunked_array([[7]]), "new")


@pytest.mark.parametrize(
    "wrong",
    [
        {}, [], {"inputs": {}, "label": "y"}, {"inputs": ["a", 3], "label": "y"}, {"inputs": ["a"], "label": 3},
        {"inputs": {"a": {"median": "1", "is_marked": True}}, "label": "y"},
        {"inputs": {"a": {"median": float("nan"), "is_marked": True}}, "label": "y"},
        {"inputs": {"a": {"median": 1.0}}, "label": "y"},
        {"inputs": {"a": {"categories": ["x", "x"]}}, "label": "y"},
        {"inputs": {"a": {"categories": [1]}}, "label": "y"},
        {"inputs": {"a": 3}, "label": "y"},
    ],
)  # fmt: skip
def test_a_saved_table_reading_with_invalid_contents_is_refused(wrong):
    with pytest.raises((ValueError, TypeError, KeyError)):
        TableReading.from_dict(wrong)


def test_a_named_index_of_a_data_frame_is_not_an_input():
    frame = pandas.DataFrame({"x": np.arange(20.0), "id": np.random.default_rng(0).permutation(20)}).set_index("id")
    dataset = from_parts("data", {"train": (frame, [0, 1] * 10)}, "the data")
    assert dataset.columns.names == ["x"]


def test_the_index_column_that_pandas_saves_is_excluded_and_reported(tmp_path):
    folder = parts(tmp_path / "t", train={"x": [1.0, 2.0] * 6, "__index_level_0__": [*range(0, 24, 2)]})
    dataset = open_dataset(folder)
    assert dataset.train.inputs.shape[1] == 1
    assert "__index_level_0__ (the index of a data frame)" in summary_of(dataset)


def test_a_constant_column_with_a_null_or_nan_gap_is_excluded_as_constant(tmp_path):
    for gap in (None, float("nan")):
        folder = parts(tmp_path / str(gap), train={"x": [1.0, 2.0] * 6, "one": [1.0] * 11 + [gap]})
        assert "one (always 1)" in summary_of(open_dataset(folder))


def test_a_table_with_two_columns_of_the_same_name_is_refused():
    table = pa.table([pa.array([1.0, 2.0]), pa.array([3.0, 4.0])], names=["x", "x"])
    with pytest.raises(DataError, match="2 columns are called 'x': rename them"):
        column_of(table, "x", "here")


def test_spaces_around_column_names_in_the_header_are_removed(tmp_path):
    (tmp_path / "t.csv").write_text(" x , the city , label \n" + "0.5,Bern,no\n1.5,Oslo,yes\n" * 6)
    dataset = open_dataset(f"{tmp_path / 't.csv'}?columns=the city,x&label=label")
    assert dataset.columns.inputs.names == ["the city=Bern", "the city=Oslo", "x"]
    assert dataset.columns.label == "label"


def test_a_data_frame_with_two_columns_of_the_same_name_is_refused():
    frame = pandas.DataFrame({"x": np.arange(0, 40.0, 2), "z": [1.5, 2.5] * 10})
    with pytest.raises(DataError, match="the data frame has several columns of the name 'x': rename them, or keep one"):
        from_parts("data", {"train": (pandas.concat([frame, frame], axis=1), [0, 1] * 10)}, "the data")


def test_labels_whose_index_differs_from_that_of_the_rows_are_refused():
    """If labels were matched by position, rows would have the labels of other rows."""
    frame = pandas.DataFrame({"x": np.arange(0, 40.0, 2), "label": [0, 1] * 10})
    x, y = frame.sample(frac=1, random_state=0)[["x"]], frame["label"]
    with pytest.raises(DataError, match=r"data, train: y has the index of x in another order: give y\.loc\[x\.index\]"):
        from_parts("data", {"train": (x, y)}, "the data")
    with pytest.raises(DataError, match=r"y has another index than x: give the labels of these rows, or y\.to_nu"):
        from_parts("data", {"train": (x[:10], y.set_axis(range(20, 40))[:10])}, "the data")
    found = [
        from_parts("data", {"train": (x, labels), "test": (x, labels)}, "the data").train.labels.tolist()
        for labels in (y.loc[x.index], y.loc[x.index].to_numpy(), [*y.loc[x.index]])
    ]
    assert found == [[row % 2 for row in x.index]] * 3


@pytest.mark.parametrize(
    ("ending", "text", "decimals"),
    [
        ("csv", "x;who;label\n" + '1,5;Meyer, Hans;a\n"-2,5";Otto;b\n' * 6, "commas"),
        ("csv", "x;who;label\r\n" + "1.5;Meyer, Hans;a\r\n-2.5;Otto;b\r\n" * 6, "points"),
        ("tsv", "x\twho\tlabel\n" + "1.5\tMeyer, Hans\ta\n-2.5\tOtto\tb\n" * 6, None),
    ],
)
def test_tables_separated_by_semicolons_or_tabs_are_read_like_those_with_commas(ending, text, decimals, tmp_path):
    (tmp_path / "plain.csv").write_text("x,who,label\n" + '1.5,"Meyer, Hans",a\n-2.5,Otto,b\n' * 6)
    path = tmp_path / f"t.{ending}"
    path.write_bytes(text.encode())
    dataset = open_dataset(str(path))
    assert dataset.checksum == open_dataset(str(tmp_path / "plain.csv")).checksum
    line = f"t.csv: columns are separated by semicolons, decimals are written with {decimals}"
    assert (line in summary_of(dataset)) == (decimals is not None)
    like = OwnData(dataset).preparation(Config(data=dataset.name, model="perceptron"))
    assert open_new(str(path), like).notes == ([line] if decimals else [])


@pytest.mark.parametrize("first", [0, 1, 7])
def test_rows_with_more_fields_than_the_header_are_refused_whatever_their_first_field_is(first, tmp_path):
    rows = "".join(f"{number},hello, world,{number % 2}\n" for number in range(first, first + 12))
    (tmp_path / "t.csv").write_text("id,text,label\n" + rows)
    with pytest.raises(DataError, match=r"t\.csv has rows with more fields than its header"):
        open_dataset(f"{tmp_path / 't.csv'}?label=label")


def test_a_comma_between_thousands_is_not_taken_for_a_decimal_comma(tmp_path):
    rows = "".join(f"{number}.5;{'1,000' if number == 3 else 'x'};{number % 2}\n" for number in range(12))
    (tmp_path / "t.csv").write_text("price;note;label\n" + rows)
    dataset = open_dataset(f"{tmp_path / 't.csv'}?label=label")
    assert "t.csv: columns are separated by semicolons, decimals are written with points" in dataset.notes
