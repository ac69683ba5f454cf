"""Every variant: the contract, its float64 reference, its memory, and what it refuses."""

import copy
import functools
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import bisam
from bisam.merge import SurrogateGap
from bisam.perturbation import AlongMean, Ball, FisherBall, MinusMean, RandomStart, RandomTensors
from bisam.plan import HighestLoss
from bisam.tensors.memory import Memory

import reference
from contract import Allocations, Contract
from family import (
    BASES,
    KINDS,
    VARIANTS,
    ConvNet,
    Skipping,
    WithScalar,
    assert_close,
    assert_identical,
    batch,
    build,
    closure_of,
    distance,
    kind_of,
    mlp,
    steps,
    tensors,
    weights_of,
)


class TestEveryVariant(Contract):
    """The shared contract, over the whole family."""


@pytest.mark.slow
# every variant of the paper on SGD, and on AdamW one round and one adaptive
@pytest.mark.parametrize(
    ("name", "base_name"),
    [
        *((name, "SGD(foreach)") for name in reference.VARIANTS),
        *((name, "AdamW(fused)") for name in ("BiSAM(log)", "ABiSAM(tanh)")),
    ],
)
def test_fifty_steps_agree_with_the_float64_reference(name, base_name):
    model, optimizer = build(name, base_name, dtype=torch.float64)
    torch.manual_seed(0)
    expected = ConvNet().double()
    base = BASES[base_name](expected.parameters())
    for seed in range(50):
        x, y = batch(seed, size=8, dtype=torch.float64)
        optimizer.minimize(x, y)
        reference.step(expected, base, x, y, *reference.VARIANTS[name])
    assert_close(tensors(model, optimizer), tensors(expected, base), 1e-10)
    sgd = ConvNet().double()
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(sgd.parameters(), model.parameters(), strict=True))


# every kind with every objective on SGD, and every kind with one of them on AdamW
@pytest.mark.parametrize(
    ("kind", "objective", "base_name"),
    [
        *((kind, objective, "SGD(foreach)") for kind in reference.STEPS for objective in reference.OBJECTIVES),
        *(
            pytest.param(kind, objective, "AdamW(fused)", marks=pytest.mark.slow)
            for kind, objective in zip(reference.STEPS, itertools.cycle(reference.OBJECTIVES))
        ),
    ],
)
def test_twelve_steps_of_each_variant_agree_with_its_own_float64_reference(kind, objective, base_name):
    phi = None if objective == "cross entropy" else objective
    name = kind if phi is None else f"EBiSAM({phi})" if kind == "ESAM" else f"{kind}({phi})"
    model, optimizer = build(name, base_name, dtype=torch.float64)
    torch.manual_seed(0)
    expected = ConvNet().double()
    base = BASES[base_name](expected.parameters())
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 20) for o in (optimizer, base)]
    memory = {}
    for seed in range(12):
        x, y = batch(seed, size=14, dtype=torch.float64)
        optimizer.minimize(x, y)
        reference.STEPS[kind](expected, base, x, y, reference.OBJECTIVES[objective], memory)
        for scheduler in schedulers:
            scheduler.step()
    assert_close(tensors(model, optimizer), tensors(expected, base), 1e-10)
    twin = head_after_twelve_plain_steps("SAM" if phi is None else f"BiSAM({phi})", base_name)
    assert (twin - model.head.weight).abs().max() > 1e-5  # and it is not just SAM


@functools.cache
def head_after_twelve_plain_steps(name, base_name):
    model, optimizer = build(name, base_name, dtype=torch.float64)
    for seed in range(12):
        optimizer.minimize(*batch(seed, size=14, dtype=torch.float64))
    return model.head.weight.detach()


@pytest.mark.parametrize(("bilevel", "plain"), [("BiSAM(log)", "SAM"), ("ABiSAM(log)", "ASAM")])
def test_bisam_with_cross_entropy_on_both_sides_is_sam_bit_for_bit(bilevel, plain, base):
    model, optimizer = build(bilevel, base, ascent=bisam.CrossEntropy())
    sam, sam_optimizer = build(plain, base)
    other, other_optimizer = build(bilevel, base)
    for seed in range(5):
        for o in (optimizer, sam_optimizer, other_optimizer):
            o.minimize(*batch(seed))
    assert_identical(tensors(model, optimizer), tensors(sam, sam_optimizer))
    assert not torch.equal(other.conv.weight, sam.conv.weight)


def test_any_variant_becomes_bilevel_with_an_ascent_of_its_own():
    model, optimizer = build("ASAM", ascent=bisam.LowerBound("tanh", mu=20))
    twin, twin_optimizer = build("ABiSAM(tanh)", mu=20)
    for seed in range(3):
        optimizer.minimize(*batch(seed))
        twin_optimizer.minimize(*batch(seed))
    assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))


def test_defaults_are_those_of_the_papers():
    radius = {name: build(name)[1].param_groups[0]["rho"] for name in VARIANTS}
    own = {"ASAM": 2.0, "MSAM": 0.3, "FisherSAM": 0.1}
    assert radius == {name: own.get(kind_of(name), 0.05) for name in VARIANTS}
    assert build("VaSSO")[1].perturbation.theta == 0.9
    assert build("FisherSAM")[1].param_groups[0]["eta"] == 1.0
    assert build("BiSAM(log)")[1].criterion.ascent.mu == 1
    assert build("BiSAM(tanh)")[1].criterion.ascent.mu == 10
    assert isinstance(build("BiSAM(log)")[1].criterion.descent, torch.nn.CrossEntropyLoss)


