"""Parameters of the model that another optimizer steps get the descent's gradient in every form of a step."""

from functools import partial

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


def in_parts(model, optimizer, x, y):
    return [closure_of(model, optimizer, x[part], y[part]) for part in (slice(0, 5), slice(5, None))]


FORMS = {
    "minimize": lambda _, optimizer, x, y: optimizer.minimize(x, y),
    "accumulate": lambda _, optimizer, x, y: optimizer.minimize(x, y, accumulate=3),
    "step": lambda model, optimizer, x, y: optimizer.step(closure_of(model, optimizer, x, y)),
    "list": lambda *args: args[1].step(in_parts(*args)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["SAM", "BiSAM", "GSAM"])
def test_a_step_adds_the_descents_gradient_to_what_was_accumulated(kind, form):
    """As where Muon has the matrices and AdamW the rest: their gradients would otherwise be the sum of all passes."""
    model, optimizer, body, head = split(kind, **({"ascent": bisam.LowerBound()} if kind == "GSAM" else {}))
    x, y = batch(dtype=torch.float64)
    found = [1 + gradient for gradient in expected(optimizer, body, head, model, x, y)]
    for param in head:
        param.grad = torch.ones_like(param)  # what the other optimizer has accumulated
    FORMS[form](model, optimizer, x, y)
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


def test_a_list_whose_closure_raises_keeps_the_accumulated_gradient():
    model, optimizer, _, head = split()
    x, y = batch(dtype=torch.float64)
    head[0].grad = torch.ones_like(head[0])

    def fails():
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step([closure_of(model, optimizer, x, y), fails])
    assert torch.equal(head[0].grad, torch.ones_like(head[0]))
    assert head[1].grad is None


class FailsAt(nn.Module):
    """An identity that raises when it is run for the n-th time."""

    def __init__(self, n):
        super().__init__()
        self.left = n

    def forward(self, x):
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError
        return x


def test_a_micro_batch_that_raises_keeps_the_accumulated_gradient():
    model, _, body, head = split()
    model.append(FailsAt(4))  # the descent pass of the second
    optimizer = bisam.SAM(torch.optim.SGD(body, lr=0.1), model, rho=0.1, micro_batch=8)
    head[0].grad = torch.ones_like(head[0])
    with pytest.raises(ArithmeticError):
        optimizer.minimize(*batch(dtype=torch.float64))
    assert torch.equal(head[0].grad, torch.ones_like(head[0]))
    assert head[1].grad is None


@pytest.mark.parametrize("kind", ["SAM", "BiSAM"])
def test_gradients_of_micro_batches_add_up_each_at_its_own_perturbed_weights(kind):
    model, optimizer, body, head = split(kind, micro_batch=8)
    x, y = batch(dtype=torch.float64)
    assert len(y) == 16
    halves = [expected(optimizer, body, head, model, x[part], y[part]) for part in (slice(0, 8), slice(8, 16))]
    for param in head:
        param.grad = torch.ones_like(param)
    optimizer.minimize(x, y)
    assert_close([p.grad for p in head], [1 + (a + b) / 2 for a, b in zip(*halves, strict=True)], 1e-12)


def test_a_step_of_one_form_does_not_affect_the_next_step_of_another_form():
    model, optimizer, body, head = split()
    x, y = batch(dtype=torch.float64)
    for param in head:
        param.grad = torch.ones_like(param)
    optimizer.minimize(x, y)
    for param in head:
        param.grad = None
    found = expected(optimizer, body, head, model, x, y)
    optimizer.step(closure_of(model, optimizer, x, y))
    assert_close([p.grad for p in head], found, 1e-12)


def test_a_base_optimizer_that_raises_keeps_the_accumulated_gradient():
    _model, optimizer, _, head = split()
    optimizer.base.register_step_post_hook(lambda *_: 1 / 0)
    for param in head:
        param.grad = torch.ones_like(param)
    with pytest.raises(ZeroDivisionError):
        optimizer.minimize(*batch(dtype=torch.float64))
    for param in head:
        assert torch.equal(param.grad, torch.ones_like(param))


def test_a_hook_of_the_base_optimizer_may_step_the_other_optimizer():
    model, optimizer, body, head = split()
    x, y = batch(dtype=torch.float64)
    other = torch.optim.SGD(head, lr=1.0)
    optimizer.base.register_step_post_hook(lambda *_: (other.step(), other.zero_grad()))
    before = [p.detach().clone() for p in head]
    found = expected(optimizer, body, head, model, x, y)
    for param in head:
        param.grad = torch.ones_like(param)
    optimizer.minimize(x, y)
    assert_close(head, [old - 1 - gradient for old, gradient in zip(before, found, strict=True)], 1e-12)
    assert all(param.grad is None for param in head)


def test_a_closure_may_clear_the_accumulated_gradient():
    model, optimizer, body, head = split()
    x, y = batch(dtype=torch.float64)
    other = torch.optim.SGD(head, lr=0.1)
    for _ in range(2):  # the second step finds the gradients of the first
        found = expected(optimizer, body, head, model, x, y)

        def closure():
            optimizer.zero_grad()
            other.zero_grad()
            loss = optimizer.criterion(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        assert_close([p.grad for p in head], found, 1e-12)


def test_a_scaler_of_the_loop_unscales_both_optimizers():
    def trained(scaler):
        model, optimizer, _, head = split("BiSAM")
        other = torch.optim.SGD(head, lr=0.1)
        x, y = batch(dtype=torch.float64)

        def closure():
            loss = optimizer.criterion(model(x), y)
            scaler.scale(loss).backward()
            return loss

        for _ in range(3):
            other.zero_grad()
            optimizer.backward(closure, scaler=scaler)
            scaler.step(optimizer)
            scaler.step(other)
            scaler.update()
        return [*model.parameters()]

    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1, enabled=on) for on in (True, False)]
    assert_close(*map(trained, scalers), 1e-12)


