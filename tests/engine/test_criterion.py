from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bisam

from family import CLASSES, ConvNet, assert_close, batch, build, closure_of, mlp, weights_of


def test_the_criterion_is_the_ascent_loss_in_the_first_pass_and_the_descent_loss_in_the_second():
    model, optimizer = build("BiSAM(tanh)", net=mlp)
    x, y = batch()
    seen = {}

    def closure():
        loss = optimizer.criterion(model(x), y)
        seen[optimizer.phase] = (
            loss.detach(),
            bisam.lower_bound(model(x), y, phi="tanh"),
            F.cross_entropy(model(x), y),
        )
        loss.backward()

    optimizer.step(closure)
    assert torch.equal(seen["ascent"][0], seen["ascent"][1])
    assert torch.equal(seen["descent"][0], seen["descent"][2])


def test_under_no_grad_the_criterion_is_the_descent_loss_and_is_not_observed():
    model, optimizer = build(net=mlp)
    x, y = batch()
    optimizer.minimize(x, y)
    before = optimizer.telemetry.as_dict()
    with torch.no_grad():
        assert torch.equal(optimizer.criterion(model(x), y), F.cross_entropy(model(x), y))
    assert optimizer.telemetry.as_dict() == before


@pytest.mark.parametrize("form", ["step", "by hand"])
def test_telemetry_agrees_with_a_count_by_hand(plain_variant, form):
    model, optimizer = build(plain_variant, net=mlp, rho=1.0)
    x, y = batch(size=64)
    logits = {}
    model.register_forward_hook(lambda _, __, output: logits.update({optimizer.phase: output.detach()}))
    if form == "step":
        optimizer.step(closure_of(model, optimizer, x, y))
    else:
        optimizer.criterion(model(x), y).backward()
        optimizer.ascend()
        optimizer.criterion(model(x), y).backward()
        optimizer.descend()
    up, down = logits["ascent"], logits["descent"]
    right, right_after = up.argmax(1) == y, down.argmax(1) == y
    ours = optimizer.telemetry
    torch.testing.assert_close(ours.loss, F.cross_entropy(up, y))
    torch.testing.assert_close(ours.perturbed_loss, F.cross_entropy(down, y))
    torch.testing.assert_close(ours.surrogate_gap, F.cross_entropy(down, y) - F.cross_entropy(up, y))
    torch.testing.assert_close(ours.error, (~right).float().mean())
    torch.testing.assert_close(ours.perturbed_error, (~right_after).float().mean())
    assert ours.flips.item() == sum(a and not b for a, b in zip(right.tolist(), right_after.tolist(), strict=True)) > 0
    ascent = optimizer.criterion.ascent
    torch.testing.assert_close(ours.ascent, ascent(up, y))
    if isinstance(ascent, bisam.LowerBound):
        torch.testing.assert_close(ours.bound, ascent.bound(up, y))
        assert ours.bound <= ours.error
    else:
        assert ours.bound is None


def test_telemetry_excludes_ignored_labels():
    _, optimizer = build(net=mlp, rho=1.0)
    x, y = batch(size=64)
    optimizer.minimize(x[:32], y[:32])
    expected = {name: value.clone() for name, value in optimizer.telemetry.as_dict().items()}
    _, optimizer = build(net=mlp, rho=1.0)
    padded = y.clone()
    padded[32:] = -100
    optimizer.minimize(x, padded)
    torch.testing.assert_close(optimizer.telemetry.as_dict(), expected)


def test_the_next_step_does_not_change_the_telemetry_of_the_last_one():
    _, optimizer = build(net=mlp)
    assert optimizer.telemetry.as_dict() == {}
    optimizer.minimize(*batch(0))
    first = optimizer.telemetry
    loss = first.loss.clone()
    optimizer.minimize(*batch(1))
    assert torch.equal(first.loss, loss)
    assert not torch.equal(optimizer.telemetry.loss, loss)


