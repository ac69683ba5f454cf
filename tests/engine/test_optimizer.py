"""The engine beyond the contract: its inputs, its refusals, and what surrounds a training loop."""

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bisam
from bisam import SAM, BiSAM, SharpnessAware

from family import (
    BASES,
    VARIANTS,
    WITH_CLOSURE,
    ConvNet,
    TwoInputs,
    assert_close,
    assert_identical,
    batch,
    build,
    closure_of,
    mlp,
    perturb,
    tensors,
)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


# What a model may accept and return


class HuggingFaceLike(nn.Module):
    """Takes keyword arguments, returns an object that holds logits."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, *, input_values, attention_mask=None):
        logits = self.net(input_values * attention_mask)
        return type("Output", (), {"logits": logits})()


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("kind", ["tuple", "dict", "mixed dict", "keyword model"])
def test_inputs_may_be_a_tensor_a_tuple_or_a_dict(kind, accumulate):
    x, y = batch(dtype=torch.float64)
    expected, expected_optimizer = build(net=mlp, dtype=torch.float64)
    expected_optimizer.minimize(x, y)
    net = HuggingFaceLike if kind == "keyword model" else TwoInputs
    model, optimizer = build(net=net, dtype=torch.float64)
    inputs = {
        "tuple": (x / 2, x / 2),
        "dict": {"left": x / 2, "right": x / 2},
        "mixed dict": {"left": x, "right": x, "flag": False},
        "keyword model": {"input_values": x, "attention_mask": torch.ones_like(x)},
    }[kind]
    optimizer.minimize(inputs, y, accumulate=accumulate)
    assert_close(list(model.parameters()), list(expected.parameters()), 1e-12)


def test_token_classification_trains_only_on_labels_that_are_not_ignored():
    """Logits (N, K, d) and padded labels, cut into unequal micro-batches, equal the whole batch."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Conv1d(6, 4, 1)

        def forward(self, x):
            return self.net(x)

    results = []
    for accumulate in (1, 3):
        model, optimizer = build(net=Tagger, dtype=torch.float64)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(8, 6, 5, dtype=torch.float64, generator=generator)
        y = torch.randint(4, (8, 5), generator=generator)
        y[0], y[3, 2:] = -100, -100
        loss = optimizer.minimize(x, y, accumulate=accumulate)
        results.append([loss, *optimizer.telemetry.as_dict().values(), *model.parameters()])
    assert_close(*results, 1e-12)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_class_weights_and_sums_accumulate_to_the_whole_batch(accumulate, reduction):
    weight = torch.rand(4, dtype=torch.float64)
    objectives = {
        "ascent": bisam.LowerBound(weight=weight, reduction=reduction),
        "descent": nn.CrossEntropyLoss(weight=weight, reduction=reduction, label_smoothing=0.0),
    }
    model, optimizer = build(net=mlp, dtype=torch.float64, **objectives)
    whole, whole_optimizer = build(net=mlp, dtype=torch.float64, **objectives)
    x, y = batch(dtype=torch.float64)
    optimizer.minimize(x, y, accumulate=accumulate)
    whole_optimizer.minimize(x, y)
    assert_close(list(model.parameters()), list(whole.parameters()), 1e-12)


def test_mixup_targets_train(variant):
    model, optimizer = build(variant)
    x, y = batch()
    soft = 0.7 * nn.functional.one_hot(y, 4) + 0.3 * nn.functional.one_hot(y.flip(0), 4)
    before = tensors(model, optimizer)
    loss = optimizer.minimize(x, soft, accumulate=2)
    assert loss.isfinite()
    assert not torch.equal(before[0], model.conv.weight)


def test_a_closure_with_a_loss_of_its_own_needs_no_criterion():
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = SAM(sgd(model), model)
    x, _ = batch()

    def closure():
        loss = model(x).square().mean()
        loss.backward()
        return loss

    expected = model(x).square().mean()
    loss = optimizer.step(closure)
    assert torch.equal(loss, expected.detach())
    assert optimizer.telemetry.loss is None
    assert optimizer.telemetry.ascent_norm > 0


