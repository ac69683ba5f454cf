"""Both passes without the update: what follows is the caller's clipping, scaler and `step()`."""

import copy

import pytest
import torch

from family import COMPOSITIONS, WITH_CLOSURE, assert_identical, batch, build, mlp, tensors


def parts(model, optimizer, x, y, scaler=None):
    """Closures for unequal parts of a batch, each of which scales its own loss."""

    def closure_for(a, b):
        def closure():
            loss = optimizer.criterion(model(a), b) * len(b) / len(y)
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss

        return closure

    return [closure_for(a, b) for a, b in zip(x.split([5, 7]), y.split([5, 7]), strict=True)]


@pytest.mark.parametrize("variant_name", [name for name in COMPOSITIONS if name in WITH_CLOSURE])
def test_compute_gradient_and_step_equal_a_step_with_the_closures(variant_name):
    results = []
    for split in (False, True):
        model, optimizer = build(variant_name, net=mlp, dtype=torch.float64)
        for seed in range(3):
            x, y = batch(seed, dtype=torch.float64)
            if split:
                optimizer.compute_gradient(parts(model, optimizer, x[:12], y[:12]))
                optimizer.step()
            else:
                optimizer.minimize(x[:12], y[:12])
        results.append(tensors(model, optimizer))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_the_gradient_of_the_update_can_be_changed_before_the_step():
    model, optimizer = build(net=mlp)
    weights = [p.detach().clone() for p in model.parameters()]
    x, y = batch()
    losses = optimizer.compute_gradient(parts(model, optimizer, x[:12], y[:12]))
    assert len(losses) == 2
    assert_identical([p.detach() for p in model.parameters()], weights)
    for param in model.parameters():
        param.grad.zero_()
    optimizer.base.param_groups[0].update(momentum=0.0, weight_decay=0.0)
    optimizer.step()
    assert_identical([p.detach() for p in model.parameters()], weights)


def test_a_scaler_steps_it_as_any_optimizer_and_skips_what_overflows():
    model, optimizer = build(net=mlp)
    twin, expected = build(net=mlp)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer.scaler = scaler
    x, y = batch()
    optimizer.compute_gradient(parts(model, optimizer, x[:12], y[:12], scaler))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    expected.compute_gradient(parts(twin, expected, x[:12], y[:12]))
    expected.step()
    for one, other in zip(tensors(model, optimizer), tensors(twin, expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert optimizer.telemetry.ascent_norm == pytest.approx(expected.telemetry.ascent_norm.item(), rel=1e-6)
    before = copy.deepcopy(tensors(model, optimizer))
    scaler.update(3e38)
    model.zero_grad()
    optimizer.compute_gradient(parts(model, optimizer, x[:12] * 1e3, y[:12], scaler))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 3e38
    assert_identical(tensors(model, optimizer), before)


def test_a_step_without_a_closure_needs_a_gradient_that_is_still_there():
    model, optimizer = build(net=mlp)
    x, y = batch()
    with pytest.raises(TypeError, match=r"needs a closure.*docs/frameworks\.md.*SharpnessAwareTrainer"):
        optimizer.step()
    closures = parts(model, optimizer, x[:12], y[:12])
    optimizer.compute_gradient(closures)
    optimizer.step()
    with pytest.raises(TypeError, match="needs a closure"):
        optimizer.step()  # that gradient was used
    optimizer.compute_gradient(closures)
    with pytest.raises(RuntimeError, match="found gradients from before"):
        optimizer.compute_gradient(closures)
    optimizer.zero_grad()
    with pytest.raises(TypeError, match="needs a closure"):
        optimizer.step()
    optimizer.compute_gradient(closures)
    model.zero_grad()
    with pytest.raises(RuntimeError, match="no gradients: compute_gradient"):
        optimizer.step()


def test_a_closure_that_raises_leaves_the_weights_and_no_gradient_to_step_with():
    model, optimizer = build(net=mlp)
    weights = [p.detach().clone() for p in model.parameters()]
    x, y = batch()

    def closure():
        if optimizer.phase == "descent":
            raise KeyboardInterrupt
        loss = optimizer.criterion(model(x), y)
        loss.backward()

    with pytest.raises(KeyboardInterrupt):
        optimizer.compute_gradient([closure])
    assert_identical([p.detach() for p in model.parameters()], weights)
    with pytest.raises(TypeError, match="needs a closure"):
        optimizer.step()
