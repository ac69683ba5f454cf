"""A failed capture names the cause, leaves the weights unchanged, and leaves torch usable."""

import inspect
import re

import pytest
import torch

from bisam.capture import capture
from bisam.capture.failures import explained

from family import ConvNet, batch, build, mlp

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CAPTURING = "operation not permitted when stream is capturing"


def test_an_error_in_a_capture_names_the_line_of_user_code():
    def culprit():
        raise RuntimeError(CAPTURING)

    error = raised_by(culprit)
    found = re.search(r"waited for the device.*test_failures.py, line \d+, in culprit: raise RuntimeError", str(error))
    assert found


def test_an_error_in_a_base_optimizer_of_torch_names_it_and_no_line_of_user_code():
    step = compile(f"raise RuntimeError({CAPTURING!r})", inspect.getsourcefile(torch.optim.SGD), "exec")
    try:
        exec(step)
    except RuntimeError as caught:
        caught.__traceback__ = caught.__traceback__.tb_next  # as in a capture, which begins below the user's call
        error = explained(caught)
    assert re.search(r"the base optimizer cannot be captured.*sgd.py, line 1.*Use optimizer.minimize, or", str(error))


def test_an_error_of_a_replica_on_the_default_stream_has_its_own_explanation():
    def depend():
        raise RuntimeError("CUDA error: operation would make the legacy stream depend on a capturing blocking stream")

    assert "build it inside of `with torch.cuda.stream" in str(raised_by(depend, several_ranks=True))
    assert "build it inside" not in str(raised_by(depend))


def test_other_errors_keep_their_type():
    def unlike():
        raise ValueError("shapes do not match")

    assert isinstance(raised_by(unlike), ValueError)


def raised_by(function, **options):
    try:
        function()
    except Exception as caught:
        return explained(caught, **options)


@needs_cuda
@pytest.mark.parametrize("where", ["model", "closure"])
def test_waiting_for_the_device_is_an_error_that_names_the_line(where):
    class Curious(ConvNet):
        def forward(self, x):
            logits = super().forward(x)
            if logits.sum().item() > 1e9:  # the culprit
                raise AssertionError
            return logits

    model, optimizer = build(net=Curious if where == "model" else ConvNet, device="cuda")

    def closure(x, y):
        loss = optimizer.criterion(model(x), y)
        loss.backward()
        print(loss.item())  # the culprit
        return loss

    step = capture(optimizer, None if where == "model" else closure)
    for seed in range(3):
        step(*batch(seed, device="cuda"))
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):  # the second call captures again, and fails for the same reason
        with pytest.raises(RuntimeError, match=r"waited for the device.*test_failures.py, line \d+.*# the culprit"):
            step(*batch(3, device="cuda"))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert torch.randn(3, device="cuda").isfinite().all()
    optimizer.minimize(*batch(device="cuda"))
    assert not optimizer.perturbed
    assert all(p.isfinite().all() for p in model.parameters())


@needs_cuda
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
def test_capturing_muon_is_an_error_that_names_its_file():
    _, optimizer = build(base="Muon and AdamW", net=mlp, device="cuda")
    step = capture(optimizer)
    for seed in range(3):
        step(*batch(seed, device="cuda"))
    with pytest.raises(RuntimeError, match=r"the base optimizer cannot be captured.*_muon\.py"):
        step(*batch(3, device="cuda"))
    assert torch.randn(3, device="cuda").isfinite().all()
