"""`start=` and `stop=`: plain steps of the base optimizer before and after the perturbed ones."""

import copy

import pytest
import torch

import bisam
from bisam.merge import Turn

from family import (
    assert_identical,
    batch,
    build,
    closure_of,
    mlp,
    weights_of,
)


def weights_after(optimizer, model, seeds):
    for seed in seeds:
        optimizer.minimize(*batch(seed))
    return weights_of(model)


def test_steps_before_the_start_are_those_of_the_base_optimizer(variant):
    model, late = build(variant, net=mlp, start=2)
    plain_model, plain = build(variant, net=mlp, rho=0.0)
    assert_identical(weights_after(late, model, range(2)), weights_after(plain, plain_model, range(2)))
    late.minimize(*batch(2))
    plain.minimize(*batch(2))
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), plain_model.parameters(), strict=True))


def test_steps_from_the_start_on_are_those_of_the_variant(plain_variant):
    model, late = build(plain_variant, net=mlp, start=2)
    weights_after(late, model, range(2))
    begun, fresh = build(plain_variant, net=mlp)
    begun.load_state_dict(model.state_dict())
    fresh.base.load_state_dict(copy.deepcopy(late.base.state_dict()))
    assert_identical(weights_after(late, model, range(2, 5)), weights_after(fresh, begun, range(2, 5)))


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({"start": 2}, [1, 1, 2, 2, 2]),
        ({"start": 1, "every": 3}, [1, 2, 1, 1, 2]),
        ({"start": lambda step: step in (0, 3)}, [2, 1, 1, 2, 1]),
        ({"stop": 3}, [2, 2, 2, 1, 1]),
        ({"start": 1, "stop": 3, "every": 2}, [1, 2, 1, 1, 1]),
        ({"start": lambda step: step in (0, 3), "stop": 3}, [2, 1, 1, 1, 1]),
    ],
)
def test_start_stop_and_every_choose_the_steps_that_perturb_by_their_number(options, passes):
    model, optimizer = build("SAM", net=mlp, **options)
    counts, seen = [], []
    model.register_forward_hook(lambda *_: counts.append(1))
    for seed in range(5):
        counts.clear()
        optimizer.step(closure_of(model, optimizer, *batch(seed)))
        seen.append(len(counts))
    assert seen == passes


@pytest.mark.parametrize("taken", [1, 3])
def test_a_checkpoint_keeps_how_many_steps_remain_before_the_start(taken):
    model, optimizer = build("SAM", net=mlp, start=2)
    weights_after(optimizer, model, range(taken))
    other, resumed = build("SAM", net=mlp, start=2)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    seeds = range(taken, 5)
    assert_identical(weights_after(optimizer, model, seeds), weights_after(resumed, other, seeds))


@pytest.mark.parametrize("start", [-1, 1.5, True, "2"])
def test_a_start_that_is_not_a_step_number_is_refused(start):
    with pytest.raises(
        ValueError, match=r"start must be the number of a step, .*, or a function.*int\(0.75 \* steps\)"
    ):
        build("SAM", net=mlp, start=start)


def test_from_the_stop_on_steps_are_those_of_the_base_optimizer(variant):
    model, early = build(variant, net=mlp, stop=2)
    weights_after(early, model, range(2))
    begun, plain = build(variant, net=mlp, rho=0.0)
    begun.load_state_dict(model.state_dict())
    plain.base.load_state_dict(copy.deepcopy(early.base.state_dict()))
    for group in plain.param_groups:
        group["rho"] = 0.0  # the state has the other's
    assert_identical(weights_after(early, model, range(2, 5)), weights_after(plain, begun, range(2, 5)))


def test_steps_before_the_stop_are_those_of_the_variant(variant):
    (model, early), (other, always) = build(variant, net=mlp, stop=3), build(variant, net=mlp)
    assert_identical(weights_after(early, model, range(3)), weights_after(always, other, range(3)))


def test_a_checkpoint_keeps_how_many_steps_remain_before_the_stop():
    model, optimizer = build("LookSAM", net=mlp, stop=3)
    weights_after(optimizer, model, range(2))
    other, resumed = build("LookSAM", net=mlp, stop=3)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_identical(weights_after(optimizer, model, range(2, 6)), weights_after(resumed, other, range(2, 6)))


@pytest.mark.parametrize("stop", [-1, 1.5, True, "2"])
def test_a_stop_that_is_not_a_step_number_is_refused(stop):
    with pytest.raises(ValueError, match=r"stop must be the number of a step, .*, or None.*int\(0.5 \* steps\)"):
        build("SAM", net=mlp, stop=stop)


