"""The fused bound against the plain form in float64, on each backend: torch on a CPU, Triton on CUDA or interpreted."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from bisam import LowerBound
from bisam.kernels import lower_bound as module
from bisam.kernels.lower_bound import LARGEST_MU, ByRows, Formula, OnePass, can_fuse

triton = pytest.importorskip("triton", reason="Triton is not on this platform")
from bisam.kernels.lower_bound_triton import Fused  # noqa: E402

# the interpreter computes with NumPy, which warns of what is NaN on purpose; Triton 3.2's, of torch 2.6, takes numbers
# from arrays of one; torch's forward mode uses torch.jit
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
CUDA = torch.cuda.is_available()
BACKENDS = {
    "cpu": (OnePass(), "cpu"),
    "rows": (ByRows(OnePass()), "cpu"),
    "triton": (Fused(), "cuda" if CUDA else "cpu"),
}
FORMS = [("log", 1.0), ("log", 0.3), ("log", 5.0), ("tanh", 10.0), ("tanh", 1.0)]
# float32 rounds w and S; half-precision gradients are rounded once, when they are stored
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [(1, 2), (128, 10), (300, 7), (5, 100), (2, 5000)]
# every shape with every type, the forms in turn; every form with every type, at one shape
SWEEP = [
    *(
        (shape, dtype, *form)
        for (shape, dtype), form in zip(itertools.product(SHAPES, TOLERANCE), itertools.cycle(FORMS))
    ),
    *(((5, 100), dtype, *form) for dtype, form in itertools.product(TOLERANCE, FORMS)),
]
# every reduction with and without class weights and ignored labels, for each φ; shapes in turn
REDUCTIONS = [
    (phi, *options, shape)
    for (phi, options), shape in zip(
        itertools.product(["log", "tanh"], itertools.product(["mean", "sum", "none"], [False, True], [-100, 3, None])),
        itertools.cycle([(40, 6), (4, 6, 3, 2), (300, 6), (4, 6, 3, 2), (40, 6)]),
    )
]


@pytest.fixture(params=["cpu", "rows", pytest.param("triton", marks=pytest.mark.slow)], autouse=True)
def place(request, monkeypatch):
    """Where to put the logits so that this backend computes them."""
    chosen, where = BACKENDS[request.param]
    monkeypatch.setattr(module, "backend", lambda _: chosen)
    if request.param == "rows":
        monkeypatch.setattr(module, "AT_ONCE", 64)  # a few rows, or less than one
    return where


def reference(objective: LowerBound, logits: Tensor, target: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient by autograd of the plain form in float64, on the CPU."""
    wide = logits.detach().double().cpu().requires_grad_()
    weight = None if objective.weight is None else objective.weight.double().cpu()
    plain = LowerBound(objective.phi, objective.mu, objective.alpha, weight=weight, ignore_index=objective.ignore_index,
                       reduction=objective.reduction)  # fmt: skip
    value = plain.plain(wide, target.cpu())
    return value.detach(), torch.autograd.grad(value, wide, upstream.double().cpu())[0]


def check(objective: LowerBound, logits: Tensor, target: Tensor) -> None:
    logits = logits.requires_grad_()
    formula = Formula(objective.phi, objective.mu, objective.alpha, objective.ignore_index, objective.reduction)
    assert can_fuse(formula, logits, target, objective.weight)
    value = objective(logits, target)
    upstream = torch.randn_like(value)
    (gradient,) = torch.autograd.grad(value, logits, upstream)
    expected_value, expected = reference(objective, logits, target, upstream)
    tolerance = TOLERANCE[logits.dtype]
    assert value.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
    assert gradient.dtype == logits.dtype
    assert gradient.shape == logits.shape
    value_tolerance = max(TOLERANCE[value.dtype] * max(1.0, expected_value.abs().max().item()), 1e-12)
    torch.testing.assert_close(value.double().cpu(), expected_value, atol=value_tolerance, rtol=1e-6)
    scale = upstream.abs().max().item() * max(expected.abs().max().item() / upstream.abs().max().item(), 1e-3)
    torch.testing.assert_close(gradient.double().cpu(), expected, atol=tolerance * scale, rtol=tolerance)


