"""A loop with Lightning Fabric against a step written by hand."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import (
    DataParallelStrategy,
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceXLAStrategy,
    XLAStrategy,
)
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import bisam
from bisam.integrations.fabric import SharpnessAwareBackward

import ranks
import two_passes
from two_passes import RHO, assert_equal_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec")

CLIPS = {"norm": {"max_norm": two_passes.CLIP["norm"]}, "value": {"clip_val": two_passes.CLIP["value"]}}


class Loop:
    """What a user writes. Two micro-batches are an update, and so are the remaining ones at the end of an epoch."""

    def __init__(self, net=None, variant="BiSAM", samples=None, fabric=None, **options):
        self.fabric = Fabric(accelerator="cpu", **{"devices": 1, **(fabric or {})})
        self.fabric.launch()
        net = two_passes.net() if net is None else net
        optimizer = two_passes.base_of(net.parameters())
        if variant is not None:
            optimizer = getattr(bisam, variant)(optimizer, net, **{"rho": RHO, **options})
        self.model, self.optimizer = self.fabric.setup(net, optimizer)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, two_passes.DECAY)
        data = TensorDataset(*(two_passes.samples() if samples is None else samples))
        self.loader = self.fabric.setup_dataloaders(DataLoader(data, batch_size=8))

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, epochs=1, clip="norm"):
        backward = SharpnessAwareBackward(self.fabric, self.model, self.optimizer)
        losses = []

        def loss_of(x, y):
            return self.optimizer.criterion(self.model(x), y) / 2

        for _ in range(epochs):
            for number, (x, y) in enumerate(self.loader, start=1):
                is_accumulating = number % 2 != 0 and number < len(self.loader)
                with self.fabric.no_backward_sync(self.model, enabled=is_accumulating):
                    losses.append(backward(loss_of, x, y, is_accumulating=is_accumulating))
                if not is_accumulating:
                    self.update(clip)
        return losses

    def train_plain(self, clip="norm"):
        """The same with a plain optimizer."""
        for number, (x, y) in enumerate(self.loader, start=1):
            is_accumulating = number % 2 != 0 and number < len(self.loader)
            with self.fabric.no_backward_sync(self.model, enabled=is_accumulating):
                self.fabric.backward(functional.cross_entropy(self.model(x), y) / 2)
            if not is_accumulating:
                self.update(clip)

    def update(self, clip):
        if clip is not None:
            self.fabric.clip_gradients(self.model, self.optimizer, error_if_nonfinite=False, **CLIPS[clip])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


def assert_identical(model, other):
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("name", "clip"), [("SAM", "norm"), ("BiSAM", "norm"), ("BiSAM", "value"), ("BiSAM", None)])
def test_accumulation_clipping_and_a_schedule_equal_the_reference(name, clip):
    """36 samples are five batches: the last update has one, of four samples."""
    loop = Loop(variant=name)
    start = copy.deepcopy(loop.model.module)
    found = loop.train(epochs=2, clip=clip)
    updates = two_passes.windows(*two_passes.samples())
    expected, losses = two_passes.train(start, updates * 2, name, clip=clip)
    assert_equal_weights(loop.model.module, expected)
    assert [loss is None for loss in found] == [True, False, True, False, False] * 2
    assert float(found[1]) == pytest.approx(sum(losses[:2]) / 2, rel=1e-6)
    assert float(found[4]) == pytest.approx(losses[4], rel=1e-6)
    assert float(loop.optimizer.telemetry.loss) == float(found[-1])


def test_training_in_float32_equals_the_reference():
    samples = two_passes.samples(dtype=torch.float32)
    loop = Loop(net=two_passes.net(torch.float32), samples=samples)
    start = copy.deepcopy(loop.model.module)
    loop.train()
    expected, _ = two_passes.train(start, two_passes.windows(*samples), "BiSAM")
    assert_equal_weights(loop.model.module, expected, 1e-6)


def test_rho_zero_is_plain_training_with_fabric_bit_for_bit():
    ours, plain = Loop(rho=0.0), Loop(variant=None)
    ours.train()
    plain.train_plain()
    assert_identical(ours.model, plain.model)


def test_a_loss_without_the_criterion_is_returned_as_the_mean_of_the_micro_batches_at_w():
    loop = Loop(variant="SAM")
    backward = SharpnessAwareBackward(loop.fabric, loop.model, loop.optimizer)
    [update, *_] = two_passes.windows(*two_passes.samples())
    losses = [functional.cross_entropy(loop.model(x), y).item() for x, y in update]

    def loss_of(x, y):
        return functional.cross_entropy(loop.model(x), y)

    assert backward(loss_of, x=update[0][0], y=update[0][1], is_accumulating=True) is None  # by name
    assert backward(loss_of, *update[1]).item() == pytest.approx(sum(losses) / 2)


def test_without_an_ascent_pass_the_loss_is_that_of_the_only_pass():
    loop = Loop(variant="MSAM")
    assert float(loop.train()[-1]) == float(loop.optimizer.telemetry.perturbed_loss)


# The optimizer's own forms of a step


def run_form(form, loop, x, y):
    fabric, model, optimizer = loop.fabric, loop.model, loop.optimizer

    def closure(x=x, y=y, share=1.0):
        loss = optimizer.criterion(model(x), y) * share
        fabric.backward(loss)
        return loss

    def cleared():
        optimizer.zero_grad()
        return closure()

    halves = [partial(closure, *half) for half in zip(x.chunk(2), y.chunk(2), strict=True)]

    def accumulated():
        with fabric.no_backward_sync(model):
            closure(x[:4], y[:4], 0.5)
        closure(x[4:], y[4:], 0.5)

    if form == "step":
        optimizer.step(closure)
    elif form == "step over gradients that are left":
        fabric.backward(model(x).sum())
        optimizer.step(cleared)
    elif form == "list":
        optimizer.step(halves)
    elif form == "accumulated":
        optimizer.step(accumulated)
    elif form == "backward":
        optimizer.backward(closure)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1e6)
        assert norm > 0
        optimizer.step()
    elif form == "minimize":
        optimizer.minimize(x, y, accumulate=2)
    else:
        with fabric.no_backward_sync(model):
            fabric.backward(optimizer.criterion(model(x), y))
        optimizer.ascend()
        assert optimizer.perturbed
        fabric.backward(optimizer.criterion(model(x), y))
        optimizer.descend()


FORMS = [
    "step", "step over gradients that are left", "list", "accumulated", "backward", "minimize", "ascend and descend",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_step_on_the_optimizer_of_fabric_equals_the_reference(form):
    loop = Loop(two_passes.net(batch_norm=False))
    start = copy.deepcopy(loop.model.module)
    x, y = two_passes.samples(32)
    updates = two_passes.windows(x, y, count=1)
    for [(x, y)] in updates:
        run_form(form, loop, x, y)
        loop.scheduler.step()
    expected, _ = two_passes.train(start, updates, "BiSAM", divisor=1, clip=None)
    assert_equal_weights(loop.model.module, expected)


@pytest.mark.parametrize("form", ["step", "backward", "minimize"])
def test_steps_of_each_form_are_counted_in_the_state_that_fabric_saves(form, tmp_path):
    """With every=2 the next step does not perturb: a count that is lost would perturb it."""
    x, y = two_passes.samples(8)
    whole = Loop(every=2)
    run_form(form, whole, x, y)
    whole.fabric.save(tmp_path / "state.ckpt", whole.state)
    resumed = Loop(every=2)
    resumed.fabric.load(tmp_path / "state.ckpt", resumed.state)
    for loop in (whole, resumed):
        run_form("step", loop, x, y)
        assert loop.optimizer.telemetry.perturbed_loss is None
    assert_identical(resumed.model, whole.model)


def test_attributes_set_on_fabrics_wrapper_are_set_on_the_optimizer():
    loop = Loop()
    loop.optimizer.clip_norm = 0.5
    assert loop.optimizer.optimizer.clip_norm == 0.5
    loop.optimizer.model = loop.model
    assert loop.optimizer.optimizer.model is loop.model
    with pytest.raises(AttributeError, match="rho is an option of the parameter groups"):
        loop.optimizer.rho = 0.2


# Precision


def test_training_in_bfloat16_equals_that_of_the_optimizer_alone():
    samples = two_passes.samples(dtype=torch.float32)
    net = two_passes.net(torch.float32)
    optimizer = bisam.BiSAM(two_passes.base_of(net.parameters()), net, rho=RHO, clip_norm=two_passes.CLIP["norm"])
    for window in two_passes.windows(*samples):

        def closure(window=window):
            for x, y in window:
                with torch.autocast("cpu", torch.bfloat16):
                    output = net(x.bfloat16())
                (optimizer.criterion(output.float(), y) / 2).backward()

        optimizer.step(closure)
        for group in optimizer.param_groups:
            group["lr"] *= two_passes.DECAY
    loop = Loop(net=two_passes.net(torch.float32), samples=samples, fabric={"precision": "bf16-mixed"})
    loop.train()
    assert_equal_weights(loop.model.module, net, 1e-6)


class Scaled(MixedPrecision):
    """The scaler of 16-mixed in the precision of the model, so that it has nothing to change but the scale."""

    def forward_context(self):
        return nullcontext()

    def convert_input(self, data):
        return data

    def convert_output(self, data):
        return data


def scaled(growth_interval=1, plugin=Scaled):
    """Fabric itself replaces 16-mixed on a CPU with bf16-mixed."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=growth_interval)
    return scaler, {"plugins": [plugin("16-mixed", "cpu", scaler)]}


