"""A loop with Accelerate against a step written by hand."""

import copy
import pickle

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader, TensorDataset

import bisam
from bisam.integrations.accelerate import SharpnessAwareBackward

import ranks
import two_passes
from two_passes import RHO, assert_equal_weights


def reset_accelerate():
    """Accelerate has one state per process: without this the settings of the first Accelerator persist."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_state():
    reset_accelerate()
    yield
    reset_accelerate()


class Loop:
    """What a user writes."""

    def __init__(
        self, net=None, variant="BiSAM", samples=None, size=8, steps=2, accelerator=None, scaler=None, **options
    ):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **(accelerator or {}))
        self.accelerator.scaler = scaler
        net = two_passes.net() if net is None else net
        optimizer = getattr(bisam, variant)(two_passes.base_of(net.parameters()), net, **{"rho": RHO, **options})
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, two_passes.DECAY)
        loader = DataLoader(TensorDataset(*(two_passes.samples() if samples is None else samples)), batch_size=size)
        prepared = self.accelerator.prepare(net, optimizer, loader, scheduler)
        self.net, self.optimizer, self.loader, self.scheduler = prepared

    def train(self, epochs=1, clip=True):
        backward = SharpnessAwareBackward(self.accelerator, self.net, self.optimizer)
        losses = []

        def loss_of(x, y):
            return backward.criterion(self.net(x), y)

        for x, y in self.batches(epochs):
            with self.accelerator.accumulate(self.net):
                losses.append(backward(loss_of, x, y))
                if clip and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.net.parameters(), two_passes.CLIP["norm"])
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return losses

    def batches(self, epochs):
        for _ in range(epochs):
            yield from self.loader


@pytest.mark.parametrize("name", ["SAM", "BiSAM"])
def test_accumulation_clipping_and_a_schedule_equal_the_reference(name):
    """36 samples are five batches: the last update has one, of four samples."""
    loop = Loop(variant=name)
    start = copy.deepcopy(loop.net)
    found = loop.train(epochs=2)
    updates = two_passes.windows(*two_passes.samples())
    expected, losses = two_passes.train(start, updates * 2, name)
    assert_equal_weights(loop.net, expected)
    assert [loss is None for loss in found] == [True, False, True, False, False] * 2
    assert float(found[1]) == pytest.approx(sum(losses[:2]) / 2, rel=1e-6)
    assert float(found[4]) == pytest.approx(losses[4], rel=1e-6)


def test_a_loss_without_the_criterion_is_returned_as_the_mean_of_the_micro_batches_at_w():
    loop = Loop(variant="SAM")
    backward = SharpnessAwareBackward(loop.accelerator, loop.net, loop.optimizer)
    [update, *_] = two_passes.windows(*two_passes.samples())
    losses = [torch.nn.functional.cross_entropy(loop.net(x), y).item() for x, y in update]
    for x, y in update:
        with loop.accelerator.accumulate(loop.net):
            found = backward(lambda x, y: torch.nn.functional.cross_entropy(loop.net(x), y), x=x, y=y)  # by name
    assert found.item() == pytest.approx(sum(losses) / 2)


def test_training_in_float32_equals_the_reference():
    samples = two_passes.samples(dtype=torch.float32)
    loop = Loop(net=two_passes.net(torch.float32), samples=samples)
    start = copy.deepcopy(loop.net)
    loop.train()
    expected, _ = two_passes.train(start, two_passes.windows(*samples), "BiSAM")
    assert_equal_weights(loop.net, expected, 1e-6)


def test_training_in_bfloat16_equals_that_of_the_optimizer_alone():
    samples = two_passes.samples(dtype=torch.float32)
    net = two_passes.net(torch.float32)
    optimizer = bisam.BiSAM(two_passes.base_of(net.parameters()), net, rho=RHO, clip_norm=two_passes.CLIP["norm"])
    for window in two_passes.windows(*samples):

        def closure(window=window):
            for x, y in window:
                with torch.autocast("cpu", torch.bfloat16):
                    output = net(x)
                (optimizer.criterion(output.float(), y) / 2).backward()

        optimizer.step(closure)
        for group in optimizer.param_groups:
            group["lr"] *= two_passes.DECAY
    loop = Loop(net=two_passes.net(torch.float32), samples=samples, accelerator={"mixed_precision": "bf16"})
    loop.train()
    assert_equal_weights(loop.accelerator.unwrap_model(loop.net), net, 1e-6)


@pytest.mark.parametrize("name", ["BiSAM", "FriendlySAM"])  # the second adds gradients of several steps
def test_training_with_a_scaler_equals_training_without_one(name, monkeypatch):
    """Accelerate makes no scaler on a CPU: it is given one, which doubles its scale with each step."""
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1)):
        reset_accelerate()
        loop = Loop(variant=name, scaler=scaler)
        if scaler is not None:
            monkeypatch.setattr(loop.accelerator, "native_amp", True)
            monkeypatch.setattr(Accelerator, "mixed_precision", "fp16")
        losses = [float(loss) for loss in loop.train() if loss is not None]
        found.append((loop.net, losses, float(loop.optimizer.optimizer.telemetry.ascent_norm)))
    (plain, losses, norm), (scaled, with_scaler, scaled_norm) = found
    assert_equal_weights(scaled, plain)
    assert with_scaler == pytest.approx(losses, rel=1e-6)
    assert scaled_norm == pytest.approx(norm, rel=1e-6)
    assert scaler.get_scale() == 2.0**15


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Accelerator(mixed_precision='fp16') needs a GPU")
def test_float16_trains_on_a_gpu():
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    net = two_passes.net(torch.float32)
    before = copy.deepcopy(net)
    optimizer = bisam.BiSAM(two_passes.base_of(net.parameters()), net, rho=RHO)
    loader = DataLoader(TensorDataset(*two_passes.samples(dtype=torch.float32)), batch_size=8)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    backward = SharpnessAwareBackward(accelerator, net, optimizer)
    for x, y in loader:
        with accelerator.accumulate(net):
            backward(lambda x, y: backward.criterion(net(x), y), x, y)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert all(p.isfinite().all() for p in net.parameters())
    assert any(not torch.equal(a.cpu(), b) for a, b in zip(net.parameters(), before.parameters(), strict=True))


def test_a_saved_state_resumes_bit_for_bit(tmp_path):
    whole = Loop(every=2)
    whole.train(epochs=2)
    reset_accelerate()
    first = Loop(every=2)
    first.train()
    first.accelerator.save_state(str(tmp_path))
    reset_accelerate()
    second = Loop(net=two_passes.net(), every=2)
    second.accelerator.load_state(str(tmp_path))
    second.train()
    for a, b in zip(whole.net.state_dict().values(), second.net.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert whole.optimizer.param_groups[0]["lr"] == second.optimizer.param_groups[0]["lr"]


def test_saving_warns_that_pending_micro_batches_are_not_saved_and_loading_drops_them(tmp_path):
    loop = Loop()
    backward = SharpnessAwareBackward(loop.accelerator, loop.net, loop.optimizer)
    loop.accelerator.save_state(str(tmp_path))
    start = copy.deepcopy(loop.net)
    updates = two_passes.windows(*two_passes.samples())

    def run(x, y):
        with loop.accelerator.accumulate(loop.net):
            backward(lambda x, y: backward.criterion(loop.net(x), y), x, y)
            loop.optimizer.step()
            loop.optimizer.zero_grad()

    run(*updates[1][0])
    with pytest.warns(UserWarning, match=r"1 micro-batches wait.*sync_gradients is True"):
        loop.accelerator.save_state(str(tmp_path / "middle"))
    loop.accelerator.load_state(str(tmp_path))
    for x, y in updates[0]:
        run(x, y)
    assert_equal_weights(loop.net, two_passes.train(start, updates[:1], "BiSAM", clip=None)[0])


class Accumulation:
    """Micro-batches that Accelerate accumulates: sharpness-aware, or by `accelerator.backward` alone."""

    def __init__(self, sharpness_aware):
        reset_accelerate()
        self.loop = Loop()
        if sharpness_aware:
            self.backward = SharpnessAwareBackward(self.loop.accelerator, self.loop.net, self.loop.optimizer)

    def run(self, x, y):
        if hasattr(self, "backward"):
            self.backward(lambda x, y: self.backward.criterion(self.loop.net(x), y), x, y)
        else:
            self.loop.accelerator.backward(torch.nn.functional.cross_entropy(self.loop.net(x), y))

    def micro_batch(self, x, y):
        with self.loop.accelerator.accumulate(self.loop.net):
            self.run(x, y)

    def has_dropped(self):
        """Whether the micro-batches so far are dropped."""
        if hasattr(self, "backward"):
            return not self.backward._waiting
        return all(p.grad is None for p in self.loop.net.parameters())


def skip_the_update(accumulation):
    """Clears gradients where the update is due, in place of stepping."""
    with accumulation.loop.accelerator.accumulate(accumulation.loop.net):
        accumulation.loop.optimizer.zero_grad()


def clear_before_the_update_is_due(accumulation):
    """Accelerate's loops do so with every micro-batch."""
    accumulation.loop.optimizer.zero_grad()


