"""Cases found by comparison with other implementations and by deliberate misuse: refused, or handled correctly."""

import gc
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bisam
from bisam.capture import capture_together
from bisam.engine.replay import Replay

from contract import HostReads, closure_of
from family import ScheduleFree, assert_close, assert_identical, batch, build, mlp, tensors, weights_of

# A running step


@pytest.mark.parametrize("when", ["ascent", "descent"])
@pytest.mark.parametrize(
    "call",
    ["step", "step()", "minimize", "base.step", "ascend", "descend", "restore", "load_state_dict", "add_param_group"],
)
def test_a_closure_cannot_begin_or_end_a_step(call, when):
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()
    optimizer.minimize(x, y)
    saved = optimizer.state_dict()
    calls = {
        "step": lambda: optimizer.step(lambda: None),
        "step()": optimizer.step,
        "minimize": lambda: optimizer.minimize(x, y),
        "base.step": optimizer.base.step,
        "ascend": optimizer.ascend,
        "descend": optimizer.descend,
        "restore": optimizer.restore,
        "load_state_dict": lambda: optimizer.load_state_dict(saved),
        "add_param_group": lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    }

    def closure():
        loss = optimizer.criterion(model(x), y)
        loss.backward()
        if optimizer.phase == when:
            calls[call]()
        return loss

    before = tensors(model, optimizer)
    with pytest.raises(RuntimeError, match="called by a closure, inside of a running step"):
        optimizer.step(closure)
    assert_identical(tensors(model, optimizer), before)
    optimizer.minimize(x, y)  # and the next step is a step


# Lists of closures


@pytest.mark.parametrize("name", ["SAM", "BiSAM(log)", "GSAM(log)"])
def test_closures_of_a_list_are_weighted_by_their_number_of_labels_that_are_not_ignored(name):
    """As `minimize(accumulate=n)` does: the mean of means would give a token of a short part more weight."""
    results = []
    for form in ("list", "whole"):
        model, optimizer = build(name, net=mlp, dtype=torch.float64)
        for seed in range(4):
            x, y = batch(seed, dtype=torch.float64)
            y = y.clone()
            y[:5] = -100  # of the first part's eight

            def closure(x, y, model=model, optimizer=optimizer):
                loss = optimizer.criterion(model(x), y)
                loss.backward()
                return loss

            parts = [(x[:8], y[:8]), (x[8:], y[8:])] if form == "list" else [(x, y)]
            optimizer.step([partial(closure, *part) for part in parts])
        results.append(tensors(model, optimizer))
    assert_close(*results, 1e-12)


def in_list(model, optimizer, parts, calls=1):
    """Closures, of which the first calls the criterion `calls` times, for the mean of equal terms."""

    def closure(x, y, times):
        loss = sum(optimizer.criterion(model(x), y) for _ in range(times)) / times
        loss.backward()
        return loss

    return [partial(closure, *part, calls if number == 0 else 1) for number, part in enumerate(parts)]


def halves(x, y):
    return [*zip(x.chunk(2), y.chunk(2), strict=True)]


def test_several_terms_in_a_closure_of_a_list_count_as_one():
    results = []
    for calls in (1, 2):
        model, optimizer = build("SAM", net=mlp, dtype=torch.float64)
        optimizer.step(in_list(model, optimizer, halves(*batch(dtype=torch.float64)), calls))
        results.append(weights_of(model))
    assert_close(*results, 1e-12)


def test_a_list_in_which_only_some_closures_call_the_criterion_is_refused():
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()
    own, *_ = in_list(model, optimizer, [(x, y)])
    before = weights_of(model)
    with pytest.raises(RuntimeError, match=r"1 of the 2 closures of a list called the criterion.*in all of them"):
        optimizer.step([own, lambda: F.cross_entropy(model(x), y).backward()])
    assert_identical(weights_of(model), before)