@pytest.mark.parametrize("form", ["minimize", "step", "by hand"])
def test_a_scaler_given_to_the_optimizer_warns_once_that_it_unscales_no_other_parameters(form):
    x, y = batch(dtype=torch.float64)
    for is_frozen in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        model, optimizer, _, head = split(scaler=scaler)
        for param in head:
            param.requires_grad_(not is_frozen)

        def closure(model=model, optimizer=optimizer, scaler=scaler):
            scaler.scale(optimizer.criterion(model(x), y)).backward()

        step = {
            "minimize": partial(optimizer.minimize, x, y),
            "step": partial(optimizer.step, closure),
            "by hand": partial(by_hand, optimizer, closure),
        }[form]
        if not is_frozen:
            with pytest.warns(UserWarning, match=r"optimizer\.backward\(closure, scaler=scaler\)") as warned:
                step()
            assert warned[0].filename == __file__
        step()  # a warning here would be an error


def test_a_disabled_scaler_does_not_warn():
    _model, optimizer, _, head = split(scaler=torch.amp.GradScaler("cpu", enabled=False))
    optimizer.minimize(*batch(dtype=torch.float64))
    assert head[0].grad is not None


def test_vectorized_micro_batches_give_the_gradient_of_the_loop():
    found = {}
    for vectorize in (True, False):
        _model, optimizer, _, head = split(micro_batch=4, vectorize=vectorize)
        head[0].grad = torch.ones_like(head[0])
        optimizer.minimize(*(tensor[:16] for tensor in batch(dtype=torch.float64)))
        found[vectorize] = [p.grad for p in head]
    assert_close(found[True], found[False], 1e-12)


def test_a_layer_that_replaces_another_after_the_optimizer_was_built_gets_the_gradient():
    model, optimizer, body, head = split()
    old = model[-1]
    model[-1] = nn.Linear(old.in_features, old.out_features, dtype=torch.float64)
    x, y = batch(dtype=torch.float64)
    head = [*model[-1].parameters()]
    found = expected(optimizer, body, head, model, x, y)
    optimizer.step(closure_of(model, optimizer, x, y))
    assert_close([p.grad for p in head], found, 1e-12)


def test_a_layer_that_replaces_another_between_two_steps_gets_the_gradient():
    model, optimizer, body, _ = split()
    x, y = batch(dtype=torch.float64)
    optimizer.step(closure_of(model, optimizer, x, y))
    old = model[-1]
    model[-1] = nn.Linear(old.in_features, old.out_features, dtype=torch.float64)
    head = [*model[-1].parameters()]
    found = expected(optimizer, body, head, model, x, y)
    optimizer.step(in_parts(model, optimizer, x, y))
    assert_close([p.grad for p in head], found, 1e-12)


def test_a_group_added_between_two_steps_is_stepped_by_its_new_optimizer_alone():
    _model, optimizer, _, head = split()
    x, y = batch(dtype=torch.float64)
    optimizer.minimize(x, y)
    optimizer.zero_grad()
    for param in head:
        param.grad = None
    optimizer.add_param_group({"params": head})
    before = [p.detach().clone() for p in head]
    optimizer.minimize(x, y, accumulate=2)
    for param, old in zip(head, before, strict=True):
        assert_close([param], [old - 0.1 * param.grad], 1e-12)  # one step of SGD, of one gradient


def test_a_group_added_later_is_perturbed_and_trained_with_the_others():
    model, optimizer, _body, head = split()
    optimizer.add_param_group({"params": head})
    x, y = batch(dtype=torch.float64)
    torch.manual_seed(0)
    twin = mlp().double()
    whole = bisam.SAM(torch.optim.SGD(twin.parameters(), lr=0.1), twin, rho=0.1)
    for one, net in ((optimizer, model), (whole, twin)):
        one.step(in_parts(net, one, x, y))
    assert_close([*model.parameters()], [*twin.parameters()], 1e-12)
