"""Labels that are classes, and those that are not."""

import pytest

from bisam.lab.data.classes import number_classes, plain
from bisam.lab.data.images import DataError


def twice(values):
    return [value for value in values for _ in range(2)]


def test_whole_numbers_are_classes_however_many_and_however_they_are_written():
    found, names = number_classes({"train": twice(float(number) for number in range(30))}, "x")
    assert found["train"].tolist() == twice(range(30))
    assert names == [str(number) for number in range(30)]


def test_a_few_numbers_with_fractions_are_classes_and_many_are_a_quantity():
    found, names = number_classes({"train": twice(number / 2 for number in range(20))}, "x")
    assert found["train"].tolist() == twice(range(20))
    assert names[:3] == ["0", "0.5", "1"]
    with pytest.raises(DataError, match="x: the labels are numbers with fractions and 21 different values"):
        number_classes({"train": twice(number / 2 for number in range(21))}, "x")


def test_a_known_class_without_a_training_sample_is_named():
    with pytest.raises(DataError, match="x: class 1 has no training sample"):
        number_classes({"train": [0, 0, 2, 2]}, "x", names=["cat", "dog", "cow"])
    found, names = number_classes({"train": [2, 0, 0, 2], "test": [2]}, "x", names=None)
    assert (found["train"].tolist(), found["test"].tolist(), names) == ([1, 0, 0, 1], [1], ["0", "2"])


def test_an_infinite_label_is_not_a_whole_number():
    assert [plain(value) for value in (2.0, 2.5, float("inf"))] == [2, 2.5, float("inf")]