def test_a_list_in_which_every_label_is_ignored_leaves_finite_weights():
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()
    optimizer.step(in_list(model, optimizer, halves(x, torch.full_like(y, -100))))
    # cross entropy itself is 0/0 there; its gradient is 0
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:the weights are in torch.float16")
def test_a_list_of_large_closures_does_not_overflow_half_precision():
    model, optimizer = build("SAM", net=mlp, dtype=torch.float16)
    x, y = (t.repeat(512, *[1] * (t.dim() - 1)) for t in batch(dtype=torch.float16))

    def closure(x, y):
        loss = optimizer.criterion(model(x).float(), y) * 1000
        loss.backward()
        return loss

    optimizer.step([partial(closure, *part) for part in halves(x, y)])
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["SAM", "MSAM"])  # before it has any momentum, MSAM's first step is at w
def test_a_list_returns_the_loss_of_the_whole(name):
    model, optimizer = build(name, net=mlp, dtype=torch.float64)
    x, y = batch(dtype=torch.float64)
    y = y.clone()
    y[:5] = -100
    expected = F.cross_entropy(model(x), y).item()
    assert optimizer.step(in_list(model, optimizer, halves(x, y))).item() == pytest.approx(expected, rel=1e-12)


def test_a_closure_of_a_list_that_calls_unscale_is_refused():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer = build("SAM", net=mlp, scaler=scaler)
    parts = halves(*batch())

    def closure(x, y, *, last):
        loss = optimizer.criterion(model(x), y)
        scaler.scale(loss).backward()
        if last and optimizer.phase == "descent":
            scaler.unscale_(optimizer)
        return loss

    before = weights_of(model)
    with pytest.raises(RuntimeError, match=r"of a list has called scaler.unscale_.*clip_norm= clips"):
        optimizer.step([partial(closure, *part, last=number == 1) for number, part in enumerate(parts)])
    assert_identical(weights_of(model), before)


def test_a_scaler_that_the_closure_does_not_use_is_an_error():
    model, optimizer = build("SAM", net=mlp, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(RuntimeError, match=r"did not use it: call scaler.scale\(loss\).backward\(\)"):
        optimizer.step(in_list(model, optimizer, [batch()])[0])


@pytest.mark.parametrize("form", ["list", "accumulate", "micro_batch"])
def test_no_more_than_two_gradients_live_beside_the_weights(form):
    """The sum so far, and what the current pass computes."""
    shape = mlp()[0].weight.shape

    def alike():
        gc.collect()
        return [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == shape and not o.requires_grad]

    others = alike()  # of other tests; as long as they live here, their places are not used again
    options = {"micro_batch": 4} if form == "micro_batch" else {}
    model, optimizer = build("SAM", net=mlp, **options)
    held = []

    def look(*_):
        excluded = {t.data_ptr() for t in [*others, *optimizer._weights.copies]}
        held.append(len({t.data_ptr() for t in alike()} - excluded))

    x, y = batch()
    optimizer.minimize(x, y)  # momentum exists now
    optimizer.zero_grad()
    model.register_forward_pre_hook(look)
    if form == "list":
        optimizer.step(in_list(model, optimizer, [*zip(x.chunk(4), y.chunk(4), strict=True)]))
    else:
        optimizer.minimize(x, y, accumulate=4 if form == "accumulate" else 1)
    assert max(held) <= 2  # the momentum, and the sum so far


def test_an_interrupt_while_the_weights_are_saved_leaves_them_unchanged(monkeypatch):
    """Weights of two types, so that they are copied by two calls."""
    model = nn.ModuleList([mlp(), mlp().double()])
    optimizer = bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x, y = batch()

    def closure():
        logits = model[0](x) + model[1](x.double()).float()
        loss = optimizer.criterion(logits, y)
        loss.backward()
        return loss

    optimizer.step(closure)
    before, copy, calls = weights_of(model), torch._foreach_copy_, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return copy(*args)

    monkeypatch.setattr(torch, "_foreach_copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    monkeypatch.undo()
    assert_identical(weights_of(model), before)


def test_after_an_ascent_by_hand_that_failed_the_phase_is_still_ascent(monkeypatch):
    model, optimizer = build("BiSAM(log)", net=mlp)
    x, y = batch()
    optimizer.criterion(model(x), y).backward()

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(bisam.Ball, "__call__", fail)
        with pytest.raises(MemoryError):
            optimizer.ascend()
    assert optimizer.phase == "ascent"
    assert torch.equal(optimizer.criterion(model(x), y), bisam.lower_bound(model(x), y))


def test_gradients_that_zero_grad_set_to_zero_are_not_read_by_the_host():
    model, optimizer = build("SAM", net=mlp)
    (closure,) = in_list(model, optimizer, [batch()])
    optimizer.step(closure)
    optimizer.zero_grad(set_to_none=False)
    with HostReads() as reads:
        optimizer.step(closure)
    assert reads.count == 0


def test_a_replayed_step_leaves_gradients_that_the_next_step_clears():
    model, optimizer = build("SAM", net=mlp)
    (closure,) = in_list(model, optimizer, [batch()])
    optimizer.step(closure)
    recorded = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    Replay(optimizer).finish(optimizer.telemetry, recorded)
    before = weights_of(model)
    optimizer.step(closure)
    assert not torch.equal(model[0].weight, before[0])


# Options and targets


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rho": torch.tensor(float("nan"))}, ValueError, "rho must be non-negative and finite, got nan"),
        ({"rho": torch.tensor(-0.1)}, ValueError, "rho must be non-negative and finite, got -0.1"),
        ({"rho": True}, TypeError, "rho must be a number, got True"),
        ({"autocast": torch.int64}, TypeError, "autocast must be torch.bfloat16, torch.float16 or None"),
        ({"autocast": torch.float32}, TypeError, "autocast must be torch.bfloat16, torch.float16 or None"),
        ({"micro_batch": True}, ValueError, "micro_batch must be a whole number of samples, at least 1"),
        ({"clip_norm": "1"}, ValueError, "clip_norm must be a positive number or None, got '1'"),
        ({"same_dropout": "yes"}, TypeError, "same_dropout must be True or False, got 'yes'"),
        ({"vectorize": 1}, TypeError, "vectorize must be True or False, got 1"),
        ({"descent": nn.CrossEntropyLoss}, TypeError, r"descent must be an .* got the class CrossEntropyLoss"),
        ({"ascent": bisam.LowerBound}, TypeError, r"ascent must be an objective .* got the class LowerBound"),
        ({"roh": 0.1}, TypeError, r"SAM has no option 'roh': did you mean rho\?"),
        ({"lr": 0.1}, TypeError, r"SAM has no option 'lr': choose from .*rho.*go to it: SAM\(torch.optim.SGD\("),
    ],
)
def test_invalid_options_are_refused_with_an_explanation(options, error, words):
    with pytest.raises(error, match=words):
        build("SAM", net=mlp, **options)