def clear_by_the_optimizer_inside(accumulation):
    accumulation.loop.optimizer.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("clear", "drops"),
    [(skip_the_update, True), (clear_before_the_update_is_due, False), (clear_by_the_optimizer_inside, True)],
)
@pytest.mark.parametrize("sharpness_aware", [False, True])
def test_zero_grad_drops_micro_batches_where_accelerate_drops_their_gradients(clear, drops, sharpness_aware):
    accumulation = Accumulation(sharpness_aware)
    accumulation.micro_batch(*two_passes.samples(8))
    clear(accumulation)
    assert accumulation.has_dropped() is drops


def test_an_update_after_a_skipped_one_has_only_its_own_micro_batches():
    accumulation = Accumulation(sharpness_aware=True)
    loop = accumulation.loop
    start = copy.deepcopy(loop.net)
    updates = two_passes.windows(*two_passes.samples())
    accumulation.micro_batch(*updates[1][0])
    skip_the_update(accumulation)
    for x, y in updates[0]:
        accumulation.micro_batch(x, y)
    loop.optimizer.step()
    assert_equal_weights(loop.net, two_passes.train(start, updates[:1], "BiSAM", clip=None)[0])


def test_an_optimizer_with_pending_micro_batches_can_be_copied_and_pickled():
    accumulation = Accumulation(sharpness_aware=True)
    accumulation.micro_batch(*two_passes.samples(8))
    for copied in (copy.deepcopy(accumulation.loop.optimizer), pickle.loads(pickle.dumps(accumulation.loop.optimizer))):
        copied.optimizer.zero_grad()
    assert not accumulation.has_dropped()