@pytest.mark.parametrize("base_name", ["SGD(foreach)", "AdamW(fused)", "RMSprop"])
def test_twelve_steps_of_momentum_sam_agree_with_its_float64_reference(base_name):
    model, optimizer = build("MSAM", base_name, dtype=torch.float64)
    torch.manual_seed(0)
    expected = ConvNet().double()
    base = BASES[base_name](expected.parameters())
    for seed in range(12):
        x, y = batch(seed, dtype=torch.float64)
        optimizer.minimize(x, y)
        reference.momentum_sam(expected, base, x, y)
    assert_close(tensors(model, optimizer), tensors(expected, base), 1e-10)  # batch statistics among them
    plain, plain_optimizer = build("SAM", base_name, dtype=torch.float64, rho=0.0)
    for seed in range(12):
        plain_optimizer.minimize(*batch(seed, dtype=torch.float64))
    assert (plain.head.weight - model.head.weight).abs().max() > 1e-5  # and it is not the base optimizer


def test_momentum_sam_has_one_pass_and_returns_its_loss():
    model, optimizer = build("MSAM")
    x, y = batch()
    steps(optimizer, [0])
    passes = []
    model.register_forward_hook(lambda _, __, logits: passes.append(nn.functional.cross_entropy(logits, y).detach()))
    statistics = model.norm.running_mean.clone()
    loss = optimizer.minimize(x, y)
    assert len(passes) == 1
    assert torch.equal(loss, passes[0])
    assert torch.equal(loss, optimizer.telemetry.perturbed_loss)
    assert optimizer.telemetry.loss is None
    assert not torch.equal(model.norm.running_mean, statistics)
    again = optimizer.step(closure_of(model, optimizer, x, y))
    assert torch.equal(again, passes[1])


def test_momentum_sam_moves_by_rho_against_the_momentum():
    model, optimizer = build("MSAM", net=mlp, rho=0.5)
    steps(optimizer, [0, 1])
    before, moved = weights_of(model), []
    model.register_forward_pre_hook(lambda *_: moved.extend(weights_of(model)))
    momentum = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    optimizer.minimize(*batch())
    epsilon = torch.cat([(m - b).flatten() for m, b in zip(moved, before, strict=True)])
    direction = torch.cat([v.flatten() for v in momentum])
    assert epsilon.norm().item() == pytest.approx(0.5, rel=1e-5)
    torch.testing.assert_close(epsilon / epsilon.norm(), -direction / direction.norm(), rtol=1e-3, atol=1e-5)


def test_without_an_ascent_pass_options_of_the_ascent_are_refused():
    with pytest.raises(ValueError, match="MSAM has no ascent pass, so ascent= has no meaning: remove it"):
        build("MSAM", ascent=bisam.LowerBound())
    with pytest.raises(ValueError, match="MSAM perturbs all samples alike, so micro_batch= has no meaning"):
        build("MSAM", micro_batch=4)
    with pytest.raises(ValueError, match="follows the momentum of the base optimizer, which keeps none"):
        bisam.MSAM(torch.optim.SGD(mlp().parameters(), lr=0.1))
    first, second = nn.Linear(6, 5), nn.Linear(5, 4)  # not needed where nothing is perturbed
    groups = [{"params": first.parameters(), "rho": 0.0}, {"params": second.parameters(), "momentum": 0.9}]
    bisam.MSAM(torch.optim.SGD(groups, lr=0.1), nn.Sequential(first, second)).minimize(*batch())
    model, optimizer = build("MSAM")
    optimizer.criterion(model(batch()[0]), batch()[1]).backward()
    with pytest.raises(RuntimeError, match="MSAM has something to do before the first pass"):
        optimizer.ascend()


def test_wsam_of_gamma_one_half_is_sam_and_of_gamma_zero_the_base_optimizer():
    for gamma, other in ((0.5, {"variant": "SAM"}), (0.0, {"variant": "SAM", "rho": 0.0})):
        model, optimizer = build("WSAM", net=mlp, dtype=torch.float64, gamma=gamma)
        twin, twin_optimizer = build(net=mlp, dtype=torch.float64, **other)
        for seed in range(3):
            for o in (optimizer, twin_optimizer):
                o.minimize(*batch(seed, dtype=torch.float64))
        assert_close(tensors(model, optimizer), tensors(twin, twin_optimizer), 1e-12)
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\), got 1"):
        build("WSAM", gamma=1)


def test_perturbations_that_wrap_a_ball_refuse_to_wrap_another_perturbation():
    outers = (
        lambda inner: MinusMean(inner, 1.0, 0.9),
        lambda inner: AlongMean(inner, 0.9),
        lambda inner: RandomTensors(inner, 0.5),
    )
    for outer in outers:
        with pytest.raises(TypeError, match=r"goes around a ball, not around RandomStart"):
            outer(RandomStart(Ball(), 0.01))


