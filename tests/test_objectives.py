import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bisam import LowerBound, bound, lower_bound, objectives, zero_one_error
from bisam.objectives import CrossEntropy, log_phi, tanh_phi

import reference

PHIS = {"log": log_phi, "tanh": tanh_phi}
FLOAT64_EPS = 1e-15
finite = st.floats(-1e4, 1e4, allow_nan=False)


def cube_root_bound(x):
    """A custom φ: below the step, and neither of the paper's."""
    return -F.softplus(-x) / 3


def random_problem(seed, classes, samples=16, scale=10.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, classes, generator=generator, dtype=torch.float64) * scale
    return logits, torch.randint(classes, (samples,), generator=generator)


# φ


@pytest.mark.parametrize("phi", PHIS)
@given(x=finite)
def test_phi_never_exceeds_the_zero_one_step(phi, x):
    value = PHIS[phi](torch.tensor(x, dtype=torch.float64)).item()
    assert value <= (1.0 if x > 0 else 0.0) + FLOAT64_EPS


@pytest.mark.parametrize("phi", PHIS)
def test_phi_is_zero_at_zero_and_increasing(phi):
    x = torch.linspace(-50, 20, 1001, dtype=torch.float64)
    values = PHIS[phi](x)
    assert abs(PHIS[phi](torch.zeros((), dtype=torch.float64)).item()) < FLOAT64_EPS
    assert (values.diff() > 0).all()


def test_phi_agrees_with_the_formulas_of_the_paper():
    x = torch.linspace(-30, 30, 601, dtype=torch.float64)
    torch.testing.assert_close(log_phi(x), reference.phi_log(x), rtol=0, atol=1e-13)
    torch.testing.assert_close(tanh_phi(x), reference.phi_tanh(x), rtol=0, atol=1e-13)


# Q and the bound


