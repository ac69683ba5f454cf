"""Predictions for the samples of a file or a folder: a table of them, and their measures where labels are there."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from bisam.lab import measures
from bisam.lab.data.new_samples import NO_CLASS, NewSamples, open_new
from bisam.lab.data.preparation import WORDS
from bisam.lab.predicting.predictor import Predictor

MOST_CLASSES = 20
"""Classes up to which the table has the probability of each, and the summary a count of each."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model predicts for samples, and the logits that it is from."""

    predictor: Predictor
    samples: NewSamples
    logits: Tensor

    @cached_property
    def predicted(self) -> list[str]:
        return [self.predictor.classes[number] for number in self.logits.argmax(1).tolist()]

    @property
    def measured(self) -> dict[str, float]:
        """The measures of the run, by name, in per cent, over the samples with a class of the model; empty if none."""
        labels = self.samples.labels
        if labels is None or not bool((known := labels != NO_CLASS).any()):
            return {}
        counts = measures.confusion(self.logits[known], labels[known], len(self.predictor.classes))
        return measures.computed(self.predictor.beside.measures, counts)

    def as_csv(self) -> str:
        """A row for each sample: its name, the predicted class, its probability, and those of all classes, if few.

        An image that does not decode has its name alone.
        """
        classes, probabilities = self.predictor.classes, self.logits.softmax(1)
        shown = classes if len(classes) <= MOST_CLASSES else []
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        head = ["sample", "predicted", "probability", *(f"probability of {name}" for name in shown)]
        largest = probabilities.max(1).values.tolist()
        found = zip(self.samples.names, self.predicted, largest, probabilities.tolist(), strict=True)
        rows = [
            [name, predicted, *(f"{value:.6f}" for value in (most, *each[: len(shown)]))]
            for name, predicted, most, each in found
        ]
        for place, name in sorted(self.samples.unread.items()):
            rows.insert(place, [name, *[""] * (len(head) - 1)])
        writer.writerows([head, *rows])
        return text.getvalue()

    def lines(self) -> list[str]:
        """How many samples of each class are predicted, and the measures."""
        classes, count = self.predictor.classes, len(self.samples)
        kind = WORDS[self.predictor.beside.preparation.kind]
        found = [f"{count} samples ({kind}), {len(classes)} classes", *self.samples.notes]
        counts = {name: self.predicted.count(name) for name in classes} if len(classes) <= MOST_CLASSES else {}
        if counts:
            found.append(f"predicted: {', '.join(f'{name} {number}' for name, number in counts.items())}")
        labels = self.samples.labels
        if labels is None:
            return [*found, "no labels, so that nothing is measured"]
        known = int((labels != NO_CLASS).sum())
        if self.measured:
            values = [f"{measures.title_of(name)} {value:.2f} %" for name, value in self.measured.items()]
            found.append(f"{', '.join(values)}, of {known} samples with labels")
        if self.samples.unknown:
            first = f"the first is {self.samples.unknown[0]!r}"
            found.append(f"labels that are no classes of the model are not counted: {first}")
        return found


def predictions(predictor: Predictor, place: str, batch: int | None = None) -> Predictions:
    """For the samples of a file or a folder: see `bisam.lab.data.new_samples`."""
    samples = open_new(place, predictor.beside.preparation)
    return Predictions(predictor, samples, predictor.logits(samples.inputs, batch))
