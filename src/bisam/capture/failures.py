"""What a failed capture means, and what torch leaves behind after one."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Iterable
from contextlib import suppress

import torch

_OURS = os.path.dirname(os.path.dirname(__file__))
_TORCHS = os.path.dirname(torch.__file__)
_TORCHS_OPTIMIZERS = os.path.dirname(torch.optim.__file__)


def explained(error: BaseException, *, several_ranks: bool = False) -> BaseException:
    """An error of the capture, in terms of the line that caused it."""
    text = str(error).lower()
    if isinstance(error, torch.cuda.OutOfMemoryError) or "captur" not in text:
        return error
    frames = traceback.extract_tb(error.__traceback__)
    # the innermost line that is neither a library's nor ours is the user's
    libraries = (_OURS, _TORCHS, os.sep + "triton" + os.sep)
    theirs = [f for f in frames if not any(library in f.filename for library in libraries) and f.line]
    frame = theirs[-1] if theirs else frames[-1]
    line = f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}"
    cuda = f"(CUDA: {str(error).splitlines()[0]})"
    if several_ranks and "legacy stream" in text:
        return RuntimeError(
            "DistributedDataParallel was built on the default stream, which cannot be captured, and keeps adding up "
            f"gradients there: build it inside of `with torch.cuda.stream(torch.cuda.Stream()):`. {cuda}"
        )
    if frame.filename.startswith(_TORCHS_OPTIMIZERS):
        return RuntimeError(
            "the base optimizer cannot be captured: it reads a value on the host, such as its learning rate "
            f"({line}). Use optimizer.minimize, or another base optimizer. {cuda}"
        )
    return RuntimeError(
        f"the step waited for the device, or copied from it, while it was captured: {line}. A graph runs without the "
        "host: take .item(), print, .cpu(), and decisions on values out of the model, the objective and the closure, "
        f"or use optimizer.minimize. {cuda}"
    )


def first_of(error: BaseException, outside: BaseException | None) -> BaseException:
    """The error that the others came from: after the first, a capture makes everything fail."""
    while error.__context__ is not None and error.__context__ is not outside:
        error = error.__context__
    return error


def let_draw_again(generators: Iterable[torch.Generator], device: torch.device) -> None:
    """End the failed capture for torch's own generator and for these, by an empty capture that succeeds.

    torch up to 2.11 ends it only then, and until then refuses to draw ("Offset increment outside graph capture").
    """
    with warnings.catch_warnings(), suppress(RuntimeError):  # the error of the capture is the one to raise
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            pass