@pytest.mark.parametrize(("phi", "q"), [("log", reference.q_log), ("tanh", reference.q_tanh)])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_q_agrees_with_the_reference_in_value_and_gradient(phi, q, classes):
    logits, labels = random_problem(classes, classes, scale=3.0)
    logits.requires_grad_()
    ours, theirs = lower_bound(logits, labels, phi=phi), q(logits, labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    for a, b in zip(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@given(
    seed=st.integers(0, 10_000),
    classes=st.integers(2, 1000),
    mu=st.floats(1e-3, 1e3),
    scale=st.floats(0, 1e3),
    phi=st.sampled_from(["log", "tanh", cube_root_bound]),
)
def test_q_minus_log_k_over_mu_never_exceeds_the_zero_one_error(seed, classes, mu, scale, phi):
    logits, labels = random_problem(seed, classes, samples=8, scale=scale)
    value = bound(logits, labels, phi=phi, mu=mu, reduction="none")
    error = (~objectives.correct(logits, labels)).double()
    assert (value <= error + 1e-12).all()
    assert bound(logits, labels, phi=phi, mu=mu) <= zero_one_error(logits, labels) + 1e-6  # float32 error


@given(seed=st.integers(0, 10_000), classes=st.integers(2, 20), dtype=st.sampled_from([torch.bfloat16, torch.float64]))
def test_the_predicted_class_is_the_first_of_the_most_likely_ones(seed, classes, dtype):
    logits, labels = random_problem(seed, classes, samples=50)
    logits = (logits * 2).round().to(dtype)  # many ties
    expected = [row.index(max(row)) == label for row, label in zip(logits.tolist(), labels.tolist(), strict=True)]
    assert objectives.correct(logits, labels).tolist() == expected
    assert zero_one_error(logits, labels).item() == pytest.approx(expected.count(False) / 50)


def test_equal_logits_are_correct_for_one_class_and_nan_logits_for_none():
    labels = torch.arange(5)
    assert objectives.correct(torch.zeros(5, 5), labels).sum() == 1
    assert not objectives.correct(torch.full((5, 5), float("nan")), labels).any()
    one_nan = torch.zeros(5, 5)
    one_nan[:, 3] = float("nan")
    assert not objectives.correct(one_nan, labels).any()


def test_a_label_out_of_range_raises_and_does_not_count_as_wrong():
    with pytest.raises(IndexError, match="labels must lie in 0 … 4, for logits of 5 classes; got labels from 5 to 5"):
        zero_one_error(torch.zeros(1, 5), torch.tensor([5]))


def test_the_bound_is_tight_for_a_confident_mistake_at_large_mu():
    logits = torch.tensor([[0.0, 1e4, 0.0]], dtype=torch.float64)
    wrong = torch.tensor([0])
    assert bound(logits, wrong, phi="tanh", mu=1e5).item() == pytest.approx(1.0, abs=1e-4)


def test_the_papers_defaults_are_mu_1_for_log_and_10_for_tanh():
    assert LowerBound("log").mu == 1
    assert (LowerBound("tanh").mu, LowerBound("tanh").alpha) == (10, 0.1)
    assert LowerBound().phi == "log"


def options_a_and_b(classes, delta):
    """The paper's example, section 2.2: two outputs of which the first class is the right one."""
    a = torch.full((classes,), 1 / classes, dtype=torch.float64)
    a[0], a[1] = 1 / classes + delta, 1 / classes - delta
    b = torch.zeros(classes, dtype=torch.float64)
    b[0], b[1] = 0.5 - delta, 0.5 + delta
    return torch.stack([a, b]), torch.tensor([0, 0])


@pytest.mark.parametrize("classes", [10, 100, 1000])
def test_maximising_cross_entropy_prefers_option_a_and_the_bound_option_b(classes):
    outputs, labels = options_a_and_b(classes, delta := 1e-4)
    assert objectives.correct(outputs, labels).tolist() == [True, False]
    # the paper reads the outputs as probabilities for the cross entropy, as logits for the bound
    cross_entropy = F.nll_loss(outputs.log(), labels, reduction="none")
    assert cross_entropy.tolist() == pytest.approx([-math.log(1 / classes + delta), -math.log(0.5 - delta)])
    assert cross_entropy[0] > cross_entropy[1]
    assert F.cross_entropy(outputs, labels, reduction="none").diff() < 0  # the same when they are logits
    # max_j φ(z_j − z_y), the paper's form of the example, is Q for large μ: 0 for A, φ(2δ) for B
    for phi in PHIS.values():
        worst = phi(objectives.margins(outputs, labels)).amax(1)
        assert worst[0].item() == pytest.approx(0, abs=1e-15)
        assert worst[1].item() == pytest.approx(phi(torch.tensor(2 * delta, dtype=torch.float64)).item(), rel=1e-9)
        values = lower_bound(outputs, labels, phi=phi, mu=1e8, reduction="none")
        assert values[0] < values[1]


def test_the_example_needs_mu_large_enough_for_its_delta():
    """With K nearly equal logits the smooth maximum adds up to log(K)/μ to option A: B needs two thirds of it."""
    for classes, delta in ((100, 1e-3), (1000, 1e-4)):
        outputs, labels = options_a_and_b(classes, delta)
        threshold = math.log(classes) / objectives.log_phi(torch.tensor(2 * delta, dtype=torch.float64)).item()
        mus = (1, 0.6 * threshold, 0.7 * threshold, 100 * threshold)
        values = [lower_bound(outputs, labels, phi="log", mu=mu, reduction="none") for mu in mus]
        assert [bool(a < b) for a, b in values] == [False, False, True, True]


# The conventions of F.cross_entropy

SHAPES = [((7,), ()), ((5, 7), (5,)), ((5, 7, 3), (5, 3)), ((2, 7, 3, 4), (2, 3, 4))]


@pytest.mark.parametrize(("logits_shape", "target_shape"), SHAPES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_shapes_and_reductions_are_those_of_cross_entropy(logits_shape, target_shape, reduction):
    logits, target = torch.randn(logits_shape), torch.randint(7, target_shape)
    assert (
        lower_bound(logits, target, reduction=reduction).shape
        == F.cross_entropy(logits, target, reduction=reduction).shape
    )
    flat = logits.movedim(1, -1).reshape(-1, 7) if logits.dim() > 1 else logits.unsqueeze(0)
    samples = lower_bound(flat, target.reshape(-1), reduction="none")
    expected = {"none": samples.reshape(target_shape), "mean": samples.mean(), "sum": samples.sum()}[reduction]
    torch.testing.assert_close(lower_bound(logits, target, reduction=reduction), expected)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignore_index", [-100, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("function", [lower_bound, bound])
def test_weights_and_ignored_labels_count_as_in_cross_entropy(reduction, ignore_index, weighted, function):
    logits, target = torch.randn(40, 5), torch.randint(5, (40,))
    target[::4] = ignore_index
    weight = torch.rand(5) if weighted else None
    per_sample = torch.stack(
        [function(z, y.clamp(min=0), reduction="none") for z, y in zip(logits, target, strict=True)]
    )
    # cross entropy of log-probabilities that are minus our values: torch does the weighting
    as_log_probabilities = torch.zeros(40, 5) - per_sample.unsqueeze(1)
    options = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    expected = F.nll_loss(as_log_probabilities, target, **options)
    torch.testing.assert_close(function(logits, target, **options), expected)


@pytest.mark.parametrize("form", [F.cross_entropy, lower_bound, LowerBound().plain], ids=["ce", "fused", "plain"])
def test_a_mean_over_ignored_labels_alone_is_nan_with_a_gradient_of_zero(form):
    """So a micro-batch without a label adds nothing to the others, whatever it is multiplied by."""
    logits = torch.randn(4, 5, requires_grad=True)
    value = form(logits, torch.full((4,), -100))
    assert value.isnan()
    (value * 0.0).backward()
    assert torch.equal(logits.grad, torch.zeros(4, 5))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_probabilities_give_the_expectation_over_the_label(weighted, reduction):
    logits, p = torch.randn(6, 4, 3), torch.rand(6, 4, 3).softmax(1)
    weight = torch.rand(4) if weighted else None
    each = torch.stack([lower_bound(logits, torch.full((6, 3), c), reduction="none") for c in range(4)], dim=1)
    weights = torch.ones(4) if weight is None else weight
    expected = (p * weights.view(1, 4, 1) * each).sum(1)
    expected = {"none": expected, "mean": expected.mean(), "sum": expected.sum()}[reduction]
    torch.testing.assert_close(lower_bound(logits, p, weight=weight, reduction=reduction), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("weighted", [False, True])
def test_labels_may_be_integers_of_any_size(dtype, weighted):
    logits, target = torch.randn(3, 200), torch.tensor([156 if dtype == torch.uint8 else 3, 3, 100])
    weight = torch.rand(200) if weighted else None
    for function in (lower_bound, bound, zero_one_error):
        expected = function(logits, target, weight=weight)
        assert torch.equal(function(logits, target.to(dtype), weight=weight), expected)
    assert torch.equal(objectives.correct(logits, target.to(dtype)), objectives.correct(logits, target))


@given(seed=st.integers(0, 1000), mu=st.floats(0.1, 100))
def test_with_class_weights_the_bound_is_below_the_error_of_the_same_weights(seed, mu):
    logits, labels = random_problem(seed, 4)
    weight = torch.tensor([100.0, 1.0, 0.1, 1.0])
    assert bound(logits, labels, mu=mu, weight=weight) <= zero_one_error(logits, labels, weight=weight) + 1e-6


def test_mixup_of_two_labels_is_the_mixture_of_their_values():
    logits, a, b = torch.randn(8, 5), torch.randint(5, (8,)), torch.randint(5, (8,))
    mixed = 0.3 * F.one_hot(a, 5).float() + 0.7 * F.one_hot(b, 5).float()
    torch.testing.assert_close(lower_bound(logits, mixed), 0.3 * lower_bound(logits, a) + 0.7 * lower_bound(logits, b))


def test_one_hot_probabilities_are_class_indices():
    logits, y = torch.randn(8, 5), torch.randint(5, (8,))
    torch.testing.assert_close(bound(logits, F.one_hot(y, 5).float()), bound(logits, y))


def test_cross_entropy_equals_that_of_torch_exactly():
    logits, y = torch.randn(8, 5), torch.randint(5, (8,))
    assert torch.equal(CrossEntropy(label_smoothing=0.1)(logits, y), F.cross_entropy(logits, y, label_smoothing=0.1))
    assert torch.equal(CrossEntropy()(logits, y.int()), F.cross_entropy(logits, y))


# Numbers


@pytest.mark.parametrize("phi", ["log", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mu", [0.1, 1.0, 10.0])
def test_value_and_gradient_are_finite_for_extreme_and_for_equal_logits(phi, dtype, mu):
    extreme = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [7.0, 7.0, 7.0]], dtype=dtype, requires_grad=True)
    value = lower_bound(extreme, torch.tensor([0, 0, 0]), phi=phi, mu=mu)
    value.backward()
    assert value.isfinite()
    assert extreme.grad.isfinite().all()


def test_at_a_confidently_correct_sample_log_has_a_gradient_and_that_of_tanh_vanishes():
    gradients = {}
    for phi in PHIS:
        logits = torch.tensor([[1e3, 0.0]], dtype=torch.float64, requires_grad=True)
        lower_bound(logits, torch.tensor([0]), phi=phi, mu=0.001).backward()
        gradients[phi] = logits.grad.abs().sum().item()
    assert gradients["log"] > 0.1
    assert gradients["tanh"] < 1e-12


@pytest.mark.parametrize("phi", ["log", "tanh", cube_root_bound])
@pytest.mark.parametrize("soft", [False, True])
def test_gradients_pass_gradcheck_and_gradgradcheck(phi, soft):
    logits, labels = random_problem(1, 4, samples=5, scale=2.0)
    target = F.one_hot(labels, 4).double() * 0.8 + 0.05 if soft else labels
    logits.requires_grad_()
    objective = LowerBound(phi, mu=2.0)
    assert torch.autograd.gradcheck(lambda z: objective(z, target), logits)
    assert torch.autograd.gradgradcheck(lambda z: objective(z, target), logits)


FORMS = {
    "fused": lambda q, z, y: torch.autograd.grad(q(z, y), z)[0],
    "plain": lambda q, z, y: torch.autograd.grad(q.plain(z, y), z)[0],
    "one-hot": lambda q, z, y: torch.autograd.grad(q(z, F.one_hot(y, z.shape[1]).to(z.dtype)), z)[0],
    "torch.func": lambda q, z, y: torch.func.grad(q)(z, y),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("mu", "margin"), [(1.0, 18.0), (41.0, 1.0)])
def test_a_sample_far_from_the_boundary_keeps_its_gradient_in_float32(form, mu, margin):
    torch.manual_seed(0)
    logits, labels = torch.randn(8, 10) / 2, torch.arange(8)
    logits[labels, labels] = logits.max(1).values + margin
    found, exact = (
        FORMS[form](LowerBound(mu=mu), logits.to(dtype).requires_grad_(), labels).double()
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-35)


def test_the_gradient_has_the_closed_form():
    """With p = softmax(μφ(F)): ∂Q/∂z_j = p_j φ′(F_j) for j ≠ y, and minus their sum for y."""
    logits, labels = random_problem(2, 6, samples=1, scale=2.0)
    logits.requires_grad_()
    lower_bound(logits, labels, phi="log", mu=3.0).backward()
    f = (logits - logits[0, labels]).detach()
    expected = torch.softmax(3.0 * log_phi(f), 1) * torch.sigmoid(objectives.GAMMA - f)
    expected[0, labels] = 0
    expected[0, labels] = -expected.sum()
    torch.testing.assert_close(logits.grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("phi", ["log", "tanh"])
def test_half_precision_logits_are_evaluated_in_float32(dtype, phi):
    logits = torch.randn(64, 100, dtype=dtype) * 10
    target = torch.randint(100, (64,))
    value = lower_bound(logits, target, phi=phi)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), lower_bound(logits.double(), target, phi=phi), rtol=1e-6, atol=0)


# Bad input

LABELS = torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize("objective", [LowerBound(), CrossEntropy()], ids=["LowerBound", "CrossEntropy"])
@pytest.mark.parametrize(
    ("logits", "target", "error", "message"),
    [
        (torch.randn(4, 1), LABELS, ValueError, r"shape \(4, 1\)\. For two .*; for a regression give SAM another loss"),
        (torch.randn(4, 3), LABELS + 3, IndexError, r"labels must lie in 0 … 2.* got labels from 3 to 3"),
        (torch.randn(4, 3), LABELS - 1, IndexError, r"labels must lie in 0 … 2.* got labels from -1 to -1"),
        (torch.randn(4, 3), LABELS.float(), TypeError, r"float32 of shape \(4,\).*pass target.long\(\)"),
        (
            torch.randn(4, 3),
            LABELS.bool(),
            TypeError,
            r"must be integers, got bool.*Pass target.long\(\)",
        ),
        (torch.randn(0, 3), LABELS[:0], ValueError, r"the batch is empty: logits have shape \(0, 3\)"),
        (torch.randn(4, 3), LABELS[:3], ValueError, r"class indices of shape \(4,\), got int64 of shape \(3,\)"),
        (torch.randn(4, 3), LABELS[:, None], ValueError, r"got int64 of shape \(4, 1\). Pass target.squeeze\(1\)"),
        (torch.randn(4, 3), LABELS[:, None].expand(4, 3), ValueError, r"one-hot.*pass target.argmax\(1\) or .*float"),
        (LABELS, LABELS, TypeError, "logits must be a floating-point tensor"),
    ],
)
def test_bad_logits_and_labels_are_explained(objective, logits, target, error, message):
    with pytest.raises(error, match=message):
        objective(logits, target)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_mu_and_alpha_must_be_positive(value):
    with pytest.raises(ValueError, match=f"mu must be positive and finite, got {value}"):
        LowerBound(mu=value)
    with pytest.raises(ValueError, match=f"alpha must be positive and finite, got {value}"):
        LowerBound("tanh", alpha=value)


def test_invalid_options_are_explained():
    with pytest.raises(ValueError, match='phi must be "log", "tanh" or a callable, got \'-log\''):
        LowerBound("-log")
    with pytest.raises(ValueError, match="reduction must be"):
        LowerBound(reduction="average")
    with pytest.raises(ValueError, match="mu must be given for a phi of your own"):
        LowerBound(cube_root_bound)
    with pytest.raises(ValueError, match="ignore_index applies to class indices only"):
        lower_bound(torch.randn(2, 3), torch.rand(2, 3), ignore_index=1)


def test_class_weights_move_with_the_module():
    objective = nn.Module()
    objective.loss = LowerBound(weight=torch.ones(3))
    assert objective.double().loss.weight.dtype == torch.float64


# Probabilities as targets


@given(seed=st.integers(0, 1000), mu=st.floats(0.1, 100), weighted=st.booleans(), phi=st.sampled_from(["log", "tanh"]))
def test_with_probabilities_the_bound_is_below_the_error_of_labels_drawn_from_them(seed, mu, weighted, phi):
    logits, _ = random_problem(seed, 4)
    torch.manual_seed(seed)
    p = torch.rand(logits.shape).softmax(1)
    weight = torch.tensor([100.0, 1.0, 0.1, 1.0]) if weighted else torch.ones(4)
    wrong = 1 - F.one_hot(logits.argmax(1), 4).float()
    expected_error = (p * weight * wrong).sum() / (p * weight).sum()
    assert bound(logits, p, phi=phi, mu=mu, weight=weight if weighted else None) <= expected_error + 1e-6


def test_ignore_index_does_not_apply_to_probabilities():
    logits, p = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    assert zero_one_error(logits, p, ignore_index=0).item() == 0.5


def test_class_weights_count_for_probabilities_as_for_indices():
    logits, y, weight = torch.randn(20, 3), torch.randint(3, (20,)), torch.tensor([1.0, 3.0, 10.0])
    one_hot = F.one_hot(y, 3).float()
    for function in (bound, zero_one_error):
        torch.testing.assert_close(function(logits, one_hot, weight=weight), function(logits, y, weight=weight))


def test_arguments_that_are_not_tensors_are_refused_with_their_type():
    for function in (lower_bound, bound, zero_one_error, CrossEntropy()):
        with pytest.raises(TypeError, match=r"logits must be a tensor, got tuple.*in a closure for step\(\)"):
            function((torch.zeros(2, 3), None), torch.tensor([0, 1]))
        with pytest.raises(TypeError, match=r"labels must be a tensor, got list"):
            function(torch.zeros(2, 3), [0, 1])


@pytest.mark.parametrize("objective", [CrossEntropy(), LowerBound()])
def test_an_out_of_range_label_that_may_mark_ignored_samples_names_ignore_index(objective):
    target = torch.tensor([[0, 1], [2, 255]])
    with pytest.raises(IndexError, match=r"If 255 marks labels to ignore.*CrossEntropyLoss\(ignore_index=255\)"):
        objective(torch.randn(2, 3, 2), target)
    with pytest.raises(IndexError, match="If -1 marks labels to ignore"):
        objective(torch.randn(2, 3, 2), torch.tensor([[0, 1], [2, -1]]))
    for other in (3, 4):  # one class too many, two labels outside
        with pytest.raises(IndexError, match="got labels from 0 to") as caught:
            objective(torch.randn(2, 3, 2), torch.tensor([[0, 3], [2, other]]))
        assert "ignore" not in str(caught.value)
