"""Wrong arguments of diagnostics are explained."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from bisam.diagnostics import average_sharpness, flips, hessian_eigenvalues, hessian_trace, sharpness, surface

from diagnosed import CALLS, DUMMY, Weights, every_call
from family import batch, mlp


@every_call
def test_misuse_is_explained(call):
    with pytest.raises(ValueError, match="no parameters that require gradients"):
        call(mlp().requires_grad_(False), batch())
    with pytest.raises(ValueError, match="the data is empty"):
        call(mlp(), [])
    with pytest.raises(ValueError, match="every sample is ignored"):
        call(mlp(), (batch()[0], torch.full((16,), -100)))
    with pytest.raises(TypeError, match=r"the model comes first and must be a torch\.nn\.Module, got tuple"):
        call(batch(), mlp())
    with pytest.raises(TypeError, match="got an iterator, which can be consumed once"):
        call(mlp(), iter([batch()]))
    with pytest.raises(TypeError, match="got a batch of Tensor"):
        call(mlp(), [batch()[0], batch()[0], batch()[0]])
    with pytest.raises(ValueError, match="must return a scalar"):
        call(mlp(), batch(), objective=nn.CrossEntropyLoss(reduction="none"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda *data: sharpness(*data, -0.05), "rho must be non-negative and finite, got -0.05"),
        (lambda *data: sharpness(*data, math.nan), "rho must be non-negative and finite, got nan"),
        (lambda *data: sharpness(*data, "0.05"), "rho must be a number, got '0.05'"),
        (lambda *data: average_sharpness(*data, None), "rho must be a number, got None"),
        (lambda *data: sharpness(*data, 0.1, eta=-1.0), "eta must be non-negative and finite, got -1.0"),
        (lambda *data: sharpness(*data, 0.1, steps=0), "steps must be a whole number, at least 1, got 0"),
        (lambda *data: average_sharpness(*data, -1.0), "rho must be non-negative"),
        (lambda *data: average_sharpness(*data, 0.1, eta=-1.0), "eta must be non-negative and finite, got -1.0"),
        (lambda *data: average_sharpness(*data, 0.1, samples=0), "samples must be a whole number, at least 1"),
        (lambda *data: hessian_eigenvalues(*data, 0), "k must be a whole number, at least 1, got 0"),
        (lambda *data: hessian_eigenvalues(*data, 100), "k must be at most the number of parameters, 92, got 100"),
        (lambda *data: hessian_eigenvalues(*data, 5, iterations=4), "k must be at most iterations, 4, got 5"),
        (lambda *data: hessian_eigenvalues(*data, tolerance=0.0), "tolerance must lie between 0 and 1, got 0.0"),
        (lambda *data: hessian_eigenvalues(*data, tolerance=1.0), "tolerance must lie between 0 and 1, got 1.0"),
        (lambda *data: hessian_trace(*data, samples=0), "samples must be a whole number, at least 1"),
        (lambda *data: surface(*data, points=1), "points must be a whole number, at least 2, got 1"),
        (lambda *data: surface(*data, dimensions=3), "dimensions must be 1 or 2, got 3"),
        (lambda *data: surface(*data, span=0.0), "span must be positive and finite, got 0.0"),
    ],
)
def test_wrong_numbers_are_explained(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        wrong(mlp(), batch())


def test_models_without_filters_classes_or_finite_curvature_are_refused():
    with pytest.raises(ValueError, match="two or more dimensions"):
        surface(Weights(torch.ones(3)), DUMMY, objective=lambda w, _: w.sum())
    with pytest.raises(ValueError, match="flips need a classification"):
        flips(Weights(torch.ones(3)), DUMMY, 0.1, objective=lambda w, _: w.sum())
    with pytest.raises(ValueError, match="not finite"):
        hessian_eigenvalues(Weights(torch.zeros(3)), DUMMY, objective=lambda w, _: w.abs().pow(1.5).sum())


def test_counts_may_be_numpy_integers_and_must_be_whole_numbers():
    model = mlp()
    expected = sharpness(model, batch(), 0.1, steps=2)
    assert sharpness(model, batch(), 0.1, steps=np.int64(2)) == expected
    assert hessian_trace(model, batch(), samples=np.uint8(2)) == hessian_trace(model, batch(), samples=2)
    for wrong in (np.int64(0), np.float64(2), np.array([1, 2]), torch.tensor(2.0), np.True_, True, 2.0, "2"):
        with pytest.raises(ValueError, match="steps must be a whole number, at least 1, got "):
            sharpness(model, batch(), 0.1, steps=wrong)


@every_call
def test_in_inference_mode_calls_that_need_gradients_are_refused_and_others_unaffected(call):
    model = mlp()
    expected = call(model, batch())
    with torch.inference_mode():
        if call in NEED_GRADIENTS:
            with pytest.raises(RuntimeError, match=r"torch.inference_mode\(\) rules out: call it outside of that"):
                call(model, batch())
        else:
            assert call(model, batch()) == expected
    assert call(model, batch()) == expected  # the model is as it was


NEED_GRADIENTS = [call for name, call in CALLS.items() if name.startswith(("sharpness", "flips", "hessian"))]
