"""Labels that are classes, and those that are not."""

import pytest

from bisam.lab.data.classes import number_classes, plain
from bisam.lab.data.images import DataError
from bisam.lab.data.own import from_parts
from bisam.lab.data.own_source import OwnData


def twice(values):
    return [value for value in values for _ in range(2)]


def test_whole_numbers_are_classes_in_any_number_and_even_as_floats():
    found, names = number_classes({"train": twice(float(number) for number in range(30))}, "x")
    assert found["train"].tolist() == twice(range(30))
    assert names == [str(number) for number in range(30)]


def test_up_to_20_fractional_label_values_are_classes_and_more_are_refused():
    found, names = number_classes({"train": twice(number / 2 for number in range(20))}, "x")
    assert found["train"].tolist() == twice(range(20))
    assert names[:3] == ["0", "0.5", "1"]
    with pytest.raises(DataError, match="x: the labels are numbers with fractions and 21 different values"):
        number_classes({"train": twice(number / 2 for number in range(21))}, "x")


def test_a_named_class_without_training_samples_is_refused_and_an_unnamed_one_is_dropped():
    with pytest.raises(DataError, match="x: class 1 has no training sample"):
        number_classes({"train": [0, 0, 2, 2]}, "x", names=["cat", "dog", "cow"])
    found, names = number_classes({"train": [2, 0, 0, 2], "test": [2]}, "x", names=None)
    assert (found["train"].tolist(), found["test"].tolist(), names) == ([1, 0, 0, 1], [1], ["0", "2"])


def test_an_infinite_label_is_not_a_whole_number():
    assert [plain(value) for value in (2.0, 2.5, float("inf"))] == [2, 2.5, float("inf")]


def source(labels):
    return OwnData(from_parts("x", {"train": ([f"text {number}" for number in range(len(labels))], labels)}, "x"))


def test_the_classes_are_listed_with_their_numbers_of_training_samples():
    assert "classes, with their training samples: no 16, yes 8" in source((["no"] * 2 + ["yes"]) * 10).described()
    many = source([*range(37)] * 5).described()
    assert any(line.endswith("samples: 0 4, 1 4, 2 4, 3 4, 4 4, 5 4, 6 4, 7 4, 8 4, 9 4 and 27 more") for line in many)


def test_classes_that_differ_only_in_case_or_spaces_are_reported():
    (line,) = [line for line in source(["yes", "no", "yes ", "no ", "YES", "NO"] * 5).notes if "only" in line]
    assert line.startswith("the classes 'NO', 'no', 'no '; 'YES', 'yes', 'yes ' differ only in case or spaces: if they")
    assert not [line for line in source(["yes", "no", "y", "n"] * 5).notes if "only" in line]