def test_a_stop_before_the_start_is_refused():
    with pytest.raises(ValueError, match="stop must come after start, got start=3 and stop=3"):
        build("SAM", net=mlp, start=3, stop=3)


@pytest.mark.parametrize("options", [{"start": 2}, {"stop": 2}])
def test_start_and_stop_are_refused_for_passes_by_hand(options):
    model, optimizer = build("SAM", net=mlp, **options)
    optimizer.criterion(model(batch()[0]), batch()[1]).backward()
    with pytest.raises(RuntimeError, match="Use step\\(closure\\) or minimize"):
        optimizer.ascend()


@pytest.mark.parametrize(("form", "options"), [("step", {}), ("minimize", {}), ("minimize", {"micro_batch": 8})])
def test_a_start_function_is_called_once_per_step(form, options):
    called = []
    model, optimizer = build("SAM", start=lambda step: called.append(step) or step > 0, **options)
    for seed in range(3):
        x, y = batch(seed)
        if form == "minimize":
            optimizer.minimize(x, y)
        else:
            optimizer.step(closure_of(model, optimizer, x, y))
    assert called == [0, 1, 2]


def plain_copy(variant, model, optimizer):
    """The same weights with the same base optimizer, which does not perturb."""
    other, plain = build(variant, net=mlp)
    other.load_state_dict(model.state_dict())
    plain.base.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
    for group in plain.param_groups:
        group["rho"] = 0.0
    return other, plain


@pytest.mark.parametrize("off", [False, None])
def test_steps_that_a_start_function_excludes_are_those_of_the_base_optimizer(variant, off):
    """Also in a variant that reuses a direction in the steps between two perturbed ones."""
    model, optimizer = build(variant, net=mlp, start=lambda step: True if step < 2 else off)
    weights_after(optimizer, model, range(2))
    plain_model, plain = plain_copy(variant, model, optimizer)
    assert_identical(weights_after(optimizer, model, range(2, 5)), weights_after(plain, plain_model, range(2, 5)))


def test_a_direction_is_not_reused_after_steps_of_the_base_optimizer_alone():
    model, optimizer = build("LookSAM", net=mlp, every=3, start=lambda step: step not in (2, 3))
    weights_after(optimizer, model, range(4))
    assert optimizer._turn() is Turn.BETWEEN
    plain_model, plain = plain_copy("LookSAM", model, optimizer)
    assert_identical(weights_after(optimizer, model, [4]), weights_after(plain, plain_model, [4]))


def test_a_checkpoint_without_a_number_of_steps_warns_where_one_is_needed():
    model, optimizer = build("SAM", net=mlp)
    weights_after(optimizer, model, range(3))
    _, stopped = build("SAM", net=mlp, stop=3)
    with pytest.warns(UserWarning, match="has no number of steps: they count from 0 here"):
        stopped.load_state_dict(optimizer.state_dict())
    _, same = build("SAM", net=mlp)
    same.load_state_dict(optimizer.state_dict())
    stopped.load_state_dict(torch.optim.SGD(mlp().parameters(), lr=0.1, momentum=0.9).state_dict())


def test_a_direction_loaded_from_a_checkpoint_during_plain_steps_is_not_reused_after_them():
    options = {"every": 5, "start": lambda step: step < 3 or step >= 6}
    model, optimizer = build("LookSAM", net=mlp, **options)
    weights_after(optimizer, model, range(3))
    checkpoint = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    expected = weights_after(optimizer, model, range(3, 9))
    other, resumed = build("LookSAM", net=mlp, **options)
    weights_after(resumed, other, range(4))  # into the steps of the base optimizer
    other.load_state_dict(checkpoint[0])
    resumed.load_state_dict(checkpoint[1])
    assert_identical(weights_after(resumed, other, range(3, 9)), expected)


def test_a_merge_acts_only_in_steps_between_perturbed_ones():
    class Counting(bisam.Merge):
        def __init__(self):
            self.turns, self.calls = [], 0

        def begin_step(self, turn):
            self.turns.append(turn.name)

        def plain(self, params):
            self.calls += 1

    merge = Counting()
    model, optimizer = build("docs", net=mlp, every=2, start=2, stop=6)
    optimizer.merge = merge
    weights_after(optimizer, model, range(7))
    assert merge.turns == ["PLAIN", "PLAIN", "PERTURBED", "BETWEEN", "PERTURBED", "BETWEEN", "PLAIN"]
    assert merge.calls == 2