# Two processes


def train_on_a_rank(variant, sharpness):
    with ranks.launched():
        reset_accelerate()
        loop = Loop(two_passes.net(batch_norm=False), variant, two_passes.samples(64), sharpness=sharpness)
        loop.train()
        net = loop.accelerator.unwrap_model(loop.net)
        reset_accelerate()
    return net


@pytest.mark.parametrize(("name", "sharpness"), [("BiSAM", None), ("SAM", "global")])
def test_two_ranks_perturb_locally_or_globally_as_configured(name, sharpness):
    """Accelerate deals out whole batches, and steps a schedule once for each rank."""
    first, second = ranks.run(train_on_a_rank, name, sharpness)
    x, y = two_passes.samples(64)
    batches = list(zip(x.split(8), y.split(8), strict=True))
    updates = [[[batches[start], batches[start + 2]], [batches[start + 1], batches[start + 3]]] for start in (0, 4)]
    net = two_passes.net(batch_norm=False)
    expected, _ = two_passes.train(net, updates, name, sharpness=sharpness or "local", decays=ranks.RANKS)
    for found in (first, second):
        assert_equal_weights(found, expected)


def misuse_on_a_rank():
    with ranks.launched():
        reset_accelerate()
        loop = Loop(two_passes.net(batch_norm=False), samples=two_passes.samples(64), steps=1)
        with pytest.raises(ValueError, match=r"2 processes.*is not wrapped.*prepare\(\) returned"):
            SharpnessAwareBackward(loop.accelerator, loop.net.module, loop.optimizer)
        x, y = next(iter(loop.loader))
        with pytest.raises(RuntimeError, match=r"DistributedDataParallel wraps.*perturbed alike"):
            loop.optimizer.step(lambda: loop.accelerator.backward(loop.optimizer.optimizer.criterion(loop.net(x), y)))
        reset_accelerate()


def test_two_ranks_with_a_model_that_is_not_the_prepared_one_are_refused():
    ranks.run(misuse_on_a_rank)


# Misuse


