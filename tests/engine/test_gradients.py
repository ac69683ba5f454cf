"""Gradients before a step, between its passes, and after it."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bisam import SAM

from family import (
    assert_close,
    assert_identical,
    batch,
    build,
    mlp,
    perturb,
    tensors,
)


@pytest.mark.parametrize("rho", [0.05, 0.0])
def test_the_gradient_of_the_update_is_readable_after_a_step_and_never_added_to_the_next_one(rho):
    model, optimizer = build(net=mlp, rho=rho)
    x, y = batch()
    for _ in range(2):
        optimizer.minimize(x, y)
        assert all(p.grad is not None for p in model.parameters())
    optimizer.criterion(model(x), y).backward()  # on top of what the step left
    with pytest.raises(RuntimeError, match=r"beneath the new one. Call optimizer.zero_grad\(\)"):
        optimizer.ascend()
    with pytest.raises(RuntimeError, match=r"found gradients from before"):
        optimizer.step(lambda: optimizer.criterion(model(x), y).backward())
    for clear in (optimizer.zero_grad, model.zero_grad):
        clear()
        perturb(model, optimizer)
        optimizer.criterion(model(x), y).backward()
        optimizer.descend()
        assert all(p.grad is None for p in model.parameters())  # so that the next pass by hand can follow
        optimizer.minimize(x, y)


def test_an_abandoned_step_leaves_no_gradients():
    model, optimizer = build(net=mlp)
    x, y = batch()
    perturb(model, optimizer)
    optimizer.criterion(model(x), y).backward()
    optimizer.restore()
    assert all(p.grad is None for p in model.parameters())


# Graphs


def test_no_graph_outlives_its_closure():
    model, optimizer = build(net=mlp)
    graphs = []

    def closure():
        assert all(graph() is None for graph in graphs)
        hidden = model(batch()[0])
        graphs.append(weakref.ref(hidden))
        loss = optimizer.criterion(hidden, batch()[1])
        loss.backward()
        return loss

    optimizer.step([closure] * 3)
    assert len(graphs) == 6


# Gradients from before a step


def test_a_gradient_added_to_zeros_before_a_step_is_refused():
    model, optimizer = build(net=mlp)
    x, y = batch()
    optimizer.zero_grad(set_to_none=False)
    model[0].weight.square().sum().backward()
    with pytest.raises(RuntimeError, match="found gradients from before"):
        optimizer.step(lambda: optimizer.criterion(model(x), y).backward())


@pytest.mark.parametrize("clear", ["model", "base"])
def test_gradients_from_before_a_step_must_be_cleared_by_the_optimizer_or_before_the_step(clear):
    """As in a training of two nets, where one's loss leaves gradients in the other."""
    model, optimizer = build(net=mlp)
    x, y = batch()
    clear = {"model": model.zero_grad, "base": optimizer.base.zero_grad}[clear]

    def closure():
        clear()  # clears nothing: the step has set the gradients aside, and does not see this call
        loss = optimizer.criterion(model(x), y)
        loss.backward()
        return loss

    model(x).sum().backward()
    found = [p.grad for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"did not clear them by optimizer.zero_grad\(\).*call zero_grad\(\) first"):
        optimizer.step(closure)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), found, strict=True))
    clear()
    optimizer.step(closure)
    twin, twin_optimizer = build(net=mlp)
    twin_optimizer.minimize(x, y)
    assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))


@pytest.mark.parametrize("whose", ["optimizer", "model", "base"])
def test_zeros_from_before_a_step_count_as_cleared(whose):
    model, optimizer = build(net=mlp)
    twin, twin_optimizer = build(net=mlp)
    clear = {"optimizer": optimizer, "model": model, "base": optimizer.base}[whose].zero_grad
    for seed in range(3):
        x, y = batch(seed)
        clear(set_to_none=False)
        optimizer.step(lambda x=x, y=y: optimizer.criterion(model(x), y).backward())
        twin_optimizer.minimize(x, y)
    assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))


