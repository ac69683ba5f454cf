"""Eigenvalues and traces against closed forms on quadratics, and against autograd's full Hessian on a small net."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import bisam
from bisam.diagnostics import hessian_eigenvalues, hessian_trace

from diagnosed import DUMMY, Quadratic, Weights, quadratic
from family import batch, mlp


def full_hessian(model, x, y, objective=nn.functional.cross_entropy):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def loss(flat):
        pieces = flat.split([p.numel() for _, p in named])
        given = {name: piece.view_as(p) for (name, p), piece in zip(named, pieces, strict=True)}
        return objective(functional_call(model, given, x), y)

    return torch.autograd.functional.hessian(loss, torch.cat([p.detach().flatten() for _, p in named]))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_eigenvalues_are_those_of_the_quadratic(k):
    model, loss = quadratic()
    expected = torch.linalg.eigvalsh(loss.matrix).flip(0)[:k].tolist()
    assert hessian_eigenvalues(model, DUMMY, k, objective=loss) == pytest.approx(expected, rel=1e-6)


def test_eigenvalues_whose_squares_float32_cannot_hold_are_found():
    spectrum = torch.tensor([3e25, 1e25, 0.5e25])
    found = hessian_eigenvalues(Weights(torch.ones(3)), DUMMY, 1, objective=lambda w, _: (spectrum * w**2).sum() / 2)
    assert found == pytest.approx([3e25], rel=1e-4)  # float32


def test_the_largest_eigenvalues_of_a_large_quadratic_converge_early():
    spectrum = [50.0, 40.0, 30.0, *torch.linspace(1, -45, 297).tolist()]
    model, loss = quadratic(spectrum)
    found = hessian_eigenvalues(model, DUMMY, 3, objective=loss, tolerance=1e-6, iterations=150)
    assert found == pytest.approx([50, 40, 30], rel=1e-6)
    assert len(loss.seen) < 150


@pytest.mark.parametrize(("spectrum", "k"), [([0.0] * 4, 1), ([0.0] * 4, 3), ([5.0, 5.0, 1.0], 2), ([2.0] * 6, 6)])
def test_repeated_eigenvalues_are_counted_with_their_multiplicity(spectrum, k):
    model, loss = quadratic(spectrum)
    assert hessian_eigenvalues(model, DUMMY, k, objective=loss) == pytest.approx(spectrum[:k], abs=1e-9)


def test_in_float32_eigenvalues_of_a_low_rank_hessian_are_not_found_twice():
    """With one orthogonalisation, rounding errors bring found directions back, and their eigenvalues again."""
    spectrum = torch.cat([torch.linspace(2, 1, 10), torch.zeros(90)])
    model = Weights(torch.ones(100))
    found = hessian_eigenvalues(model, DUMMY, 20, objective=lambda w, _: (spectrum * w**2).sum() / 2)
    assert found == pytest.approx(spectrum[:20].tolist(), abs=1e-5)


def test_eigenvalues_warn_when_they_have_not_converged():
    model, loss = quadratic(torch.linspace(1, 2, 60).tolist())
    with pytest.warns(RuntimeWarning, match="did not converge in 5 iterations"):
        hessian_eigenvalues(model, DUMMY, 2, iterations=5, objective=loss)


def test_trace_of_a_diagonal_is_exact():
    model, loss = (
        Weights(torch.ones(3).double()),
        Quadratic(torch.diag(torch.tensor([1.0, -4.0, 9.0])).double(), torch.ones(3).double()),
    )
    assert hessian_trace(model, DUMMY, samples=5, objective=loss) == (6.0, 0.0)


def test_trace_lies_within_its_standard_error():
    model, loss = quadratic()
    mean, error = hessian_trace(model, DUMMY, samples=500, objective=loss)
    assert abs(mean - loss.matrix.trace().item()) < 4 * error
    assert 0 < error < 0.5


def test_a_linear_loss_has_no_curvature():
    model = Weights(torch.ones(3))
    assert hessian_eigenvalues(model, DUMMY, objective=lambda w, _: w.sum()) == [0.0]
    assert hessian_trace(model, DUMMY, samples=2, objective=lambda w, _: w.sum()) == (0.0, 0.0)


@pytest.mark.parametrize("objective", [nn.CrossEntropyLoss(), bisam.LowerBound(), bisam.LowerBound("tanh")])
def test_curvature_of_a_net_agrees_with_the_full_hessian(objective):
    model, (x, y) = mlp().double(), batch(dtype=torch.float64)
    hessian = full_hessian(model, x, y, objective)
    found = hessian_eigenvalues(model, (x, y), 4, objective=objective, tolerance=1e-8)
    assert found == pytest.approx(torch.linalg.eigvalsh(hessian).flip(0)[:4].tolist(), rel=1e-6)
    signs = 2 * torch.randint(2, (100, len(hessian)), generator=torch.Generator().manual_seed(1)) - 1.0
    spread = torch.einsum("si,ij,sj->s", signs.double(), hessian, signs.double()).std().item()
    mean, error = hessian_trace(model, (x, y), samples=100, objective=objective)
    assert abs(mean - hessian.trace().item()) < 4 * error
    assert error == pytest.approx(spread / 10, rel=0.5)


def test_only_parameters_that_require_gradients_count():
    model, (x, y) = mlp().double(), batch(dtype=torch.float64)
    model[0].requires_grad_(False)
    hessian = full_hessian(model, x, y)
    assert len(hessian) == 36
    largest = torch.linalg.eigvalsh(hessian)[-1].item()
    assert hessian_eigenvalues(model, (x, y), tolerance=1e-8) == pytest.approx([largest], rel=1e-6)


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False)).double()
    model[2].weight = model[0].weight
    x, y = batch(dtype=torch.float64)
    largest = torch.linalg.eigvalsh(full_hessian(model, x, y))[-1].item()
    assert hessian_eigenvalues(model, (x, y), tolerance=1e-8) == pytest.approx([largest], rel=1e-6)


def test_attention_is_differentiated_twice():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(6, 4)

        def forward(self, x):
            z = self.project(x)[None, None]
            return nn.functional.scaled_dot_product_attention(z, z, z)[0, 0]

    assert hessian_eigenvalues(Attention(), batch())[0] > 0


def test_a_compiled_layer_is_differentiated_twice():
    model, (x, y) = mlp(), batch()
    expected = hessian_trace(model, (x, y), samples=3)
    model[0] = torch.compile(model[0], backend="aot_eager")
    assert hessian_trace(model, (x, y), samples=3) == expected
    assert hessian_eigenvalues(model, (x, y))