@pytest.mark.parametrize("name", ["ESAM", "RSAM"])
def test_a_pickled_optimizer_has_no_device_generators_and_draws_the_same_numbers_as_the_original(name):
    _, optimizer = build(name, net=mlp)
    optimizer.minimize(*batch())
    assert optimizer.perturbation.generators()
    copied = pickle.loads(pickle.dumps(optimizer))
    assert not copied.perturbation.generators()
    for either in (optimizer, copied):
        either.minimize(*batch(1))
    assert_identical(optimizer._parameters(), copied._parameters())


def forward_backward_flops(optimizer, x, y):
    with FlopCounterMode(display=False) as counter:
        optimizer.minimize(x, y)
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least", "most", "steps"),
    [
        ("SAM", 1.99, 2.01, 1),
        ("BiSAM(log)", 1.99, 2.01, 1),
        ("ESAM", 1.4, 1.70, 8),  # which draws other tensors in every step
        ("EBiSAM(log)", 1.4, 1.70, 8),
        ("KSAM", 1.2, 1.36, 1),
    ],
)
def test_flops_relative_to_sgd_are_in_the_expected_range(name, least, most, steps):
    def net():
        return nn.Sequential(*[nn.Linear(6, 6) for _ in range(40)], nn.Linear(6, 4))

    _, sgd = build("SAM", net=net, rho=0.0)
    _, optimizer = build(name, net=net)
    x, y = batch(size=64)
    counted = sum(forward_backward_flops(optimizer, x, y) for _ in range(steps)) / steps
    assert least <= counted / forward_backward_flops(sgd, x, y) <= most


def test_ksam_of_the_whole_batch_is_sam():
    model, optimizer = build("KSAM", k=16)
    twin, twin_optimizer = build("SAM")
    steps(optimizer, range(3))
    steps(twin_optimizer, range(3))
    assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GSAM", {"alpha": 0.0, "rho_min": 0.05}),
        ("LookSAM", {"every": 1}),
        ("FriendlySAM", {"sigma": 0.0}),
        ("RSAM", {"sigma": 0.0}),
        ("periodic", {"every": 1}),
    ],
)
def test_each_variant_with_its_own_effect_switched_off_is_sam(name, options):
    model, optimizer = build(name, dtype=torch.float64, **options)
    twin, twin_optimizer = build("SAM", dtype=torch.float64)
    for seed in range(4):
        for o in (optimizer, twin_optimizer):
            o.minimize(*batch(seed, dtype=torch.float64))
    assert_close(tensors(model, optimizer), tensors(twin, twin_optimizer), 1e-13)


@pytest.mark.parametrize(
    ("name", "options", "plain"),
    [
        ("VaSSO", {"theta": 1.0}, "SAM"),
        ("VaSSO(log)", {"theta": 1.0}, "BiSAM(log)"),
        ("FisherSAM", {"eta": 0.0}, "SAM"),
        ("FisherSAM(tanh)", {"eta": 0.0}, "BiSAM(tanh)"),
    ],
)
def test_vasso_of_theta_one_and_fisher_sam_of_eta_zero_are_sam_bit_for_bit(name, options, plain, base):
    model, optimizer = build(name, base, rho=0.2, **options)
    twin, twin_optimizer = build(plain, base, rho=0.2)
    steps(optimizer, range(4))
    steps(twin_optimizer, range(4))
    assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))


@pytest.mark.parametrize(
    ("name", "passes"),
    [("LookSAM", [2, 1, 1, 2, 1]), ("periodic", [2, 1, 1, 2, 1]), ("LookSAM(log)", [3, 1, 1, 3, 1])],
)
def test_steps_between_perturbations_run_one_pass(name, passes):
    model, optimizer = build(name, every=3)
    counts = []
    model.register_forward_hook(lambda *_: counts.append(1))
    seen = []
    for seed in range(5):
        counts.clear()
        optimizer.minimize(*batch(seed))
        seen.append(len(counts))
    assert seen == passes


@pytest.mark.parametrize("start", [0, 2])
def test_batch_norm_of_a_model_that_was_not_given_warns_in_the_first_perturbed_step(start):
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    optimizer = bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), start=start)
    closure = closure_of(model, optimizer, torch.randn(8, 6), torch.arange(8) % 5)
    for _ in range(start):
        optimizer.step(closure)
    with pytest.warns(UserWarning, match="BatchNorm1d may update buffers"):
        optimizer.step(closure)


def test_looksam_keeps_its_memory_in_the_same_storage():
    _, optimizer = build("LookSAM", net=mlp)
    addresses = []
    for seed in range(0, 6, 2):
        steps(optimizer, (seed, seed + 1))
        addresses.append([t.data_ptr() for t in optimizer.merge.memory.tensors["orthogonal"].values()])
    assert addresses[0] == addresses[1] == addresses[2]


def test_rsam_does_not_move_frozen_parameters():
    model, optimizer = build("RSAM", net=mlp)
    model[0].requires_grad_(False)
    before, moved = weights_of(model), []
    model.register_forward_pre_hook(
        lambda *_: moved.append([not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)])
    )
    optimizer.minimize(*batch())
    assert moved == [[False, False, True, True]] * 2


