"""Parameters of the model that another optimizer steps have the descent's gradient, whatever the form of the step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bisam

from family import assert_close, batch, closure_of, mlp


def expected(optimizer, body, head, model, x, y):
    """∇ cross entropy at w + ε, where ε moves the body alone: by torch.autograd.grad."""
    gradients = torch.autograd.grad(optimizer.criterion.ascent(model(x), y), body)
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    names = [name for name, _ in model.named_parameters()]
    moved = [p + 0.1 * g / norm for p, g in zip(body, gradients, strict=True)]
    values = dict(zip(names, [*moved, *head], strict=True))
    return torch.autograd.grad(F.cross_entropy(torch.func.functional_call(model, values, (x,)), y), head)


def split(kind="SAM", **options):
    torch.manual_seed(0)
    model = mlp().double()
    *body, weight, bias = model.parameters()
    optimizer = getattr(bisam, kind)(torch.optim.SGD(body, lr=0.1), model, rho=0.1, **options)
    return model, optimizer, body, [weight, bias]


@pytest.mark.parametrize("form", ["minimize", "step"])
@pytest.mark.parametrize("kind", ["SAM", "BiSAM", "GSAM"])
def test_a_step_leaves_it_beside_what_was_accumulated(kind, form):
    """As where Muon has the matrices and AdamW the rest: their gradients were the sum of those of all passes."""
    model, optimizer, body, head = split(kind, **({"ascent": bisam.LowerBound()} if kind == "GSAM" else {}))
    x, y = batch(dtype=torch.float64)
    found = [1 + gradient for gradient in expected(optimizer, body, head, model, x, y)]
    for param in head:
        param.grad = torch.ones_like(param)  # what the other optimizer has accumulated
    if form == "minimize":
        optimizer.minimize(x, y)
    else:
        optimizer.step(closure_of(model, optimizer, x, y))
    assert_close([p.grad for p in head], found, 1e-12)  # float64, sums in another order


def by_hand(optimizer, closure):
    closure()
    optimizer.ascend()
    closure()
    optimizer.descend()


@pytest.mark.parametrize("kind", ["SAM", "BiSAM"])
def test_a_step_by_hand_leaves_the_gradient_of_the_descent(kind):
    model, optimizer, body, head = split(kind)
    x, y = batch(dtype=torch.float64)
    found = expected(optimizer, body, head, model, x, y)
    by_hand(optimizer, lambda: optimizer.criterion(model(x), y).backward())
    assert_close([p.grad for p in head], found, 1e-12)


@pytest.mark.parametrize("kind", ["SAM", "BiSAM"])
def test_a_list_of_closures_weighs_them_as_it_weighs_its_own(kind):
    model, optimizer, body, head = split(kind)
    x, y = batch(dtype=torch.float64)
    found = [1 + gradient for gradient in expected(optimizer, body, head, model, x, y)]
    for param in head:
        param.grad = torch.ones_like(param)  # what the other optimizer has accumulated
    optimizer.step([closure_of(model, optimizer, x[:5], y[:5]), closure_of(model, optimizer, x[5:], y[5:])])
    assert_close([p.grad for p in head], found, 1e-12)


def test_a_list_whose_closure_raises_leaves_what_was_accumulated():
    model, optimizer, _, head = split()
    x, y = batch(dtype=torch.float64)
    head[0].grad = torch.ones_like(head[0])

    def fails():
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step([closure_of(model, optimizer, x, y), fails])
    assert torch.equal(head[0].grad, torch.ones_like(head[0]))
    assert head[1].grad is None


def test_micro_batches_in_one_computation_leave_it_as_the_loop_does():
    found = {}
    for vectorize in (True, False):
        _model, optimizer, _, head = split(micro_batch=4, vectorize=vectorize)
        head[0].grad = torch.ones_like(head[0])
        optimizer.minimize(*(tensor[:16] for tensor in batch(dtype=torch.float64)))
        found[vectorize] = [p.grad for p in head]
    assert_close(found[True], found[False], 1e-12)


def test_a_layer_that_was_replaced_after_the_optimizer_was_built_counts():
    model, optimizer, body, head = split()
    old = model[-1]
    model[-1] = nn.Linear(old.in_features, old.out_features, dtype=torch.float64)
    x, y = batch(dtype=torch.float64)
    head = [*model[-1].parameters()]
    found = expected(optimizer, body, head, model, x, y)
    optimizer.step(closure_of(model, optimizer, x, y))
    assert_close([p.grad for p in head], found, 1e-12)


def test_a_group_that_is_added_later_is_perturbed_and_belongs_to_no_other():
    model, optimizer, _body, head = split()
    optimizer.add_param_group({"params": head})
    x, y = batch(dtype=torch.float64)
    torch.manual_seed(0)
    twin = mlp().double()
    whole = bisam.SAM(torch.optim.SGD(twin.parameters(), lr=0.1), twin, rho=0.1)
    for one, net in ((optimizer, model), (whole, twin)):
        one.step([closure_of(net, one, x[:5], y[:5]), closure_of(net, one, x[5:], y[5:])])
    assert_close([*model.parameters()], [*twin.parameters()], 1e-12)
