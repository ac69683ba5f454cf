"""`micro_batch=`: a perturbation for each micro-batch, one by one or as one batched computation."""

import pytest
import torch
from torch import nn

import bisam
from bisam.merge import SurrogateGap

import reference
from family import (
    WithScalar,
    assert_close,
    assert_identical,
    batch,
    build,
    mlp,
    steps,
    tensors,
    weights_of,
)


def test_micro_batches_equal_single_steps_whose_gradients_are_averaged(base):
    model, optimizer = build("BiSAM(log)", base, net=mlp, dtype=torch.float64, micro_batch=4)
    twin, single = build("BiSAM(log)", base, net=mlp, dtype=torch.float64)
    for seed in range(3):
        x, y = batch(seed, dtype=torch.float64)
        total, norms = [torch.zeros_like(p) for p in twin.parameters()], []
        for part in zip(x.split(4), y.split(4), strict=True):
            single.criterion(twin(part[0]), part[1]).backward()
            norms.append(torch.cat([p.grad.flatten() for p in twin.parameters()]).norm())
            single.ascend()
            single.criterion(twin(part[0]), part[1]).backward()
            total = [t + p.grad / 4 for t, p in zip(total, twin.parameters(), strict=True)]
            single.restore()
        for p, t in zip(twin.parameters(), total, strict=True):
            p.grad = t
        single.base.step()
        single.zero_grad()
        optimizer.minimize(x, y)
        torch.testing.assert_close(optimizer.telemetry.ascent_norm, torch.stack(norms).mean())
    assert_close(tensors(model, optimizer), tensors(twin, single), 1e-9)


@pytest.mark.parametrize("ascent", [None, bisam.LowerBound()])
def test_the_gradient_at_w_of_unequal_micro_batches_is_that_of_the_whole_batch(ascent):
    seen = {}

    class Watch(SurrogateGap):
        def perturbed(self, params, at_weights):
            seen["at_weights"] = [g.clone() for g in at_weights]

    model = mlp().double()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bisam.SharpnessAware(base, model, merge=Watch(0.1), ascent=ascent, micro_batch=6)
    x, y = batch(dtype=torch.float64)
    expected = reference.gradient(model, x, y, reference.cross_entropy)
    optimizer.minimize(x, y)
    assert_close(seen["at_weights"], expected, 1e-12)


@pytest.mark.parametrize("micro_batch", [16, 100])
def test_a_micro_batch_of_at_least_the_whole_batch_is_the_plain_variant(micro_batch):
    model, optimizer = build("BiSAM(log)", micro_batch=micro_batch)
    twin, twin_optimizer = build("BiSAM(log)")
    steps(optimizer, range(3))
    steps(twin_optimizer, range(3))
    assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))


def convolutions():
    norm = nn.GroupNorm(2, 4)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), norm, nn.GELU(), nn.Flatten(), nn.Linear(16, 4))


@pytest.mark.parametrize(
    "name", ["SAM", "ASAM", "BiSAM(log)", "ABiSAM(tanh)", "FriendlySAM(log)", "VaSSO", "FisherSAM(log)"]
)
@pytest.mark.parametrize("net", [mlp, convolutions])
@pytest.mark.parametrize("size", [4, 6])  # 6 does not divide 16: then it is the loop
def test_vectorized_micro_batches_take_the_steps_of_the_loop(name, net, size, device):
    model, optimizer = build(name, net=net, dtype=torch.float64, device=device, micro_batch=size, vectorize=True)
    loop, loop_optimizer = build(name, net=net, dtype=torch.float64, device=device, micro_batch=size)
    for seed in range(4):
        x, y = batch(seed, dtype=torch.float64, device=device)
        y[:3] = -100  # so that micro-batches do not count alike
        torch.testing.assert_close(optimizer.minimize(x, y), loop_optimizer.minimize(x, y))
        torch.testing.assert_close(optimizer.telemetry.as_dict(), loop_optimizer.telemetry.as_dict())
    assert_close(tensors(model, optimizer), tensors(loop, loop_optimizer), 1e-9)