MISSPELT = [
    ("SAM", "roh", "rho"),
    ("SAM", "Rho", "rho"),
    ("ASAM", "adaptve", "adaptive"),
    ("ASAM", "adaptivee", "adaptive"),
    ("GSAM", "rho_mim", "rho_min"),
]


@pytest.mark.parametrize(("name", "given", "meant"), MISSPELT)
@pytest.mark.parametrize("when", ["at first", "later"])
def test_a_misspelt_option_of_a_parameter_group_is_refused_with_its_correct_name(name, given, meant, when):
    first, *others = mlp().parameters()
    group = {"params": others, given: 0.1}
    words = f"a parameter group has the option '{given}': did you mean '{meant}'"
    if when == "at first":
        base = torch.optim.SGD([{"params": [first]}, group], lr=0.1)
        with pytest.raises(ValueError, match=words):
            getattr(bisam, name)(base)
    else:
        optimizer = getattr(bisam, name)(torch.optim.SGD([first], lr=0.1))
        with pytest.raises(ValueError, match=words):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["SAM", "ASAM", "GSAM"])
def test_unrelated_keys_of_a_parameter_group_are_accepted_and_unchanged(name):
    keys = ["beta", "theta", "lr_mul", "lr_scale", "max_lr", "min_lr", "initial_lr", "rho_max", "adaptive_lr", "who"]
    base = torch.optim.SGD([{"params": mlp().parameters(), **dict.fromkeys(keys, 0.5), 3: "three"}], lr=0.1)
    (group,) = getattr(bisam, name)(base).param_groups
    assert all(group[key] == 0.5 for key in keys)


