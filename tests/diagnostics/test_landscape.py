"""Surfaces: their centre, their directions and their shape."""

import pytest
import torch
from torch import nn

from bisam.diagnostics import sharpness, surface

from diagnosed import DUMMY, Weights
from family import ConvNet, batch


@pytest.mark.parametrize("dimensions", [1, 2])
def test_the_centre_of_a_surface_is_the_loss(dimensions):
    model, (x, y) = ConvNet().eval(), batch()
    found = surface(model, (x, y), points=5, span=0.7, dimensions=dimensions)
    here = sharpness(model, (x, y), 0.0)
    loss, error = found.losses, found.errors
    for _ in range(dimensions):
        assert len(loss) == len(error) == 5
        loss, error = loss[2], error[2]
    assert (loss, error) == (here.loss, here.error)
    assert found.coordinates == pytest.approx([-0.7, -0.35, 0.0, 0.35, 0.7])


def test_directions_have_the_lengths_of_the_filters_and_do_not_move_vectors():
    model, (x, y) = ConvNet().double().eval(), batch(dtype=torch.float64)
    places = []

    def objective(output, target):
        places.append([p.detach().clone() for p in model.parameters()])
        return nn.functional.cross_entropy(output, target)

    surface(model, (x, y), points=3, span=2.0, objective=objective)
    low, here, high = places
    for before, centre, after in zip(low, here, high, strict=True):
        if centre.dim() == 1:
            assert torch.equal(before, centre)
            assert torch.equal(after, centre)
        else:
            length = (after - centre).flatten(1).norm(dim=1)
            torch.testing.assert_close(length, 2 * centre.flatten(1).norm(dim=1))
            torch.testing.assert_close(after - centre, centre - before)


def test_a_surface_of_a_quadratic_is_a_parabola():
    w = torch.randn(3, 2, dtype=torch.float64)
    found = surface(Weights(w), DUMMY, points=5, objective=lambda w, _: (w * w).sum() / 2)
    second = [a - 2 * b + c for a, b, c in zip(found.losses, found.losses[1:], found.losses[2:], strict=False)]
    assert second == pytest.approx([(w * w).sum().item() / 4] * 3)  # ‖d‖ = ‖w‖, step ½
    assert found.errors is None


def test_a_surface_of_two_dimensions_has_its_two_directions_along_rows_and_columns():
    """Of a loss that is linear in w, rows rise along the first direction and columns along the second."""
    slope = torch.randn(3, 2, dtype=torch.float64)
    model = Weights(torch.randn(3, 2, dtype=torch.float64))
    options = {"points": 3, "objective": lambda w, _: (w * slope).sum(), "seed": 1}
    line, found = surface(model, DUMMY, **options), surface(model, DUMMY, dimensions=2, **options)
    assert [row[1] for row in found.losses] == pytest.approx(line.losses)  # the same first direction
    centre, across = found.losses[1][1], found.losses[1]
    assert across[2] - centre == pytest.approx(centre - across[0])
    assert abs(across[2] - centre) != pytest.approx(abs(line.losses[2] - centre), rel=1e-3)
    sums = [[a + b - centre for b in across] for a in line.losses]
    assert torch.tensor(found.losses).flatten().tolist() == pytest.approx(torch.tensor(sums).flatten().tolist())