def test_regression_has_losses_but_no_errors():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = SAM(sgd(model), model, descent=nn.MSELoss())
    optimizer.minimize(batch()[0], torch.randn(16, 3))
    assert optimizer.telemetry.surrogate_gap > 0
    assert optimizer.telemetry.flips is None
    assert optimizer.telemetry.error is None


def test_frozen_and_tied_parameters_train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Linear(6, 4))
    model[2].weight = model[0].weight
    model[3].bias.requires_grad_(False)
    optimizer = BiSAM(sgd(model), model)
    frozen = model[3].bias.detach().clone()
    optimizer.minimize(*batch())
    assert torch.equal(model[3].bias, frozen)
    assert model[2].weight is model[0].weight


# Sparse gradients


def test_sparse_gradients_are_refused_with_the_remedy_and_trained_where_rho_is_zero():
    torch.manual_seed(0)
    embedding, head = nn.Embedding(10, 6, sparse=True), nn.Linear(6, 4)
    model = nn.Sequential(embedding, head)
    words, y = torch.randint(10, (16,)), batch()[1]
    optimizer = BiSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"shape \(10, 6\) in group 0 has a sparse gradient.*rho=0"):
        optimizer.minimize(words, y)
    assert_identical([p.detach() for p in model.parameters()], before)
    groups = [{"params": embedding.parameters(), "rho": 0.0}, {"params": head.parameters()}]
    optimizer = BiSAM(torch.optim.SGD(groups, lr=0.1), model)
    optimizer.minimize(words, y)
    assert not torch.equal(embedding.weight, before[0])


# Around the loop


def test_hooks_and_named_parameters_of_torch_optimizers_work():
    torch.manual_seed(0)
    model = mlp()
    optimizer = BiSAM(torch.optim.SGD(model.named_parameters(), lr=0.1), model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    x, y = batch()
    optimizer.step(closure_of(model, optimizer, x, y))
    assert calls == ["before", "after"]
    assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "0.weight"


def test_a_base_optimizer_that_has_stepped_keeps_its_state():
    model = mlp()
    base = BASES["Adam"](model.parameters())
    nn.functional.cross_entropy(model(batch()[0]), batch()[1]).backward()
    base.step()
    state, groups = base.state, base.param_groups
    optimizer = SAM(base, model)
    assert optimizer.state is base.state is state
    assert optimizer.param_groups is base.param_groups is groups
    assert len(state) == 4


def test_the_optimizer_can_be_pickled_with_its_model():
    model, optimizer = build()
    optimizer.minimize(*batch(0))
    twin, twin_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    for m, o in ((model, optimizer), (twin, twin_optimizer)):
        o.minimize(*batch(1))
        o.zero_grad()
        with pytest.raises(RuntimeError, match="base optimizer's step"):
            perturb(m, o).base.step()
        o.restore()
    assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))


def test_a_model_moved_to_another_precision_after_a_step_is_restored_in_that_precision():
    model, optimizer = build("SAM", net=mlp)
    optimizer.minimize(*batch())
    model.double()
    optimizer.zero_grad()
    optimizer.state.clear()
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, b in zip(model.parameters(), before, strict=True):
            p.add_(1e-12)
            b.copy_(p)
    perturb(model, optimizer, *batch(dtype=torch.float64)).restore()
    assert_identical([p.detach() for p in model.parameters()], before)


