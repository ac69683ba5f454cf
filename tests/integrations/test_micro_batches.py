"""Micro-batches that wait for their update."""

from collections import UserDict

import pytest
import torch

from bisam.integrations.micro_batches import MicroBatch


def test_each_pass_gets_the_batch_as_it_was_given():
    x, y = torch.zeros(2), torch.ones(2)
    batch = {"x": x, "more": [y, {"y": y}], "named": UserDict(y=y)}
    kept = MicroBatch(batch, 3)
    batch.pop("x")
    for _ in range(2):
        found, number = kept.arguments()
        assert found.pop("x") is x
        assert found["more"].pop()["y"] is y
        assert found["named"].pop("y") is y
        assert number == 3


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"x": x}, lambda x: ((x, 1), []), lambda x: UserDict(x=[x])])
def test_a_tensor_that_was_changed_in_place_is_refused(wrap):
    x = torch.zeros(2, 3)
    kept = MicroBatch(wrap(x))
    kept.arguments()
    x[0] += 1
    with pytest.raises(RuntimeError, match=r"shape \(2, 3\), was changed in place.*x = x.clone\(\)"):
        kept.arguments()


def test_tensors_that_count_no_changes_are_taken():
    with torch.inference_mode():
        x = torch.zeros(2)
    assert MicroBatch(x).arguments()[0] is x
