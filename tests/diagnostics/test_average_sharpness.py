"""Average sharpness against closed forms on quadratics."""

import math

import pytest
import torch

from bisam.diagnostics import average_sharpness

from diagnosed import DUMMY, Quadratic, Weights, quadratic


@pytest.mark.parametrize("adaptive", [False, True])
def test_average_sharpness_of_a_quadratic_is_its_scaled_trace(adaptive):
    """E over ε = ρ T u, u uniform on the sphere: ρ²/(2P) tr(T A T)."""
    model, loss = quadratic()
    t = model.w.detach().abs() if adaptive else torch.ones(5, dtype=torch.float64)
    expected = 0.5**2 / (2 * 5) * (t * t * loss.matrix.diag()).sum().item()
    mean, error = average_sharpness(model, DUMMY, 0.5, samples=3000, adaptive=adaptive, objective=loss)
    assert abs(mean - expected) < 4 * error
    assert error < 0.03
    lengths = [((w - loss.seen[0]) / t).norm().item() for w in loss.seen[1:]]
    assert lengths == pytest.approx([0.5] * 3000)


def test_average_sharpness_is_exact_if_all_directions_have_the_same_curvature():
    model, loss = (
        Weights(torch.zeros(4, dtype=torch.float64)),
        Quadratic(3 * torch.eye(4).double(), torch.zeros(4).double()),
    )
    mean, error = average_sharpness(model, DUMMY, 0.2, samples=3, objective=loss)
    assert mean == pytest.approx(3 * 0.2**2 / 2, rel=1e-12)
    assert error == pytest.approx(0, abs=1e-15)
    assert math.isnan(average_sharpness(model, DUMMY, 0.2, samples=1, objective=loss).standard_error)


def test_a_loss_that_overflows_gives_a_mean_that_is_not_finite():
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1e38)
    found = average_sharpness(model, (torch.full((4, 2), 1e30), torch.tensor([0, 1, 0, 1])), rho=0.1, samples=3)
    assert not math.isfinite(found.mean)
    assert math.isnan(found.standard_error)
