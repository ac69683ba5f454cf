"""Mixed precision: it does not change the mathematics of a step."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from family import BASES, VARIANTS, assert_close, assert_identical, batch, build, mlp, over_plain_pairs, tensors

pytestmark = pytest.mark.filterwarnings("ignore:the weights are in torch.*float16 and cannot move")


def scaled_closure(model, optimizer, x, y, spoil=None):
    def closure():
        optimizer.zero_grad()
        loss = optimizer.criterion(model(x), y)
        optimizer.scaler.scale(loss).backward()
        if optimizer.phase == spoil:
            next(model.parameters()).grad.view(-1)[0] = float("inf")
        return loss

    return closure


# GradScaler


@pytest.mark.parametrize("form", ["step", "minimize", "by hand"])
@over_plain_pairs
def test_scaled_steps_equal_unscaled_ones(pair, device, form):
    check_scaled_steps(pair, device, form, torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2))


@pytest.mark.parametrize("form", ["step", "minimize", "by hand"])
def test_steps_with_a_disabled_scaler_are_plain_ones(device, form):
    check_scaled_steps(("BiSAM(log)", "AdamW(fused)"), device, form, torch.amp.GradScaler(device, enabled=False))


def check_scaled_steps(pair, device, form, scaler):
    model, optimizer = build(*pair, net=mlp, device=device, scaler=scaler, clip_norm=0.5)
    plain, plain_optimizer = build(*pair, net=mlp, device=device, clip_norm=0.5)
    for seed in range(4):
        x, y = batch(seed, device=device)
        if form == "step":
            loss = optimizer.step(scaled_closure(model, optimizer, x, y))
        elif form == "minimize":
            loss = optimizer.minimize(x, y)
        else:
            scaler.scale(optimizer.criterion(model(x), y)).backward()
            optimizer.ascend()
            scaler.scale(optimizer.criterion(model(x), y)).backward()
            optimizer.descend()
            loss = optimizer.telemetry.loss
        expected = plain_optimizer.minimize(x, y)
        assert torch.equal(loss, expected)
        for ours, theirs in zip(*(o.telemetry.as_dict().values() for o in (optimizer, plain_optimizer)), strict=True):
            torch.testing.assert_close(ours, theirs)
    # scaling by powers of two is exact
    assert_identical(tensors(model, optimizer), tensors(plain, plain_optimizer))
    if scaler.is_enabled():
        assert scaler.get_scale() == 2.0**12  # four good steps: grown twice


@pytest.mark.parametrize("failing", ["ascent", "descent"])
@pytest.mark.parametrize("form", ["step", "by hand"])
@over_plain_pairs
def test_a_pass_that_overflows_restores_the_weights_skips_the_update_and_halves_the_scale_once(
    pair, device, failing, form
):
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    model, optimizer = build(*pair, device=device, scaler=scaler)
    x, y = batch(device=device)
    optimizer.minimize(x, y)
    before = tensors(model, optimizer)
    model.norm.eval()
    closure = scaled_closure(model, optimizer, x, y, spoil=failing)
    if form == "step":
        optimizer.step(closure)
    else:
        closure()
        optimizer.ascend()
        closure()
        optimizer.descend()
    assert_identical(tensors(model, optimizer), before)
    assert scaler.get_scale() == 512.0
    optimizer.minimize(x, y)
    assert not torch.equal(model.conv.weight, before[0])
    assert scaler.get_scale() == 512.0


def test_a_pass_that_raises_leaves_the_scaler_usable():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer = build(net=mlp, scaler=scaler)
    good = scaled_closure(model, optimizer, *batch())

    def raising():
        if optimizer.phase == "descent":
            raise MemoryError
        return good()

    with pytest.raises(MemoryError):
        optimizer.step(raising)
    optimizer.step(good)
    assert scaler.get_scale() == 1024.0


# autocast


@pytest.mark.parametrize("around", ["the forward passes", "the whole step"])
def test_autocast_around_the_step_uses_the_perturbed_weights_in_the_second_pass(plain_variant, device, around):
    """Autocast caches low-precision copies of weights; stale ones would make the second pass a copy of the first."""
    outputs = []
    model, optimizer = build(plain_variant, net=mlp, device=device, rho=5.0)
    model.register_forward_hook(lambda _, __, output: outputs.append(output.detach()))
    x, y = batch(device=device)
    low_precision = torch.autocast(device, torch.bfloat16)
    inside, outside = (
        (low_precision, nullcontext()) if around == "the forward passes" else (nullcontext(), low_precision)
    )

    def closure():
        with inside:
            loss = optimizer.criterion(model(x), y)
        loss.backward()
        return loss

    with outside:
        optimizer.step(closure)
        with inside:
            model(x)
    at_weights, at_perturbed, after = outputs
    assert at_weights.dtype == torch.bfloat16
    assert not torch.equal(at_weights, at_perturbed)
    with low_precision:  # a fresh cache
        assert torch.equal(after, model(x).detach())


class Symmetric(nn.Module):
    def forward(self, matrix):
        return matrix.triu() + matrix.triu(1).mT


@pytest.mark.parametrize("around", [nullcontext, parametrize.cached])
def test_weights_that_parametrize_caches_are_recomputed_after_a_perturbation(plain_variant, around):
    """With weights that `parametrize.cached()` keeps, the second pass would be at w."""
    outputs = []
    model, optimizer = build(plain_variant, net=lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)), rho=5.0)
    parametrize.register_parametrization(model[1], "weight", Symmetric())
    model.register_forward_hook(lambda _, __, output: outputs.append(output.detach()))
    with around():
        optimizer.minimize(*batch())
        after = model(batch()[0])
    at_weights, at_perturbed, _ = outputs
    assert not torch.equal(at_weights, at_perturbed)
    assert torch.equal(after, model(batch()[0]))


def test_an_evaluation_after_a_plain_step_in_the_same_autocast_uses_the_new_weights():
    model, optimizer = build("SAM", net=mlp, start=1)
    x, y = batch()
    with torch.autocast("cpu", torch.bfloat16):
        optimizer.minimize(x, y)
        assert optimizer.telemetry.perturbed_loss is None
        after = model(x)
    with torch.autocast("cpu", torch.bfloat16):  # a fresh cache
        assert torch.equal(after, model(x))


def test_autocast_around_a_step_by_hand_uses_the_restored_weights_afterwards():
    model, optimizer = build("SAM", net=mlp, rho=5.0)
    x, y = batch()
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        optimizer.criterion(before, y).backward()
        optimizer.ascend()
        optimizer.criterion(model(x), y).backward()
        optimizer.restore()
        assert torch.equal(model(x), before)


def test_the_autocast_option_of_minimize_equals_autocast_in_a_closure(closure_variant, device):
    model, optimizer = build(closure_variant, net=mlp, device=device, autocast=torch.bfloat16)
    twin, twin_optimizer = build(closure_variant, net=mlp, device=device)
    for seed in range(3):
        x, y = batch(seed, device=device)

        def closure(x=x, y=y):
            with torch.autocast(device, torch.bfloat16):
                loss = twin_optimizer.criterion(twin(x), y)
            loss.backward()
            return loss

        optimizer.minimize(x, y)
        twin_optimizer.step(closure)
    assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))


def test_a_step_in_bfloat16_autocast_is_close_to_the_float32_step(plain_variant, device):
    model, optimizer = build(plain_variant, net=mlp, device=device, autocast=torch.bfloat16)
    exact, exact_optimizer = build(plain_variant, net=mlp, device=device)
    for seed in range(3):
        x, y = batch(seed, device=device)
        optimizer.minimize(x, y)
        exact_optimizer.minimize(x, y)
    # bfloat16 has 8 bits: products are off by 2⁻⁸, updates of 0.1 × gradients of order one by a hundredth
    assert_close(list(model.parameters()), list(exact.parameters()), 2e-2)


# Whole models in half precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_trains_and_its_weights_are_restored_bitwise(plain_variant, dtype):
    torch.manual_seed(0)
    model = mlp().to(dtype)
    optimizer = VARIANTS[plain_variant](BASES["SGD(foreach)"](model.parameters()), model)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch(dtype=dtype)
    optimizer.criterion(model(x), y).backward()
    optimizer.ascend()
    assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.restore()
    assert_identical([p.detach() for p in model.parameters()], before)
    losses = [optimizer.minimize(x, y) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_minimize_runs_both_passes_under_the_autocast_around_it():
    dtypes = []
    model, optimizer = build(net=mlp)
    model.register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        optimizer.minimize(*batch())
    assert dtypes == [torch.bfloat16] * 2


def test_an_update_that_raises_leaves_the_scaler_usable():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _, optimizer = build(net=mlp, scaler=scaler)
    hook = optimizer.base.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.minimize(*batch())
    hook.remove()
    optimizer.minimize(*batch())


def test_adaptive_perturbations_of_small_float16_weights_do_not_vanish():
    weights = torch.full((4, 6), 1e-2, dtype=torch.float16)
    model, optimizer = build("ASAM", net=lambda: nn.Linear(6, 4, bias=False), dtype=torch.float16, rho=2.0)
    with torch.no_grad():
        model.weight.copy_(weights)
    model.weight.grad = torch.full_like(weights, 1e-4)  # T²g is 1e-8, below what float16 can hold
    optimizer.ascend()
    length = ((model.weight.detach() - weights).float() / weights.float()).norm()
    assert length.item() == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("name", ["SAM", "LookSAM", "BiSAM(log)"])
@pytest.mark.parametrize("rho", [0.0, 0.05])
def test_one_autocast_around_many_steps_uses_the_new_weights_in_each_step(name, rho):
    """Autocast caches its casts of the weights until it ends: a step must not leave stale casts to the next."""

    def train(around_all):
        _, optimizer = build(name, net=mlp, rho=rho)
        losses = []
        if around_all:
            with torch.autocast("cpu", torch.bfloat16):
                losses = [optimizer.minimize(*batch()).item() for _ in range(5)]
        else:
            for _ in range(5):
                with torch.autocast("cpu", torch.bfloat16):
                    losses.append(optimizer.minimize(*batch()).item())
        return losses

    assert train(around_all=True) == train(around_all=False)


@pytest.mark.parametrize("before_ascend", [False, True])
def test_gradients_that_the_caller_has_unscaled_are_not_unscaled_again(device, before_ascend):
    """Torch's recipe for clipping: scaler.unscale_(optimizer), clip, step."""
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
    model, optimizer = build("BiSAM(log)", net=mlp, device=device, scaler=scaler)
    plain, plain_optimizer = build("BiSAM(log)", net=mlp, device=device, clip_norm=0.1)
    for seed in range(4):
        x, y = batch(seed, device=device)
        scaler.scale(optimizer.criterion(model(x), y)).backward()
        if before_ascend:
            scaler.unscale_(optimizer)
        optimizer.ascend()
        scaler.scale(optimizer.criterion(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.descend()
        plain_optimizer.minimize(x, y)
        torch.testing.assert_close(optimizer.telemetry.ascent_norm, plain_optimizer.telemetry.ascent_norm)
    assert scaler.get_scale() == 2.0**12
    assert_close(tensors(model, optimizer), tensors(plain, plain_optimizer), 1e-6)
    weights = [p.detach().clone() for p in model.parameters()]
    scaler.scale(optimizer.criterion(model(x), y)).backward()
    optimizer.ascend()
    scaler.scale(optimizer.criterion(model(x), y)).backward()
    next(model.parameters()).grad.view(-1)[0] = float("inf")
    scaler.unscale_(optimizer)
    optimizer.descend()  # which is skipped
    assert_identical([p.detach() for p in model.parameters()], weights)
    assert scaler.get_scale() == 2.0**11


def test_unscaling_in_an_abandoned_step_does_not_affect_the_next(device):
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    model, optimizer = build("SAM", net=mlp, device=device, scaler=scaler)
    x, y = batch(device=device)
    scaler.scale(optimizer.criterion(model(x), y)).backward()
    optimizer.ascend()
    scaler.scale(optimizer.criterion(model(x), y)).backward()
    scaler.unscale_(optimizer)
    optimizer.restore()
    scaler.scale(optimizer.criterion(model(x), y)).backward()
    optimizer.ascend()
    norm = optimizer.telemetry.ascent_norm
    optimizer.restore()
    _, plain = build("SAM", net=mlp, device=device)
    plain.minimize(x, y)
    torch.testing.assert_close(norm, plain.telemetry.ascent_norm)


@pytest.mark.parametrize("name", ["GSAM", "LookSAM"])
def test_a_closure_that_unscales_is_refused_by_variants_that_compare_the_gradients_of_both_passes(name, device):
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    model, optimizer = build(name, net=mlp, device=device, scaler=scaler)
    x, y = batch(device=device)
    before = tensors(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = optimizer.criterion(model(x), y)
        scaler.scale(loss).backward()
        if optimizer.phase == "descent":
            scaler.unscale_(optimizer)
        return loss

    for _ in range(2):
        with pytest.raises(RuntimeError, match="compares the gradients of both passes"):
            optimizer.step(closure)
        assert_identical(tensors(model, optimizer), before)
    _, plain = build(name, net=mlp, device=device)
    for either in (optimizer, plain):
        either.minimize(x, y)
    torch.testing.assert_close(optimizer.telemetry.ascent_norm, plain.telemetry.ascent_norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inner_products_of_half_precision_gradients_are_computed_in_float32(dtype):
    """The update of GSAM is g_p plus a vector orthogonal to it, however long: so ⟨g, g_p⟩ needs its digits."""
    model, optimizer = build("GSAM", net=lambda: nn.Linear(200, 100, bias=False), dtype=dtype)
    plain, perturbed = ((10 * torch.randn(100, 200) + 10).to(dtype) for _ in range(2))  # ⟨g, g_p⟩ overflows float16

    def closure():
        model.weight.grad = (plain if optimizer.phase == "ascent" else perturbed).clone()

    optimizer.step(closure)
    along = (model.weight.grad.double() * perturbed).sum() / perturbed.double().square().sum()
    assert along.item() == pytest.approx(1.0, abs=5e-4)  # the rounding of so many cancels
    assert not torch.equal(model.weight.grad, perturbed)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.9 has no grad_dtype")
@pytest.mark.parametrize("name", ["LookSAM", "FriendlySAM", "VaSSO"])
def test_the_memory_has_the_type_of_the_gradients(name):
    """As in training bfloat16 weights by float32 gradients; a checkpoint resumes it bit for bit."""
    pairs = []
    for _ in range(2):
        model = mlp().bfloat16()
        for param in model.parameters():
            param.grad_dtype = torch.float32
        base = torch.optim.SGD(model.parameters(), lr=0.1)  # torch loads a momentum in the type of the weights
        pairs.append((model, VARIANTS[name](base, model)))
    (model, optimizer), (twin, resumed) = pairs
    x, y = batch(dtype=torch.bfloat16)
    for _ in range(3):
        optimizer.minimize(x, y)
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for each in (optimizer, resumed):
        for _ in range(4):
            each.minimize(x, y)
    assert_identical(tensors(model, optimizer), tensors(twin, resumed))
