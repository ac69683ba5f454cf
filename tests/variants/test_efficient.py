"""ESAM and E-BiSAM: which tensors are perturbed, which samples the descent has, and what is not computed."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bisam

from family import (
    BASES,
    VARIANTS,
    Skipping,
    assert_close,
    assert_identical,
    batch,
    build,
    closure_of,
    distance,
    mlp,
    steps,
    tensors,
    weights_of,
)


@pytest.mark.parametrize(
    ("efficient", "full"), [("ESAM", "SAM"), ("EBiSAM(log)", "BiSAM(log)"), ("EBiSAM(tanh)", "BiSAM(tanh)")]
)
def test_esam_that_keeps_all_tensors_and_samples_is_sam_bit_for_bit(efficient, full, base):
    model, optimizer = build(efficient, base, beta=1.0, gamma=1.0)
    twin, twin_optimizer = build(full, base)
    steps(optimizer, range(4))
    steps(twin_optimizer, range(4))
    assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))


@pytest.mark.parametrize(
    ("gamma", "size", "kept"), [(0.5, 16, 8), (0.5, 15, 8), (0.1, 30, 3), (0.28, 25, 7), (0.01, 16, 1), (1.0, 7, 7)]
)
def test_esams_descent_has_exactly_the_share_gamma_of_samples_even_with_ties(gamma, size, kept):
    model, optimizer = build("ESAM", net=mlp, gamma=gamma)
    sizes = []
    model.register_forward_hook(lambda _, inputs, __: sizes.append((len(inputs[0]), torch.is_grad_enabled())))
    x = torch.ones(size, 6)  # all alike: every score is a tie
    optimizer.minimize(x, torch.zeros(size, dtype=torch.long))
    with_gradient = [n for n, graded in sizes if graded]
    assert with_gradient == [size, kept]


def test_esam_with_same_dropout_starts_every_pass_with_the_same_random_state():
    """The scoring pass at w + ε, which chooses samples, and the descent pass after it."""
    model, optimizer = build("ESAM", net=lambda: nn.Sequential(nn.Dropout(0.5), mlp()), same_dropout=True)
    states = []
    model.register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))
    optimizer.minimize(*batch())
    assert len(states) == 3
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def test_esam_computes_no_weight_gradient_of_what_it_drops_and_perturbs_only_what_it_keeps():
    def net():
        return nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(20)], mlp())

    model, optimizer = build("ESAM", net=net)
    optimizer.minimize(*batch())  # the first step computes all of them
    before = dict(zip(model.parameters(), weights_of(model), strict=True))
    graded, moved = dict.fromkeys(before, False), {}

    def watch_gradients(param):
        graded[param] |= optimizer.phase == "ascent"

    def watch_weights(*_):
        if optimizer.perturbed and optimizer.phase == "descent":
            moved.update({p: not torch.equal(p, w) for p, w in before.items()})

    for param in before:
        param.register_post_accumulate_grad_hook(watch_gradients)
    model.register_forward_pre_hook(watch_weights)
    optimizer.minimize(*batch())
    assert graded == moved
    assert 0 < sum(graded.values()) < len(graded)
    assert all(p.requires_grad for p in model.parameters())


def test_esam_perturbs_one_tensor_where_the_draw_keeps_none():
    model, optimizer = build("ESAM", net=mlp, rho=1e-9, beta=1e-9, gamma=1.0)
    before, moved = weights_of(model), []
    model.register_forward_pre_hook(
        lambda *_: moved.append([not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)])
    )
    optimizer.minimize(*batch())
    assert [sum(each) for each in moved] == [0, 1]


def test_esam_of_a_compiled_model_with_an_adaptive_ball_takes_the_same_steps():
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = mlp()
        if compiled:
            model.compile(backend="eager")
        groups = [{"params": model.parameters(), "adaptive": True}]
        optimizer = bisam.ESAM(torch.optim.SGD(groups, lr=0.1), model, rho=0.5)
        steps(optimizer, range(4))
        results.append(weights_of(model))
    assert_close(*results, 1e-6)


class Checkpointed(nn.Module):
    """Its second layer is a reentrant checkpoint: without gradients unless the output of the first requires one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), mlp()])
        self.reentrant = True

    def forward(self, x):
        first, second = self.layers
        return checkpoint(second, first(x), use_reentrant=True) if self.reentrant else second(first(x))


@pytest.mark.parametrize("sees_the_graph", [True, False])
def test_esam_with_a_reentrant_checkpoint_equals_esam_without_one(sees_the_graph):
    """With β = 0.2 most steps drop both tensors before the checkpoint."""
    results = []
    for reentrant in (False, True):
        model, optimizer = build("ESAM", net=Checkpointed, beta=0.2, gamma=1.0)
        model.reentrant = reentrant
        for seed in range(6):
            closure = closure_of(model, optimizer, *batch(seed))
            optimizer.step(closure if sees_the_graph else lambda closure=closure: closure().item())
        results.append(weights_of(model))
    assert_identical(*results)


