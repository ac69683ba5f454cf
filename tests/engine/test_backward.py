"""`backward`: both passes without the update, for loops and frameworks that clip and step by themselves."""

import pickle

import pytest
import torch

import bisam

from family import BASES, VARIANTS, assert_identical, batch, build, closure_of, mlp


def pair(variant, **options):
    return [build(variant, net=mlp, dtype=torch.float64, **options) for _ in range(2)]


def data(seed):
    return batch(seed, dtype=torch.float64)


def test_backward_and_step_equal_a_step_with_a_closure(closure_variant):
    (model, optimizer), (other, whole) = pair(closure_variant)
    for seed in range(4):
        x, y = data(seed)
        torch.manual_seed(seed)
        loss = optimizer.backward(closure_of(model, optimizer, x, y))
        optimizer.step()
        torch.manual_seed(seed)
        assert torch.equal(loss, whole.step(closure_of(other, whole, x, y)))
        assert_identical([*model.parameters()], [*other.parameters()])


def test_between_backward_and_step_the_weights_are_unchanged_and_the_gradient_can_be_clipped():
    (model, optimizer), (other, whole) = pair("BiSAM(log)")
    whole.clip_norm = 0.1
    before = [p.detach().clone() for p in model.parameters()]
    x, y = data(0)
    optimizer.backward(closure_of(model, optimizer, x, y))
    assert_identical([*model.parameters()], before)
    assert not optimizer.perturbed
    assert optimizer.state_dict()["state"] == {}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    whole.step(closure_of(other, whole, x, y))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_closure_of_the_step_after_backward_runs_once_and_may_change_gradients():
    (model, optimizer), _ = pair("SAM")
    optimizer.backward(closure_of(model, optimizer, *data(0)))
    before = [p.detach().clone() for p in model.parameters()]
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad(set_to_none=False)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        return "loss"

    lr = optimizer.param_groups[0]["lr"]
    decay = optimizer.param_groups[0]["weight_decay"]
    assert optimizer.step(closure) == "loss"
    assert calls == [False]
    for p, w in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), w - lr * (1 + decay * w))


def test_a_third_pass_in_the_step_after_backward_is_refused():
    (model, optimizer), _ = pair("BiSAM(log)")
    closure = closure_of(model, optimizer, *data(0))
    optimizer.backward(closure)
    with pytest.raises(RuntimeError, match=r"has run both passes already.*step\(\) without it"):
        optimizer.step(lambda: optimizer.criterion(model(data(0)[0]), data(0)[1]).backward())


def test_a_second_backward_refuses_the_gradient_of_the_first():
    """Two calls of backward do not accumulate."""
    (model, optimizer), _ = pair("SAM")
    x, y = data(0)

    def closure():
        torch.nn.functional.cross_entropy(model(x), y).backward()

    optimizer.backward(closure)
    with pytest.raises(RuntimeError, match=r"found gradients from before.*docs/frameworks.md"):
        optimizer.backward(closure)
    optimizer.zero_grad()
    optimizer.backward(closure)
    optimizer.step()


def test_a_step_after_backward_and_zero_grad_is_refused():
    (model, optimizer), _ = pair("SAM")
    optimizer.backward(closure_of(model, optimizer, *data(0)))
    optimizer.zero_grad()
    with pytest.raises(TypeError, match=r"needs a closure.*docs/frameworks.md"):
        optimizer.step()


def test_ascend_after_backward_is_refused():
    (model, optimizer), _ = pair("SAM")
    optimizer.backward(closure_of(model, optimizer, *data(0)))
    with pytest.raises(RuntimeError, match=r"ascend\(\) called after backward\(\).*call step\(\)"):
        optimizer.ascend()
    optimizer.step()


def test_a_step_after_backward_and_a_step_of_the_base_optimizer_is_refused():
    (model, optimizer), _ = pair("SAM")
    optimizer.backward(closure_of(model, optimizer, *data(0)))
    optimizer.base.step()
    with pytest.raises(TypeError, match="needs a closure"):
        optimizer.step()


def train_with_scaler(scale, steps=2):
    """Two models after as many steps: one by a scaler of the loop, one without."""
    (model, optimizer), (other, whole) = pair("FriendlySAM")
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for seed in range(steps):
        x, y = data(seed)

        def closure(x=x, y=y):
            scaler.scale(optimizer.criterion(model(x), y)).backward()

        optimizer.zero_grad()
        optimizer.backward(closure, scaler=scaler)
        assert optimizer.scaler is None
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        whole.step(closure_of(other, whole, x, y))
    return (model, optimizer), (other, whole), scaler


