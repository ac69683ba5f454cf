"""Options and models that would train wrongly without an error: warned about once, or refused."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import bisam
from bisam.engine.objective_options import per_sample

from family import assert_close, batch, build, closure_of, mlp


def test_batch_statistics_that_cannot_be_restored_are_warned_about_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    closure = closure_of(model, optimizer, *batch())
    with pytest.warns(UserWarning, match=r"BatchNorm1d may update buffers .* in both passes.*SAM\(base, model\)"):
        optimizer.step(closure)
    optimizer.step(closure)  # warnings are errors here
    for unaffected in (nn.Sequential(*model).eval(), mlp()):
        optimizer = bisam.SAM(torch.optim.SGD(unaffected.parameters(), lr=0.1))
        optimizer.step(closure_of(unaffected, optimizer, *batch()))
    assert not nn.modules.module._global_forward_pre_hooks


def test_a_warning_names_the_line_of_the_caller_also_below_a_scheduler():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    for form in ("step", "backward"):
        optimizer = bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1))
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps `step`
        with pytest.warns(UserWarning, match="may update buffers") as warned:
            getattr(optimizer, form)(closure_of(model, optimizer, *batch()))
        assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_round_small_perturbations_away_are_warned_about_once(dtype):
    _, optimizer = build("SAM", net=mlp, dtype=dtype)
    x, y = batch(dtype=dtype)
    with pytest.warns(UserWarning, match=f"the weights are in {dtype} and cannot move by less than their rounding"):
        optimizer.minimize(x, y)
    optimizer.minimize(x, y)  # warnings are errors here


def test_a_label_that_the_descent_alone_ignores_is_warned_about():
    base = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="ignores the label 0, and the ascent -100: give it to the LowerBound too"):
        bisam.SAM(base, ascent=bisam.LowerBound(), descent=nn.CrossEntropyLoss(ignore_index=0))
    base = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"to the descent too: descent=torch.nn.CrossEntropyLoss\(ignore_index=0"):
        bisam.SAM(base, ascent=bisam.LowerBound("tanh", ignore_index=0))
    for ascent, descent in (
        (bisam.LowerBound(ignore_index=0), nn.CrossEntropyLoss(ignore_index=0)),
        (bisam.LowerBound(), nn.CrossEntropyLoss()),
        (None, nn.CrossEntropyLoss(ignore_index=0)),
    ):
        bisam.BiSAM(torch.optim.SGD(mlp().parameters(), lr=0.1), ascent=ascent, descent=descent)


def test_autocast_with_a_closure_is_refused_because_it_would_have_no_effect():
    model, optimizer = build("SAM", net=mlp, autocast=torch.bfloat16)
    x, y = batch()
    closure = closure_of(model, optimizer, x, y)
    for step in (optimizer.step, optimizer.backward):
        with pytest.raises(RuntimeError, match=r"autocast= is for minimize\(x, y\).*torch.autocast"):
            step(closure)
    optimizer.criterion(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"has no effect on ascend\(\)"):
        optimizer.ascend()


def test_objectives_of_a_criterion_cannot_be_replaced_in_part():
    _, optimizer = build("BiSAM(log)", net=mlp)
    for name in ("ascent", "descent", "bilevel"):
        with pytest.raises(AttributeError, match="build a new optimizer" if name != "bilevel" else "no setter"):
            setattr(optimizer.criterion, name, nn.CrossEntropyLoss())


def test_torchs_error_about_a_change_in_place_in_the_first_pass_is_kept():
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()

    def closure():
        hidden = torch.sigmoid(model(x))
        hidden += 1
        loss = optimizer.criterion(hidden, y)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        optimizer.step(closure)


def test_a_batch_none_of_whose_inputs_can_be_cut_is_refused():
    @dataclass
    class Inputs:
        x: torch.Tensor

    model = mlp()
    forward = model.forward
    model.forward = lambda inputs: forward(inputs.x)
    x, y = batch()
    optimizer = bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.minimize(Inputs(x), y)
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(TypeError, match=rf"no tensor of x \(Inputs\) has {len(y)} rows, as y has"):
        optimizer.minimize(Inputs(x), y, accumulate=2)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("kind", [int, np.float32, float])
def test_numbers_of_a_list_of_closures_are_averaged_by_labels(kind):
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()

    def closure(part, value):
        optimizer.criterion(model(x[part]), y[part]).backward()
        return kind(value)

    value = optimizer.step([partial(closure, slice(0, 3), 1), partial(closure, slice(3, 4), 5)])
    assert value == pytest.approx(2.0)


def test_the_score_of_a_sample_is_the_mean_over_the_labels_that_count():
    logits = torch.randn(2, 3, 5)
    target = torch.tensor([[0, -100, -100, -100, -100], [1, 2, 0, 1, 2]])
    loss = nn.CrossEntropyLoss()
    expected = [loss(logits[:1], target[:1]), loss(logits[1:], target[1:])]
    assert_close([*per_sample(loss, logits, target)], expected, 1e-6)


def test_numbers_of_numpy_are_taken_as_steps():
    optimizer = bisam.SAM(torch.optim.SGD(mlp().parameters(), lr=0.1), start=np.int64(2), stop=np.int64(4))
    assert (optimizer.start, optimizer.stop) == (2, 4)
    assert type(optimizer.start) is int