def test_telemetry_starts_over_after_an_abandoned_step():
    model, optimizer = build(net=mlp)
    x, y = batch()
    for abandon in (True, False):
        optimizer.criterion(model(x), y).backward()
        optimizer.ascend()
        optimizer.criterion(model(x), y).backward()
        optimizer.restore() if abandon else optimizer.descend()
        optimizer.zero_grad()
    assert len(optimizer.telemetry._at_weights) == len(optimizer.telemetry._at_perturbed) == 1


def test_micro_batches_by_hand_add_up_to_the_batch():
    model, optimizer = build(net=mlp, rho=1.0)
    whole, whole_optimizer = build(net=mlp, rho=1.0)
    x, y = batch(size=64)
    for move in (optimizer.ascend, optimizer.descend):
        for part in zip(x.chunk(4), y.chunk(4), strict=True):
            (optimizer.criterion(model(part[0]), part[1]) / 4).backward()
        move()
    whole_optimizer.minimize(x, y)
    torch.testing.assert_close(optimizer.telemetry.as_dict(), whole_optimizer.telemetry.as_dict())
    torch.testing.assert_close(list(model.parameters()), list(whole.parameters()))


def test_a_step_without_perturbation_reports_its_loss_and_error_only():
    _, optimizer = build(net=mlp, rho=0.0)
    optimizer.minimize(*batch())
    assert optimizer.telemetry.as_dict().keys() == {"loss", "error"}


def test_telemetry_holds_no_logits_and_no_graph():
    """Small masks and scalars only: logits of a language model are larger than its weights."""
    model, optimizer = build(net=ConvNet)
    x, y = batch(size=64)
    optimizer.step(closure_of(model, optimizer, x, y))
    for observation in optimizer.telemetry._at_weights + optimizer.telemetry._at_perturbed:
        held = [v for v in vars(observation).values() if isinstance(v, torch.Tensor) and v is not y]
        assert all(not v.requires_grad and v.nbytes <= 64 * 8 for v in held)


def test_telemetry_holds_no_soft_labels():
    _, optimizer = build("SAM", net=mlp)
    x, y = batch()
    optimizer.minimize(x, F.one_hot(y, 4).float())
    seen = [*optimizer.telemetry._at_weights, *optimizer.telemetry._at_perturbed]
    assert [observation.target for observation in seen] == [None, None]


def test_label_smoothing_applies_to_the_descent_only():
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    model, optimizer = build(net=mlp, descent=smooth)
    x, y = batch()
    expected, q = smooth(model(x), y).detach(), bisam.lower_bound(model(x), y).detach()
    assert torch.equal(optimizer.minimize(x, y), expected)
    assert torch.equal(optimizer.telemetry.ascent, q)


def test_a_part_in_which_every_label_is_ignored_does_not_count():
    x, y = batch()
    y[:4] = -100
    results = []
    for accumulate in (1, 4):
        _, optimizer = build(net=mlp)
        loss = optimizer.minimize(x, y, accumulate=accumulate)
        results.append({"returned": loss, **optimizer.telemetry.as_dict()})
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_parts_with_class_weights_or_sums_merge_to_the_whole(reduction):
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    descent = nn.CrossEntropyLoss(weight=weight, reduction=reduction)
    ascent = bisam.LowerBound(reduction="mean")
    results = []
    for accumulate in (1, 4):
        _, optimizer = build(net=mlp, descent=descent, ascent=ascent)
        loss = optimizer.minimize(*batch(), accumulate=accumulate)
        results.append({"returned": loss, **optimizer.telemetry.as_dict()})
    torch.testing.assert_close(*results)
    assert "bound" in results[0]


def test_no_bound_is_reported_if_the_ascent_has_class_weights_of_its_own():
    _, optimizer = build(net=mlp, ascent=bisam.LowerBound(weight=torch.tensor([100.0, 1.0, 1.0, 1.0]), mu=20))
    optimizer.minimize(*batch())
    assert optimizer.telemetry.bound is None


