import math

import pytest
import torch
from torch import nn

from bisam import ASAM, SAM, Ball, FisherSAM

from family import assert_close, batch, build, kind_of, mlp


def epsilon_of(model, optimizer, x, y):
    """ε as measured on the weights, the ascent gradient, and the weights before."""
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.criterion(model(x), y).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.ascend()
    return [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)], gradients, before


def scales_of(variant, optimizer, gradients, weights):
    """T of each parameter, from its equation."""
    options = optimizer.param_groups[0]
    if kind_of(variant) == "FisherSAM":
        return [1 / (1 + options["eta"] * g**2).sqrt() for g in gradients]
    return [w.abs() + options["eta"] if options["adaptive"] else torch.ones_like(w) for w in weights]


@pytest.mark.parametrize("rho", [1e-3, 0.05, 2.0])
def test_perturbation_has_length_rho_in_its_own_norm(plain_variant, rho):
    model, optimizer = build(plain_variant, net=mlp, dtype=torch.float64, rho=rho)
    epsilon, gradients, weights = epsilon_of(model, optimizer, *batch(dtype=torch.float64))
    t = scales_of(plain_variant, optimizer, gradients, weights)
    length = torch.cat([(e / s).flatten() for e, s in zip(epsilon, t, strict=True)]).norm()
    assert length.item() == pytest.approx(rho, rel=1e-9)
    norm = torch.cat([(s * g).flatten() for g, s in zip(gradients, t, strict=True)]).norm()
    assert optimizer.telemetry.ascent_norm.item() == pytest.approx(norm.item(), rel=1e-12)
    assert_close(epsilon, [rho * s * s * g / norm for g, s in zip(gradients, t, strict=True)], 1e-12)


def test_each_group_has_its_own_option_adaptive():
    torch.manual_seed(0)
    model = mlp().double()
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    base = torch.optim.SGD([{"params": matrices}, {"params": vectors, "adaptive": False}], lr=0.1)
    optimizer = ASAM(base, model, rho=0.5, eta=0.01)
    epsilon, gradients, weights = epsilon_of(model, optimizer, *batch(dtype=torch.float64))
    t = [w.abs() + 0.01 if w.dim() == 2 else torch.ones_like(w) for w in weights]
    norm = torch.cat([(s * g).flatten() for g, s in zip(gradients, t, strict=True)]).norm()
    assert_close(epsilon, [0.5 * s * s * g / norm for g, s in zip(gradients, t, strict=True)], 1e-12)


def test_each_group_has_its_own_rho_and_all_share_one_norm():
    torch.manual_seed(0)
    model = mlp().double()
    base = torch.optim.SGD([{"params": model[0].parameters(), "rho": 0.3}, {"params": model[2].parameters()}], lr=0.1)
    epsilon, gradients, _ = epsilon_of(model, SAM(base, model, rho=0.1), *batch(dtype=torch.float64))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    radii = [0.3, 0.3, 0.1, 0.1]
    assert_close(epsilon, [rho * g / norm for rho, g in zip(radii, gradients, strict=True)], 1e-12)


@pytest.mark.parametrize("gradient", [1e-40, 1e-38, 3e25])
@pytest.mark.parametrize("kind", [SAM, FisherSAM])
def test_a_gradient_near_the_limits_of_float32_gives_a_finite_perturbation(kind, gradient):
    weight = nn.Parameter(torch.ones(1))
    optimizer = kind(torch.optim.SGD([weight], lr=0.1), rho=5.0)
    weight.grad = torch.full((1,), gradient)
    optimizer.ascend()
    assert weight.isfinite().all()


def test_a_perturbation_does_not_depend_on_the_scale_of_the_loss(plain_variant):
    results = []
    for scale in (1.0, 1e3):
        # but for the Fisher metric, whose η is that of one scale
        options = {"eta": 1 / scale**2} if kind_of(plain_variant) == "FisherSAM" else {}
        model, optimizer = build(plain_variant, net=mlp, dtype=torch.float64, **options)
        x, y = batch(dtype=torch.float64)
        (scale * optimizer.criterion(model(x), y)).backward()
        optimizer.ascend()
        results.append([p.detach() for p in model.parameters()])
    assert_close(*results, 1e-12)


