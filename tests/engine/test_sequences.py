"""Any order of calls: a plain model of the rules predicts which are refused, and when the weights are unchanged.

`BISAM_SEQUENCES=10000 pytest tests/engine/test_sequences.py` runs as many; CI runs a few hundred.
"""

import copy
import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import bisam

from family import assert_identical, batch, mlp

RHO = 0.05
seeds = st.integers(0, 3)


class BrokenError(Exception):
    pass


def expected_step(model, momenta, x, y):
    """SAM and SGD with momentum, written out. Returns the new weights and momenta."""
    weights = [p.detach().clone() for p in model.parameters()]
    twin = copy.deepcopy(model)
    params = list(twin.parameters())
    gradients = torch.autograd.grad(torch.nn.functional.cross_entropy(twin(x), y), params)
    norm = torch.stack([g.norm() for g in gradients]).norm()
    for p, g in zip(params, gradients, strict=True):
        p.data += RHO * g / norm
    gradients = torch.autograd.grad(torch.nn.functional.cross_entropy(twin(x), y), params)
    momenta = [0.9 * m + g for m, g in zip(momenta or [torch.zeros_like(w) for w in weights], gradients, strict=True)]
    return [w - 0.1 * m for w, m in zip(weights, momenta, strict=True)], momenta


class Sequences(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        torch.manual_seed(0)
        self.model = mlp().double()
        self.optimizer = bisam.SAM(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9), self.model, rho=RHO)
        self.weights, self.momenta = self.now(), None
        self.perturbed = False
        self.gradients = "none"
        """Of what `.grad` holds: "none", "zeros", "own" by hand, "last" of a step, "mixed" own and last."""
        self.saved = None

    def now(self):
        return [p.detach().clone() for p in self.model.parameters()]

    def data(self, seed):
        return batch(seed, dtype=torch.float64)

    @invariant()
    def the_weights_are_those_of_the_model(self):
        if not hasattr(self, "model"):
            return
        assert self.optimizer.perturbed == self.perturbed
        if not self.perturbed:
            assert_identical(self.now(), self.weights)

    def steps(self, seed, run):
        x, y = self.data(seed)
        weights, momenta = expected_step(self.model, self.momenta, x, y)
        run(x, y)
        torch.testing.assert_close(self.now(), weights, rtol=1e-10, atol=1e-12)
        self.weights = self.now()
        self.momenta = [self.optimizer.state[p]["momentum_buffer"].clone() for p in self.model.parameters()]
        torch.testing.assert_close(self.momenta, momenta, rtol=1e-10, atol=1e-12)
        self.gradients = "last"

    def closure(self, x, y, *, clears=False, breaks_in=None):
        def closure():
            if clears:
                self.optimizer.zero_grad()
            loss = self.optimizer.criterion(self.model(x), y)
            if self.optimizer.phase == breaks_in:
                raise BrokenError
            loss.backward()
            return loss

        return closure

    @rule(seed=seeds)
    def minimize(self, seed):
        if self.perturbed:
            with pytest.raises(RuntimeError, match="between ascend"):
                self.optimizer.minimize(*self.data(seed))
        else:
            self.steps(seed, self.optimizer.minimize)

    @rule(seed=seeds, clears=st.booleans())
    def step(self, seed, clears):
        def run(x, y):
            self.optimizer.step(self.closure(x, y, clears=clears))

        if self.perturbed:
            with pytest.raises(RuntimeError, match="between ascend"):
                run(*self.data(seed))
        elif self.gradients in ("own", "mixed") and not clears:
            found = [p.grad.clone() for p in self.model.parameters()]
            with pytest.raises(RuntimeError, match="found gradients from before"):
                run(*self.data(seed))
            assert_identical([p.grad for p in self.model.parameters()], found)
        else:
            self.steps(seed, run)

    @rule(seed=seeds, breaks_in=st.sampled_from(["ascent", "descent"]))
    def step_that_raises(self, seed, breaks_in):
        if self.perturbed or self.gradients in ("own", "mixed"):
            return
        with pytest.raises(BrokenError):
            self.optimizer.step(self.closure(*self.data(seed), breaks_in=breaks_in))
        self.gradients = "none"

    @rule(seed=seeds)
    def backward(self, seed):
        x, y = self.data(seed)
        self.optimizer.criterion(self.model(x), y).backward()
        self.gradients = {"last": "mixed", "mixed": "mixed"}.get(self.gradients, "own")

    @rule()
    def ascend(self):
        if self.perturbed:
            words = "called twice"
        elif self.gradients in ("last", "mixed"):
            words = "gradient of the last step"
        elif self.gradients == "none":
            words = "found no gradients"
        else:
            words = ""
        if words:
            with pytest.raises(RuntimeError, match=words):
                self.optimizer.ascend()
            return
        self.optimizer.ascend()
        moved = torch.stack([(a - b).norm() for a, b in zip(self.now(), self.weights, strict=True)]).norm().item()
        assert moved == pytest.approx(0.0 if self.gradients == "zeros" else RHO, abs=1e-9)
        self.perturbed, self.gradients = True, "none"

    @rule(zero_grad=st.booleans())
    def descend(self, zero_grad):
        if not self.perturbed:
            with pytest.raises(RuntimeError, match="called before ascend"):
                self.optimizer.descend()
            return
        self.perturbed = False
        if self.gradients == "none":
            with pytest.raises(RuntimeError, match="found no gradients"):
                self.optimizer.descend()
            return
        found = [p.grad.clone() for p in self.model.parameters()]
        self.optimizer.descend(zero_grad=zero_grad)
        before = self.momenta or [torch.zeros_like(g) for g in found]
        momenta = [0.9 * m + g for m, g in zip(before, found, strict=True)]
        expected = [w - 0.1 * m for w, m in zip(self.weights, momenta, strict=True)]
        torch.testing.assert_close(self.now(), expected, rtol=1e-12, atol=1e-14)
        self.weights, self.momenta = self.now(), momenta
        self.gradients = "none" if zero_grad else "last"

    @rule()
    def restore(self):
        self.optimizer.restore()
        if self.perturbed:
            self.perturbed, self.gradients = False, "none"

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none):
        had = self.gradients != "none"
        self.optimizer.zero_grad(set_to_none)
        self.gradients = "zeros" if had and not set_to_none else "none"

    @rule()
    def save(self):
        if self.perturbed:
            with pytest.raises(RuntimeError, match="between ascend"):
                self.optimizer.state_dict()
        else:
            self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict())), self.momenta

    @rule()
    def load(self):
        if self.saved is None:
            return
        (weights, state), momenta = copy.deepcopy(self.saved)
        if self.perturbed:
            with pytest.raises(RuntimeError, match="between ascend"):
                self.optimizer.load_state_dict(state)
            return
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        self.weights, self.momenta = self.now(), momenta

    @rule()
    def copied(self):
        if self.perturbed:
            with pytest.raises(RuntimeError, match="between ascend"):
                copy.deepcopy((self.model, self.optimizer))
        else:
            self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
            self.gradients = "none"  # torch copies a parameter without its gradient


TestSequences = pytest.mark.slow(Sequences.TestCase)
TestSequences.settings = settings(
    max_examples=int(os.environ.get("BISAM_SEQUENCES", "200")),
    stateful_step_count=20,
    deadline=None,
    derandomize="BISAM_SEQUENCES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
