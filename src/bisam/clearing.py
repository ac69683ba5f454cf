"""What the closures of a step may clear of the gradients that they find: those from before it, not each other's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from bisam import gradients


class Clearing:
    """Told where a step is, it knows whether `zero_grad` clears, and refuses what would be lost in silence.

    The closures of a list, and the parts of a batch, add up: whichever is not the first leaves what it finds.
    """

    def __init__(self) -> None:
        self.inside_pass = False
        self.began_clear = True
        """Whether the step found no gradients, or those that it found were cleared."""
        self._before: Before | None = None
        self._adds_up = False
        self._held: dict[Tensor, tuple[int, int]] = {}
        self._arrivals: Arrivals | None = None

    def begin_step(self, params: Sequence[Tensor]) -> None:
        self.began_clear = not gradients.present(params)
        if not self.began_clear:
            self._before = Before(params)

    def end_step(self) -> None:
        self._forget_before()

    @contextmanager
    def during_pass(self, params: Sequence[Tensor], *, listed: bool) -> Iterator[None]:
        """Around the closures of a pass; `listed` are several of the user's, which are looked after."""
        self.inside_pass = True
        trained = [param for param in params if param.requires_grad] if listed else []
        # two stand for all, which are cleared together; to watch each would cost a call for each of its gradients
        self._arrivals = Arrivals({*trained[:1], *trained[-1:]}) if listed else None
        try:
            yield
        finally:
            if self._arrivals is not None:
                self._arrivals.close()
            self.inside_pass, self._adds_up, self._held, self._arrivals = False, False, {}, None

    def begin_closure(self, params: Sequence[Tensor]) -> None:
        self._adds_up = gradients.present(params) and not gradients.are_as_marked(params)  # zeros are none
        if self._arrivals is not None:
            self._arrivals.forget()
            self._held = gradients.versions(params) if self._keeps else {}

    def end_closure(self) -> None:
        if self._before is not None and not self._before.are_cleared():
            raise RuntimeError(
                "step() found gradients from before it, and the closure did not clear them. Gradients cannot be "
                "accumulated outside, because the second pass would miss them: give step() a list of closures, one for "
                "each micro-batch, or use minimize(x, y, accumulate=n). If they are left over, call zero_grad() first."
            )
        self._forget_before()
        if self._arrivals is not None and any(param in self._arrivals.first for param in self._held):
            raise RuntimeError(
                "a closure has cleared the gradients of those before it in the list, which add up to one step. Clear "
                "by optimizer.zero_grad(), which knows of them, or not at all"
            )

    def keeps_gradients(self) -> bool:
        """Whether `zero_grad` is to leave them."""
        if self._keeps and self._held and gradients.versions(self._held) != self._held:
            raise RuntimeError(
                "zero_grad() found gradients of this closure added to those of the closures before it, and cannot tell "
                "them apart. Have the first backward pass leave none, by torch.autograd.grad, or give one closure"
            )
        return self._keeps

    def note_cleared(self) -> None:
        self.began_clear, self._adds_up = True, False
        self._forget_before()

    @property
    def _keeps(self) -> bool:
        return self.inside_pass and self._adds_up and self.began_clear

    def _forget_before(self) -> None:
        if self._before is not None:
            self._before.close()
        self._before = None


class Arrivals:
    """What backward passes add to the gradients of parameters, and whether there was one to add it to."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.added: set[Tensor] = set()
        """Whose gradient was made or added to."""
        self.first: set[Tensor] = set()
        """Those that had none when one came, for them or for whoever asked by `autograd.grad`."""
        self._handles = []
        for param in params:
            if param.requires_grad:
                self._handles.append(param.register_hook(partial(self._arrives, param)))  # type: ignore[no-untyped-call]
                self._handles.append(param.register_post_accumulate_grad_hook(self.added.add))  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        self.added.clear()
        self.first.clear()

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()

    def _arrives(self, param: Tensor, _: Tensor) -> None:
        if param.grad is None:
            self.first.add(param)


class Before:
    """Gradients from before a pass, which it must clear: whether new ones were added to them, or any is left."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._held = {param: param.grad for param in params if param.grad is not None}
        self._arrivals = Arrivals(self._held)

    def are_cleared(self) -> bool:
        cleared, added = self._arrivals.first, self._arrivals.added
        left = any(param.grad is gradient and param not in cleared for param, gradient in self._held.items())
        return not left and added <= cleared

    def close(self) -> None:
        """Look no more."""
        self._arrivals.close()