def test_an_adaptive_perturbation_is_unchanged_by_rescaling_layers():
    """What ASAM is for: (W₁, W₂) and (cW₁, W₂/c) are the same relu net, and their perturbed nets are too."""

    def net():
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))

    outputs = {}
    for variant in ("SAM", "ASAM"):
        for scale in (1.0, 8.0):
            model, optimizer = build(variant, net=net, dtype=torch.float64, rho=0.5)
            with torch.no_grad():
                model[0].weight.mul_(scale)
                model[2].weight.div_(scale)
            x, y = batch(dtype=torch.float64)
            optimizer.criterion(model(x), y).backward()
            optimizer.ascend()
            outputs[variant, scale] = model(x).detach()
    torch.testing.assert_close(outputs["ASAM", 1.0], outputs["ASAM", 8.0])
    assert (outputs["SAM", 1.0] - outputs["SAM", 8.0]).abs().max() > 0.01


def test_a_ball_in_the_fisher_metric_is_narrow_where_gradients_are_large():
    """Two weights: the step along the larger gradient is the shorter one when η g² is far above 1."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = FisherSAM(torch.optim.SGD([weight], lr=0.1), rho=0.1, eta=1e6)
    weight.grad = torch.tensor([1.0, 10.0], dtype=torch.float64)
    optimizer.ascend()
    assert (weight[0] / weight[1]).item() == pytest.approx(10.0, rel=1e-4)  # ε is 1/(η g), but for the norm


def test_each_group_has_its_own_eta_of_the_fisher_metric_and_eta_zero_is_a_round_ball():
    torch.manual_seed(0)
    model = mlp().double()
    eta = torch.tensor(3.0)
    groups = [{"params": model[0].parameters(), "eta": 0.0}, {"params": model[2].parameters(), "eta": eta}]
    optimizer = FisherSAM(torch.optim.SGD(groups, lr=0.1), model, rho=0.5)
    for value in (3.0, 7.0):  # a tensor may change between steps
        eta.fill_(value)
        epsilon, gradients, _ = epsilon_of(model, optimizer, *batch(dtype=torch.float64))
        t = [1 / (1 + one * g**2).sqrt() for one, g in zip([0.0, 0.0, value, value], gradients, strict=True)]
        norm = torch.cat([(s * g).flatten() for g, s in zip(gradients, t, strict=True)]).norm()
        assert_close(epsilon, [0.5 * s * s * g / norm for g, s in zip(gradients, t, strict=True)], 1e-12)
        optimizer.restore()
        optimizer.zero_grad()


def test_parameters_of_several_types_share_one_perturbation():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4).double())
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5)
    hidden = model[0](batch()[0]).double()
    model[1](hidden).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.ascend()
    moved = [(p.detach() - b).double().flatten() for p, b in zip(model.parameters(), before, strict=True)]
    assert torch.cat(moved).norm().item() == pytest.approx(0.5, rel=1e-5)
    optimizer.restore()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_rho_may_be_a_tensor_that_changes_between_steps():
    rho = torch.tensor(0.1)
    model, optimizer = build("SAM", net=mlp, rho=rho)
    for value in (0.1, 0.3, 0.0):
        rho.fill_(value)
        epsilon, _, _ = epsilon_of(model, optimizer, *batch())
        assert torch.cat([e.flatten() for e in epsilon]).norm().item() == pytest.approx(value, rel=1e-4)
        optimizer.restore()
        optimizer.zero_grad()


@pytest.mark.parametrize("value", [-0.05, math.inf, math.nan])
@pytest.mark.parametrize("name", ["rho", "eta"])
def test_rho_and_eta_must_be_non_negative_and_finite(name, value):
    message = f"{name} must be non-negative and finite, got {value}"
    with pytest.raises(ValueError, match=message):
        Ball(**{name: value})
    model, optimizer = build()
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], name: value})
    assert len(optimizer.param_groups) == len(before)
    base = torch.optim.SGD([{"params": model.parameters(), name: value}], lr=0.1)
    with pytest.raises(ValueError, match=message):
        SAM(base, model)
    optimizer.param_groups[0][name] = value  # set later, as a schedule would
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        optimizer.minimize(*batch())
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