def test_the_option_adaptive_of_a_group_must_be_a_bool():
    base = torch.optim.SGD([{"params": mlp().parameters(), "adaptive": "no"}], lr=0.1)
    with pytest.raises(TypeError, match="adaptive must be True or False, got 'no'"):
        bisam.ASAM(base)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (lambda: bisam.LowerBound("log", mu=True), "mu must be a number, got True"),
        (lambda: bisam.KSAM(torch.optim.SGD(mlp().parameters()), k=True), "k must be a whole number of samples"),
        (lambda: bisam.WSAM(torch.optim.SGD(mlp().parameters()), gamma="a"), r"gamma must lie in \[0, 1\), got 'a'"),
    ],
)
def test_numeric_options_of_another_type_are_refused(part, words):
    with pytest.raises((TypeError, ValueError), match=words):
        part()


@pytest.mark.parametrize("accumulate", [0, 2.0, True, "2"])
def test_accumulate_must_be_a_positive_whole_number(accumulate):
    _, optimizer = build("SAM", net=mlp)
    with pytest.raises(ValueError, match="accumulate must be a whole number of parts, at least 1"):
        optimizer.minimize(*batch(), accumulate=accumulate)


def test_one_target_for_a_whole_batch_is_refused():
    _, optimizer = build("SAM", net=mlp)
    x, y = batch()
    with pytest.raises(ValueError, match="y must hold one target for each sample of x, got a single number"):
        optimizer.minimize(x, y[0])


def test_a_loss_in_the_place_of_the_closure_is_refused():
    model, optimizer = build("SAM", net=mlp)
    closure = closure_of(model, optimizer, *batch())
    with pytest.raises(TypeError, match=r"step\(\) was given a loss\. Give it the closure itself"):
        optimizer.step(closure())


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_forward_pass_outside_of_the_closure_is_refused_with_the_remedy(retain_graph):
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()
    output, before = model(x), weights_of(model)

    def closure():
        loss = optimizer.criterion(output, y)
        loss.backward(retain_graph=retain_graph)
        return loss

    with pytest.raises(RuntimeError, match="run the model and compute the loss inside of the closure"):
        optimizer.step(closure)
    assert_identical(weights_of(model), before)


def test_a_model_with_every_parameter_frozen_is_refused_with_the_remedy():
    model, optimizer = build("SAM", net=mlp)
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="every parameter of the optimizer has requires_grad=False"):
        optimizer.minimize(*batch())


def test_parameters_in_the_place_of_a_base_optimizer_are_refused():
    with pytest.raises(TypeError, match=r"got generator\. Build it first.*bisam\.compat\.SAM takes parameters"):
        bisam.BiSAM(mlp().parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"got generator\. Build it first.*bisam\.compat\.SAM takes parameters"):
        bisam.SAM(mlp().parameters(), torch.optim.SGD, rho=0.05, lr=0.1)


def test_options_of_the_base_optimizer_are_refused_with_where_they_go():
    with pytest.raises(TypeError, match=r"BiSAM has no option 'lr'.*BiSAM\(torch.optim.SGD\(model.parameters\(\)"):
        bisam.BiSAM(torch.optim.SGD(mlp().parameters(), lr=0.1), lr=0.1)


def test_capture_together_refuses_the_same_optimizer_twice():
    _, optimizer = build(net=mlp)
    with pytest.raises(ValueError, match="an optimizer is in the list twice"):
        capture_together([optimizer, optimizer])


@pytest.mark.parametrize("tolerance", [float("inf"), float("nan"), 0.0, -1.0])
def test_a_tolerance_of_eigenvalues_outside_of_zero_to_one_is_refused(tolerance):
    with pytest.raises(ValueError, match="tolerance must lie between 0 and 1"):
        bisam.diagnostics.hessian_eigenvalues(mlp(), batch(), tolerance=tolerance)


@pytest.mark.parametrize("name", ["SAM", "BiSAM(log)"])
def test_targets_with_several_labels_for_a_sample_are_refused_unless_the_loss_is_for_them(name):
    model, optimizer = build(name, net=mlp)
    x, _ = batch()
    several = (torch.rand(len(x), 4, generator=torch.Generator().manual_seed(0)) < 0.6).float()
    before = weights_of(model)
    with pytest.raises(ValueError, match=r"one label for each sample.*sum to 1.*BCEWithLogitsLoss"):
        optimizer.minimize(x, several)
    assert_identical(weights_of(model), before)
    if name == "SAM":
        _, optimizer = build(name, net=mlp, descent=nn.BCEWithLogitsLoss())
        optimizer.minimize(x, several)


