"""Worst-case sharpness against closed forms on quadratics, and against direct computing on a small net."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

import bisam
from bisam.diagnostics import flips, sharpness

from diagnosed import DUMMY, Quadratic, Weights, quadratic
from family import batch, mlp


def highest_in_ball(matrix, gradient, rho):
    """max ½ εᵀ A ε + gᵀ ε over ‖ε‖ ≤ ρ: ε = (λ − A)⁻¹ g with λ ≥ max(0, A's largest eigenvalue), found by bisection."""
    values, vectors = torch.linalg.eigh(matrix)
    g = vectors.T @ gradient

    def step(multiplier):
        return g / (multiplier - values)

    if values[-1] < 0 and step(0.0).norm() <= rho:
        epsilon = step(0.0)
    else:
        low = max(values[-1].item(), 0.0)
        high = low + g.norm().item() / rho + 1.0
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if step(middle).norm() > rho else (low, middle)
        epsilon = step(high)
    return (epsilon @ (values * epsilon) / 2 + g @ epsilon).item()


@pytest.mark.parametrize("rho", [0.0, 0.1, 2.0])
@pytest.mark.parametrize(("adaptive", "eta"), [(False, 0.0), (True, 0.0), (True, 0.1)])
def test_one_step_sharpness_is_its_closed_form_on_a_quadratic(rho, adaptive, eta):
    model, loss = quadratic()
    w = model.w.detach()
    t = w.abs() + eta if adaptive else torch.ones_like(w)
    g = loss.matrix @ w + loss.linear
    epsilon = rho * t * t * g / (t * g).norm()
    measured = sharpness(model, DUMMY, rho, adaptive=adaptive, eta=eta, objective=loss)
    assert measured.loss == pytest.approx(loss.at(w).item(), rel=1e-12)
    assert measured.perturbed_loss == pytest.approx(loss.at(w + epsilon).item(), rel=1e-12)
    assert measured.value == pytest.approx((g @ epsilon + epsilon @ loss.matrix @ epsilon / 2).item(), abs=1e-12)
    assert (measured.error, measured.perturbed_error, measured.flips, measured.bound) == (None, None, None, None)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("rho", [0.1, 1.0])
def test_perturbation_has_length_rho_in_its_own_norm(adaptive, rho):
    model, loss = quadratic()
    measured = sharpness(model, DUMMY, rho, adaptive=adaptive, eta=0.01, objective=loss)
    w, there = loss.seen
    t = w.abs() + 0.01 if adaptive else torch.ones_like(w)
    assert ((there - w) / t).norm().item() == pytest.approx(rho, rel=1e-9)
    assert measured.norm == pytest.approx(rho, rel=1e-12)


@pytest.mark.parametrize(("slope", "rho"), [(1.0, 1e30), (1e-25, 1.0)])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_perturbation_has_length_rho_where_squares_overflow_or_underflow_float32(slope, rho, steps):
    """A linear loss: L(w + ε) − L(w) = ρ‖g‖."""
    model = Weights(torch.zeros(2))
    measured = sharpness(model, DUMMY, rho, steps=steps, objective=lambda w, _: slope * w.sum())
    assert measured.value == pytest.approx(rho * slope * math.sqrt(2), rel=1e-6)  # float32
    assert measured.norm == pytest.approx(rho, rel=1e-6)


@pytest.mark.parametrize(
    "eigenvalues", [(3.0, 1.0, 0.5, -0.2, -2.0), (4.0, 2.0, 1.0, 0.5, 0.1), (-0.1, -0.5, -1.0, -2.0, -4.0)]
)
@pytest.mark.parametrize("rho", [0.1, 1.0, 20.0])
def test_projected_ascent_reaches_the_highest_point_of_the_ball(eigenvalues, rho):
    model, loss = quadratic(eigenvalues)
    gradient = loss.matrix @ model.w.detach() + loss.linear
    highest = highest_in_ball(loss.matrix, gradient, rho)
    measured = sharpness(model, DUMMY, rho, steps=100, objective=loss)
    assert measured.norm <= rho * (1 + 1e-9)
    assert measured.value <= highest + 1e-9
    # on the boundary it converges; around a maximum inside it circles, by half of the last steps' length
    inside = max(-eigenvalues[-1], 0.0) / 2 * (2 * rho / 100) ** 2
    assert measured.value == pytest.approx(highest, rel=1e-6, abs=inside)


def test_projected_ascent_in_the_adaptive_ball_is_the_round_one_of_scaled_weights():
    model, loss = quadratic()
    w = model.w.detach()
    t = w.abs() + 0.1
    gradient = t * (loss.matrix @ w + loss.linear)
    measured = sharpness(model, DUMMY, 0.5, adaptive=True, eta=0.1, steps=100, objective=loss)
    assert measured.value == pytest.approx(highest_in_ball(t[:, None] * loss.matrix * t, gradient, 0.5), rel=1e-6)


@pytest.mark.parametrize("steps", [2, 3, 10])
@pytest.mark.parametrize("adaptive", [False, True])
def test_more_steps_never_find_a_lower_loss_than_one(steps, adaptive):
    for seed in range(10):
        model, data = mlp(), batch(seed)
        one, more = (sharpness(model, data, 0.5, adaptive=adaptive, steps=n).value for n in (1, steps))
        assert more >= one


def test_with_several_steps_sharpness_is_never_negative_though_with_one_it_may_be():
    """One step goes past the top and down on the other side; the start itself is in the ball too."""
    model, loss = Weights(torch.tensor([1.0])), Quadratic(torch.tensor([[-1.0]]), torch.tensor([0.9]))
    assert sharpness(model, DUMMY, 1.0, objective=loss).value < 0
    assert sharpness(model, DUMMY, 1.0, steps=10, objective=loss).value >= 0


@pytest.mark.parametrize("phi", ["log", "tanh"])
@pytest.mark.parametrize("rho", [0.05, 1.0, 5.0])
def test_flips_errors_and_bound_agree_with_a_direct_computation(phi, rho):
    model, (x, y) = mlp().double(), batch(size=64, dtype=torch.float64)
    y = model(x).argmax(1) * (torch.arange(64) % 3 > 0) + y * (torch.arange(64) % 3 == 0)  # mostly right
    bound = bisam.LowerBound(phi)
    measured = sharpness(model, (x, y), rho, ascent=bound)

    gradients = torch.autograd.grad(bound(model(x), y), list(model.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    moved = {n: p + rho * g / norm for (n, p), g in zip(model.named_parameters(), gradients, strict=True)}
    before, after = model(x), functional_call(model, moved, x)
    right, still = before.argmax(1) == y, after.argmax(1) == y
    assert measured.loss == pytest.approx(nn.functional.cross_entropy(before, y).item(), rel=1e-12)
    assert measured.perturbed_loss == pytest.approx(nn.functional.cross_entropy(after, y).item(), rel=1e-9)
    assert measured.error == pytest.approx(1 - right.double().mean().item())
    assert measured.perturbed_error == pytest.approx(1 - still.double().mean().item())
    assert measured.flips == int((right & ~still).sum()) == flips(model, (x, y), rho, ascent=bound)
    assert measured.bound == pytest.approx(bound.bound(after, y).item(), rel=1e-9)
    assert measured.bound <= measured.perturbed_error
    assert isinstance(measured.flips, int)
    assert isinstance(measured.bound, float)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("seed", range(5))
def test_the_bound_never_exceeds_the_error_under_perturbation(steps, seed):
    model, data = mlp(), batch(seed)
    for rho in (0.0, 0.1, 1.0, 10.0):
        measured = sharpness(model, data, rho, steps=steps, adaptive=bool(seed % 2), ascent=bisam.LowerBound())
        assert measured.bound <= measured.perturbed_error + 1e-6


def test_sharpness_agrees_with_the_telemetry_of_an_optimizer():
    model, (x, y) = mlp().double(), batch(dtype=torch.float64)
    measured, still = (sharpness(model, (x, y), rho, ascent=bisam.LowerBound()) for rho in (0.3, 0.0))
    optimizer = bisam.BiSAM(torch.optim.SGD(model.parameters(), lr=0.1), model, rho=0.3)
    optimizer.minimize(x, y)
    assert measured.value == pytest.approx(optimizer.telemetry.surrogate_gap.item(), rel=1e-9)
    assert measured.flips == optimizer.telemetry.flips.item()
    assert still.bound == pytest.approx(optimizer.telemetry.bound.item(), rel=1e-9)  # the step reports it at w


class Cliff(nn.Module):
    """Flat at its weight; beyond a quarter from the origin it has the value `beyond`."""

    def __init__(self, beyond):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.1, 0.0]))
        self.beyond = beyond

    def forward(self, x):
        return self.w.square().sum() * torch.where(self.w.norm() > 0.25, self.beyond, 1.0) + 0 * x