def test_gsams_radius_follows_the_learning_rate_whose_maximum_is_in_the_state_dict():
    model, optimizer = build("GSAM", net=mlp, rho=0.4, rho_min=0.1, dtype=torch.float64)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=4)
    before, radii = [], []

    def watch(*_):
        if optimizer.perturbed:
            radii.append(distance(weights_of(model), before))

    model.register_forward_pre_hook(watch)
    for seed in range(4):
        before[:] = weights_of(model)
        optimizer.minimize(*batch(seed, dtype=torch.float64))
        scheduler.step()
    assert radii == pytest.approx([0.4, 0.325, 0.25, 0.175], rel=1e-9)
    assert optimizer.state_dict()["param_groups"][0]["lr_max"] == 0.1


@pytest.mark.parametrize("name", ["LookSAM", "FriendlySAM", "VaSSO", "LookSAM(log)"])
def test_gradients_that_overflow_do_not_enter_the_memory(name):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer = build(name, net=mlp, scaler=scaler)
    x, y = batch()

    def closure(spoiled):
        loss = optimizer.criterion(model(x), y)
        scaler.scale(loss).backward()
        if spoiled:
            model[0].weight.grad[0, 0] = float("inf")
        return loss

    optimizer.step(lambda: closure(True))
    assert scaler.get_scale() == 512.0
    for _ in range(3):
        optimizer.step(lambda: closure(False))
    assert scaler.get_scale() == 512.0
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_ascent_gradient_makes_the_loss_of_the_second_pass_nan(hand_variant, value):
    model, optimizer = build(hand_variant, net=mlp)
    x, y = batch()
    optimizer.criterion(model(x), y).backward()
    model[0].bias.grad[0] = value
    optimizer.ascend()
    assert optimizer.criterion(model(x), y).isnan()
    optimizer.restore()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("scale", [1e25, 1e-40])
def test_finite_gradients_of_any_size_give_finite_weights(variant, scale):
    model, optimizer = build(variant, net=mlp, rho=5.0, clip_norm=1.0)
    x, y = batch(8)
    handles = [p.register_hook(lambda gradient: gradient * scale) for p in model.parameters()]
    for _ in range(3):
        optimizer.minimize(x, y)
    assert all(p.isfinite().all() for p in model.parameters())
    for handle in handles:
        handle.remove()
    optimizer.minimize(x, y)  # the memory has nothing of them that would spoil a step
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ESAM", {"beta": 0.0}, r"beta must lie in \(0, 1\], got 0.0"),
        ("ESAM", {"beta": 1.5}, r"beta must lie in \(0, 1\], got 1.5"),
        ("EBiSAM(log)", {"gamma": 0.0}, r"gamma must lie in \(0, 1\], got 0.0"),
        ("ESAM", {"gamma": float("nan")}, r"gamma must lie in \(0, 1\], got nan"),
        ("mSAM", {"micro_batch": 0}, "micro_batch must be a whole number of samples, at least 1, or None, got 0"),
        ("mSAM", {"micro_batch": 2.5}, "micro_batch must be a whole number of samples"),
        ("KSAM", {"k": 0}, "k must be a whole number of samples, at least 1, got 0"),
        ("periodic", {"every": 0}, "every must be a whole number of steps, at least 1, got 0"),
        ("LookSAM", {"every": 0}, "every must be a whole number of steps, at least 1, got 0"),
        ("RSAM", {"sigma": -1.0}, "sigma must be non-negative and finite, got -1.0"),
        ("FriendlySAM", {"decay": 1.0}, r"decay must lie in \[0, 1\), got 1.0"),
        ("VaSSO", {"theta": 0.0}, r"theta must lie in \(0, 1\], got 0.0"),
        ("FisherSAM", {"eta": -1.0}, "eta must be non-negative and finite, got -1.0"),
        ("GSAM", {"alpha": -0.1}, "alpha must be non-negative and finite, got -0.1"),
        ("GSAM", {"rho_min": -0.1}, "rho_min must be non-negative and finite, got -0.1"),
    ],
)
def test_invalid_options_of_variants_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)


@pytest.mark.parametrize("variant_name", ["ESAM", "KSAM", "mSAM"])
def test_variants_that_need_the_batch_refuse_closures_and_passes_by_hand(variant_name):
    model, optimizer = build(variant_name)
    x, y = batch()
    before = tensors(model, optimizer)
    with pytest.raises(RuntimeError, match=r"cannot see them in step\(closure\). Use minimize\(x, y\)"):
        optimizer.step(closure_of(model, optimizer, x, y))
    model.eval()(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"cannot see them in ascend\(\)"):
        optimizer.ascend()
    assert_identical(tensors(model, optimizer), before)


@pytest.mark.parametrize("variant_name", ["GSAM", "LookSAM", "RSAM", "periodic"])
def test_variants_that_act_outside_the_two_passes_cannot_be_run_by_hand(variant_name):
    model, optimizer = build(variant_name, net=mlp)
    model(batch()[0]).sum().backward()
    with pytest.raises(RuntimeError, match=r"ascend\(\) and descend\(\) cannot do between them"):
        optimizer.ascend()


