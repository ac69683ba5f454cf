"""`bisam.compat.SAM` against the usual two-step class, which is written out here."""

import io

import pytest
import torch
import torch.nn.functional as F

import bisam
from bisam.compat import SAM

from family import ConvNet, assert_close, assert_identical, batch, mlp, tensors


class UsualSAM:
    """The textbook two steps, for the comparison."""

    def __init__(self, params, base_class, rho, adaptive, **kwargs):
        self.base, self.rho, self.adaptive = base_class(params, **kwargs), rho, adaptive
        self.params = self.base.param_groups[0]["params"]

    @torch.no_grad()
    def first_step(self):
        scaled = [p.abs() * p.grad if self.adaptive else p.grad for p in self.params]
        norm = torch.stack([s.norm() for s in scaled]).norm()
        self.old = [p.clone() for p in self.params]
        for p in self.params:
            p.add_((p**2 if self.adaptive else 1.0) * p.grad * self.rho / norm)
            p.grad = None

    @torch.no_grad()
    def second_step(self):
        for p, old in zip(self.params, self.old, strict=True):
            p.copy_(old)
        self.base.step()
        self.base.zero_grad()


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("form", ["two steps", "closure"])
def test_it_trains_as_the_usual_class_does(adaptive, form):
    options = {"rho": 0.5, "adaptive": adaptive, "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = SAM(model.parameters(), torch.optim.SGD, **options)
    torch.manual_seed(0)
    usual_model = mlp().double()
    usual = UsualSAM(usual_model.parameters(), torch.optim.SGD, **options)
    for seed in range(10):
        x, y = batch(seed, dtype=torch.float64)

        def loss(net, x=x, y=y):
            return F.cross_entropy(net(x), y)

        loss(model).backward()
        if form == "two steps":
            optimizer.first_step(zero_grad=True)
            loss(model).backward()
            optimizer.second_step(zero_grad=True)
        else:

            def closure(loss=loss):
                value = loss(model)
                value.backward()
                return value

            assert isinstance(optimizer.step(closure), torch.Tensor)
            optimizer.zero_grad()
        loss(usual_model).backward()
        usual.first_step()
        loss(usual_model).backward()
        usual.second_step()
    assert_close(list(model.parameters()), list(usual_model.parameters()), 1e-12)


def test_gradients_of_the_first_pass_never_leak_into_the_second():
    results = []
    for zero_grad in (True, False):
        torch.manual_seed(0)
        model = mlp()
        optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        optimizer.first_step(zero_grad=zero_grad)
        F.cross_entropy(model(x), y).backward()
        optimizer.second_step(zero_grad=True)
        results.append(list(model.parameters()))
    assert_identical(*results)


def test_a_checkpoint_resumes_bitwise_and_a_scheduler_reaches_the_base():
    def train(model, optimizer, scheduler, seeds):
        for seed in seeds:
            x, y = batch(seed)
            F.cross_entropy(model(x), y).backward()
            optimizer.first_step(zero_grad=True)
            F.cross_entropy(model(x), y).backward()
            optimizer.second_step(zero_grad=True)
            scheduler.step()

    def fresh():
        torch.manual_seed(0)
        model = ConvNet()
        optimizer = SAM(model.parameters(), torch.optim.Adam, lr=1e-2)
        optimizer.model = model
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    whole = fresh()
    train(*whole, range(2))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in whole], file)
    train(*whole, range(2, 5))
    resumed = fresh()
    file.seek(0)
    for part, state in zip(resumed, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(*resumed, range(2, 5))
    assert_identical(tensors(*resumed[:2]), tensors(*whole[:2]))
    assert resumed[1].base_optimizer.param_groups[0]["lr"] < 1e-2


def test_defaults_are_those_of_the_usual_class():
    model = mlp()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    assert optimizer.param_groups[0]["rho"] == 0.05
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    optimizer.first_step()
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    optimizer.second_step()
    assert all(p.grad is not None for p in model.parameters())  # zero_grad=True clears them


def test_misuse_raises_with_an_explanation():
    model = mlp()
    with pytest.raises(TypeError, match=r"must be a class such as torch.optim.SGD, got an instance of SGD"):
        SAM(model.parameters(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"params must be parameters, got SGD. bisam.SAM takes .base, model."):
        SAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match="needs a closure"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"descend\(\) called before ascend\(\)"):
        optimizer.second_step()
    with pytest.raises(ValueError, match="rho must be non-negative and finite, got -1"):
        SAM(model.parameters(), torch.optim.SGD, rho=-1, lr=0.1)


def test_weights_are_restored_when_the_closure_raises():
    model = mlp()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert_identical([p.detach() for p in model.parameters()], before)


@pytest.mark.parametrize("base_class", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("name", ["old_p", "e_w"])
def test_a_checkpoint_of_the_usual_class_loads_without_the_weights_it_carries(base_class, name):
    """Its state held the old weights of the last step, or ε, and nothing of the base optimizer."""
    model = mlp()
    optimizer = SAM(model.parameters(), base_class, lr=0.1)
    usual = {
        "state": {index: {name: p.detach().clone()} for index, p in enumerate(model.parameters())},
        "param_groups": [{**optimizer.state_dict()["param_groups"][0], "rho": 0.2}],
    }
    optimizer.load_state_dict(usual)
    assert optimizer.param_groups[0]["rho"] == 0.2
    assert optimizer.state_dict()["state"] == {}
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    optimizer.first_step(zero_grad=True)
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    optimizer.second_step(zero_grad=True)


def test_a_captured_step_runs_both_passes():
    x, y = batch()
    trained = []
    for make in (
        lambda model: SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1),
        lambda model: bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05),
    ):
        torch.manual_seed(0)
        model = mlp()
        optimizer = make(model)

        def closure(x, y, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        with pytest.warns(UserWarning, match="a CUDA graph needs"):
            step = bisam.capture(optimizer, closure)
        for _ in range(3):
            step(x, y)
        trained.append(tensors(model, optimizer))
    assert_identical(*trained)


def test_the_closure_runs_with_gradients_enabled_under_no_grad():
    """As in frameworks that call step() under torch.no_grad()."""
    x, y = batch()
    trained = []
    for context in (torch.enable_grad, torch.no_grad):
        torch.manual_seed(0)
        model = mlp()
        optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
        F.cross_entropy(model(x), y).backward()
        with context():
            optimizer.step(lambda model=model: F.cross_entropy(model(x), y).backward())
        trained.append(list(model.parameters()))
    assert_identical(*trained)


def test_a_scaler_skips_an_overflow_and_batch_norm_counts_each_step_once():
    x, y = batch()
    model = ConvNet()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    optimizer.model = model
    optimizer.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before = [p.detach().clone() for p in model.parameters()]
    for factor in (1e3, 1e-3):  # of which the first overflows
        scaler.scale(F.cross_entropy(model(x), y) * factor).backward()
        optimizer.first_step(zero_grad=True)
        scaler.scale(F.cross_entropy(model(x), y) * factor).backward()
        optimizer.second_step(zero_grad=True)
        is_unchanged = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert is_unchanged == (factor == 1e3)
    assert all(p.isfinite().all() for p in model.parameters())
    assert {m.num_batches_tracked.item() for m in model.modules() if hasattr(m, "num_batches_tracked")} == {2}


def test_scaler_step_is_refused_unless_both_passes_have_run():
    x, y = batch()
    model = mlp()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        return scaler.scale(F.cross_entropy(model(x), y)).backward()

    closure()
    with pytest.raises(TypeError, match=r"Set optimizer\.scaler"):
        scaler.step(optimizer, closure)
    assert_identical(before, list(model.parameters()))
    with pytest.raises(TypeError, match=r"Set optimizer\.scaler"):
        scaler.step(bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model), closure)
    with pytest.raises(TypeError, match="A GradScaler goes to the optimizer"):
        scaler.step(bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model))
    switched_off = torch.amp.GradScaler("cpu", enabled=False)
    switched_off.step(optimizer, lambda: F.cross_entropy(model(x), y).backward())
    assert not all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_step_inside_another_optimizers_step_may_run_under_that_optimizers_scaler():
    x, y = batch()
    model, other = mlp(), mlp()
    optimizer = bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = [p.detach().clone() for p in model.parameters()]

    class Outer(torch.optim.SGD):
        def step(self):
            optimizer.step(lambda: F.cross_entropy(model(x), y).backward())

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(F.cross_entropy(other(x), y)).backward()
    scaler.step(Outer(other.parameters(), lr=0.1))
    assert not all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_scaler_step_works_after_both_passes():
    x, y = batch()
    found = {}
    for enabled in (True, False):
        torch.manual_seed(0)
        model = mlp().double()
        optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)

        def closure(model=model, scaler=scaler):
            return scaler.scale(F.cross_entropy(model(x.double()), y)).backward()

        for _ in range(2):
            optimizer.backward(closure, scaler=scaler)
            scaler.step(optimizer)
            scaler.update()
        found[enabled] = list(model.parameters())
    assert_close(found[True], found[False], 1e-12)


def test_a_dict_that_is_not_an_optimizer_state_is_refused():
    model = mlp()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"several parts give the optimizer's"):
        optimizer.load_state_dict({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    with pytest.raises(ValueError, match="got state, epoch"):
        optimizer.load_state_dict({"state": model.state_dict(), "epoch": 3})
    with pytest.raises(ValueError, match="got NoneType"):
        optimizer.load_state_dict(None)
