"""Measures against scikit-learn's, on random predictions and in edge cases."""

import pytest
import torch
from sklearn import metrics

from bisam.lab.measures import MEASURES, computed, confusion, lowest_of

REFERENCES = {
    "accuracy": metrics.accuracy_score,
    "balanced_accuracy": metrics.balanced_accuracy_score,
    "macro_f1": lambda y, p: metrics.f1_score(y, p, average="macro"),
    "mcc": metrics.matthews_corrcoef,
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("seed", range(3))
def test_a_measure_equals_that_of_scikit_learn(name, classes, seed):
    torch.manual_seed(seed)
    logits, labels = torch.randn(60, classes), torch.randint(classes, (60,))
    logits[torch.arange(60), labels] += 0.7
    found = computed((name,), confusion(logits, labels, classes))[name]
    assert found == pytest.approx(100 * REFERENCES[name](labels, logits.argmax(1)), abs=1e-9)


@pytest.mark.parametrize("name", REFERENCES)
def test_a_class_of_one_sample_counts_even_if_it_is_never_predicted(name):
    labels, predicted = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([0, 0, 1, 1, 0, 1])
    found = computed((name,), confusion(torch.eye(3)[predicted], labels, 3))[name]
    assert found == pytest.approx(100 * REFERENCES[name](labels, predicted), abs=1e-9)


def test_a_class_without_samples_or_predictions_does_not_count():
    labels, predicted = torch.tensor([0, 0, 0, 2, 2]), torch.tensor([0, 0, 2, 2, 2])
    counts = confusion(torch.eye(4)[predicted], labels, 4)
    expected = {name: 100 * of(labels, predicted) for name, of in REFERENCES.items()}
    assert computed(tuple(REFERENCES), counts) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_f1_of_two_classes_is_that_of_class_1(seed):
    torch.manual_seed(seed)
    logits, labels = torch.randn(40, 2), torch.randint(2, (40,))
    found = computed(("f1",), confusion(logits, labels, 2))["f1"]
    assert found == pytest.approx(100 * metrics.f1_score(labels, logits.argmax(1)), abs=1e-9)


def test_f1_of_three_classes_is_refused_with_a_hint_at_macro_f1():
    with pytest.raises(ValueError, match="use macro_f1"):
        computed(("f1",), torch.ones(3, 4))


def test_the_correlation_is_zero_if_only_one_class_is_predicted():
    counts = torch.tensor([[4, 0, 0], [6, 0, 0]])
    assert computed(("mcc", "accuracy", "f1"), counts) == {"mcc": 0.0, "accuracy": 40.0, "f1": 0.0}


def test_nan_logits_predict_no_class_and_tied_logits_the_first():
    logits = torch.tensor([[torch.nan, 0.0], [1.0, 1.0]])
    counts = confusion(logits, torch.tensor([1, 0]), 2)
    assert counts.tolist() == [[1, 0, 0], [0, 0, 1]]
    assert computed(("accuracy",), counts) == {"accuracy": 50.0}


def test_only_the_correlation_may_be_negative():
    counts = torch.tensor([[0, 5, 0], [5, 0, 0]])
    assert computed(tuple(MEASURES), counts)["mcc"] == -100.0
    assert {name: lowest_of(f"test_{name}") for name in MEASURES} == {**dict.fromkeys(MEASURES, 0.0), "mcc": -100.0}
    assert lowest_of("validation_mcc") == -100.0
    assert lowest_of("test_top5_accuracy") == 0.0