def test_the_closure_of_a_plain_loop_is_refused_if_it_would_drop_accumulated_batches():
    loop = Loop()
    start = copy.deepcopy(loop.net)

    def run_epoch():
        for x, y in loop.loader:
            with loop.accelerator.accumulate(loop.net):

                def closure(x=x, y=y):
                    loop.optimizer.zero_grad()
                    loss = loop.optimizer.optimizer.criterion(loop.net(x), y)
                    loop.accelerator.backward(loss)
                    return loss

                loop.optimizer.step(closure)

    with pytest.raises(RuntimeError, match=r"accumulates 2 batches.*would be dropped.*SharpnessAwareBackward"):
        run_epoch()
    assert_equal_weights(loop.net, start, 0.0)


def test_the_two_step_class_is_refused_with_accumulation():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = two_passes.net()
    optimizer = bisam.compat.SAM(net.parameters(), torch.optim.SGD, lr=0.1)
    net, optimizer = accelerator.prepare(net, optimizer)
    x, y = two_passes.samples(8)

    def run():
        for _ in range(2):
            with accelerator.accumulate(net):
                accelerator.backward(torch.nn.functional.cross_entropy(net(x), y))
                optimizer.step(lambda: accelerator.backward(torch.nn.functional.cross_entropy(net(x), y)))

    with pytest.raises(RuntimeError, match="accumulates 2 batches"):
        run()


def test_without_accumulation_the_closure_of_a_plain_loop_equals_the_reference():
    loop = Loop(steps=1)
    start = copy.deepcopy(loop.net)
    for x, y in loop.loader:

        def closure(x=x, y=y):
            loss = loop.optimizer.optimizer.criterion(loop.net(x), y)
            loop.accelerator.backward(loss)
            return loss

        loop.optimizer.step(closure)
        loop.scheduler.step()
    updates = two_passes.windows(*two_passes.samples(), count=1)
    expected, _ = two_passes.train(start, updates, "BiSAM", divisor=1, clip=None)
    assert_equal_weights(loop.net, expected)


def test_a_step_without_a_closure_is_refused_with_a_link_to_the_page_on_frameworks():
    loop = Loop(steps=1)
    x, y = two_passes.samples(8)
    loop.accelerator.backward(loop.optimizer.optimizer.criterion(loop.net(x), y))
    with pytest.raises(TypeError, match=r"needs a closure.*docs/frameworks.md"):
        loop.optimizer.step()


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA])
def test_backends_that_run_backward_passes_themselves_are_refused(kind, monkeypatch):
    loop = Loop()
    monkeypatch.setattr(Accelerator, "distributed_type", kind)  # as Accelerate would find it there
    with pytest.raises(RuntimeError, match=f"{kind} runs or averages.*use DistributedDataParallel or FSDP2"):
        SharpnessAwareBackward(loop.accelerator, loop.net, loop.optimizer)


def test_a_function_without_its_batch_is_refused():
    loop = Loop()
    backward = SharpnessAwareBackward(loop.accelerator, loop.net, loop.optimizer)
    with pytest.raises(TypeError, match=r"backward\(loss_of, x, y\).*the last batch only"):
        backward(lambda: torch.zeros(()))


def test_a_loader_that_fills_the_same_memory_again_is_refused():
    """All micro-batches of an update would be the last one."""
    loop = Loop()
    backward = SharpnessAwareBackward(loop.accelerator, loop.net, loop.optimizer)
    x, y = two_passes.samples(8)

    def run():
        for _ in range(2):
            x.normal_()
            with loop.accelerator.accumulate(loop.net):
                backward(lambda x, y: backward.criterion(loop.net(x), y), x, y)

    with pytest.raises(RuntimeError, match="changed in place"):
        run()


def test_an_optimizer_that_is_not_prepared_or_not_sharpness_aware_is_refused():
    loop = Loop()
    with pytest.raises(TypeError, match=r"what accelerator.prepare\(\) returned.*got BiSAM"):
        SharpnessAwareBackward(loop.accelerator, loop.net, loop.optimizer.optimizer)
    plain = loop.accelerator.prepare(two_passes.base_of(loop.net.parameters()))
    with pytest.raises(TypeError, match=r"sharpness-aware one.*got that around a SGD"):
        SharpnessAwareBackward(loop.accelerator, loop.net, plain)