def test_repr_shows_the_class_its_options_and_the_base_optimizer():
    text = repr(build("BiSAM(tanh)")[1])
    assert text.startswith("BiSAM(rho=0.05, adaptive=False, eta=0.0, ascent=LowerBound(phi=tanh, mu=10, alpha=0.1)")
    assert "base=SGD" in text


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (partial(bisam.ESAM, beta=0.6, gamma=0.7), "eta=0.0, beta=0.6, gamma=0.7, ascent="),
        (partial(bisam.LookSAM, every=3, start=10), "eta=0.0, alpha=0.7, every=3, start=10, ascent="),
        (partial(bisam.SAM, stop=10), "eta=0.0, stop=10, ascent="),
        (partial(bisam.FriendlySAM, clip_norm=1.0), "eta=0.0, decay=0.9, sigma=1.0, clip_norm=1.0, ascent="),
        (partial(bisam.VaSSO, theta=0.4), "eta=0.0, theta=0.4, ascent="),
        (partial(bisam.FisherSAM, eta=0.1), "FisherSAM(rho=0.1, eta=0.1, ascent="),
        (partial(bisam.SAM, autocast=torch.bfloat16, micro_batch=8), "micro_batch=8, autocast=torch.bfloat16, ascent="),
        (
            partial(bisam.SAM, descent=bisam.CrossEntropy(label_smoothing=0.1)),
            "descent=CrossEntropy(label_smoothing=0.1)",
        ),
    ],
)
def test_repr_has_the_options_of_the_variant_and_those_that_are_set(make, options):
    model = mlp()
    assert options in repr(make(sgd(model), model))


def test_a_closure_runs_once_in_each_pass_and_can_read_the_phase():
    model, optimizer = build()
    phases = []
    closure = closure_of(model, optimizer, *batch())
    optimizer.step(lambda: (phases.append(optimizer.phase), closure())[1])
    assert phases == ["ascent", "descent"]
    optimizer.param_groups[0]["rho"] = 0.0
    optimizer.step(lambda: (phases.append(optimizer.phase), closure())[1])
    assert phases == ["ascent", "descent", "plain"]


def test_descend_before_ascend_is_refused():
    _, optimizer = build()
    with pytest.raises(RuntimeError, match=r"descend\(\) called before ascend\(\).*use step\(closure\)"):
        optimizer.descend()


def test_a_second_ascend_is_refused_and_restore_undoes_the_first():
    model, optimizer = build()
    before = [p.detach().clone() for p in model.parameters()]
    perturb(model, optimizer)
    with pytest.raises(RuntimeError, match=r"ascend\(\) called twice.*restore\(\)"):
        optimizer.ascend()
    optimizer.restore()
    assert_identical([p.detach() for p in model.parameters()], before)
    optimizer.restore()  # between steps it has nothing to do
    assert_identical([p.detach() for p in model.parameters()], before)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("step", lambda model, optimizer: optimizer.step(lambda: None)),
        ("minimize", lambda model, optimizer: optimizer.minimize(*batch())),
        ("state_dict", lambda model, optimizer: optimizer.state_dict()),
        ("load_state_dict", lambda model, optimizer: optimizer.load_state_dict({})),
        ("base optimizer's step", lambda model, optimizer: optimizer.base.step()),
        ("copying", lambda model, optimizer: copy.deepcopy(optimizer)),
    ],
)
def test_calls_that_would_keep_or_lose_perturbed_weights_are_refused(name, use):
    model, optimizer = build()
    before = [p.detach().clone() for p in model.parameters()]
    perturb(model, optimizer)
    with pytest.raises(RuntimeError, match=rf"{name}.* called between ascend\(\) and descend\(\)"):
        use(model, optimizer)
    optimizer.restore()
    assert_identical([p.detach() for p in model.parameters()], before)


@pytest.mark.parametrize(
    ("closure", "message"),
    [(None, r"step\(\) needs a closure.*minimize\(x, y\).*scaler="), ([], "non-empty list of closures"), (3, "got 3")],
)
def test_step_needs_a_closure(closure, message):
    _, optimizer = build()
    with pytest.raises(TypeError, match=message):
        optimizer.step(closure)