@pytest.mark.parametrize(("shape", "dtype", "phi", "mu"), dict.fromkeys(SWEEP), ids=str)
def test_value_and_gradient_are_those_of_the_plain_form(phi, mu, dtype, shape, place):
    logits = (4 * torch.randn(shape)).to(place, dtype)
    check(LowerBound(phi, mu), logits, torch.randint(shape[1], shape[:1], device=place))


@pytest.mark.parametrize(("phi", "reduction", "weighted", "ignores", "shape"), REDUCTIONS, ids=str)
def test_reduction_class_weights_and_ignored_labels_are_those_of_cross_entropy(
    phi, reduction, weighted, ignores, shape, place
):
    weight = torch.rand(6, device=place) if weighted else None
    target = torch.randint(6, (shape[0], *shape[2:]), device=place)
    if ignores is not None:
        target.view(-1)[::3] = ignores
    objective = LowerBound(phi, weight=weight, reduction=reduction, ignore_index=-100 if ignores is None else ignores)
    check(objective, torch.randn(shape, device=place), target)


@pytest.mark.parametrize("phi", ["log", "tanh"])
def test_logits_of_ignored_samples_may_be_nan(phi, place):
    logits = torch.randn(4, 5, device=place)
    logits[1] = math.nan
    logits.requires_grad_()
    target = torch.tensor([0, -100, 2, 3], device=place)
    value = LowerBound(phi)(logits, target)
    value.backward()
    keep = [0, 2, 3]
    torch.testing.assert_close(value, LowerBound(phi)(logits[keep], target[keep]))
    assert (logits.grad[1] == 0).all()
    assert logits.grad.isfinite().all()


def test_a_batch_that_is_all_ignored_is_nan_with_a_gradient_of_zero_as_in_cross_entropy(place):
    logits = torch.randn(2, 5, device=place, requires_grad=True)
    value = LowerBound()(logits, torch.tensor([-100, -100], device=place))
    assert value.isnan()
    (value * 0.0).backward()  # the weight of a micro-batch without labels
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("phi", ["log", "tanh"])
@pytest.mark.parametrize("margin", [-1e4, -200.0, -30.0, 30.0, 200.0, 1e4])
def test_huge_margins_neither_overflow_nor_lose_the_gradient(phi, margin, place):
    logits = torch.tensor([[0.0, margin, margin], [margin, 0.0, 0.0]], device=place)
    check(LowerBound(phi), logits, torch.tensor([0, 0], device=place))


@pytest.mark.parametrize("mu", [1.0, 2.5])
@pytest.mark.parametrize("margin", [5.0, 15.0, 20.0, 30.0])
def test_a_sample_that_is_wrong_by_a_large_margin_has_an_accurate_gradient(margin, mu, place):
    """It is small beside the gradients of other samples, but in a micro-batch of its own it is the whole gradient."""
    logits = torch.tensor([[0.0, margin, -1.0]], device=place, requires_grad=True)
    target = torch.tensor([0], device=place)
    objective = LowerBound("log", mu)
    (gradient,) = torch.autograd.grad(objective(logits, target), logits)
    _, expected = reference(objective, logits, target, torch.ones(()))
    torch.testing.assert_close(gradient.double().cpu(), expected, atol=0.0, rtol=3e-6)


@pytest.mark.parametrize("phi", ["log", "tanh"])
def test_a_class_that_is_masked_by_minus_infinity_has_no_gradient(phi, place):
    logits = torch.tensor([[0.5, -math.inf, 1.0]], device=place, requires_grad=True)
    LowerBound(phi)(logits, torch.tensor([0], device=place)).backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1] < 1e-30