def test_a_gradient_that_descend_leaves_is_refused_in_the_next_ascent():
    model, optimizer = build(net=mlp)
    x, y = batch()
    perturb(model, optimizer)
    optimizer.criterion(model(x), y).backward()
    optimizer.descend(zero_grad=False)
    assert all(p.grad is not None for p in model.parameters())
    optimizer.criterion(model(x), y).backward()
    with pytest.raises(RuntimeError, match="gradient of the last step beneath the new one"):
        optimizer.ascend()
    optimizer.zero_grad()
    perturb(model, optimizer)


@pytest.mark.parametrize("index", [0, 1, 3])
def test_a_gradient_added_to_that_of_the_last_step_is_refused_for_any_parameter(index):
    model, optimizer = build(net=mlp)
    x, y = batch()
    optimizer.minimize(x, y)
    [*model.parameters()][index].square().sum().backward()
    with pytest.raises(RuntimeError, match="found gradients from before"):
        optimizer.step(lambda: optimizer.criterion(model(x), y).backward())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_from_before_a_step_are_detected_however_autograd_adds_to_them():
    model, optimizer = build(net=mlp)
    x, y = batch()
    model(x).sum().backward()

    def closure():  # create_graph makes autograd put the sum into a new tensor
        optimizer.criterion(model(x), y).backward(create_graph=True)

    with pytest.raises(RuntimeError, match="gradients from before"):
        optimizer.step(closure)
    for clear in (lambda: None, lambda: setattr(model[0].weight, "grad", None)):  # not all are cleared
        optimizer.zero_grad()
        model(x).sum().backward()

        def partly(clear=clear):
            clear()
            optimizer.criterion(model(x), y).backward()

        with pytest.raises(RuntimeError, match="found gradients from before"):
            optimizer.step(partly)
    optimizer.zero_grad()
    optimizer.minimize(x, y)


def test_an_old_gradient_of_a_parameter_that_the_closure_does_not_use_is_refused():
    model, optimizer = build(net=lambda: nn.ModuleList([mlp(), mlp()]))
    x, y = batch()
    model[1](x).sum().backward()
    with pytest.raises(RuntimeError, match="found gradients from before"):
        optimizer.step(lambda: optimizer.criterion(model[0](x), y).backward())


def test_clearing_gradients_through_the_model_or_the_base_frees_their_memory():
    model, optimizer = build(net=mlp)
    x, y = batch()
    for clear in (model.zero_grad, optimizer.base.zero_grad):
        optimizer.minimize(x, y)
        held = [weakref.ref(p.grad) for p in model.parameters()]
        clear()
        gc.collect()
        assert not any(ref() is not None for ref in held)


def test_closures_may_clear_gradients_in_place_replace_them_or_run_several_backward_passes():
    x, y = batch()
    twin, twin_optimizer = build(net=mlp)
    twin_optimizer.minimize(x, y)

    def cleared_in_place(model, optimizer):
        optimizer.zero_grad(set_to_none=False)
        for _ in range(2):  # two backward passes
            (optimizer.criterion(model(x), y) / 2).backward()

    def cleared_by_the_model(model, optimizer):
        torch.autograd.grad(F.cross_entropy(model(x), y), [*model.parameters()])
        model.zero_grad(set_to_none=False)
        optimizer.criterion(model(x), y).backward()

    def replaced(model, optimizer):
        found = torch.autograd.grad(optimizer.criterion(model(x), y), [*model.parameters()])
        for param, gradient in zip(model.parameters(), found, strict=True):
            param.grad = gradient

    for way in (cleared_in_place, cleared_by_the_model, replaced):
        model, optimizer = build(net=mlp)
        optimizer.step(partial(way, model, optimizer))
        assert_close(tensors(model, optimizer), tensors(twin, twin_optimizer), 1e-6)
        assert not any(param._backward_hooks or param._post_accumulate_grad_hooks for param in model.parameters())


# Passes that raise, and what becomes of gradients


def test_a_pass_that_raised_leaves_no_gradients():
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()

    def failing():
        optimizer.criterion(model(x), y).backward()
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(failing)
    assert all(p.grad is None for p in model.parameters())


class InPlace(torch.optim.SGD):
    """Clears gradients in their own memory, whatever `set_to_none` is."""

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=False)