def test_a_closure_that_leaves_no_gradients_is_refused(closure_variant):
    model, optimizer = build(closure_variant)
    for _ in range(2):  # so that the variants with a period of two perturb in the next
        optimizer.minimize(*batch())
    before = tensors(model, optimizer)
    with pytest.raises(RuntimeError, match=r"no gradients: the closure left none.*Call backward\(\)"):
        optimizer.step(lambda: None)
    assert_identical(tensors(model, optimizer), before)

    def only_the_first_time():
        if optimizer.phase in ("ascent", "plain"):
            optimizer.criterion(model.eval()(batch()[0]), batch()[1]).backward()

    with pytest.raises(RuntimeError, match="no gradients"):
        optimizer.step(only_the_first_time)
    assert_identical(tensors(model, optimizer), before)


def test_ascend_and_descend_without_gradients_are_refused():
    model, optimizer = build()
    with pytest.raises(RuntimeError, match=r"ascend\(\) found no gradients: the first backward pass"):
        optimizer.ascend()
    before = tensors(model, optimizer)
    perturb(model.eval(), optimizer)
    with pytest.raises(RuntimeError, match=r"descend\(\) found no gradients: the second backward pass"):
        optimizer.descend()
    assert_identical(tensors(model, optimizer), before)


@pytest.mark.parametrize(
    ("make_base", "error", "message"),
    [
        (lambda m: SAM(sgd(m), m), TypeError, "SAM is sharpness-aware already"),
        (lambda m: bisam.compat.SAM(m.parameters(), torch.optim.SGD, lr=0.1), TypeError, "sharpness-aware already"),
        (
            lambda m: m.parameters(),
            TypeError,
            "a torch optimizer, or a list of them, got generator.*compat.SAM",
        ),
        (lambda m: torch.optim.SGD, TypeError, "base must be a torch optimizer, or a list of them, got the class SGD"),
        (lambda m: torch.optim.LBFGS(m.parameters()), TypeError, "LBFGS"),
        (lambda m: torch.optim.SGD([{"params": []}], lr=0.1), ValueError, "empty parameter list"),
        (lambda m: torch.optim.SGD([], lr=0.1), ValueError, "empty parameter list"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, maximize=True), ValueError, "maximize=True.*the negative"),
    ],
)
def test_invalid_base_optimizers_are_refused(make_base, error, message):
    model = mlp()
    with pytest.raises(error, match=message):
        BiSAM(make_base(model), model)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_twice_in_a_group_is_refused():  # as by listing encoder and decoder, whose weights are tied
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    with pytest.raises(ValueError, match=r"of shape \(2,\) is in a parameter group 2 times.*dict.fromkeys"):
        SAM(torch.optim.SGD([weight, weight], lr=0.1))
    optimizer = SAM(torch.optim.SGD([weight], lr=0.1))
    twice = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="2 times"):
        optimizer.add_param_group({"params": [twice, twice]})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rho": -0.05}, ValueError, "rho must be non-negative and finite, got -0.05"),
        ({"mu": 0}, ValueError, "mu must be positive and finite, got 0"),
        ({"clip_norm": 0.0}, ValueError, "clip_norm must be a positive number or None, got 0.0"),
        ({"phi": "hinge"}, ValueError, "phi must be"),
        ({"rh0": 0.1}, TypeError, "rh0"),
    ],
)
def test_invalid_options_are_refused_and_leave_the_base_optimizer_unchanged(options, error, message):
    model = mlp()
    base = sgd(model)
    before = base.state_dict()
    with pytest.raises(error, match=message):
        BiSAM(base, model, **options)
    assert base.state_dict() == before
    assert not base._optimizer_step_pre_hooks


def test_a_model_that_is_not_a_module_is_refused():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module or None, got list"):
        SAM(sgd(mlp()), [1])
    with pytest.raises(TypeError, match=r"got float. Options have names, such as rho=0.1"):
        SAM(sgd(mlp()), 0.1)