def test_telemetry_is_unaffected_by_a_closure_that_changes_its_loss_in_place():
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()
    expected = F.cross_entropy(model(x), y).detach()

    def closure():
        loss = optimizer.criterion(model(x), y)
        loss /= 4
        loss.backward()
        return loss

    assert torch.equal(optimizer.step(closure), expected / 4)  # its own value, as it returned it
    assert torch.equal(optimizer.telemetry.loss, expected)


def test_telemetry_is_unaffected_by_refilling_the_label_tensor():
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()
    y[:6] = -100  # so that the halves do not count alike
    labels = torch.empty(8, dtype=torch.long)
    expected = F.cross_entropy(model(x), y).item()

    def closure(half):
        labels.copy_(y[half])
        return closure_of(model, optimizer, x[half], labels)()

    optimizer.step([partial(closure, half) for half in (slice(8), slice(8, 16))])
    labels.fill_(-100)
    assert optimizer.telemetry.loss.item() == pytest.approx(expected, rel=1e-6)


def test_criterion_calls_before_a_step_are_excluded_from_its_telemetry():
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()
    expected = F.cross_entropy(model(x), y).item()
    optimizer.criterion(model(batch(5)[0]), batch(5)[1])
    optimizer.minimize(x, y)
    assert optimizer.telemetry.loss.item() == pytest.approx(expected, rel=1e-6)


def test_a_step_by_hand_without_the_criterion_starts_new_telemetry():
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()
    optimizer.minimize(x, y)
    held = optimizer.telemetry
    norm = held.ascent_norm.clone()
    optimizer.zero_grad()
    (10 * F.cross_entropy(model(x), y)).backward()
    optimizer.ascend()
    optimizer.restore()
    assert torch.equal(held.ascent_norm, norm)
    assert optimizer.telemetry is not held
    assert optimizer.telemetry.loss is None


def test_integer_targets_of_another_task_are_not_taken_for_classes():
    """A language model's shifted loss: logits (N, T, K), labels (N, T)."""

    def shifted(logits, tokens):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    optimizer = bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model, descent=shifted)
    tokens = torch.randint(50, (4, 7))
    optimizer.minimize(tokens, tokens)
    assert optimizer.telemetry.surrogate_gap > 0
    assert optimizer.telemetry.error is None


def test_a_step_returns_the_value_of_a_closure_with_several_terms():
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()

    def closure():
        loss = optimizer.criterion(model(x), y) + 0.1 * optimizer.criterion(model(-x), y)
        loss.backward()
        return loss

    with torch.no_grad():
        expected = F.cross_entropy(model(x), y) + 0.1 * F.cross_entropy(model(-x), y)
    assert torch.equal(optimizer.step(closure), expected)


@pytest.mark.parametrize("name", ["SAM", "BiSAM(tanh)"])
def test_for_a_loss_of_several_terms_only_the_ascent_norm_is_reported(name):
    """Mixup by two labels: only the closure has the weights of the terms."""
    model, optimizer = build(name, net=mlp)
    x, y = batch()
    other = y.roll(1)

    def closure():
        optimizer.zero_grad()
        logits = model(x)
        loss = 0.9 * optimizer.criterion(logits, y) + 0.1 * optimizer.criterion(logits, other)
        loss.backward()
        return loss

    with torch.no_grad():
        ascent = optimizer.criterion.ascent
        expected = 0.9 * ascent(model(x), y) + 0.1 * ascent(model(x), other)
    assert torch.equal(optimizer.step(closure), expected)
    assert optimizer.telemetry.as_dict().keys() == {"ascent_norm"}
    optimizer.step(closure_of(model, optimizer, x, y))
    assert optimizer.telemetry.loss is not None


