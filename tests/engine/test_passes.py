"""A step does not depend on how closures clear gradients, and gradients from before it are never lost."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from family import assert_close, assert_identical, batch, build, closure_of, mlp, tensors


def test_gradients_accumulated_before_a_step_are_refused_and_kept():
    """As a framework does that accumulates by calling closures and stepping with the last one."""
    model, optimizer = build(net=mlp)
    first, last = batch(0), batch(1)

    def backward(x, y):
        loss = optimizer.criterion(model(x), y)
        loss.backward()
        return loss

    backward(*first)
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"found gradients from before.*list of closures.*zero_grad"):
        optimizer.step(lambda: backward(*last))
    assert_identical([p.detach() for p in model.parameters()], weights)
    assert all(p.grad is not None for p in model.parameters())
    optimizer.step(closure_of(model, optimizer, *last))  # this closure clears them, as torch's convention has it
    twin, twin_optimizer = build(net=mlp)
    twin_optimizer.minimize(*last)
    assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))


def attacked(model, optimizer, x, y, clear):
    """Training on samples that a first backward pass of the closure has moved to where the loss is larger."""

    def closure():
        optimizer.zero_grad()
        moved = x.clone().requires_grad_()
        F.cross_entropy(model(moved), y).backward()
        clear()
        loss = optimizer.criterion(model(x + 0.1 * moved.grad.sign()), y)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("variant_name", ["SAM", "BiSAM(log)"])
def test_gradients_of_an_extra_backward_pass_in_a_closure_may_be_cleared_by_optimizer_or_model(variant_name):
    results = []
    for way in ("optimizer", "model", "none was left"):
        model, optimizer = build(variant_name, net=mlp, dtype=torch.float64)
        x, y = batch(dtype=torch.float64)
        clear = {"optimizer": optimizer.zero_grad, "model": model.zero_grad, "none was left": lambda: None}[way]
        if way == "none was left":

            def closure(model=model, optimizer=optimizer, x=x, y=y):
                moved = x.clone().requires_grad_()
                (slope,) = torch.autograd.grad(F.cross_entropy(model(moved), y), moved)
                loss = optimizer.criterion(model(x + 0.1 * slope.sign()), y)
                loss.backward()
                return loss

        else:
            closure = attacked(model, optimizer, x, y, clear)
        optimizer.step(closure)
        results.append([p.detach() for p in model.parameters()])
    assert_identical(results[0], results[2])
    assert_identical(results[1], results[2])


@pytest.mark.parametrize("way", ["optimizer", "model", "base", "not at all"])
def test_closures_of_a_list_add_up_however_they_clear(way):
    results = []
    for clears in (True, False):
        model, optimizer = build("SAM", net=mlp, dtype=torch.float64)
        ways = {"optimizer": optimizer.zero_grad, "model": model.zero_grad, "base": optimizer.base.zero_grad}
        clear = ways.get(way, lambda: None) if clears else optimizer.zero_grad

        def closure(x, y, model=model, optimizer=optimizer, clear=clear):
            clear()
            loss = optimizer.criterion(model(x), y)
            loss.backward()
            return loss

        optimizer.step([partial(closure, *batch(seed, dtype=torch.float64)) for seed in range(3)])
        results.append([p.detach() for p in model.parameters()])
    assert_identical(*results)


def test_closures_of_a_list_may_run_an_extra_backward_pass_first():
    """Adversarial training on two micro-batches: what an attack leaves is cleared, the other closure's is not."""
    results = []
    for way in ("optimizer", "model", "autograd.grad"):
        model, optimizer = build("SAM", net=mlp, dtype=torch.float64)
        batches = [batch(seed, dtype=torch.float64) for seed in range(2)]

        def by_autograd(x, y, model=model, optimizer=optimizer):
            moved = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(F.cross_entropy(model(moved), y), moved)
            loss = optimizer.criterion(model(x + 0.1 * slope.sign()), y)
            loss.backward()
            return loss

        clear = optimizer.zero_grad if way == "optimizer" else model.zero_grad
        if way == "autograd.grad":
            closures = [partial(by_autograd, *each) for each in batches]
        else:
            closures = [attacked(model, optimizer, *each, clear) for each in batches]
        optimizer.step(closures)
        results.append([p.detach() for p in model.parameters()])
    assert_identical(results[0], results[2])
    assert_identical(results[1], results[2])


def test_a_closure_of_a_list_may_compute_gradients_before_it_clears():
    """A penalty on the norm of the gradient, as it is usually written."""
    results = []
    for clear in (True, False):
        model, optimizer = build("SAM", net=mlp, dtype=torch.float64)

        def closure(x, y, model=model, optimizer=optimizer, clear=clear):
            loss = optimizer.criterion(model(x), y)
            slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            if clear:
                optimizer.zero_grad()
            (loss + sum(slope.square().sum() for slope in slopes)).backward()
            return loss.detach().numpy()

        value = optimizer.step([partial(closure, *batch(seed, dtype=torch.float64)) for seed in range(3)])
        results.append([*(p.detach() for p in model.parameters()), torch.as_tensor(value)])
    assert_identical(*results)


def test_closures_of_a_list_may_return_more_than_a_loss():
    model, optimizer = build("SAM", net=mlp)

    def closure(x, y):
        optimizer.zero_grad()
        loss = optimizer.criterion(model(x), y)
        loss.backward()
        return loss, "more"

    assert optimizer.step([partial(closure, *batch(seed)) for seed in range(2)])[1] == "more"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler has warnings of its own
def test_a_compiled_function_may_take_steps(recwarn):
    x, y = batch()

    def trained(compiled):
        model, optimizer = build("BiSAM(log)", net=mlp)

        def function(x, y):
            return optimizer.step(closure_of(model, optimizer, x, y))

        step = torch.compile(function, backend="eager") if compiled else function
        return [step(x, y) for _ in range(2)], list(model.parameters())

    (losses, weights), (expected, of_eager) = trained(True), trained(False)
    assert_close([*losses, *weights], [*expected, *of_eager], 1e-6)  # float32
    assert not [str(one.message) for one in recwarn if "_getframe" in str(one.message)]