def test_rho_is_an_option_of_groups_and_not_an_attribute_of_the_optimizer():
    _, optimizer = build()
    with pytest.raises(AttributeError, match=r'rho is an option of the parameter groups.*group\["rho"\] = 0.2'):
        optimizer.rho = 0.2
    with pytest.raises(AttributeError, match=r'rho is an option of the parameter groups.*param_groups\[0\]\["rho"\]'):
        _ = optimizer.rho
    optimizer.param_groups[0]["rho"] = 0.2
    assert repr(optimizer).startswith("BiSAM(rho=0.2, adaptive=False")
    optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)], "rho": 0.0})
    assert repr(optimizer).startswith("BiSAM(rho=0.2 or 0.0, adaptive=False")


class Holder:
    """Wraps an optimizer as some frameworks do: its class is derived from the optimizer's, and it reads from it."""

    def __init__(self, optimizer):
        self.held, self.calls = optimizer, 0
        self.__class__ = type("Held", (Holder, type(optimizer)), {})

    def __getattr__(self, name):
        return getattr(self.held, name)

    def step(self, closure=None):
        self.calls += 1
        return self.held.step(closure)


def test_methods_called_on_an_object_that_wraps_the_optimizer_keep_their_state_in_the_optimizer():
    model, optimizer = build(every=2)
    other, plain = build(every=2)
    held = Holder(optimizer)
    x, y = batch()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(held, 0.9)  # it replaces held.step
    for chosen, used in ((held, model), (plain, other)):
        chosen.minimize(x, y)
        chosen.backward(closure_of(used, chosen, x, y))
        chosen.step()
        chosen.clip_norm = 0.1
        chosen.minimize(x, y)
        chosen.zero_grad()
    assert vars(held).keys() == {"held", "calls", "step"}
    assert held.calls == 1  # its own attributes stay its own
    assert "calls" not in vars(optimizer)
    assert optimizer.clip_norm == 0.1
    assert optimizer.state_dict()["sharpness"]["steps"] == 3
    assert_identical(tensors(model, optimizer), tensors(other, plain))
    scheduler.step()
    with pytest.raises(AttributeError, match="rho is an option of the parameter groups"):
        held.rho = 0.2


def test_an_option_of_groups_may_have_the_name_of_an_attribute_and_any_value():
    perturbation = bisam.perturbation.Ball()
    perturbation.defaults.update(start=[0.1, 0.9])
    model = mlp()
    optimizer = SharpnessAware(sgd(model), model, perturbation=perturbation, start=3)
    optimizer.start = 5
    assert optimizer.start == 5
    assert "start=[0.1, 0.9]" in repr(optimizer)


def test_a_step_between_ascend_and_descend_is_refused_also_without_a_closure():
    model, optimizer = build()
    perturb(model, optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) called between ascend\(\) and descend\(\)"):
        optimizer.step()


def test_minimize_is_refused_for_a_model_that_the_base_optimizer_does_not_train():
    model, other = mlp(), mlp()
    optimizer = BiSAM(sgd(other), model)
    with pytest.raises(RuntimeError, match="no gradients: the base optimizer has no parameter of the model"):
        optimizer.minimize(*batch())


@pytest.mark.parametrize(
    ("x", "y", "error", "message"),
    [
        (torch.randn(0, 6), torch.zeros(0, dtype=torch.long), ValueError, "the batch is empty"),
        (torch.randn(4, 6), torch.tensor([0, 1, 2, 4]), IndexError, "labels must lie in 0 … 3.*from 0 to 4"),
        (torch.randn(4, 6), torch.tensor([0.0, 1.0, 2.0, 3.0]), TypeError, r"float32 of shape \(4,\).*target.long\(\)"),
    ],
)
def test_invalid_batches_are_refused_and_leave_weights_and_state_unchanged(variant, x, y, error, message):
    model, optimizer = build(variant, net=mlp)
    optimizer.minimize(*batch())
    before = tensors(model, optimizer)
    with pytest.raises(error, match=message):
        optimizer.minimize(x, y)
    if variant in WITH_CLOSURE:
        with pytest.raises(error, match=message):
            optimizer.step(closure_of(model, optimizer, x, y))
    assert_identical(tensors(model, optimizer), before)
    optimizer.minimize(*batch())