@pytest.mark.parametrize("writer", ["SAM", "LookSAM", "FriendlySAM", "VaSSO", "ESAM", "RSAM"])
@pytest.mark.parametrize("reader", ["SAM", "LookSAM", "FriendlySAM", "VaSSO", "ESAM", "RSAM"])
def test_a_checkpoint_of_another_variants_memory_is_refused_and_changes_nothing(writer, reader):
    _, written = build(writer)
    steps(written, range(2))
    model, optimizer = build(reader)
    steps(optimizer, range(2))
    if writer == reader:
        optimizer.load_state_dict(written.state_dict())
        return
    before, state = tensors(model, optimizer), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"of another variant: it has .*optimizer\.base\.load_state_dict"):
        optimizer.load_state_dict(written.state_dict())
    assert_identical(tensors(model, optimizer), before)
    assert str(optimizer.state_dict()) == str(state)
    optimizer.base.load_state_dict(written.state_dict())  # the remedy
    momentum, theirs = ([entry["momentum_buffer"] for entry in opt.state.values()] for opt in (optimizer, written))
    assert_identical(momentum, theirs)


@pytest.mark.parametrize("name", ["FriendlySAM", "VaSSO", "RSAM"])
def test_loading_a_checkpoint_of_the_base_optimizer_alone_resets_the_memory(name):
    model, optimizer = build(name, net=mlp)
    steps(optimizer, range(2))
    twin, fresh = build(name, net=mlp)
    twin.load_state_dict(model.state_dict())
    state = BASES["SGD(foreach)"](mlp().parameters()).state_dict()
    for either in (optimizer, fresh):
        either.load_state_dict(state)
        steps(either, range(2, 4))
    assert_identical(tensors(model, optimizer), tensors(twin, fresh))


def test_further_training_does_not_change_the_loaded_checkpoint():
    _, optimizer = build("FriendlySAM", net=mlp)
    steps(optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state["sharpness"])
    optimizer.load_state_dict(state)
    steps(optimizer, range(2, 4))
    torch.testing.assert_close(state["sharpness"], kept, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [("SAM", "ASAM"), ("ABiSAM(log)", "BiSAM(log)"), ("SAM", "FisherSAM"), ("FisherSAM", "ASAM"), ("docs", "SAM")],
)
def test_a_checkpoint_of_another_ball_is_refused_and_changes_nothing(writer, reader):
    _, written = build(writer)
    _, optimizer = build(reader)
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="this checkpoint is of another variant: its ball is"):
        optimizer.load_state_dict(written.state_dict())
    assert optimizer.state_dict() == state
    model = mlp()
    groups = [{"params": model[0].parameters(), "adaptive": False}, {"params": model[2].parameters()}]
    mixed = bisam.ASAM(torch.optim.SGD(groups, lr=0.1), model).state_dict()
    for reader in (bisam.SAM, bisam.ASAM):  # some groups round, some adaptive: both may load it
        model = mlp()
        groups = [{"params": layer.parameters()} for layer in (model[0], model[2])]
        optimizer = reader(torch.optim.SGD(groups, lr=0.1), model)
        optimizer.load_state_dict(mixed)
        assert [group["adaptive"] for group in optimizer.param_groups] == [False, True]


@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_friendly_sam_agrees_with_the_float64_reference_for_any_sigma(sigma):
    model, optimizer = build("FriendlySAM", dtype=torch.float64, sigma=sigma)
    twin, other = build("FriendlySAM", dtype=torch.float64)
    memory = {}
    for seed in range(10):
        x, y = batch(seed, dtype=torch.float64)
        optimizer.minimize(x, y)
        reference.friendlysam(twin, other.base, x, y, reference.cross_entropy, memory, sigma=sigma)
    assert_close(tensors(model, optimizer), tensors(twin, other), 1e-10)


@pytest.mark.parametrize("name", ["FriendlySAM", "VaSSO"])
def test_the_running_mean_starts_with_the_first_finite_gradient(name):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer = build(name, net=mlp, scaler=scaler)
    x, y = batch()
    for spoiled in (True, True, False):
        gradients = []

        def closure(spoiled=spoiled, gradients=gradients):
            optimizer.zero_grad()
            loss = optimizer.criterion(model(x), y)
            scaler.scale(loss).backward()
            if spoiled:
                model[0].weight.grad[0, 0] = float("inf")
            gradients.append([p.grad / scaler.get_scale() for p in model.parameters()])
            return loss

        optimizer.step(closure)
    means = optimizer.perturbation.memory.of("mean", [*model.parameters()])
    assert_close(means, gradients[0], 1e-6)