def test_vectorized_micro_batches_take_tuples_dicts_and_frozen_parameters():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.net[0].bias.requires_grad_(False)

        def forward(self, left, *, right, flag=False):
            return self.net(left + right) if flag else None

    results = []
    for vectorize in (False, True):
        model, optimizer = build("BiSAM(log)", net=Sum, dtype=torch.float64, micro_batch=4, vectorize=vectorize)
        x, y = batch(dtype=torch.float64)
        optimizer.minimize({"left": x, "right": x, "flag": True}, y)
        results.append(list(model.parameters()))
    assert_close(*results, 1e-12)


def test_vectorized_micro_batches_do_not_perturb_groups_with_rho_zero():
    results = []
    for vectorize in (False, True):
        torch.manual_seed(0)
        model = mlp().double()
        groups = [{"params": model[0].parameters(), "rho": 0.0}, {"params": model[2].parameters()}]
        base = torch.optim.SGD(groups, lr=0.1)
        optimizer = bisam.ABiSAM(base, model, rho=1.0, micro_batch=4, vectorize=vectorize)
        for seed in range(3):
            optimizer.minimize(*batch(seed, dtype=torch.float64))
        results.append(list(model.parameters()))
    assert_close(*results, 1e-12)


def test_vectorized_micro_batches_have_dropout_masks_of_their_own():
    model, optimizer = build("SAM", net=lambda: nn.Sequential(nn.Dropout(0.5), mlp()), micro_batch=1, vectorize=True)
    optimizer.minimize(torch.ones(16, 6), batch()[1])
    used = model[1][0].weight.grad.any(0)  # an input that is dropped has no gradient
    assert used.all()


def test_options_and_models_that_cannot_be_vectorized_are_refused():
    for name, size in (("SAM", None), ("ESAM", 4), ("GSAM", 4), ("RSAM", 4)):
        with pytest.raises(ValueError, match="vectorize runs micro-batches at once: it needs micro_batch="):
            build(name, vectorize=True, micro_batch=size)
    model, optimizer = build("SAM", micro_batch=4, vectorize=True)
    before = tensors(model, optimizer)
    with pytest.raises(RuntimeError, match=r"cannot run as one batched computation.*Use vectorize=False"):
        optimizer.minimize(*batch())
    assert_identical(tensors(model, optimizer), before)


class WithGain(nn.Module):
    """Each entry of its gain gets the same gradient, which autograd returns as one expanded number."""

    def __init__(self):
        super().__init__()
        self.net, self.gain = mlp(), nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        return self.net(x) * self.gain.sum()


def test_vectorized_micro_batches_accept_expanded_gradients():
    gains = []
    for vectorize in (False, True):
        model, optimizer = build("SAM", net=WithGain, dtype=torch.float64, micro_batch=4, vectorize=vectorize)
        optimizer.minimize(*batch(dtype=torch.float64))
        gains.append(model.gain.detach())
    torch.testing.assert_close(gains[1], gains[0], rtol=1e-12, atol=0)
    assert (gains[0] != torch.tensor([1.0, 2.0, 3.0])).all()