@pytest.mark.parametrize("name", ["SAM", "BiSAM(log)"])
def test_summed_losses_of_a_list_of_closures_add_up_to_the_batch(name):
    results = []
    for form in ("whole", "parts", "list"):
        model, optimizer = build(name, net=mlp, dtype=torch.float64, descent=nn.CrossEntropyLoss(reduction="sum"))
        x, y = batch(dtype=torch.float64)
        if form == "list":
            parts = zip(x.split(5), y.split(5), strict=True)
            loss = optimizer.step([closure_of(model, optimizer, *part) for part in parts])
        else:
            loss = optimizer.minimize(x, y, accumulate=1 if form == "whole" else 4)
        results.append([loss, *optimizer.telemetry.as_dict().values(), *model.parameters()])
    assert_close(results[0], results[1], 1e-12)
    assert_close(results[0], results[2], 1e-12)


@pytest.mark.parametrize(
    ("descent", "mean"),
    [
        (nn.CrossEntropyLoss(), lambda z, y: F.cross_entropy(z, y, reduction="none")),
        (nn.MSELoss(), F.mse_loss),
        (nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits),
        (lambda z, y: F.cross_entropy(z, y.argmax(1)), lambda z, y: F.cross_entropy(z, y.argmax(1), reduction="none")),
    ],
)
def test_closures_with_sequences_of_different_lengths_are_weighted_by_their_positions(descent, mean):
    """Floating-point targets (N, K, length). The loss of the list is the mean over all positions."""
    torch.manual_seed(0)
    model = nn.Conv1d(3, 4, 1).double()
    optimizer = bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model, rho=0.0, descent=descent)
    data = [(torch.randn(2, 3, n).double(), torch.randn(2, 4, n).double().softmax(1)) for n in (5, 20)]
    whole = torch.cat([mean(model(x), y).expand_as(y[:, 0]).flatten() for x, y in data]).mean()
    expected = torch.autograd.grad(whole, [*model.parameters()])
    loss = optimizer.step([closure_of(model, optimizer, x, y) for x, y in data])
    assert_close([p.grad for p in model.parameters()], expected, 1e-12)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-12)


def test_a_mean_over_samples_is_weighted_by_samples():
    torch.manual_seed(0)
    model = nn.Conv1d(3, 4, 1).double()
    descent = nn.KLDivLoss(reduction="batchmean")
    optimizer = bisam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model, rho=0.0, descent=descent)
    shapes = [(2, 9), (4, 3)]
    data = [(torch.randn(n, 3, m).double(), torch.randn(n, 4, m).double().softmax(1)) for n, m in shapes]
    whole = sum(F.kl_div(model(x), y, reduction="sum") for x, y in data) / 6
    expected = torch.autograd.grad(whole, [*model.parameters()])
    optimizer.step([closure_of(model, optimizer, x, y) for x, y in data])
    assert_close([p.grad for p in model.parameters()], expected, 1e-12)


def test_a_bilevel_step_needs_its_criterion():
    """With cross entropy in both passes it would be SAM. Reading the phase, as a logger may, changes nothing."""
    model, optimizer = build("BiSAM(log)", net=mlp)
    x, y = batch()
    weights = [p.detach().clone() for p in model.parameters()]

    def closure():
        assert optimizer.phase in ("ascent", "descent")
        assert optimizer.perturbed == (optimizer.phase == "descent")
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"BiSAM needs two losses.*optimizer.criterion.*optimizer.phase.*SAM"):
            optimizer.step(closure)
        assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
        assert all(p.grad is None for p in model.parameters())

    for _ in range(2):
        closure()
        with pytest.warns(UserWarning, match=r"did not call BiSAM's criterion.*optimizer.criterion"):
            optimizer.ascend()
        optimizer.restore()