def test_friendly_sam_of_decay_zero_ascends_along_the_change_of_the_gradient():
    model, optimizer = build("FriendlySAM", net=mlp, dtype=torch.float64, decay=0.0)
    optimizer.minimize(*batch(0, dtype=torch.float64))
    before = [p.detach().clone() for p in model.parameters()]
    first = batch(0, dtype=torch.float64)
    expected, moved = [], []

    def watch(*_):
        if optimizer.perturbed:
            moved.extend(p - w for p, w in zip(model.parameters(), before, strict=True))

    second = batch(1, dtype=torch.float64)
    start, _ = build("FriendlySAM", net=mlp, dtype=torch.float64)
    old = torch.autograd.grad(nn.functional.cross_entropy(start(first[0]), first[1]), [*start.parameters()])
    new = torch.autograd.grad(nn.functional.cross_entropy(model(second[0]), second[1]), [*model.parameters()])
    expected = [n - o for n, o in zip(new, old, strict=True)]
    length = torch.cat([e.flatten() for e in expected]).norm()
    model.register_forward_pre_hook(watch)
    optimizer.minimize(*second)
    assert_close([m.detach() for m in moved], [0.05 * e / length for e in expected], 1e-12)


@pytest.mark.parametrize("theta", [0.1, 0.5])
def test_vasso_agrees_with_the_float64_reference_for_any_theta(theta):
    model, optimizer = build("VaSSO", dtype=torch.float64, theta=theta)
    twin, other = build("VaSSO", dtype=torch.float64)
    memory = {}
    for seed in range(10):
        x, y = batch(seed, dtype=torch.float64)
        optimizer.minimize(x, y)
        reference.vasso(twin, other.base, x, y, reference.cross_entropy, memory, theta=theta)
    assert_close(tensors(model, optimizer), tensors(twin, other), 1e-10)


@pytest.mark.parametrize("eta", [0.01, 100.0])
def test_fisher_sam_agrees_with_the_float64_reference_for_any_eta(eta):
    model, optimizer = build("FisherSAM", dtype=torch.float64, eta=eta)
    twin, other = build("FisherSAM", dtype=torch.float64)
    for seed in range(10):
        x, y = batch(seed, dtype=torch.float64)
        optimizer.minimize(x, y)
        reference.fisher_sam(twin, other.base, x, y, reference.cross_entropy, {}, eta=eta)
    assert_close(tensors(model, optimizer), tensors(twin, other), 1e-10)


def test_vasso_starts_the_mean_of_a_parameter_with_its_own_first_gradient():
    """Also of a layer that the loss does not use at first, and whose mean is unchanged while it is skipped again."""
    torch.manual_seed(0)
    model = Skipping()
    optimizer = bisam.VaSSO(torch.optim.SGD(model.parameters(), lr=0.1), model, theta=0.3)
    seen, expected = [], None
    model.second.weight.register_post_accumulate_grad_hook(
        lambda param: seen.append(param.grad.clone()) if optimizer.phase == "ascent" else None
    )
    for step, model.skips in enumerate((True, True, False, True, False, False)):
        optimizer.minimize(*batch(step))
        if not model.skips:
            expected = seen[-1] if expected is None else 0.7 * expected + 0.3 * seen[-1]
            (mean,) = optimizer.perturbation.memory.of("mean", [model.second.weight])
            torch.testing.assert_close(mean, expected)
    assert len(seen) == 3


def test_vasso_keeps_one_copy_of_the_weights_and_allocates_no_more_for_it():
    net = lambda: nn.Sequential(nn.Linear(6, 2000), nn.Tanh(), nn.Linear(2000, 4))  # noqa: E731
    model, optimizer = build("VaSSO", net=net)
    optimizer.minimize(*batch())
    weights = sum(p.nbytes for p in model.parameters())
    assert sum(t.nbytes for t in optimizer.perturbation.memory.tensors["mean"].values()) == weights
    optimizer.zero_grad()
    optimizer.criterion(model(batch()[0]), batch()[1]).backward()
    with Allocations() as allocations:
        optimizer.ascend()
    assert allocations.bytes < weights / 100  # norms, shares and the like


@pytest.mark.parametrize("name", ["SAM", "GSAM", "LookSAM", "FriendlySAM", "VaSSO"])
def test_complex_parameters_train_as_pairs_of_real_numbers(name):
    class Net(nn.Module):
        def __init__(self, paired):
            super().__init__()
            torch.manual_seed(0)
            weight = torch.randn(4, 6, dtype=torch.complex128)
            self.weight = nn.Parameter(torch.view_as_real(weight).clone() if paired else weight)

        def forward(self, x):
            weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
            return (x.to(weight.dtype) @ weight.T).abs()

    results = []
    for paired in (False, True):
        model = Net(paired)
        optimizer = VARIANTS[name](BASES["SGD(foreach)"](model.parameters()), model)
        for seed in range(6):
            optimizer.minimize(*batch(seed, dtype=torch.float64))
        weight = model.weight.detach()
        results.append([weight if paired else torch.view_as_real(weight).clone()])
    assert_close(*results, 1e-12)
    model = Net(paired=False)
    optimizer = bisam.ASAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(TypeError, match="an adaptive ball is not defined for complex parameters"):
        optimizer.minimize(*batch(dtype=torch.float64))
    optimizer = bisam.FisherSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(TypeError, match=r"Fisher SAM is not defined for complex parameters: set eta=0\.0"):
        optimizer.minimize(*batch(dtype=torch.float64))


@pytest.mark.parametrize("name", ["GSAM(log)", "LookSAM(log)"])
def test_the_extra_pass_of_a_merge_has_the_same_dropout_mask_too(name):
    masks = []
    model, optimizer = build(name, net=lambda: nn.Sequential(nn.Dropout(0.5), mlp()), same_dropout=True)
    model[0].register_forward_hook(lambda module, inputs, output: masks.append(output == 0))
    optimizer.minimize(*batch())
    assert len(masks) == 3
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[1], masks[2])