def test_a_scaler_given_to_backward_unscales_both_passes():
    """The factor is a power of two."""
    (model, optimizer), (other, whole), _ = train_with_scaler(2.0**8)
    assert torch.equal(optimizer.telemetry.ascent_norm, whole.telemetry.ascent_norm)
    assert_identical([*model.parameters()], [*other.parameters()])


def test_a_scaler_given_to_backward_skips_an_overflow():
    model, _ = pair("FriendlySAM")[0]
    before = [p.detach().clone() for p in model.parameters()]
    (model, _), _, scaler = train_with_scaler(torch.inf, steps=1)
    assert_identical([*model.parameters()], before)
    assert scaler.state_dict()["_growth_tracker"] == 0


@pytest.mark.parametrize("then", ["backward", "step", "ascend"])
@pytest.mark.parametrize("unscales", [True, False])
def test_after_an_overflow_the_next_step_starts_over_without_clearing_the_gradients(then, unscales):
    (model, optimizer), (other, whole) = pair("SAM")
    x, y = data(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=torch.inf)

    def closure():
        loss = optimizer.criterion(model(x), y)
        scaler.scale(loss).backward()
        return loss

    optimizer.backward(closure, scaler=scaler)
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert not any(p.grad.isfinite().all() for p in model.parameters())
    scaler.update(4.0)
    if then == "backward":
        assert optimizer.backward(closure, scaler=scaler) is not None
        scaler.step(optimizer)
    elif then == "step":
        optimizer.step(closure_of(model, optimizer, x, y))
    else:
        with pytest.raises(RuntimeError, match=r"the gradient of the last step.*zero_grad\(\)"):
            optimizer.ascend()
        return
    whole.step(closure_of(other, whole, x, y))
    assert_identical([*model.parameters()], [*other.parameters()])


def test_a_copy_made_after_an_overflow_starts_over():
    model, optimizer = pair("SAM")[0]
    x, y = data(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=torch.inf)
    optimizer.backward(lambda: scaler.scale(optimizer.criterion(model(x), y)).backward(), scaler=scaler)
    scaler.step(optimizer)
    twin, twin_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    for net, one in ((model, optimizer), (twin, twin_optimizer)):
        one.step(closure_of(net, one, x, y))
    assert_identical([*twin.parameters()], [*model.parameters()])


def test_a_second_backward_refuses_the_scaled_gradient_of_the_first():
    (model, optimizer), _ = pair("SAM")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def closure():
        scaler.scale(optimizer.criterion(model(data(0)[0]), data(0)[1])).backward()

    optimizer.backward(closure, scaler=scaler)
    with pytest.raises(RuntimeError, match="found gradients from before"):
        optimizer.backward(closure, scaler=scaler)


def test_a_scaler_given_to_backward_is_refused_if_the_optimizer_has_one():
    model = mlp()
    optimizer = VARIANTS["SAM"](BASES["SGD(foreach)"](model.parameters()), model, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="a GradScaler of its own"):
        optimizer.backward(lambda: None, scaler=torch.amp.GradScaler("cpu"))


def test_schedulers_see_the_step_after_backward():
    (model, optimizer), _ = pair("BiSAM(log)")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.backward(closure_of(model, optimizer, *data(0)))
    optimizer.step()
    scheduler.step()  # warnings are errors here
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]


def test_the_two_step_class_steps_after_backward():
    model, expected = mlp(), mlp()
    expected.load_state_dict(model.state_dict())
    x, y = batch(0)
    old = bisam.compat.SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1)
    new = bisam.SAM(torch.optim.SGD(expected.parameters(), lr=0.1), expected, rho=0.05)
    old.backward(closure_of(model, old, x, y))
    old.step()
    new.step(closure_of(expected, new, x, y))
    assert_identical([*model.parameters()], [*expected.parameters()])


def test_hooks_of_the_two_step_class_run_once_after_backward():
    bisam.SAM(torch.optim.SGD(mlp().parameters(), lr=0.1))  # torch wraps `step` of a class that it has built
    model, calls = mlp(), []
    optimizer = bisam.compat.SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    optimizer.backward(closure_of(model, optimizer, *batch(0)))
    optimizer.step()
    assert calls == ["step"]