@pytest.mark.parametrize(("base_class", "options"), [(InPlace, {}), (torch.optim.SGD, {"set_to_none": False})])
def test_gradients_cleared_in_place_after_a_step_do_not_block_the_next_ascent(base_class, options):
    torch.manual_seed(0)
    model = mlp()
    optimizer = SAM(base_class(model.parameters(), lr=0.1), model)
    optimizer.minimize(*batch())
    optimizer.zero_grad(**options)
    assert perturb(model, optimizer).perturbed
    optimizer.restore()


@pytest.mark.parametrize("most", [0.01, 1e6])
def test_clipping_includes_sparse_and_dense_gradients(most):
    embedding, head = nn.Embedding(8, 6, sparse=True), nn.Linear(6, 4)
    model = nn.Sequential(embedding, head)
    groups = [{"params": embedding.parameters(), "rho": 0.0}, {"params": head.parameters()}]
    optimizer = SAM(torch.optim.SGD(groups, lr=0.1), model, clip_norm=most)
    optimizer.minimize(torch.tensor([0, 3, 3, 5]), torch.tensor([0, 1, 2, 3]))
    norm = torch.stack([p.grad.to_dense().norm() for p in model.parameters()]).norm()
    reported = optimizer.telemetry.descent_norm
    torch.testing.assert_close(norm, reported.clamp(max=most), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["SAM", "GSAM(log)"])
def test_closures_may_keep_all_gradients_in_one_flat_tensor(name):
    """As libraries do that communicate or clip them as one: the next closure clears those that were taken."""

    def trained(*, flat):
        model, optimizer = build(name, net=mlp)
        params = [*model.parameters()]
        memory = torch.zeros(sum(p.numel() for p in params))

        def closure(x, y):
            if flat:
                memory.zero_()
                for param, part in zip(params, memory.split([p.numel() for p in params]), strict=True):
                    param.grad = part.view_as(param)
            loss = optimizer.criterion(model(x), y)
            loss.backward()
            return loss

        optimizer.step(partial(closure, *batch(0)))
        optimizer.step([partial(closure, *batch(seed)) for seed in (1, 2)])
        return [p.detach() for p in params]

    assert_close(trained(flat=True), trained(flat=False), 1e-6)  # float32, sums in another order


def test_closures_of_a_list_that_reuse_one_memory_for_gradients_are_refused():
    model, optimizer = build("SAM", net=mlp)
    memory = {param: torch.zeros_like(param) for param in model.parameters()}
    before = [p.detach().clone() for p in model.parameters()]

    def closure(x, y):
        for param, own in memory.items():
            param.grad = own.zero_()
        loss = optimizer.criterion(model(x), y)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="wrote into the gradients of the one before it"):
        optimizer.step([partial(closure, *batch(seed)) for seed in (1, 2)])
    assert_identical(before, list(model.parameters()))


SUMS = {
    "vectors": lambda x, a, b: x[:, :1] + (a.unsqueeze(0) + b.unsqueeze(0)),
    "matrices": lambda x, a, b: x @ (a.view(4, 1).t() + b.view(4, 1).t()).expand(4, 4),
    "one sample": lambda x, a, b: x[:1] + a[None] + b[None],
}


@pytest.mark.parametrize("form", ["step", "by hand", "list"])
@pytest.mark.parametrize("kind", SUMS)
def test_gradients_that_share_memory_are_scaled_once(kind, form):
    """Autograd leaves views of one tensor in the `.grad` of parameters that are added up."""

    def trained(cloned):
        params = [torch.nn.Parameter(torch.linspace(n, 1, 4, dtype=torch.float64)) for n in range(2)]
        x = torch.linspace(-1, 2, 16, dtype=torch.float64).view(4, 4)
        optimizer = SAM(torch.optim.SGD(params, lr=0.1, momentum=0.9), rho=0.1, clip_norm=0.5)

        def closure():
            loss = SUMS[kind](x, *params).square().sum()
            loss.backward()
            if cloned:
                for param in params:
                    param.grad = param.grad.clone()
            return loss

        for _ in range(2):
            if form == "by hand":
                closure()
                optimizer.ascend()
                closure()
                optimizer.descend()
            else:
                optimizer.step(closure if form == "step" else [closure, closure])
        return params

    assert_close(trained(cloned=False), trained(cloned=True), 1e-12)