def test_minimize_needs_the_model():
    model = mlp()
    with pytest.raises(RuntimeError, match=r"give it, as in SAM\(base, model\)"):
        SAM(sgd(model)).minimize(*batch())


def test_an_objective_that_returns_one_loss_per_sample_is_refused():
    _, optimizer = build(ascent=bisam.LowerBound(reduction="none"))
    with pytest.raises(ValueError, match=r"must return a scalar.*got shape \(16,\)"):
        optimizer.minimize(*batch())


def test_sharpness_aware_with_its_defaults_is_sam():
    model, optimizer = build("SAM")
    torch.manual_seed(0)
    bare = ConvNet()
    engine = SharpnessAware(BASES["SGD(foreach)"](bare.parameters()), bare)
    for seed in range(3):
        optimizer.minimize(*batch(seed))
        engine.minimize(*batch(seed))
    assert_identical(tensors(bare, engine), tensors(model, optimizer))


# Found by adversarial tests


def test_a_base_optimizer_with_an_option_called_rho_is_refused():
    model = mlp()
    with pytest.raises(ValueError, match=r"Adadelta has its own option rho, .*: use another base optimizer"):
        SAM(torch.optim.Adadelta(model.parameters()), model)


def test_a_base_optimizer_serves_one_wrapper_only():
    model = mlp()
    base = sgd(model)
    SAM(base, model)
    with pytest.raises(TypeError, match=r"base of a sharpness-aware optimizer already.*Build a new one"):
        bisam.ASAM(base, model)


def test_a_wrapper_that_is_dropped_is_freed_with_its_copy_of_the_weights():
    model, optimizer = build()
    base, watcher = optimizer.base, weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert watcher() is None
    nn.functional.cross_entropy(model(batch()[0]), batch()[1]).backward()
    base.step()


def test_a_copy_made_with_a_scheduler_attached_steps_independently():
    model, optimizer = build(net=mlp)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_post_hook(lambda *_: None)
    optimizer.minimize(*batch())
    scheduler.step()
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    before = tensors(model, optimizer)
    twin_optimizer.minimize(*batch())
    assert_identical(tensors(model, optimizer), before)
    pickle.dumps((twin, twin_optimizer))


def test_step_hooks_run_around_minimize_too():
    _, optimizer = build(net=mlp)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.minimize(*batch())
    assert calls == [1]


def test_the_ascent_is_the_lower_bound_by_default_and_phi_cannot_be_given_with_an_ascent():
    assert isinstance(build("BiSAM(log)", ascent=None)[1].criterion.ascent, bisam.LowerBound)
    with pytest.raises(ValueError, match="or an ascent of your own, not both: got phi='tanh'"):
        build("BiSAM(tanh)", ascent=bisam.CrossEntropy())


@pytest.mark.parametrize("ignore_index", [255, 0])
def test_the_ascent_has_the_ignore_index_and_class_weights_of_the_descent(ignore_index):
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    descent = nn.CrossEntropyLoss(ignore_index=ignore_index, weight=weight)
    model, optimizer = build(net=mlp, descent=descent)
    x, y = batch()
    padded = y.clone()
    padded[::3] = ignore_index
    counted = padded != ignore_index
    expected = bisam.lower_bound(model(x)[counted], y[counted], weight=weight)
    optimizer.minimize(x, padded)
    torch.testing.assert_close(optimizer.telemetry.ascent, expected.detach())