def test_esam_trains_if_all_parameters_that_it_would_perturb_are_frozen():
    model = nn.Sequential(nn.Linear(6, 6), mlp())
    frozen = list(model[0].parameters())
    for param in frozen:
        param.requires_grad_(False)
    groups = [{"params": frozen, "rho": 0.05}, {"params": list(model[1].parameters()), "rho": 0.0}]
    optimizer = bisam.ESAM(torch.optim.SGD(groups, lr=0.1), model)
    before = [p.detach().clone() for p in model[1].parameters()]
    optimizer.minimize(*batch())
    assert all(not torch.equal(p, b) for p, b in zip(model[1].parameters(), before, strict=True))


def test_esam_scales_what_it_keeps_so_that_the_radius_is_rho_over_beta():
    model, optimizer = build("ESAM", net=mlp, rho=0.3, beta=0.25, gamma=1.0, dtype=torch.float64)
    before, lengths = weights_of(model), []
    model.register_forward_pre_hook(lambda *_: lengths.append(distance(weights_of(model), before)))
    optimizer.minimize(*batch(dtype=torch.float64))
    assert lengths == pytest.approx([0.0, 0.3 / 0.25], rel=1e-9)


def test_esam_chooses_by_its_own_objective():
    """ESAM by cross entropy, E-BiSAM by Q: on the same perturbation they may choose differently."""
    chosen = {}
    for name in ("ESAM", "EBiSAM(tanh)"):
        model, optimizer = build(name, net=mlp, beta=1.0, rho=3.0)
        model.register_forward_hook(lambda _, inputs, __, name=name: chosen.update({name: inputs[0]}))
        optimizer.minimize(*batch(size=32))
    assert not torch.equal(chosen["ESAM"], chosen["EBiSAM(tanh)"])


@pytest.mark.slow
def test_esam_draws_a_layer_that_was_skipped_for_a_while_as_often_as_before():
    torch.manual_seed(0)
    model = Skipping()
    optimizer = bisam.ESAM(torch.optim.SGD(model.parameters(), lr=0.0), model, beta=0.5, gamma=1.0)
    weights = model.second.weight.detach().clone()
    moved = []

    def watch(*_):
        if optimizer.perturbed and optimizer.phase == "descent":
            moved.append(not torch.equal(model.second.weight, weights))

    model.register_forward_pre_hook(watch)
    for skips, steps_ in ((True, 10), (False, 400)):
        model.skips = skips
        moved.clear()
        for _ in range(steps_):
            optimizer.minimize(*batch())
    assert 0.42 < sum(moved) / len(moved) < 0.58


def test_esam_resumes_bitwise_with_unused_parameters():
    results = []
    for cut in (None, 3):
        model, optimizer = build("ESAM", net=Skipping, rho=0.5)
        for step in range(8):
            if step == cut:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = VARIANTS["ESAM"](BASES["SGD(foreach)"](model.parameters()), model, rho=0.5)
                optimizer.load_state_dict(state)
            optimizer.minimize(*batch(step))
        results.append(weights_of(model))
    assert_identical(*results)


def test_esam_descends_at_the_weights_if_the_loss_uses_none_of_the_perturbed_parameters():
    """The loss may depend on none of the tensors that it keeps; a loss without any gradient is refused."""
    torch.manual_seed(0)
    model = Skipping()
    model.first.requires_grad_(False)
    optimizer = bisam.ESAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    unmoved = 0
    for step in range(40):
        model.skips = step % 2 == 0
        before = model.head.weight.detach().clone()
        optimizer.minimize(*batch(step))
        assert not torch.equal(model.head.weight, before)
        unmoved += optimizer.telemetry.surrogate_gap == 0
    assert 0 < unmoved < 20
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"found no gradients"):
        optimizer.minimize(*batch())


def test_esam_never_chooses_an_ignored_sample_over_one_with_a_label():
    model, optimizer = build("ESAM", net=mlp, rho=0.5)
    chosen = []
    model.register_forward_hook(lambda _, inputs, __: chosen.append(inputs[0]) if torch.is_grad_enabled() else None)
    x, y = batch()
    y[:8] = -100
    for _ in range(10):
        optimizer.minimize(x, y)
        counted = {tuple(row.tolist()) for row in x[8:]}
        assert {tuple(row.tolist()) for row in chosen[-1]} == counted


def test_esams_scoring_pass_has_the_dropout_masks_of_the_pass_that_it_is_compared_with():
    net = lambda: nn.Sequential(nn.Dropout(0.5), mlp())  # noqa: E731
    model, optimizer = build("ESAM", net=net, same_dropout=True)
    masks = []
    model[0].register_forward_hook(lambda _, inputs, output: masks.append(output == 0))
    optimizer.minimize(*batch())
    at_weights, scoring, _ = masks
    assert torch.equal(at_weights, scoring)


def test_esams_telemetry_compares_all_samples_before_and_after():
    model, optimizer = build("ESAM", net=mlp, rho=1.0)
    logits = []
    model.register_forward_hook(lambda _, __, output: logits.append(output.detach()))
    x, y = batch(size=64)
    optimizer.minimize(x, y)
    before, after, _ = logits
    flipped = (before.argmax(1) == y) & (after.argmax(1) != y)
    assert optimizer.telemetry.flips == flipped.sum() > 0
    torch.testing.assert_close(optimizer.telemetry.perturbed_loss, nn.functional.cross_entropy(after, y))