@pytest.mark.parametrize(
    "ascends",
    [
        lambda optimizer: optimizer.phase == "ascent",
        lambda optimizer: optimizer.criterion.phase == "ascent",
        lambda optimizer: not optimizer.perturbed,
    ],
)
def test_a_closure_may_compute_both_losses_by_itself_with_sam(ascends):
    model, optimizer = build("SAM", net=mlp)
    twin, twin_optimizer = build("BiSAM(log)", net=mlp)
    x, y = batch()

    def closure():
        loss = (bisam.lower_bound if ascends(optimizer) else F.cross_entropy)(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        twin_optimizer.step(closure_of(twin, twin_optimizer, x, y))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_parts_with_a_backward_call_each_in_one_closure_add_up_to_the_batch():
    x, y = batch()
    reported = []
    for pieces in (1, 4):
        model, optimizer = build("BiSAM(log)", net=mlp, dtype=torch.float64)

        def closure(model=model, optimizer=optimizer, pieces=pieces):
            optimizer.zero_grad()
            for a, b in zip(x.double().chunk(pieces), y.chunk(pieces), strict=True):
                (optimizer.criterion(model(a), b) / pieces).backward()

        loss = optimizer.step(closure)
        reported.append({**optimizer.telemetry.as_dict(), "returned": loss})
    assert reported[0].keys() == reported[1].keys()
    assert "flips" in reported[0]
    torch.testing.assert_close(*reported, check_dtype=False)


def test_for_soft_labels_an_error_but_no_bound_is_reported():
    _, optimizer = build("BiSAM(tanh)", net=mlp)
    x, _ = batch()
    optimizer.minimize(x, torch.rand(16, 4).softmax(1))
    assert optimizer.telemetry.error is not None
    assert optimizer.telemetry.bound is None


@pytest.mark.parametrize(
    "descent",
    [
        nn.BCEWithLogitsLoss(),
        F.binary_cross_entropy_with_logits,
        partial(F.mse_loss),
        nn.MultiLabelSoftMarginLoss(),
    ],
)
@pytest.mark.parametrize("name", ["BiSAM(log)", "EBiSAM(tanh)", "GSAM(log)"])
def test_q_is_refused_where_a_sample_has_no_single_label(descent, name):
    x, y = batch()
    one_hot = F.one_hot(y, 4).float()
    if name != "EBiSAM(tanh)":  # which chooses by losses that have a value for each sample
        _, optimizer = build(name, net=mlp, descent=descent)
        optimizer.minimize(x, 0.9 * one_hot + 0.1 * one_hot.roll(1, 0))  # such as mixup, for any loss
    _, optimizer = build(name, net=mlp, descent=descent)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"one label for each sample.*shape \(16, 4\).*two logits"):
            optimizer.minimize(x, one_hot + one_hot.roll(1, 0))


def test_q_is_refused_in_vectorized_micro_batches_too():
    x, y = batch()
    _, optimizer = build("BiSAM(log)", net=mlp, descent=nn.BCEWithLogitsLoss(), micro_batch=4, vectorize=True)
    with pytest.raises(ValueError, match=r"one label for each sample"):
        optimizer.minimize(x, torch.ones(16, 4))
    optimizer.minimize(x, F.one_hot(y, 4).float())


def test_soft_targets_that_sum_to_1_with_a_negative_one_are_refused():
    _, optimizer = build("BiSAM(log)", net=mlp)
    with pytest.raises(ValueError, match="one label for each sample"):
        optimizer.minimize(batch()[0], torch.tensor([2.0, -1.0, 0.0, 0.0]).expand(16, 4))


def test_a_failed_closure_leaves_no_pending_term():
    model, optimizer = build("BiSAM(log)", net=mlp)
    x, y = batch()

    def failing():
        optimizer.criterion(model(x), y)
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(failing)
    optimizer.step(closure_of(model, optimizer, x, y))
    assert optimizer.telemetry.loss is not None


def test_q_is_refused_where_the_model_has_one_output():
    net = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
    optimizer = bisam.BiSAM(torch.optim.SGD(net.parameters(), lr=0.1), net, descent=F.binary_cross_entropy_with_logits)
    with pytest.raises(ValueError, match=r"one label for each sample.*shape \(16,\)"):
        optimizer.minimize(batch()[0], F.one_hot(torch.tensor(3), 16).float())


def test_probabilities_of_one_unbatched_sample_are_accepted():
    model, optimizer = build("BiSAM(log)", net=mlp)
    probabilities = torch.rand(4).softmax(0)
    x = batch()[0][0]
    expected = F.cross_entropy(model(x), probabilities).item()
    assert optimizer.step(closure_of(model, optimizer, x, probabilities)).item() == pytest.approx(expected)