def test_options_of_the_wrong_type_are_refused_at_construction():
    for options, message in (
        ({"ascent": "log"}, "ascent must be an objective to call.*got 'log'"),
        ({"autocast": True}, "autocast must be torch.bfloat16, torch.float16 or None, got True"),
        ({"scaler": True}, "scaler must be a torch.amp.GradScaler or None, got True"),
        ({"rho": None}, "rho must be a number, got None"),
    ):
        with pytest.raises(TypeError, match=message):
            build("SAM", **options)
    with pytest.raises(ValueError, match=r"rho must be a number or a tensor with no dimensions, got \(1,\)"):
        build("SAM", rho=torch.tensor([0.05]))


def test_same_dropout_is_refused_for_passes_by_hand():
    model, optimizer = build(same_dropout=True)
    with pytest.raises(RuntimeError, match=r"same_dropout has something to do before the first pass"):
        perturb(model, optimizer)
    assert not optimizer.perturbed


FUNCTIONS = {
    "cross_entropy": F.cross_entropy,
    "sum": partial(F.cross_entropy, reduction="sum"),
    "ignores": partial(F.cross_entropy, ignore_index=0),
    "module": partial(nn.CrossEntropyLoss(reduction="sum")),
    "weighs": partial(F.cross_entropy, weight=torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parts_add_up_to_the_whole_batch_with_loss_functions_as_with_modules(name):
    x, y = batch()
    y[:7] = -100 if name != "ignores" else 0
    losses, results = [], []
    for pieces in (1, 4):
        model, optimizer = build("SAM", net=mlp, descent=FUNCTIONS[name], dtype=torch.float64)
        losses.append(optimizer.minimize(x.double(), y, accumulate=pieces))
        results.append(tensors(model, optimizer))
    torch.testing.assert_close(*losses)
    assert_close(*results, 1e-12)


def test_the_lower_bound_has_the_ignore_index_and_class_weights_of_a_loss_function():
    x, y = batch()
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    model, optimizer = build("BiSAM(log)", net=mlp, descent=partial(F.cross_entropy, ignore_index=0, weight=weight))
    expected = bisam.lower_bound(model(x), y, ignore_index=0, weight=weight).detach()
    optimizer.minimize(x, y)
    torch.testing.assert_close(optimizer.telemetry.ascent, expected)
    assert optimizer.telemetry.error is not None


def test_samples_are_chosen_by_a_loss_function_as_by_a_module():
    results = []
    for descent in (F.cross_entropy, nn.CrossEntropyLoss(), partial(nn.CrossEntropyLoss())):
        model, optimizer = build("ESAM", net=mlp, descent=descent)
        for seed in range(3):
            optimizer.minimize(*batch(seed))
        results.append(tensors(model, optimizer))
    assert_identical(results[0], results[1])
    assert_identical(results[1], results[2])


# Other outputs, targets and inputs


def test_outputs_and_targets_that_are_not_tensors_are_refused():
    x, y = batch()
    _, optimizer = build(net=mlp)
    for other in (y.tolist(), None, y.numpy(), (y, y)):
        with pytest.raises(TypeError, match=r"y must be a tensor of targets, got .*step\(closure\)"):
            optimizer.minimize(x, other)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x), x

    _, optimizer = build(net=Pair)
    with pytest.raises(TypeError, match="logits must be a tensor, got tuple"):
        optimizer.minimize(x, y)


def test_a_packed_sequence_trains_whole_and_cannot_be_cut_into_parts():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(6, 5), nn.Linear(5, 4)

        def forward(self, sequences):
            return self.head(self.rnn(sequences)[1][0])

    model, optimizer = build(net=Recurrent)
    lengths = torch.tensor([3, 2, 2, 1])
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 4, 6), lengths)
    y = torch.tensor([0, 1, 2, 3])
    expected = F.cross_entropy(model(packed), y).item()
    assert optimizer.minimize(packed, y).item() == pytest.approx(expected)
    with pytest.raises(TypeError, match="a PackedSequence cannot be cut into parts"):
        optimizer.minimize(packed, y, accumulate=2)
    _, choosing = build("KSAM", net=Recurrent)
    with pytest.raises(TypeError, match="a PackedSequence cannot be cut into parts"):
        choosing.minimize(packed, y)
    assert bisam.diagnostics.sharpness(model, (packed, y), rho=0.05).error is not None