@pytest.mark.parametrize("steps", [1, 2, 10])
@pytest.mark.parametrize("beyond", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_nearby_has_infinite_or_nan_sharpness(steps, beyond):
    measured = sharpness(Cliff(beyond), DUMMY, rho=1.0, steps=steps, objective=lambda output, _: output.mean())
    assert measured.value == pytest.approx(beyond, nan_ok=True)
    assert measured.norm == pytest.approx(1.0)


def test_errors_are_reported_only_if_every_batch_is_a_classification():
    """With several labels per sample, each row of a batch may happen to have just one."""
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(5, 6)
    several = torch.tensor([[1.0, 1.0, 0.0, 0.0]]).repeat(5, 1)
    several[4] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    parts = [(x[:4], several[:4]), (x[4:], several[4:])]
    for order in (parts, parts[::-1]):
        for objective in (nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss()):
            measured = sharpness(model, order, rho=0.05, objective=objective)
            assert (measured.error, measured.perturbed_error, measured.flips) == (None, None, None)
    one_hot = nn.functional.one_hot(torch.arange(5) % 4, 4).float()
    assert sharpness(model, (x, one_hot), rho=0.05, objective=nn.BCEWithLogitsLoss()).error is None
    assert sharpness(model, (x, one_hot), rho=0.05).error is not None


def test_labels_may_be_uint8():
    """In uint8, 156 has the bits of −100, which is ignored."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 200), torch.randn(16, 6)
    model.bias.data[156] = 50.0
    y = torch.full((16,), 156)
    y[:2] = 5
    for labels in (y, y.to(torch.uint8)):
        assert sharpness(model, (x, labels), rho=0.05).error == pytest.approx(2 / 16)


def test_for_soft_labels_an_error_but_no_bound_is_reported():
    measured = sharpness(mlp(), (batch()[0], torch.rand(16, 4).softmax(1)), rho=0.05, ascent=bisam.LowerBound("tanh"))
    assert measured.error is not None
    assert measured.bound is None


def test_loss_functions_are_averaged_over_labels_that_are_not_ignored():
    model, (x, y) = mlp(), batch()
    y[:7] = -100
    whole = sharpness(model, (x, y), rho=0.05, objective=nn.functional.cross_entropy)
    parts = sharpness(model, [(x[:8], y[:8]), (x[8:], y[8:])], rho=0.05, objective=nn.functional.cross_entropy)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_flips_are_those_of_sharpness_with_the_same_options():
    torch.manual_seed(3)
    model = nn.Sequential(*mlp(), nn.BatchNorm1d(4)).double()
    x = torch.randn(500, 6, dtype=torch.float64)
    data = x, model.eval()(x).argmax(1)
    smooth = nn.CrossEntropyLoss(label_smoothing=0.9)
    choices = [
        {}, {"adaptive": True}, {"adaptive": True, "eta": 0.5}, {"steps": 4}, {"objective": smooth},
        {"ascent": bisam.LowerBound(mu=20.0)}, {"train_mode": True},
    ]  # fmt: skip
    measured = [sharpness(model, data, 0.5, **options).flips for options in choices]
    assert len(set(measured)) == len(choices), measured  # each option shows
    assert [flips(model, data, 0.5, **options) for options in choices] == measured
    ticks = []
    flips(model, data, 0.5, steps=2, progress=lambda *tick: ticks.append(tick))
    assert ticks == [(1, 3), (2, 3), (3, 3)]


def test_sparse_gradients_give_the_sharpness_of_dense_ones():
    x, y = torch.randint(10, (12, 5)), torch.arange(12) % 3
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=sparse, mode="sum"), nn.Linear(4, 3))
        found.append(sharpness(model, (x, y), 0.1))
    assert found[1].perturbed_loss == pytest.approx(found[0].perturbed_loss)
    assert found[1].value > 0