class Replacing(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.net(x)


class RaisingAfter(Replacing):
    def forward(self, x):
        super().forward(x)
        raise ValueError("after a buffer was replaced")


@pytest.mark.parametrize(
    ("net", "error", "words"),
    [
        (Replacing, RuntimeError, r"another tensor in the place of a buffer.*Use vectorize=False"),
        (RaisingAfter, ValueError, "after a buffer was replaced"),
    ],
)
def test_a_model_that_replaces_a_buffer_cannot_be_vectorized_and_the_buffer_is_unchanged(net, error, words):
    model, optimizer = build("SAM", net=net, micro_batch=4, vectorize=True)
    before = model.mean
    with pytest.raises(error, match=words):
        optimizer.minimize(*batch())
    assert model.mean is before
    assert not before.any()


def test_vectorized_micro_batches_do_not_train_unused_parameters():
    results = []
    for vectorize in (False, True):
        model, optimizer = build("SAM", net=WithScalar, dtype=torch.float64, micro_batch=4, vectorize=vectorize)
        for seed in range(3):
            optimizer.minimize(*batch(seed, dtype=torch.float64))
        results.append(list(model.parameters()))
    assert_close(*results, 1e-12)
    stranger = nn.Parameter(torch.ones(()))
    base = torch.optim.SGD([*mlp().parameters(), stranger], lr=0.1)
    with pytest.raises(ValueError, match="vectorize sees the model's parameters only"):
        bisam.SAM(base, mlp(), micro_batch=4, vectorize=True)


def test_inputs_shared_by_all_samples_are_never_cut():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, table):
            assert table.shape == (4, 6)  # as long as a micro-batch
            return self.net(x + table.mean(0))

    _, optimizer = build("SAM", net=Shared, micro_batch=4)
    optimizer.minimize((batch()[0], torch.ones(4, 6)), batch()[1], accumulate=2)


def test_vectorized_micro_batches_are_averaged_in_double_precision():
    x, y = (part[:12] for part in batch(dtype=torch.float64))  # thirds, which float32 rounds
    weights = []
    for vectorize in (False, True):
        options = {"micro_batch": 4, "vectorize": vectorize, "descent": nn.MSELoss(), "ascent": nn.MSELoss()}
        model, optimizer = build("SAM", net=mlp, dtype=torch.float64, **options)
        optimizer.minimize(x, nn.functional.one_hot(y, 4).double())
        weights.append(weights_of(model))
    assert_close(*weights, 1e-14)


@pytest.mark.parametrize("micro_batch", [None, 4])
def test_parts_in_which_every_label_is_ignored_leave_finite_weights(variant, micro_batch):
    x, y = batch()
    everything = torch.full_like(y, -100)
    mixed = torch.cat([y[:4], everything[4:8], y[8:]])
    options = {} if micro_batch is None or variant == "MSAM" else {"micro_batch": micro_batch}
    for labels in (everything, mixed):
        for accumulate in (1, 2):
            model, optimizer = build(variant, net=mlp, **options)
            optimizer.minimize(x, labels, accumulate=accumulate)
            assert all(p.isfinite().all() for p in model.parameters())


def test_vectorized_micro_batches_in_which_every_label_is_ignored_leave_finite_weights():
    model, optimizer = build("SAM", net=mlp, micro_batch=4, vectorize=True)
    x, y = batch()
    optimizer.minimize(x, torch.full_like(y, -100))
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("inside", [False, True])
def test_vectorized_micro_batches_run_under_autocast(inside):
    weights = []
    for vectorize in (False, True):
        options = {"micro_batch": 4, "vectorize": vectorize, "autocast": torch.bfloat16 if inside else None}
        model, optimizer = build("SAM", net=mlp, **options)
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            optimizer.minimize(*batch())
        weights.append(weights_of(model))
    assert_close(*weights, 1e-2)  # bfloat16 has 8 bits


def test_vectorized_micro_batches_train_a_parameter_that_only_the_second_pass_uses():
    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.expert = mlp(), nn.Linear(6, 4)

        def forward(self, x):
            return self.net(x) + self.expert(x) if self.uses_expert() else self.net(x)

    weights = []
    for vectorize in (False, True):
        model, optimizer = build("SAM", net=Expert, dtype=torch.float64, micro_batch=4, vectorize=vectorize)
        model.uses_expert = lambda optimizer=optimizer: optimizer.phase == "descent"
        optimizer.minimize(*batch(dtype=torch.float64))
        assert model.expert.weight.grad is not None
        weights.append(weights_of(model))
    assert_close(*weights, 1e-12)
