"""Micro-batches that are kept until their update."""

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch

import bisam
from bisam.integrations.micro_batches import MicroBatch, loss_of_pass, run_all

from family import batch, mlp


def test_each_pass_gets_the_batch_as_it_was_given_whatever_the_last_pass_did_to_it():
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


def test_tensors_without_a_version_counter_are_accepted():
    with torch.inference_mode():
        x = torch.zeros(2)
    assert MicroBatch(x).arguments()[0] is x


def test_the_loss_of_the_ascent_has_the_value_of_the_descent_and_the_gradient_of_its_own_objective():
    model, (x, y) = mlp(), batch()
    optimizer = bisam.BiSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    entropy, bound = (objective(model(x), y) for objective in (optimizer.criterion.descent, optimizer.criterion.ascent))
    (expected,) = torch.autograd.grad(bound, model[0].weight)
    found = {}

    def closure():
        loss = loss_of_pass(optimizer.criterion, SimpleNamespace(logits=model(x)), y)
        slope = torch.autograd.grad(loss, model[0].weight, retain_graph=True)[0]
        found.setdefault(optimizer.phase, (loss.item(), slope))
        loss.backward()
        return loss

    optimizer.step(closure)
    value, slope = found["ascent"]
    assert value == pytest.approx(entropy.item())
    assert value != pytest.approx(bound.item())
    assert torch.allclose(slope, expected)
    with torch.no_grad():  # as in a validation: the criterion's own
        assert loss_of_pass(optimizer.criterion, model(x), y) == optimizer.criterion(model(x), y)


def test_the_mean_loss_of_micro_batches_excludes_those_without_a_loss():
    runs = [lambda: torch.tensor(1.0), lambda: None, lambda: torch.tensor(4.0)]
    assert run_all(runs, None) == 2.5
    assert run_all([lambda: None], None) is None