class Margin(nn.Module):
    """A loss with weights that are no class weights."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, logits, y):
        return F.cross_entropy(logits, y)


@pytest.mark.parametrize("weight", [0.5, nn.Parameter(torch.ones(4, 8))])
def test_an_attribute_called_weight_need_not_be_class_weights(weight):
    _, optimizer = build("BiSAM(log)", net=mlp, descent=Margin(weight))
    assert optimizer.criterion.ascent.weight is None
    optimizer.minimize(*batch())


@pytest.mark.parametrize("form", ["minimize", "step"])
def test_q_is_refused_also_if_every_sample_of_an_earlier_batch_had_one_label(form):
    x, y = batch()
    one_hot = F.one_hot(y, 4).float()
    model, optimizer = build("BiSAM(log)", net=mlp, descent=nn.BCEWithLogitsLoss())
    optimizer.minimize(x, one_hot)
    several = (one_hot + one_hot.roll(1, 0)).clamp(max=1)
    with pytest.raises(ValueError, match="one label for each sample"):
        optimizer.minimize(x, several) if form == "minimize" else optimizer.step(
            closure_of(model, optimizer, x, several)
        )


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_batch_by_hand_whose_gradients_are_cleared_is_excluded_from_the_next_step(set_to_none):
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()
    optimizer.criterion(model(9 * x), 3 - y).backward()
    optimizer.zero_grad(set_to_none)  # this batch is skipped
    for _ in range(2):
        first = optimizer.criterion(model(x), y)
        optimizer.zero_grad(set_to_none)  # also after the forward pass, as many loops have it
        first.backward()
        optimizer.ascend()
        optimizer.criterion(model(x), y).backward()
        optimizer.descend()
        assert optimizer.telemetry.loss == first
        assert optimizer.telemetry.flips is not None


def test_clearing_gradients_between_forward_and_backward_pass_keeps_the_batch_in_the_step():
    model, optimizer = build("BiSAM(log)", net=mlp)
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    optimizer.base.step()  # a plain step of a warm-up, which leaves its gradient
    first = optimizer.criterion(model(x), y)
    optimizer.zero_grad()
    first.backward()
    optimizer.ascend()  # and warns of nothing
    optimizer.criterion(model(x), y).backward()
    optimizer.descend()
    assert optimizer.telemetry.ascent == first


@pytest.mark.parametrize("batches", ["one of two terms", "one of two and the first half of another"])
def test_dropped_batches_of_two_terms_or_without_a_backward_pass_are_excluded_from_the_next_step(batches):
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()
    if batches == "one of two terms":
        (optimizer.criterion(model(x), y) + optimizer.criterion(model(x), y)).backward()
    else:
        optimizer.criterion(model(x), y).backward()
        optimizer.criterion(model(x), y)
    optimizer.zero_grad()
    first = optimizer.criterion(model(x), y)
    first.backward()
    optimizer.ascend()
    optimizer.criterion(model(x), y).backward()
    optimizer.descend()
    assert optimizer.telemetry.loss == first


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
def test_the_batch_of_a_compiled_criterion_is_observed():
    """A compiled criterion cannot record the backward pass."""
    model, optimizer = build("BiSAM(log)", net=mlp)
    x, y = batch()
    compiled = torch.compile(lambda x, y: optimizer.criterion(model(x), y), backend="eager")
    for _ in range(2):
        first = compiled(x, y)
        optimizer.zero_grad()
        first.backward()
        optimizer.ascend()
        compiled(x, y).backward()
        optimizer.descend()
        assert optimizer.telemetry.loss is not None


@pytest.mark.parametrize("kind", ["SAM", "BiSAM(log)"])
def test_a_list_returns_a_finite_loss_also_if_every_label_of_a_part_is_ignored(kind):
    model, optimizer = build(kind, net=mlp)
    x, y = batch()
    expected = F.cross_entropy(model(x), y)
    ignored = torch.full_like(y, -100)
    found = optimizer.step([closure_of(model, optimizer, x, y), closure_of(model, optimizer, x, ignored)])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("descent", "reads"),
    [
        (lambda z, t: F.cross_entropy(z, t), 1),
        (nn.CrossEntropyLoss(), 1),
        (nn.BCEWithLogitsLoss(), 6),
        (partial(F.binary_cross_entropy_with_logits, reduction="mean"), 6),
    ],
)
def test_soft_labels_are_read_once_unless_the_loss_takes_several_labels_per_sample(descent, reads, monkeypatch):
    count, own = [], torch.allclose
    monkeypatch.setattr(torch, "allclose", lambda *args, **options: count.append(args) or own(*args, **options))
    _, optimizer = build("BiSAM(log)", net=mlp, descent=descent)
    x, y = batch()
    for _ in range(3):
        optimizer.minimize(x, F.one_hot(y, 4).float())
    assert len(count) == reads


@pytest.mark.parametrize("read", [lambda loss: loss, torch.Tensor.item])
@pytest.mark.parametrize("ignored", [0, 2])
def test_a_list_of_closures_returns_the_weighted_mean_of_what_they_returned(read, ignored):
    model, optimizer = build("SAM", net=mlp)
    x, y = batch()
    y[:ignored] = -100

    def closure(x, y):
        loss = optimizer.criterion(model(x), y) + 5  # a term of its own
        loss.backward()
        return read(loss)

    parts = [partial(closure, x[:4], y[:4]), partial(closure, x[4:], y[4:])]
    expected = F.cross_entropy(model(x), y) + 5
    torch.testing.assert_close(optimizer.step(parts), read(expected.detach()))


@pytest.mark.parametrize(
    ("returned", "name"), [((torch.ones(()), "more"), "tuple"), (None, "NoneType"), (1.0, "float")]
)
def test_an_objective_that_returns_no_tensor_is_refused_with_the_type_it_returned(returned, name):
    for options in ({}, {"micro_batch": 8, "vectorize": True}):
        _, optimizer = build("SAM", net=mlp, descent=lambda output, target: returned, **options)
        with pytest.raises(TypeError, match=f"must return a scalar tensor to step on, got {name} from"):
            optimizer.minimize(*batch())


@pytest.mark.parametrize("form", ["step", "list"])
@pytest.mark.parametrize("wrapped", [lambda y: {"labels": y}, lambda y: (y,), lambda y: None])
def test_targets_may_be_anything_that_a_custom_loss_accepts(wrapped, form):
    x, y = batch()

    def own(logits, target):
        labels = target["labels"] if isinstance(target, dict) else y if target is None else target[0]
        return nn.functional.cross_entropy(logits, labels)

    weights = []
    for target, descent in ((wrapped(y), own), (y, None)):
        model, optimizer = build("SAM", net=mlp, descent=descent)

        def closure(model=model, optimizer=optimizer, target=target):
            optimizer.zero_grad()
            loss = optimizer.criterion(model(x), target)
            loss.backward()
            return loss

        optimizer.step(closure if form == "step" else [closure, closure])
        assert optimizer.telemetry.loss > 0
        weights.append(weights_of(model))
    assert_close(*weights, 1e-6)


@pytest.mark.parametrize(("accumulate", "options"), [(2, {}), (1, {"micro_batch": 4})])
def test_out_of_range_labels_are_named_also_in_parts_of_a_batch(accumulate, options):
    x, y = batch()
    y[0] = 255
    descent = nn.CrossEntropyLoss(weight=torch.arange(1.0, 1 + CLASSES))
    _, optimizer = build("BiSAM(log)", net=mlp, descent=descent, **options)
    with pytest.raises(IndexError, match="If 255 marks labels to ignore"):
        optimizer.minimize(x, y, accumulate=accumulate)


def test_ignore_index_must_be_a_whole_number():
    with pytest.raises(TypeError, match="ignore_index must be a whole number, such as -100, got None"):
        bisam.LowerBound(ignore_index=None)