@pytest.mark.parametrize("phi", ["log", "tanh"])
def test_the_gradient_sums_to_zero_over_the_classes(phi, place):
    logits = torch.randn(64, 33, device=place, dtype=torch.float64, requires_grad=True)
    LowerBound(phi, reduction="sum")(logits, torch.randint(33, (64,), device=place)).backward()
    assert logits.grad.sum(1).abs().max() < 1e-14


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_logits_of_any_memory_layout_are_supported(layout, place):
    logits = {
        "transposed": lambda: torch.randn(6, 40, device=place).T,
        "strided": lambda: torch.randn(40, 12, device=place)[:, ::2],
        "expanded": lambda: torch.randn(1, 6, device=place).expand(40, 6),
    }[layout]()
    target = torch.randint(6, (40,), device=place)
    torch.testing.assert_close(LowerBound()(logits, target), LowerBound().plain(logits, target))
    rows = logits.detach().requires_grad_()
    check(LowerBound(), rows, target)


@pytest.mark.parametrize("phi", ["log", "tanh"])
def test_the_hessian_is_that_of_the_plain_form(phi, place):
    logits = torch.randn(3, 4, device=place, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 3, 1], device=place)
    fused = torch.autograd.functional.hessian(lambda z: LowerBound(phi)(z, target), logits)
    plain = torch.autograd.functional.hessian(lambda z: LowerBound(phi).plain(z, target), logits)
    assert fused.abs().max() > 1e-3
    torch.testing.assert_close(fused, plain)


def test_two_backward_passes_through_one_value_give_the_same_gradient(place):
    logits = torch.randn(8, 5, device=place, requires_grad=True)
    value = LowerBound()(logits, torch.randint(5, (8,), device=place))
    first = torch.autograd.grad(value, logits, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(value, logits)[0])


def test_the_value_has_no_graph_if_the_logits_require_no_gradient(place):
    logits = torch.randn(8, 5, device=place)
    assert not LowerBound()(logits, torch.randint(5, (8,), device=place)).requires_grad


@pytest.mark.parametrize("case", ["own phi", "probabilities", "large mu", "weight with gradient", "one sample"])
def test_cases_that_are_not_fused_use_the_plain_form(case, place):
    logits, target = torch.randn(4, 3, device=place, requires_grad=True), torch.tensor([0, 1, 2, 0], device=place)
    objective = LowerBound()
    if case == "own phi":
        objective = LowerBound(lambda x: torch.tanh(x) / 2, mu=1.0)
    elif case == "probabilities":
        target = torch.softmax(torch.randn(4, 3, device=place), 1)
    elif case == "large mu":
        objective = LowerBound(mu=2 * LARGEST_MU)
    elif case == "weight with gradient":
        objective = LowerBound(weight=torch.rand(3, device=place, requires_grad=True))
    else:
        logits, target = logits[0], target[0]
    value = objective(logits, target)
    torch.testing.assert_close(value, objective.plain(logits, target), rtol=0, atol=0)
    assert "Fused" not in type(value.grad_fn).__name__


def test_no_backend_is_chosen_inside_of_a_functional_transform(monkeypatch):
    tried = []
    monkeypatch.setattr(module, "backend", tried.append)
    logits, target = torch.randn(3, 4, 5), torch.zeros(4, dtype=torch.long)
    torch.func.vmap(LowerBound(), (0, None))(logits, target)
    assert not tried
    LowerBound()(logits[0], target)
    assert tried == ["cpu"]


@pytest.mark.parametrize("transform", ["vmap", "forward mode", "func.grad"])
def test_functional_transforms_use_the_plain_form(transform, place):
    logits, target = torch.randn(4, 3, device=place), torch.tensor([0, 1, 2, 0], device=place)
    objective = LowerBound()
    if transform == "vmap":
        batch = torch.stack([logits, 2 * logits])
        values = torch.func.vmap(objective, (0, None))(batch, target)
        torch.testing.assert_close(values[1], objective.plain(2 * logits, target))
    elif transform == "func.grad":
        got = torch.func.grad(objective)(logits, target)
        torch.testing.assert_close(got, torch.func.grad(objective.plain)(logits, target))
    else:
        _, tangent = torch.func.jvp(lambda z: objective(z, target), (logits,), (torch.ones_like(logits),))
        assert tangent.abs() < 1e-6  # Q does not change when all logits move alike