def test_choosing_samples_needs_an_objective_with_a_value_for_each_sample():
    _, optimizer = build("ESAM", net=mlp, descent=lambda logits, y: nn.functional.cross_entropy(logits, y))
    with pytest.raises(ValueError, match="choosing samples needs an objective with a reduction"):
        optimizer.minimize(*batch())


def test_a_random_start_and_an_adaptive_group_are_refused_together():
    model = mlp()
    base = torch.optim.SGD([{"params": model.parameters(), "adaptive": True}], lr=0.1)
    with pytest.raises(ValueError, match="cannot be combined"):
        bisam.RSAM(base, model)
    base = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="cannot be combined"):
        bisam.SharpnessAware(base, perturbation=RandomStart(FisherBall(), 0.01))


def test_the_tested_variants_are_all_kinds_with_all_objectives_and_all_named_classes():
    """Every kind with the three objectives, but for one without an ascent, and every named class among them."""
    one_pass = {name for name in VARIANTS if not build(name)[1].perturbation.needs_ascent}
    assert {name for name in VARIANTS if "(" not in name} == {*KINDS} | one_pass
    for objective in ("log", "tanh"):
        assert len([name for name in VARIANTS if name.endswith(f"({objective})")]) == len(KINDS)
    classes = {
        cls for cls in vars(bisam.variants).values() if isinstance(cls, type) and cls.__module__ == "bisam.variants"
    }
    assert classes | {bisam.SharpnessAware} == {type(build(name)[1]) for name in VARIANTS}


def test_scalar_parameters_train_and_unused_parameters_are_unchanged(variant):
    model, optimizer = build(variant, net=WithScalar)
    unused = model.unused.weight.detach().clone()
    for seed in range(8):
        optimizer.minimize(*batch(seed))
    assert torch.equal(model.unused.weight, unused)  # no gradient, so no weight decay either
    assert model.temperature != 1.0


@pytest.mark.parametrize(
    ("group", "rates", "radii"),
    [
        ({"rho": 0.2}, [0.1, 0.05, 0.0], [0.2, 0.15, 0.1]),  # half of the group's own ρ, not of the constructor's
        ({"rho": 0.2}, [0.0, 0.1, 0.05], [0.1, 0.2, 0.15]),  # a rate that starts at zero
        ({"rho": 0.2}, [0.01, 0.1, 0.05], [0.2, 0.2, 0.15]),  # a warm-up without an announced maximum
        ({"rho": 0.2, "max_lr": 0.1}, [0.01, 0.1, 0.05], [0.11, 0.2, 0.15]),  # one whose maximum a scheduler announces
        ({"rho": 0.2, "rho_min": 0.0, "lr_max": 0.2}, [0.1, 0.2], [0.1, 0.2]),
        ({"rho": 0.04, "lr_min": 0.4}, [1.6, 1.0, 0.4, 0.2], [0.04, 0.03, 0.02, 0.02]),  # a schedule that ends above 0
        ({"rho": 0.2, "lr_min": 0.5}, [0.1, 0.1], [0.1, 0.1]),  # an lr_min above every learning rate
    ],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_gsams_radius_follows_every_kind_of_learning_rate_schedule(group, rates, radii, as_tensor):
    model = mlp()
    first = torch.tensor(rates[0]) if as_tensor else rates[0]
    optimizer = bisam.GSAM(torch.optim.SGD([{"params": model.parameters(), **group}], lr=first), model, rho=0.7)
    ball, options = optimizer.perturbation, optimizer.param_groups[0]
    seen = []
    for rate in rates:
        if as_tensor:
            options["lr"].fill_(rate)
        else:
            options["lr"] = rate
        seen.append(float(ball.radius(options)))
    assert seen == pytest.approx(radii, rel=1e-5)


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s["sharpness"].pop("steps"),
        lambda s: s["sharpness"].pop("memory"),
        lambda s: s["sharpness"]["memory"]["Reuse"].pop("tensors"),
        lambda s: s["sharpness"]["memory"]["Reuse"]["tensors"]["orthogonal"].update({99: torch.zeros(2)}),
        lambda s: s["sharpness"]["memory"]["Reuse"]["tensors"]["orthogonal"].update({0: torch.zeros(2)}),
    ],
)
def test_a_damaged_memory_is_refused_and_changes_nothing(damage):
    _, written = build("LookSAM", "Adam")
    steps(written, range(2))
    state = copy.deepcopy(written.state_dict())
    damage(state)
    model, optimizer = build("LookSAM", "Adam")
    steps(optimizer, range(3, 4))
    before, groups = tensors(model, optimizer), str(optimizer.state_dict())
    with pytest.raises(ValueError, match="the checkpoint's memory is damaged"):
        optimizer.load_state_dict(state)
    assert_identical(tensors(model, optimizer), before)
    assert str(optimizer.state_dict()) == groups


