"""The fused bound on a real device: sizes, graphs and labels that the interpreter cannot show."""

import pytest
import torch

from bisam import LowerBound
from kernels.test_lower_bound import TOLERANCE, check, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("classes", [2, 1000, 32_000, 256_000])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_any_number_of_classes_agrees_with_the_plain_form(classes, dtype):
    logits = (4 * torch.randn(4, classes, device="cuda")).to(dtype)
    check(LowerBound(), logits, torch.randint(classes, (4,), device="cuda"))


def test_more_than_two_to_the_31_logits_agree_with_the_plain_form():
    rows, classes = 70_000, 32_000
    logits = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(classes, (rows,), device="cuda")
    last = slice(rows - 50, rows)
    logits.requires_grad_()
    value = LowerBound(reduction="none")(logits, target)
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    expected, slope = reference(
        LowerBound(reduction="none"), logits[last].detach(), target[last], torch.ones(50, device="cuda")
    )
    torch.testing.assert_close(value[last].double().cpu(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient[last].double().cpu(), slope, atol=1e-6, rtol=1e-2)


def test_a_label_out_of_range_gives_nan_and_leaves_the_device_usable():
    assert LowerBound()(torch.randn(2, 3, device="cuda"), torch.tensor([0, 7], device="cuda")).isnan()
    torch.cuda.synchronize()


@pytest.mark.parametrize("shape", [(128, 10), (512, 1000)], ids=str)
def test_the_fused_bound_can_be_captured_in_a_cuda_graph(shape):
    logits = torch.randn(shape, device="cuda", requires_grad=True)
    target = torch.randint(shape[1], shape[:1], device="cuda")

    def run():
        value = LowerBound()(logits, target)
        return value.detach(), torch.autograd.grad(value, logits)[0]  # no graph is kept: it belongs to its stream

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which fills the logits
    with torch.cuda.stream(stream):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        value, gradient = run()
    torch.cuda.current_stream().wait_stream(stream)  # what it still reads is overwritten next
    with torch.no_grad():
        logits.normal_()
    graph.replay()  # on the current stream, after the new logits
    expected = run()
    assert torch.equal(value, expected[0])
    assert torch.equal(gradient, expected[1])


@pytest.mark.parametrize("phi", ["log", "tanh"])
@pytest.mark.parametrize("mu", [1.0, 3.0])
def test_a_logit_of_nan_gives_a_value_and_a_gradient_of_nan(phi, mu):
    logits = torch.randn(4, 7, device="cuda")
    logits[2, 5] = torch.nan
    logits.requires_grad_()
    value = LowerBound(phi, mu, reduction="none")(logits, torch.tensor([0, 1, 2, 3], device="cuda"))
    assert value.isnan().tolist() == [False, False, True, False]
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert gradient[2].isnan().all()
    assert gradient[[0, 1, 3]].isfinite().all()