def test_the_largest_mu_that_is_fused_does_not_overflow(place):
    logits = 100 * torch.randn(8, 1000, device=place)
    check(LowerBound("tanh", mu=LARGEST_MU), logits, torch.randint(1000, (8,), device=place))


@pytest.mark.slow
@pytest.mark.parametrize("phi", ["log", "tanh"])
def test_a_compiled_loss_has_the_same_value_and_gradient(phi, place):
    logits, target = torch.randn(64, 10, device=place, requires_grad=True), torch.randint(10, (64,), device=place)
    backend = "inductor" if place == "cuda" else "aot_eager"  # inductor's C++ takes half a minute to build
    compiled = torch.compile(LowerBound(phi), fullgraph=True, backend=backend)
    value, expected = compiled(logits, target), LowerBound(phi)(logits, target)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(*(torch.autograd.grad(v, logits)[0] for v in (value, expected)))


@pytest.mark.parametrize("layout", ["strided", "expanded"])
def test_class_weights_of_any_memory_layout_are_supported(layout, place):
    weight = torch.rand(12, device=place)[::2] if layout == "strided" else torch.full((1,), 0.5, device=place).expand(6)
    check(LowerBound(weight=weight), torch.randn(20, 6, device=place), torch.randint(6, (20,), device=place))


def test_class_weights_for_another_number_of_classes_are_refused(place):
    with pytest.raises(ValueError, match=r"one number for each of the 3 classes, got shape \(1,\)"):
        LowerBound(weight=torch.ones(1, device=place))(
            torch.randn(2, 3, device=place), torch.tensor([0, 1], device=place)
        )


def test_a_row_of_nan_gives_nan_even_with_a_class_weight_of_zero(place):
    logits = torch.randn(3, 2, device=place)
    logits[1] = math.nan
    target, weight = torch.tensor([0, 1, 0], device=place), torch.tensor([1.0, 0.0], device=place)
    assert LowerBound(weight=weight)(logits, target).isnan()
    assert LowerBound(weight=weight).plain(logits, target).isnan()


def test_changing_alpha_of_an_objective_takes_effect(place):
    objective = LowerBound("tanh")
    objective.alpha = 0.5
    logits, target = torch.randn(5, 4, device=place), torch.tensor([0, 1, 2, 3, 0], device=place)
    torch.testing.assert_close(objective(logits, target), objective.plain(logits, target))
    assert objective(logits, target) != LowerBound("tanh")(logits, target)


def test_hooks_of_the_logits_run_once_also_with_create_graph(place):
    logits = torch.randn(4, 3, device=place, requires_grad=True)
    seen = []
    logits.register_hook(lambda gradient: seen.append(gradient))
    value = LowerBound()(logits, torch.tensor([0, 1, 2, 0], device=place))
    torch.autograd.grad(value, logits, create_graph=True)
    assert len(seen) == 1


def test_a_value_for_each_sample_may_be_changed_in_place(place):
    logits = torch.randn(4, 3, device=place, requires_grad=True)
    values = LowerBound(reduction="none")(logits, torch.tensor([0, 1, 2, 0], device=place))
    values.mul_(2.0)
    values.sum().backward()
    assert logits.grad.any()


def test_batched_gradients_are_those_computed_one_by_one(place):
    logits = torch.randn(4, 3, device=place, requires_grad=True)
    values = LowerBound(reduction="none")(logits, torch.tensor([0, 1, 2, 0], device=place))
    rows = torch.eye(4, device=place)
    (batched,) = torch.autograd.grad(values, logits, rows, is_grads_batched=True, retain_graph=True)
    for row, expected in zip(rows, batched, strict=True):
        torch.testing.assert_close(torch.autograd.grad(values, logits, row, retain_graph=True)[0], expected)