@pytest.mark.parametrize("objective", [bisam.CrossEntropy(), bisam.LowerBound()], ids=["cross entropy", "Q"])
def test_logits_with_the_classes_last_are_refused_with_the_remedy(objective):
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    with pytest.raises(ValueError, match=r"give logits.transpose\(1, -1\), or flatten both"):
        objective(logits, labels)
    flat = objective(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(objective(logits.transpose(1, -1), labels), flat)


# Telemetry


def test_telemetry_prints_its_numbers():
    _, optimizer = build("BiSAM(log)", net=mlp)
    optimizer.minimize(*batch())
    text = repr(optimizer.telemetry)
    assert text.startswith("Telemetry(ascent_norm=")
    assert f"loss={optimizer.telemetry.loss.item():.4g}" in text


def test_the_criterion_prints_its_two_objectives():
    _, optimizer = build("BiSAM(log)", net=mlp)
    assert repr(optimizer.criterion) == "Criterion(ascent=LowerBound(phi=log, mu=1), descent=CrossEntropy())"


@pytest.mark.parametrize("propagates", [True, False])
def test_a_criterion_that_is_called_outside_of_steps_does_not_keep_every_call(propagates):
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()
    logits = model(x).detach().requires_grad_()
    for _ in range(1010):
        loss = optimizer.criterion(logits, y)
        if propagates:
            loss.backward()
    assert len(optimizer.telemetry._at_weights) <= 1000
    optimizer.minimize(x, y)
    assert optimizer.telemetry.loss is not None


def test_a_step_of_more_than_a_thousand_parts_observes_all_of_them():
    model, optimizer = build("SAM", net=mlp, micro_batch=1)
    x, y = batch(size=1010)
    expected = F.cross_entropy(model(x), y).item()
    assert optimizer.minimize(x, y).item() == pytest.approx(expected, rel=1e-5)
    assert optimizer.telemetry.flips is not None


# Base optimizers and checkpoints


class Lookahead(torch.optim.Optimizer):
    """As wrappers are often written: without the parent's constructor."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


def test_a_wrapper_of_another_optimizer_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"Lookahead is a torch optimizer without state, defaults.*that it wraps"):
        bisam.SAM(Lookahead(torch.optim.SGD(mlp().parameters(), lr=0.1)))


def test_the_modes_of_a_base_optimizer_are_reached_through_the_wrapper():
    optimizer = bisam.SAM(ScheduleFree(mlp().parameters(), lr=0.1))
    optimizer.eval()
    assert optimizer.base.mode == "eval"
    optimizer.train()
    assert optimizer.base.mode == "train"
    plain = bisam.SAM(torch.optim.SGD(mlp().parameters(), lr=0.1))
    with pytest.raises(AttributeError, match="'SAM' object has no attribute 'eval'"):
        plain.eval()


@pytest.mark.parametrize("given", [{}, mlp().state_dict(), {"model": {}, "optimizer": {}}, None])
def test_a_dict_that_is_not_an_optimizer_state_is_refused_with_the_remedy(given):
    _, optimizer = build("SAM", net=mlp)
    with pytest.raises(ValueError, match=r'has the keys state and param_groups, got .*checkpoint\["optimizer"\]'):
        optimizer.load_state_dict(given)


def test_options_that_are_numpy_numbers_are_saved_so_that_they_load_without_pickle(tmp_path):
    """As in a sweep over np.linspace: torch.load refuses NumPy's numbers, after the training is done."""
    _, optimizer = build("SAM", net=mlp, rho=np.linspace(0.05, 0.2, 4)[1])
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    (group,) = torch.load(tmp_path / "state.pt", weights_only=True)["param_groups"]
    assert group["rho"] == 0.1
    assert isinstance(optimizer.param_groups[0]["rho"], np.float64)  # as it was given


@pytest.mark.parametrize("base_class", [torch.optim.SGD, torch.optim.AdamW])
def test_a_checkpoint_of_the_two_step_class_is_refused_and_loads_into_compat_sam(base_class):
    model = mlp()
    optimizer = bisam.SAM(base_class(model.parameters(), lr=0.1), model)
    optimizer.minimize(*batch())
    state = optimizer.state_dict()
    theirs = {**state, "state": {i: {"old_p": p.detach().clone()} for i, p in enumerate(model.parameters())}}
    before = tensors(model, optimizer)
    with pytest.raises(ValueError, match=r"two-step SAM class.*Load it into bisam.compat.SAM"):
        optimizer.load_state_dict(theirs)
    assert_identical(tensors(model, optimizer), before)
    compatible = bisam.compat.SAM(model.parameters(), base_class, lr=0.1)
    compatible.load_state_dict(theirs)
    compatible.zero_grad()
    for _ in range(2):
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
        compatible.first_step()
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
        compatible.second_step(zero_grad=True)
    assert not any("old_p" in entry for entry in compatible.state.values())


# Plans


def test_ksam_uses_all_samples_of_a_batch_that_is_smaller_than_k():
    results = []
    for variant, options in (("KSAM", {"k": 8}), ("SAM", {})):
        model, optimizer = build(variant, net=mlp, **options)
        optimizer.minimize(*batch(size=5))
        results.append(weights_of(model))
    assert_identical(*results)


# Buffers


def test_class_weights_are_not_taken_for_batch_statistics(recwarn):
    model, (x, y) = mlp(), batch()
    for loss_of in (nn.CrossEntropyLoss(weight=torch.ones(4)), bisam.LowerBound(weight=torch.ones(4))):
        optimizer = bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1))

        def closure(loss_of=loss_of):
            loss = loss_of(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert not recwarn.list


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_model_that_the_optimizer_is_not_given_takes_the_same_steps():
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net, (x, y) = mlp(), batch()
        model = torch.compile(net, backend="eager") if compiled else net
        optimizer = bisam.SAM(torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(2):
            optimizer.step(closure_of(model, optimizer, x, y))
        results.append(weights_of(net))
    assert_identical(*results)


# Weights that are saved before the first forward pass


class Initialised(nn.Module):
    """A layer that takes its scale from the first batch."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("done", torch.tensor(False))

    def forward(self, x):
        if not self.done:
            self.scale.data.copy_(1 / x.std(0))  # `.data` counts no versions
            with torch.no_grad():
                self.scale.mul_(1.0)
            self.done.fill_(True)
        return x * self.scale


@pytest.mark.parametrize("name", ["ESAM", "RSAM", "MSAM"])
def test_losing_weights_that_the_first_forward_pass_writes_warns(name):
    x, y = batch()
    for form in ("minimize", "step"):
        if (name, form) == ("ESAM", "step"):
            continue  # it chooses samples
        model, optimizer = build(name, net=lambda: nn.Sequential(Initialised(), mlp()))
        closure = closure_of(model, optimizer, x, y)
        with pytest.warns(UserWarning, match=f"{name} saves the weights before it.*run the model on a batch before"):
            optimizer.minimize(x, y) if form == "minimize" else optimizer.step(closure)
        optimizer.minimize(x, y)
    model, optimizer = build(name, net=lambda: nn.Sequential(Initialised(), mlp()))
    model(x)
    optimizer.minimize(x, y)


def test_weights_that_the_first_forward_pass_writes_are_kept_if_it_runs_at_the_weights():
    x, y = batch()
    model, optimizer = build("BiSAM(log)", net=lambda: nn.Sequential(Initialised(), mlp()), rho=0.1)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.minimize(x, y)
    assert_close([model[0].scale], [1 / x.std(0)], 1e-6)


@pytest.mark.parametrize("name", ["ESAM", "RSAM", "MSAM"])
def test_lazy_layers_need_a_forward_pass_before_variants_that_save_the_weights_first(name):
    x, y = batch()

    def lazy(variant):
        model = nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 4))
        return model, getattr(bisam, variant)(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)

    model, optimizer = lazy(name)
    with pytest.raises(RuntimeError, match=rf"lazy layers.*{name} saves the weights before it.*torch.no_grad\(\)"):
        optimizer.minimize(x, y)
    with torch.no_grad():
        model(x)
    optimizer.minimize(x, y)
    lazy("SAM")[1].minimize(x, y)