@pytest.mark.parametrize("clip", ["norm", None])  # without clipping the gradient is unscaled by the step
@pytest.mark.parametrize("name", ["BiSAM", "FriendlySAM"])  # the second adds gradients of several steps
def test_training_with_a_scaler_equals_training_without_one(name, clip):
    """It doubles its scale with each step."""
    scaler, options = scaled()
    plain, with_scaler = Loop(variant=name), Loop(variant=name, fabric=options)
    losses, scaled_losses = (
        [float(v) for v in loop.train(clip=clip) if v is not None] for loop in (plain, with_scaler)
    )
    assert_equal_weights(with_scaler.model.module, plain.model.module)
    assert scaled_losses == pytest.approx(losses, rel=1e-6)
    norms = [float(loop.optimizer.telemetry.ascent_norm) for loop in (plain, with_scaler)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    assert scaler.get_scale() == 2.0**15


def test_backward_of_the_optimizer_uses_the_scaler():
    _, options = scaled()
    plain, with_scaler = Loop(variant="FriendlySAM"), Loop(variant="FriendlySAM", fabric=options)
    for loop in (plain, with_scaler):
        SharpnessAwareBackward(loop.fabric, loop.model, loop.optimizer)
        for [(x, y)] in two_passes.windows(*two_passes.samples(24), count=1):
            run_form("backward", loop, x, y)
    assert_equal_weights(with_scaler.model.module, plain.model.module)


def test_training_in_float16_equals_both_passes_written_by_hand():
    _, options = scaled(plugin=MixedPrecision)
    loop = Loop(two_passes.net(torch.float32), "SAM", two_passes.samples(16, torch.float32), fabric=options)
    net = copy.deepcopy(loop.model.module)
    base, params = two_passes.base_of(net.parameters()), list(net.parameters())
    batches = two_passes.windows(*two_passes.samples(16, torch.float32))[0]

    def gradient():
        for x, y in batches:
            with torch.autocast("cpu", torch.float16):
                output = net(x.half())
            (2.0**12 * functional.cross_entropy(output.float(), y) / 2).backward()
        found = [p.grad / 2.0**12 for p in params]
        base.zero_grad()
        return found

    at_weights = gradient()
    buffers = [b.clone() for b in net.buffers()]
    weights = [p.detach().clone() for p in params]
    length = torch.sqrt(sum((g * g).sum() for g in at_weights))
    for p, g in zip(params, at_weights, strict=True):
        p.data += RHO * g / length
    perturbed = gradient()
    for p, w, g in zip(params, weights, perturbed, strict=True):
        p.data, p.grad = w, g
    for b, saved in zip(net.buffers(), buffers, strict=True):
        b.copy_(saved)
    base.step()
    loop.train(clip=None)
    assert_equal_weights(loop.model.module, net, 1e-6)


@pytest.mark.parametrize("clip", ["norm", None])
def test_an_update_whose_gradient_overflows_is_skipped_and_the_next_one_is_correct(clip):
    scaler, options = scaled(growth_interval=1000)
    loop = Loop(two_passes.net(batch_norm=False), fabric=options)
    start = copy.deepcopy(loop.model.module)
    backward = SharpnessAwareBackward(loop.fabric, loop.model, loop.optimizer)
    [x, y], [more, labels] = two_passes.windows(*two_passes.samples(16))[0]

    def loss_of(x, y):
        return loop.optimizer.criterion(loop.model(x), y)

    backward(loss_of, x * torch.inf, y)
    loop.update(clip)
    assert_identical(loop.model.module, start)
    assert scaler.get_scale() == 2.0**11
    loop.optimizer.param_groups[0]["lr"] = two_passes.LR  # the schedule has stepped, as with any optimizer
    backward(loss_of, more, labels)
    loop.update(clip)
    expected, _ = two_passes.train(start, [[(more, labels)]], "BiSAM", divisor=1, clip=clip)
    assert_equal_weights(loop.model.module, expected)


# Checkpoints


@pytest.mark.parametrize(("name", "options"), [("BiSAM", {"every": 2}), ("LookSAM", {}), ("FriendlySAM", {})])
def test_a_saved_state_resumes_bit_for_bit(name, options, tmp_path):
    whole = Loop(variant=name, **options)
    whole.train(epochs=2)
    first = Loop(variant=name, **options)
    first.train()
    first.fabric.save(tmp_path / "state.ckpt", first.state)
    second = Loop(variant=name, **options)
    rest = second.fabric.load(tmp_path / "state.ckpt", second.state)
    assert rest == {}
    second.train()
    assert_identical(second.model, whole.model)
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_a_saved_scaler_resumes(tmp_path):
    whole, whole_options = scaled(growth_interval=2)
    loop = Loop(fabric=whole_options)
    loop.train()
    loop.fabric.save(tmp_path / "state.ckpt", {**loop.state, "scaler": loop.fabric.strategy.precision.scaler})
    loop.train()
    resumed, options = scaled(growth_interval=2)
    second = Loop(fabric=options)
    second.fabric.load(tmp_path / "state.ckpt", {**second.state, "scaler": second.fabric.strategy.precision.scaler})
    assert resumed.get_scale() == 2.0**13
    second.train()
    assert_identical(second.model, loop.model)
    assert resumed.get_scale() == whole.get_scale() == 2.0**15


def test_saving_warns_that_pending_micro_batches_are_not_saved_and_loading_drops_them(tmp_path):
    loop = Loop()
    backward = SharpnessAwareBackward(loop.fabric, loop.model, loop.optimizer)
    loop.fabric.save(tmp_path / "start.ckpt", loop.state)
    start = copy.deepcopy(loop.model.module)
    updates = two_passes.windows(*two_passes.samples())

    def loss_of(x, y):
        return loop.optimizer.criterion(loop.model(x), y) / 2

    backward(loss_of, *updates[1][0], is_accumulating=True)
    with pytest.warns(UserWarning, match=r"1 micro-batches wait.*Save after optimizer.step\(\)"):
        loop.fabric.save(tmp_path / "middle.ckpt", loop.state)
    loop.fabric.load(tmp_path / "start.ckpt", loop.state)
    backward(loss_of, *updates[0][0], is_accumulating=True)
    backward(loss_of, *updates[0][1])
    loop.update(clip=None)
    assert_equal_weights(loop.model.module, two_passes.train(start, updates[:1], "BiSAM", clip=None)[0])


def test_zero_grad_drops_pending_micro_batches():
    """As their gradients would be, had they been computed."""
    loop = Loop()
    backward = SharpnessAwareBackward(loop.fabric, loop.model, loop.optimizer)
    start = copy.deepcopy(loop.model.module)
    updates = two_passes.windows(*two_passes.samples())

    def loss_of(x, y):
        return loop.optimizer.criterion(loop.model(x), y) / 2

    backward(loss_of, *updates[1][0], is_accumulating=True)
    loop.optimizer.zero_grad()
    backward(loss_of, *updates[0][0], is_accumulating=True)
    backward(loss_of, *updates[0][1])
    loop.update(clip=None)
    assert_equal_weights(loop.model.module, two_passes.train(start, updates[:1], "BiSAM", clip=None)[0])


# Two processes


def ranks_of(strategy=None):
    """The options of a Fabric that a launcher such as torchrun has started."""
    strategy = DDPStrategy(process_group_backend="gloo") if strategy is None else strategy
    return {"devices": ranks.RANKS, "strategy": strategy, "plugins": [TorchElasticEnvironment()]}


def shards(x, y, count=2):
    """The micro-batches of each update, by rank, as torch's sampler deals them out."""
    of_ranks = [two_passes.windows(x[rank :: ranks.RANKS], y[rank :: ranks.RANKS], count=count) for rank in (0, 1)]
    return [list(update) for update in zip(*of_ranks, strict=True)]


def counting(counts):
    """A hook of DistributedDataParallel that averages as it does itself."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def hook(state, bucket):
        counts.append(bucket.index())
        return allreduce_hook(state, bucket)

    return hook


def train_on_a_rank(variant, sharpness, folder):
    """Half of the training, and the other half after a checkpoint."""
    with ranks.launched():
        counts = []
        for half in (0, 1):
            loop = Loop(
                two_passes.net(batch_norm=False), variant, two_passes.samples(64), ranks_of(), sharpness=sharpness
            )
            loop.model._forward_module.register_comm_hook(None, counting(counts))
            if half:
                loop.fabric.load(f"{folder}/state.ckpt", loop.state)
            loop.train()
            loop.fabric.save(f"{folder}/state.ckpt", loop.state)
            loop.fabric.barrier()
    return loop.model.module, len(counts)


@pytest.mark.parametrize(("name", "sharpness"), [("BiSAM", None), ("SAM", "global")])
def test_two_ranks_perturb_as_configured_and_average_once_per_pass_if_global_and_per_step_if_local(
    name, sharpness, tmp_path
):
    found = ranks.run(train_on_a_rank, name, sharpness, str(tmp_path))
    updates = shards(*two_passes.samples(64))
    net = two_passes.net(batch_norm=False)
    expected, _ = two_passes.train(net, updates * 2, name, sharpness=sharpness or "local")
    for net, reductions in found:
        assert_equal_weights(net, expected)
        assert reductions == 2 * len(updates) * (2 if sharpness == "global" else 1)  # one bucket


def train_by_closures_on_a_rank(form):
    with ranks.launched():
        loop = Loop(two_passes.net(batch_norm=False), "BiSAM", two_passes.samples(64), ranks_of())
        loop.optimizer.model = loop.model
        for x, y in loop.loader:
            run_form(form, loop, x, y)
            loop.scheduler.step()
    return loop.model.module


@pytest.mark.parametrize("form", ["step", "list", "accumulated", "backward", "minimize", "ascend and descend"])
def test_two_ranks_with_the_optimizers_own_forms_perturb_each_by_its_own_gradient(form):
    found = ranks.run(train_by_closures_on_a_rank, form)
    updates = shards(*two_passes.samples(64), count=1)
    expected, _ = two_passes.train(two_passes.net(batch_norm=False), updates, "BiSAM", divisor=1, clip=None)
    for net in found:
        assert_equal_weights(net, expected)


def train_plain_on_a_rank(variant):
    with ranks.launched():
        net = two_passes.net(batch_norm=False)
        loop = Loop(net, variant, two_passes.samples(64), ranks_of(), **({"rho": 0.0} if variant else {}))
        loop.train() if variant else loop.train_plain()
    return loop.model.module


def test_two_ranks_with_rho_zero_are_plain_training_with_fabric_bit_for_bit():
    ours, plain = (ranks.run(train_plain_on_a_rank, variant)[0] for variant in ("BiSAM", None))
    assert_identical(ours, plain)


def sharded(module, mesh):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=mesh["data_parallel"])


def train_sharded_on_a_rank(folder):
    """Half of the training, and the other half after a checkpoint of the model and the base optimizer."""
    with ranks.launched():
        train_half_sharded(f"{folder}/state.ckpt", is_resumed=False)
        model = train_half_sharded(f"{folder}/state.ckpt", is_resumed=True)
        net = two_passes.net(batch_norm=False)
        net.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    return net


def train_half_sharded(path, *, is_resumed):
    options = ranks_of(ModelParallelStrategy(sharded, data_parallel_size=2, tensor_parallel_size=1))
    fabric = Fabric(accelerator="cpu", **options)
    fabric.launch()
    model = fabric.setup_module(two_passes.net(batch_norm=False))
    optimizer = fabric.setup_optimizers(bisam.BiSAM(two_passes.base_of(model.parameters()), model, rho=RHO))
    backward = SharpnessAwareBackward(fabric, model, optimizer)
    if is_resumed:
        fabric.load(path, {"model": model, "optimizer": optimizer.base})
    for update in shards(*two_passes.samples(64)):
        for number, (x, y) in enumerate(update[fabric.global_rank]):
            backward(lambda x, y: optimizer.criterion(model(x), y) / 2, x, y, is_accumulating=number == 0)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= two_passes.DECAY
        optimizer.zero_grad()
    fabric.save(path, {"model": model, "optimizer": optimizer.base})
    return model.module


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 cannot run fully_shard on a CPU")
def test_two_ranks_with_sharded_parameters_share_one_perturbation_and_resume(tmp_path):
    found = ranks.run(train_sharded_on_a_rank, str(tmp_path))
    net, updates = two_passes.net(batch_norm=False), shards(*two_passes.samples(64))
    expected, _ = two_passes.train(net, updates * 2, "BiSAM", sharpness="global", clip=None)
    for net in found:
        assert_equal_weights(net, expected)


def misuse_on_a_rank():
    with ranks.launched():
        loop = Loop(two_passes.net(batch_norm=False), samples=two_passes.samples(64), fabric=ranks_of())
        x, y = next(iter(loop.loader))
        with pytest.raises(RuntimeError, match=r"DistributedDataParallel wraps.*perturbed alike.*optimizer.model"):
            run_form("step", loop, x, y)
        backward = SharpnessAwareBackward(loop.fabric, loop.model, loop.optimizer)
        with (
            loop.fabric.no_backward_sync(loop.model),
            pytest.raises(RuntimeError, match=r"no_backward_sync\(\) is on where the update is due"),
        ):
            backward(lambda x, y: loop.optimizer.criterion(loop.model(x), y), x, y)


def test_two_ranks_without_the_wrapped_model_or_without_gradient_sync_are_refused():
    ranks.run(misuse_on_a_rank)


# Misuse


def test_an_optimizer_that_fabric_has_not_set_up_or_that_is_not_sharpness_aware_is_refused():
    loop, plain = Loop(), Loop(variant=None)
    with pytest.raises(TypeError, match=r"what fabric.setup\(\) returned.*got BiSAM"):
        SharpnessAwareBackward(loop.fabric, loop.model, loop.optimizer.optimizer)
    with pytest.raises(TypeError, match=r"sharpness-aware one.*got that around a SGD"):
        SharpnessAwareBackward(plain.fabric, plain.model, plain.optimizer)


def test_a_model_that_fabric_has_not_set_up_is_refused():
    loop = Loop()
    with pytest.raises(TypeError, match=r"model must be what fabric.setup\(\) returned, got Sequential"):
        SharpnessAwareBackward(loop.fabric, loop.model.module, loop.optimizer)


@pytest.mark.parametrize(
    "strategy", [FSDPStrategy, DeepSpeedStrategy, DataParallelStrategy, XLAStrategy, SingleDeviceXLAStrategy]
)
def test_a_strategy_that_cannot_run_two_passes_is_refused(strategy):
    loop = Loop()
    loop.fabric._strategy = strategy.__new__(strategy)  # they need hardware or packages that are not here
    with pytest.raises(RuntimeError, match=rf'{strategy.__name__} is not.*strategy="ddp".*fully_shard'):
        SharpnessAwareBackward(loop.fabric, loop.model, loop.optimizer)


def test_a_function_without_its_batch_is_refused():
    loop = Loop()
    backward = SharpnessAwareBackward(loop.fabric, loop.model, loop.optimizer)
    with pytest.raises(TypeError, match=r"backward\(loss_of, x, y\).*the last batch only"):
        backward(lambda: torch.zeros(()), is_accumulating=True)


def test_a_loader_that_fills_the_same_memory_again_is_refused():
    """All micro-batches of an update would be the last one."""
    loop = Loop()
    backward = SharpnessAwareBackward(loop.fabric, loop.model, loop.optimizer)
    x, y = two_passes.samples(8)

    def run():
        for is_accumulating in (True, False):
            x.normal_()
            backward(lambda x, y: loop.optimizer.criterion(loop.model(x), y), x, y, is_accumulating=is_accumulating)

    with pytest.raises(RuntimeError, match="changed in place"):
        run()


def test_bisam_refuses_a_loss_that_is_not_its_criterion():
    loop = Loop()
    backward = SharpnessAwareBackward(loop.fabric, loop.model, loop.optimizer)
    with pytest.raises(RuntimeError, match=r"BiSAM needs two losses.*optimizer.criterion"):
        backward(lambda x, y: functional.cross_entropy(loop.model(x), y), *two_passes.samples(8))


def test_the_loop_of_a_plain_optimizer_is_refused():
    loop = Loop()
    with pytest.raises(TypeError, match=r"needs a closure.*docs/frameworks.md"):
        loop.train_plain(clip=None)


def test_forms_that_would_use_scaled_gradients_are_refused_with_float16():
    _, options = scaled()
    loop = Loop(fabric=options)
    start = copy.deepcopy(loop.model.module)
    SharpnessAwareBackward(loop.fabric, loop.model, loop.optimizer)
    x, y = two_passes.samples(8)
    with pytest.raises(RuntimeError, match=r"16-mixed.*backward\(loss_of, x, y\) and optimizer.step\(\) instead of"):
        run_form("ascend and descend", loop, x, y)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported if GradScaler is enabled"):
        run_form("step", loop, x, y)
    with pytest.raises(RuntimeError, match=r"requires you to call `fabric.backward\(loss\)`"):
        run_form("minimize", loop, x, y)
    for a, b in zip(loop.model.parameters(), start.parameters(), strict=True):
        assert torch.equal(a, b)


def test_minimize_is_refused_with_bfloat16():
    loop = Loop(two_passes.net(torch.float32), fabric={"precision": "bf16-mixed"})
    SharpnessAwareBackward(loop.fabric, loop.model, loop.optimizer)
    with pytest.raises(RuntimeError, match=r"requires you to call `fabric.backward\(loss\)`"):
        loop.optimizer.minimize(*two_passes.samples(8, torch.float32))