def test_the_scoring_pass_of_a_failed_step_is_discarded():
    model, optimizer = build("KSAM", k=8)
    armed = [True]

    def break_once(*_):
        if torch.is_grad_enabled() and armed:
            armed.clear()
            raise RuntimeError("out of memory")

    model.head.register_forward_hook(break_once)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.minimize(*batch())
    tracked = model.norm.num_batches_tracked.item()
    optimizer.minimize(*batch(size=8))  # all samples are used, so none is scored
    assert model.norm.num_batches_tracked == tracked + 1


def test_looksam_is_the_base_optimizer_once_its_radius_is_zero():
    model, optimizer = build("LookSAM", every=3, net=mlp)
    steps(optimizer, range(1))
    alone = copy.deepcopy(model)
    base = BASES["SGD(foreach)"](alone.parameters())
    state = copy.deepcopy(optimizer.base.state_dict()["state"])
    base.load_state_dict({"state": state, "param_groups": base.state_dict()["param_groups"]})
    optimizer.param_groups[0]["rho"] = 0.0
    for seed in range(4):
        optimizer.minimize(*batch(seed))
        base.zero_grad()
        nn.functional.cross_entropy(alone(batch(seed)[0]), batch(seed)[1]).backward()
        base.step()
    assert_identical(weights_of(model), weights_of(alone))


@pytest.mark.parametrize("name", ["GSAM", "LookSAM", "WSAM", "GSAM(log)"])
def test_sparse_gradients_are_refused_by_a_merge_that_computes_with_them(name):
    torch.manual_seed(0)
    embedding, head = nn.Embedding(10, 6, sparse=True), nn.Linear(6, 4)
    groups = [{"params": embedding.parameters(), "rho": 0.0}, {"params": head.parameters()}]
    optimizer = VARIANTS[name](torch.optim.SGD(groups, lr=0.1), nn.Sequential(embedding, head))
    before = embedding.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"shape \(10, 6\) has a sparse gradient.*sparse=False.*such as SAM"):
        optimizer.minimize(torch.randint(10, (16,)), batch()[1])
    assert torch.equal(embedding.weight, before)


def test_a_merge_that_needs_the_gradient_at_w_gets_it_in_any_composition():
    """From all tensors, at w, on the samples that were chosen."""
    model = mlp().double()
    seen = {}

    class Watch(SurrogateGap):
        def perturbed(self, params, at_weights):
            seen["at_weights"] = [g.clone() for g in at_weights]

    optimizer = bisam.SharpnessAware(
        torch.optim.SGD(model.parameters(), lr=0.1), model,
        perturbation=RandomTensors(Ball(), 0.3), plan=HighestLoss(4), merge=Watch(0.1),
    )  # fmt: skip
    x, y = batch(dtype=torch.float64)
    chosen = nn.functional.cross_entropy(model(x), y, reduction="none").topk(4).indices
    expected = torch.autograd.grad(nn.functional.cross_entropy(model(x[chosen]), y[chosen]), list(model.parameters()))
    optimizer.minimize(x, y)
    assert_close(seen["at_weights"], list(expected), 1e-12)


def test_random_numbers_differ_from_those_that_initialised_the_weights():
    torch.manual_seed(7)
    weight = torch.randn(1000)
    assert abs(torch.cosine_similarity(torch.randn(1000, generator=Memory().generator), weight, dim=0)) < 0.2


def test_gsam_accepts_a_learning_rate_that_changes_between_tensor_and_number():
    _, optimizer = build("GSAM", net=mlp)
    for rate in (torch.tensor(0.1), 0.05, torch.tensor(0.02)):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.minimize(*batch())
    assert float(optimizer.param_groups[0]["lr_max"]) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["GSAM", "WSAM"])
def test_a_gradient_missing_in_the_pass_at_the_weights_counts_as_zero(name):
    """As where samples are routed to other experts at w + ε."""
    model, optimizer = build(name, net=lambda: nn.ModuleList([mlp(), mlp()]), dtype=torch.float64)
    x, y = batch(dtype=torch.float64)
    found, params = {}, list(model.parameters())

    def closure():
        logits = model[0](x) + (model[1](x) if optimizer.phase == "descent" else 0)
        loss = optimizer.criterion(logits, y)
        loss.backward()
        found[optimizer.phase] = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]
        return loss

    optimizer.backward(closure)
    plain, perturbed = (torch.cat([g.flatten() for g in found[phase]]) for phase in ("ascent", "descent"))
    if name == "WSAM":
        expected = plain + 0.9 / (1 - 0.9) * (perturbed - plain)
    else:
        expected = perturbed - 0.4 * (plain - (plain @ perturbed) / perturbed.norm() ** 2 * perturbed)
    assert plain[-1] == 0 != perturbed[-1]
    assert_close([torch.cat([p.grad.flatten() for p in params])], [expected], 1e-12)


def test_msam_names_the_state_of_a_base_optimizer_that_keeps_no_momentum():
    class Averaging(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["z"] = param.detach().clone()
            super().step(closure)

    model = mlp()
    base = Averaging(model.parameters(), lr=0.1)
    base.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer = bisam.MSAM(base, model)
    optimizer.minimize(*batch())
    with pytest.raises(ValueError, match=r"momentum_buffer or exp_avg in its state, which has z only"):
        optimizer.minimize(*batch())