def test_sparse_inputs_train_whole_and_cannot_be_cut_into_parts():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x.to_dense())

    _, optimizer = build(net=Dense)
    x, y = batch()
    optimizer.minimize(x.to_sparse(), y)
    with pytest.raises(TypeError, match=r"cannot be cut into parts.*must be dense, not sparse.*list of closures"):
        optimizer.minimize(x.to_sparse(), y, accumulate=2)


# After a failure or a change from outside


def test_a_perturbation_that_fails_half_way_leaves_the_weights_unchanged():
    """An adaptive ball works in the storage of the weights; here it fails at complex weights, after the real ones."""
    model = nn.ParameterList([torch.randn(3), torch.randn(3, dtype=torch.complex64)])
    optimizer = bisam.ASAM(sgd(model))
    before = [p.detach().clone() for p in model]
    (model[0].sum() + model[1].abs().sum()).backward()
    with pytest.raises(TypeError, match="not defined for complex parameters"):
        optimizer.ascend()
    assert not optimizer.perturbed
    assert all(torch.equal(p, b) for p, b in zip(model, before, strict=True))


def test_a_group_added_to_the_base_is_perturbed_with_the_options_of_the_others():
    model = mlp()
    optimizer = SAM(torch.optim.SGD(model[0].parameters(), lr=0.1), model, rho=0.5)
    optimizer.base.add_param_group({"params": model[2].parameters()})
    before = [p.detach().clone() for p in model.parameters()]
    perturb(model, optimizer)
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-5)
    assert not torch.equal(model[2].weight, before[2])


def test_a_step_in_inference_mode_is_refused_and_the_next_step_is_unaffected(variant):
    model, optimizer = build(variant)
    twin, twin_optimizer = build(variant)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"step\(\) needs gradients.*leave that first"):
        optimizer.minimize(*batch())
    for each in (optimizer, twin_optimizer):
        each.minimize(*batch())
    assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))


def test_random_numbers_do_not_depend_on_the_default_device(variant):
    model, optimizer = build(variant)
    twin, twin_optimizer = build(variant)
    x, y = batch()
    with torch.device("meta"):  # as "cuda" would be on a machine that has it
        optimizer.minimize(x, y)
    twin_optimizer.minimize(x, y)
    assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))


class Shared(nn.Module):
    """A buffer that is a weight's own memory."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 4)
        self.register_buffer("seen", self.head.weight.data)

    def forward(self, x):
        return self.head(x)


@pytest.mark.parametrize("variant_name", ["SAM", "RSAM"])
def test_weights_are_restored_also_where_a_buffer_shares_their_memory(variant_name):
    model = Shared()
    optimizer = VARIANTS[variant_name](torch.optim.SGD(model.parameters(), lr=0.0), model)
    before = model.head.weight.detach().clone()
    optimizer.minimize(*batch())
    assert_identical([model.head.weight.detach()], [before])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda base: bisam.FriendlySAM(base, sigma=float("nan")), "sigma must be non-negative and finite, got nan"),
        (lambda base: bisam.FriendlySAM(base, sigma="a"), "sigma must be a number, got 'a'"),
        (lambda base: bisam.GSAM(base, alpha=float("inf")), "alpha must be non-negative and finite, got inf"),
        (lambda base: SAM(base, every=True), "every must be a whole number of steps, at least 1, got True"),
    ],
)
def test_option_values_that_are_not_valid_numbers_are_refused(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make(sgd(mlp()))
