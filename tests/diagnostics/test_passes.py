"""Passes over data: batches add up, progress is reported, and the model is restored."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import bisam
from bisam import diagnostics
from bisam.diagnostics import hessian_eigenvalues, sharpness, surface
from bisam.diagnostics.tally import is_classification

from diagnosed import every_call
from family import ConvNet, batch, mlp


def numbers(measured):
    """All numbers in a result, flat."""
    if isinstance(measured, (diagnostics.Sharpness, diagnostics.Surface)):
        measured = list(vars(measured).values())
    if isinstance(measured, (list, tuple)):
        return [number for part in measured for number in numbers(part)]
    assert measured is None or type(measured) in (int, float)
    return [] if measured is None else [measured]


def state_of(model):
    """Everything that must be restored, bit for bit."""
    return (
        {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        [(p, p.requires_grad, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        [module.training for module in model.modules()],
        torch.get_rng_state(),
    )


def assert_unchanged(before, after):
    for (name, a), b in zip(before[0].items(), after[0].values(), strict=True):
        assert torch.equal(a, b), name
    for (p, requires, grad, value), (q, requires_now, grad_now, value_now) in zip(before[1], after[1], strict=True):
        assert p is q
        assert requires == requires_now
        assert grad is grad_now
        assert value is None or torch.equal(value, value_now)
    assert before[2] == after[2]
    assert torch.equal(before[3], after[3])


def used_net():
    """Batch statistics, dropout, a frozen parameter, mixed modes, gradients of an earlier pass, and a negative zero."""
    model = ConvNet(dropout=0.5)
    model.train()
    nn.functional.cross_entropy(model(batch()[0]), batch()[1]).backward()
    model.norm.weight.requires_grad_(False)
    model.norm.eval()
    model.head.weight.data[0, 0] = -0.0
    return model


# Data.


@every_call
@pytest.mark.parametrize("ignoring", [False, True])
def test_several_batches_equal_one_large_one(call, ignoring):
    model, (x, y) = mlp().double(), batch(size=20, dtype=torch.float64)
    if ignoring:
        y = y.masked_fill(torch.arange(20) < 9, -100)  # all of the first part
    parts = [(x[:7], y[:7]), (x[7:8], y[7:8]), (x[8:], y[8:])]
    objective = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
    whole, apart = [call(model, data, objective=objective) for data in ((x, y), parts)]
    assert numbers(apart) == pytest.approx(numbers(whole), rel=1e-7, abs=1e-9)


def test_errors_and_flips_exclude_ignored_samples():
    model, (x, y) = mlp().double(), batch(size=40, dtype=torch.float64)
    ignored = y.masked_fill(torch.arange(40) % 3 == 0, -100)
    kept = ignored != -100
    some, all_of_them = sharpness(model, (x, ignored), 1.0), sharpness(model, (x[kept], y[kept]), 1.0)
    assert numbers(some) == pytest.approx(numbers(all_of_them))
    assert some.flips > 0 < some.error < some.perturbed_error


def test_with_a_summed_loss_sharpness_and_eigenvalues_are_sums_over_all_batches():
    model, (x, y) = mlp().double(), batch(dtype=torch.float64)
    summed, mean = nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss()
    parts = [(x[:5], y[:5]), (x[5:], y[5:])]
    assert sharpness(model, parts, 0.1, objective=summed).value == pytest.approx(
        16 * sharpness(model, parts, 0.1, objective=mean).value
    )
    assert hessian_eigenvalues(model, parts, objective=summed) == pytest.approx(
        [16 * v for v in hessian_eigenvalues(model, parts)]
    )


def test_a_shuffled_loader_gives_the_same_numbers_as_its_batches():
    model, (x, y) = mlp().double(), batch(size=32, dtype=torch.float64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5, shuffle=True)
    assert numbers(sharpness(model, loader, 0.5)) == pytest.approx(numbers(sharpness(model, (x, y), 0.5)), rel=1e-9)


def test_data_whose_order_changes_between_passes_are_refused():
    x, y = batch(size=32)
    generator = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 8, shuffle=True, generator=generator)
    with pytest.raises(ValueError, match="another order"):
        sharpness(mlp(), loader, 0.5)


def test_inputs_may_be_tuples_or_dicts_and_outputs_may_have_logits():
    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, left, right):
            return Output(self.net(left + right))

    model, (x, y) = Two(), batch()
    expected = sharpness(model.net, (x, y), 0.1)
    assert sharpness(model, ((x / 2, x / 2), y), 0.1) == expected
    assert sharpness(model, [({"left": x / 2, "right": x / 2}, y)], 0.1) == expected


@pytest.mark.parametrize(("row", "are_labels"), [([0.5, 0.495], True), ([0.5, 0.45], False), ([1.5, -0.5], False)])
def test_targets_are_probabilities_if_they_are_not_negative_and_sum_to_one(row, are_labels):
    logits, target = torch.randn(3, 2), torch.tensor([row] * 3)
    assert is_classification([nn.CrossEntropyLoss()], logits, target) == are_labels


def test_probabilities_count_as_labels_and_a_regression_has_no_errors():
    model, (x, y) = mlp(), batch()
    soft = nn.functional.one_hot(y, 4).float() * 0.8 + 0.05
    assert sharpness(model, (x, soft), 1.0).error == sharpness(model, (x, y), 1.0).error
    measured = sharpness(model, (x, torch.randn(16, 4)), 1.0, objective=nn.MSELoss())
    assert measured.error is None
    assert measured.value > 0
    assert surface(model, (x, torch.randn(16, 4)), points=2, objective=nn.MSELoss()).errors is None


@every_call
def test_recurrent_nets_are_evaluated_and_differentiated_on_the_models_device(call, device):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent, self.head = nn.LSTM(1, 5, batch_first=True), nn.Linear(5, 4)

        def forward(self, x):
            return self.head(self.recurrent(x.unsqueeze(2))[0][:, -1])

    model = Recurrent().double()
    expected = numbers(call(model, batch(dtype=torch.float64)))
    assert numbers(call(model.to(device), batch(dtype=torch.float64))) == pytest.approx(expected, rel=1e-6)


@every_call
@pytest.mark.parametrize("sized", [True, False])
def test_progress_increases_up_to_its_total(call, sized):
    class Unsized:
        def __iter__(self):
            return iter([batch(0), batch(1)])

    seen = []
    call(mlp(), [batch(0), batch(1)] if sized else Unsized(), progress=lambda *counts: seen.append(counts))
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(set(done))
    assert set(totals) == {done[-1]}


def test_a_parameter_that_the_loss_does_not_use_changes_no_result():
    class Idle(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net, self.idle = net, nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            return self.net(x)

    net, data = mlp().double(), batch(dtype=torch.float64)
    for steps in (1, 3):
        ours, theirs = (sharpness(model, data, 0.3, steps=steps) for model in (Idle(net), net))
        assert numbers(ours) == pytest.approx(numbers(theirs))
    ours, theirs = (hessian_eigenvalues(model, data, 2, tolerance=1e-8) for model in (Idle(net), net))
    assert ours == pytest.approx(theirs)


# What is restored.


@every_call
@pytest.mark.parametrize("train_mode", [False, True])
def test_the_model_is_restored_bit_for_bit(call, train_mode):
    model = used_net()
    before = state_of(model)
    call(model, [batch(0), batch(1)], train_mode=train_mode)
    assert_unchanged(before, state_of(model))
    assert torch.signbit(model.head.weight[0, 0])


@every_call
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_the_model_is_restored_after_an_exception(call, calls):
    model, left = used_net(), calls

    def objective(output, target):
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return nn.functional.cross_entropy(output, target)

    before = state_of(model)
    with pytest.raises(KeyboardInterrupt):
        call(model, [batch(0), batch(1)], objective=objective, train_mode=True)
    assert_unchanged(before, state_of(model))


@every_call
def test_a_backward_pass_works_after_a_call_between_it_and_its_forward_pass(call):
    model, (x, y) = mlp(), batch()
    loss = nn.functional.cross_entropy(model(x), y)
    expected = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    with torch.no_grad():  # as an evaluation would
        call(model, (x, y))
    loss.backward()
    for param, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad, gradient)


@every_call
def test_the_same_call_gives_the_same_numbers(call):
    model = used_net()
    assert numbers(call(model, batch(), train_mode=True)) == numbers(call(model, batch(), train_mode=True))


@every_call
def test_evaluation_is_the_default_of_every_call(call):
    model, data = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double(), batch(size=64, dtype=torch.float64)
    evaluated, trained = (call(model, data, train_mode=train_mode) for train_mode in (False, True))
    assert numbers(call(model, data)) == numbers(evaluated) != numbers(trained)


def test_evaluation_is_the_default_and_train_mode_has_batch_statistics():
    model, (x, y) = ConvNet(), batch()
    evaluated, trained = sharpness(model, (x, y), 0.1), sharpness(model, (x, y), 0.1, train_mode=True)
    assert trained.loss == pytest.approx(nn.functional.cross_entropy(model.train()(x), y).item(), rel=1e-6)
    assert evaluated.loss != trained.loss


def test_an_optimizers_criterion_may_be_the_objective_and_its_telemetry_is_unchanged():
    model, (x, y) = mlp(), batch()
    optimizer = bisam.BiSAM(torch.optim.SGD(model.parameters(), lr=0.0), model, rho=0.1)
    optimizer.minimize(x, y)
    flips_of_step, telemetry = optimizer.telemetry.flips.item(), optimizer.telemetry
    measured = sharpness(model, (x, y), 0.1, objective=optimizer.criterion, ascent=optimizer.criterion)
    assert measured == sharpness(model, (x, y), 0.1, ascent=bisam.LowerBound())
    assert optimizer.telemetry is telemetry
    assert telemetry.flips.item() == flips_of_step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_weights_are_restored_and_warn_that_small_perturbations_are_lost(dtype):
    model, (x, y) = mlp().to(dtype), batch(dtype=dtype)
    before = state_of(model)
    coarse = pytest.warns(UserWarning, match=r"in torch.bfloat16.*small perturbations are lost")
    with nullcontext() if dtype is torch.float32 else coarse:
        measured = sharpness(model, (x, y), 0.5, objective=lambda z, y: nn.functional.cross_entropy(z.float(), y))
    assert measured.value > 0
    assert measured.norm == pytest.approx(0.5, rel=1e-6)
    assert_unchanged(before, state_of(model))


@pytest.mark.parametrize(
    "call", [diagnostics.average_sharpness, diagnostics.hessian_trace, hessian_eigenvalues, surface]
)
def test_directions_are_drawn_on_the_cpu_whatever_the_default_device(call):
    model, data = mlp(), batch()
    arguments = [0.1] if call is diagnostics.average_sharpness else []
    expected = numbers(call(model, data, *arguments))
    with torch.device("meta"):  # stands for a GPU: a draw there would fail
        assert numbers(call(model, data, *arguments)) == expected


@every_call
def test_autocast_around_a_call_gives_the_results_of_autocast_inside_of_the_model(call):
    class Inside(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x).float()

    model, data = mlp(), batch()
    expected = call(Inside(model), data)
    with torch.autocast("cpu", torch.bfloat16):
        found = call(model, data)
        after = model(data[0])
    assert numbers(found) == pytest.approx(numbers(expected), rel=1e-3, abs=1e-4)
    with torch.autocast("cpu", torch.bfloat16):  # a fresh cache
        assert torch.equal(after, model(data[0]))
