"""Lightning's Trainer against a step written by hand."""

import copy

import lightning
import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bisam
from bisam.integrations.lightning import SharpnessAwareModule

import ranks
import two_passes
from two_passes import RHO, assert_equal_weights

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{PossibleUserWarning.__module__}.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec"),
]


class Classifier(SharpnessAwareModule):
    def __init__(self, variant=bisam.BiSAM, net=None, **options):
        super().__init__()
        self.net = two_passes.net() if net is None else net
        self.variant, self.options = variant, {"rho": RHO, **options}
        self.updates = []
        self.counted = torchmetrics.SumMetric()
        self.called = torchmetrics.MeanMetric()

    def loss_of(self, x, y):
        return self.sharpness_loss(self.net(x), y)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss_of(x, y)
        self.counted.update(len(y))
        assert self.called(loss.detach()) is not None  # its value, in the second pass too
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.updates.append(optimizer)

    def configure_optimizers(self):
        base = two_passes.base_of(self.net.parameters())
        optimizer = base if self.variant is None else self.variant(base, self, **self.options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, two_passes.DECAY)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Steady(Classifier):
    """Without a schedule."""

    def configure_optimizers(self):
        return super().configure_optimizers()["optimizer"]


class Plain(lightning.LightningModule):
    """Not derived from SharpnessAwareModule."""

    def __init__(self, make):
        super().__init__()
        self.net, self.make = two_passes.net(), make

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.make(self)


def fit(module, epochs=1, batches=None, checkpoint=None, rank=None, **options):
    x, y = two_passes.samples() if batches is None else batches
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": two_passes.CLIP["norm"], **options}
    trainer = lightning.Trainer(
        max_epochs=epochs,
        **{"accelerator": "cpu", "logger": False, "enable_checkpointing": False, **options},
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, barebones=False,
    )  # fmt: skip
    data = TensorDataset(x, y)
    sampler = None if rank is None else DistributedSampler(data, ranks.RANKS, rank, shuffle=False)
    trainer.fit(module, DataLoader(data, batch_size=8, sampler=sampler), ckpt_path=checkpoint)
    return trainer


@pytest.mark.parametrize(("name", "clip"), [("SAM", "norm"), ("BiSAM", "norm"), ("BiSAM", "value")])
def test_accumulation_clipping_and_a_schedule_equal_the_reference(name, clip):
    """36 samples are five batches: the last update has one, of four samples."""
    module = Classifier(getattr(bisam, name))
    start = copy.deepcopy(module.net)
    trainer = fit(module, epochs=2, gradient_clip_val=two_passes.CLIP[clip], gradient_clip_algorithm=clip)
    expected, _ = two_passes.train(start, two_passes.windows(*two_passes.samples()) * 2, name, clip=clip)
    assert_equal_weights(module.net, expected)
    assert trainer.global_step == len(module.updates) == 6


def test_training_in_float32_equals_the_reference():
    module = Classifier(net=two_passes.net(torch.float32))
    start = copy.deepcopy(module.net)
    batches = two_passes.samples(dtype=torch.float32)
    fit(module, batches=batches)
    expected, _ = two_passes.train(start, two_passes.windows(*batches), "BiSAM")
    assert_equal_weights(module.net, expected, 1e-6)


def test_rho_zero_is_plain_training_with_lightning_bit_for_bit():
    modules = [Classifier(net=two_passes.net()), Classifier(None, net=two_passes.net())]
    modules[0].options["rho"] = 0.0
    modules[1].loss_of = lambda x, y: torch.nn.functional.cross_entropy(modules[1].net(x), y)
    for module in modules:
        fit(module, epochs=2)
    for a, b in zip(modules[0].net.state_dict().values(), modules[1].net.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_the_logged_loss_is_that_at_the_weights_and_metrics_count_each_batch_once():
    """28 samples: the last update has batches of 8 and 4, which weigh differently in the mean over the epoch."""
    module = Classifier()
    start = copy.deepcopy(module.net)
    x, y = two_passes.samples(28)
    trainer = fit(module, batches=(x, y))
    _, losses = two_passes.train(start, two_passes.windows(x, y), "BiSAM")
    sizes = [len(part) for part in y.split(8)]
    expected = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / len(y)
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(expected, rel=1e-6)
    assert module.counted.compute() == len(y)
    assert float(module.called.compute()) == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    module.counted.update(1)  # metrics work normally after the step
    assert module.counted.compute() == len(y) + 1


def test_metrics_that_a_training_step_resets_and_metric_collections_count_each_batch_once():
    class Resetting(Classifier):
        def __init__(self):
            super().__init__()
            metrics = {"a": torchmetrics.SumMetric(), "b": torchmetrics.MeanMetric()}
            self.collected = torchmetrics.MetricCollection(metrics)
            self.sums = []

        def training_step(self, batch, batch_idx):
            if batch_idx % 2 == 0:
                self.collected.reset()
            self.collected(batch[1].double())
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx % 2 == 1:
                self.sums.append(float(self.collected.compute()["a"]))

    module = Resetting()
    fit(module)
    y = two_passes.samples()[1]
    assert module.sums == [float(part.sum()) for part in y[:32].split(16)]


class Wrapped(Classifier):
    """With metrics that do not keep the value of their last call."""

    def __init__(self, **options):
        super().__init__(**options)
        accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3, average=None)
        self.by_class = torchmetrics.ClasswiseWrapper(accuracy)
        self.running = torchmetrics.wrappers.Running(torchmetrics.MeanMetric(), window=2)
        self.values = []

    def loss_of(self, x, y):
        output = self.net(x)
        self.log_dict(self.by_class(output.detach(), y))
        loss = self.sharpness_loss(output, y)
        self.values.append(float(self.running(loss.detach())))
        return loss


@pytest.mark.parametrize("kind", [bisam.BiSAM, bisam.GSAM])
def test_metrics_return_the_value_of_the_first_pass_in_the_other_passes(kind):
    """GSAM has three passes for a bilevel objective."""
    module = Wrapped(variant=kind, ascent=bisam.LowerBound()) if kind is bisam.GSAM else Wrapped()
    fit(module, accumulate_grad_batches=1)
    passes = 3 if kind is bisam.GSAM else 2
    assert len(module.values) == 5 * passes
    firsts = module.values[::passes]
    assert module.values == [value for value in firsts for _ in range(passes)]
    assert float(module.running.compute()) == pytest.approx(sum(firsts[-2:]) / 2)
    assert module._values == {}
    assert not module.running._forward_hooks


@pytest.mark.parametrize("kind", [bisam.BiSAM, bisam.GSAM, bisam.LookSAM, bisam.FriendlySAM, bisam.RSAM, bisam.MSAM])
def test_every_kind_of_variant_trains_as_in_a_plain_loop(kind):
    """Extra passes, plain steps, memory, random starts, no ascent pass: the engine runs them all on micro-batches."""
    module = Classifier(kind, same_dropout=True)
    other = copy.deepcopy(module.net)
    torch.manual_seed(5)
    optimizer = kind(two_passes.base_of(other.parameters()), other, rho=RHO, same_dropout=True)
    for window in two_passes.windows(*two_passes.samples()):

        def closure(window=window):
            for x, y in window:
                (optimizer.criterion(other(x), y) / 2).backward()

        optimizer.step(closure)
        for group in optimizer.param_groups:
            group["lr"] *= two_passes.DECAY
    torch.manual_seed(5)
    fit(module, gradient_clip_val=None)
    assert_equal_weights(module.net, other)


def test_batches_of_an_unfinished_accumulation_are_dropped():
    """As Lightning clears their gradients."""

    class Breaking(Steady):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.current_epoch == 0 and batch_idx == 1 else None

    module, whole = Breaking(), Steady()
    fit(module, epochs=2)
    fit(whole)
    assert_equal_weights(module.net, whole.net, 0.0)


def test_a_checkpoint_resumes_bit_for_bit(tmp_path):
    def saving(folder):
        return lightning.pytorch.callbacks.ModelCheckpoint(folder, save_last=True, save_top_k=0)

    whole = Classifier(every=2)
    fit(whole, epochs=2)
    first = Classifier(every=2)
    fit(first, epochs=1, enable_checkpointing=True, callbacks=[saving(tmp_path)])
    assert not torch.equal(first.net[0].weight, whole.net[0].weight)
    second = Classifier(every=2)
    options = {"enable_checkpointing": True, "callbacks": [saving(tmp_path)]}
    fit(second, epochs=2, checkpoint=tmp_path / "last.ckpt", **options)
    for a, b in zip(whole.net.state_dict().values(), second.net.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_stochastic_weight_averaging_gives_the_mean_of_the_weights_with_its_batch_statistics():
    """Its last epoch runs only forward passes: batches must not be kept, and the weights must not change."""
    starts = []

    class Starts(lightning.Callback):
        def on_train_epoch_start(self, trainer, module):
            starts.append(copy.deepcopy(module.net))

    module = Steady()
    averaging = lightning.pytorch.callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=2)
    fit(module, epochs=3, gradient_clip_val=None, callbacks=[Starts(), averaging])
    expected = starts[1]
    with torch.no_grad():
        for mean, other in zip(expected.parameters(), starts[2].parameters(), strict=True):
            mean.copy_((mean + other) / 2)
    expected[1].reset_running_stats()
    expected[1].momentum = None
    for x in two_passes.samples()[0].split(8):
        expected(x)
    assert_equal_weights(module.net, expected)
    assert module.counted.compute() == 4 * 36


@pytest.mark.filterwarnings("ignore:.training_step. returned .None")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("skipped", [{0}, {1}, {0, 1}, {4}])
def test_a_training_step_that_returns_none_is_skipped_as_in_lightning(skipped):
    class Skipping(Classifier):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in skipped else super().training_step(batch, batch_idx)

    modules = [Skipping(rho=0.0), Skipping(None)]
    modules[1].loss_of = lambda x, y: torch.nn.functional.cross_entropy(modules[1].net(x), y)
    trainers = [fit(module) for module in modules]
    assert_equal_weights(modules[0].net, modules[1].net, 0.0)
    assert trainers[0].global_step == trainers[1].global_step


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_loss_that_is_skipped_only_in_the_second_pass_leaves_the_weights_unchanged():
    class Skipping(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx=batch_idx)
            return None if self.trainer.optimizers[0].phase == "descent" else loss

    module = Skipping(net=two_passes.net(batch_norm=False))
    fit(module)
    assert_equal_weights(module.net, two_passes.net(batch_norm=False), 0.0)


def test_a_training_step_may_remove_entries_from_its_batch():
    class Taking(Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch[0], batch.pop()), batch_idx)

    modules = [Taking(), Classifier()]
    for module in modules:
        fit(module)
    assert_equal_weights(modules[0].net, modules[1].net, 0.0)


def test_a_training_step_that_changes_its_batch_in_place_is_refused():
    """The second pass would change it once more."""

    class Noisy(Classifier):
        def training_step(self, batch, batch_idx):
            batch[0].mul_(0.5)
            return super().training_step(batch, batch_idx)

    module = Noisy()
    start = copy.deepcopy(module.net)
    with pytest.raises(RuntimeError, match="changed in place"):
        fit(module, accumulate_grad_batches=1)
    assert all(torch.equal(a, b) for a, b in zip(module.net.parameters(), start.parameters(), strict=True))


def test_a_training_step_inherited_from_another_class_accumulates():
    class Steps:
        def training_step(self, batch, batch_idx):
            return self.sharpness_loss(self.net(batch[0]), batch[1])

    class Mixed(Steps, SharpnessAwareModule):
        def __init__(self):
            super().__init__()
            self.net = two_passes.net()

        def configure_optimizers(self):
            return bisam.BiSAM(two_passes.base_of(self.net.parameters()), self, rho=RHO)

    whole, mixed = Classifier(), Mixed()
    for module in (whole, mixed):
        fit(module, max_steps=1)
    assert_equal_weights(mixed.net, whole.net, 0.0)


def test_the_two_step_class_in_the_module_equals_the_reference():
    module = Classifier(lambda base, _, rho: bisam.compat.SAM(module.net.parameters(), two_passes.base_of, rho=rho))
    start = copy.deepcopy(module.net)
    fit(module)
    expected, _ = two_passes.train(start, two_passes.windows(*two_passes.samples()), "SAM")
    assert_equal_weights(module.net, expected)


# Precision


def train_with_autocast(net, dtype, count=2):
    """The same accumulation by the optimizer alone. Returns the net, and the norm of the last ascent gradient."""
    optimizer = bisam.BiSAM(two_passes.base_of(net.parameters()), net, rho=RHO)
    for window in two_passes.windows(*two_passes.samples(dtype=torch.float32), count=count):

        def closure(window=window):
            for x, y in window:
                with torch.autocast("cpu", dtype, cache_enabled=False):
                    loss = optimizer.criterion(net(x), y)
                (loss / count).backward()

        optimizer.step(closure)
        for group in optimizer.param_groups:
            group["lr"] *= two_passes.DECAY
    return net, optimizer.telemetry.ascent_norm


def in_half_precision(precision, **options):
    module = Classifier(net=two_passes.net(torch.float32))
    before = copy.deepcopy(module.net)
    fit(module, batches=two_passes.samples(dtype=torch.float32), gradient_clip_val=None, **precision, **options)
    return module.net, before


def test_training_in_bfloat16_equals_that_of_the_optimizer_alone():
    net, before = in_half_precision({"precision": "bf16-mixed"})
    assert_equal_weights(net, train_with_autocast(before, torch.bfloat16)[0], 1e-6)


def test_gradients_in_float16_are_unscaled_in_both_passes():
    """The factor is a power of two. The norm is what the perturbation is divided by."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    plugins = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    norms = []

    class Norms(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            norms.append(trainer.optimizers[0].telemetry.ascent_norm)

    net, before = in_half_precision(plugins, callbacks=[Norms()])
    expected, norm = train_with_autocast(before, torch.float16)
    assert_equal_weights(net, expected, 1e-4)
    assert float(norms[-1]) == pytest.approx(float(norm), rel=1e-2)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # Lightning steps the schedule all the same
def test_an_overflow_skips_the_update_and_lowers_the_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    net, before = in_half_precision({"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]})
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before.parameters(), strict=True))
    assert scaler.get_scale() == 2.0**57


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Trainer(precision='16-mixed') needs a GPU")
def test_float16_trains_on_a_gpu():
    net, before = in_half_precision({"precision": "16-mixed", "accelerator": "gpu", "devices": 1})
    assert any(not torch.equal(a.cpu(), b) for a, b in zip(net.parameters(), before.parameters(), strict=True))
    assert all(p.isfinite().all() for p in net.parameters())


# Manual optimization


class Manual(Classifier):
    form = "step"

    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False
        self.returned = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer, returned = self.optimizers(), None

        def closure(x=x, y=y):
            loss = self.sharpness_loss(self.net(x), y)
            self.counted.update(len(y))
            self.log("loss", loss, on_step=False, on_epoch=True)
            self.manual_backward(loss)
            return loss

        if self.form == "list":
            halves = zip(x.chunk(2), y.chunk(2), strict=True)
            returned = optimizer.step([lambda a=a, b=b: closure(a, b) for a, b in halves])
        elif self.form == "minimize":
            returned = optimizer.minimize(x, y, accumulate=2)
        elif self.form == "backward":
            optimizer.backward(closure)
            self.clip_gradients(optimizer, gradient_clip_val=two_passes.CLIP["norm"], gradient_clip_algorithm="norm")
            optimizer.step()
        elif self.form == "bare":
            self.optimizers(use_pl_optimizer=False).step(closure)
        elif self.form == "hand":
            optimizer.zero_grad()
            closure()
            optimizer.ascend()
            closure()
            optimizer.descend()
        else:
            returned = optimizer.step(closure)
        self.returned.append(returned)
        self.lr_schedulers().step()

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("form", ["step", "list", "minimize", "hand"])
def test_manual_optimization_counts_each_update_once_and_equals_the_reference(form):
    module = Manual(net=two_passes.net(batch_norm=False))
    module.form = form
    start = copy.deepcopy(module.net)
    trainer = fit(module, accumulate_grad_batches=1, gradient_clip_val=None)
    batches = two_passes.samples()
    expected, losses = two_passes.train(start, two_passes.windows(*batches, count=1), "BiSAM", divisor=1, clip=None)
    assert_equal_weights(module.net, expected)
    assert trainer.global_step == 5
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
    assert (progress.ready, progress.completed) == (5, 5)
    if form != "hand":
        assert [float(loss) for loss in module.returned] == pytest.approx(losses, rel=1e-6)
    if form in ("step", "list"):
        assert module.counted.compute() == len(batches[1])
        mean = sum(loss * len(y) for loss, y in zip(losses, batches[1].split(8), strict=True)) / len(batches[1])
        assert float(trainer.callback_metrics["loss"]) == pytest.approx(mean, rel=1e-6)


def test_metrics_return_the_value_of_the_first_pass_also_in_manual_optimization():
    class ManualWrapped(Manual, Wrapped):
        def sharpness_loss(self, output, y):
            self.log_dict(self.by_class(output.detach(), y))
            return super().sharpness_loss(output, y)

    module = ManualWrapped()
    trainer = fit(module, accumulate_grad_batches=1, gradient_clip_val=None)
    assert trainer.global_step == 5
    assert module._values == {}


@pytest.mark.parametrize("form", ["step", "backward"])
def test_gradients_in_float16_are_unscaled_in_both_passes_of_manual_optimization(form):
    """The perturbation is divided by the norm of gradients that are not scaled."""
    norms = []

    class Unclipped(Manual):
        def clip_gradients(self, *args, **kwargs):
            norms.append(self.trainer.optimizers[0].telemetry.ascent_norm)

        on_train_batch_end = clip_gradients

    module = Unclipped(net=two_passes.net(torch.float32, batch_norm=False))
    module.form = form
    start = copy.deepcopy(module.net)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**6))
    batches = two_passes.samples(dtype=torch.float32)
    fit(module, accumulate_grad_batches=1, gradient_clip_val=None, batches=batches, plugins=[plugin])
    expected, norm = train_with_autocast(start, torch.float16, count=1)
    assert_equal_weights(module.net, expected, 1e-4)
    assert float(norms[-1]) == pytest.approx(float(norm), rel=1e-2)


def test_gradients_can_be_clipped_between_the_passes_and_the_update_in_manual_optimization():
    module = Manual(net=two_passes.net(batch_norm=False))
    module.form = "backward"
    start = copy.deepcopy(module.net)
    trainer = fit(module, accumulate_grad_batches=1, gradient_clip_val=None)
    expected, _ = two_passes.train(start, two_passes.windows(*two_passes.samples(), count=1), "BiSAM", divisor=1)
    assert_equal_weights(module.net, expected)
    assert trainer.global_step == 5


def test_in_manual_optimization_a_closure_may_clear_gradients_of_another_loss():
    """Such as those that the generator's loss leaves in the discriminator."""

    class Leaving(Manual):
        def training_step(self, batch, batch_idx):
            x, y = batch
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.sharpness_loss(self.net(x), y)
                self.manual_backward(loss)
                return loss

            self.net(x).sum().backward()
            optimizer.step(closure)
            self.lr_schedulers().step()

    module = Leaving(net=two_passes.net(batch_norm=False))
    start = copy.deepcopy(module.net)
    fit(module, accumulate_grad_batches=1, gradient_clip_val=None)
    updates = two_passes.windows(*two_passes.samples(), count=1)
    assert_equal_weights(module.net, two_passes.train(start, updates, "BiSAM", divisor=1, clip=None)[0])


def test_methods_of_the_optimizer_store_nothing_in_lightnings_wrapper():
    """The optimizer would not see it."""
    module = Manual(net=two_passes.net(batch_norm=False))
    stored = []

    class Names(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            stored.append({name for name in vars(module.optimizers()) if name.startswith("_")})

    module.form = "hand"
    fit(module, accumulate_grad_batches=1, gradient_clip_val=None, callbacks=[Names()])
    assert stored[0] == stored[-1]
    assert not stored[0] & {*vars(module.trainer.optimizers[0])}


def test_the_optimizer_without_lightnings_wrapper_takes_correct_steps():
    module = Manual(net=two_passes.net(batch_norm=False))
    module.form = "bare"
    start = copy.deepcopy(module.net)
    fit(module, accumulate_grad_batches=1, gradient_clip_val=None)
    updates = two_passes.windows(*two_passes.samples(), count=1)
    assert_equal_weights(module.net, two_passes.train(start, updates, "BiSAM", divisor=1, clip=None)[0])


@pytest.mark.parametrize("form", ["minimize", "hand"])
def test_a_scaled_loss_needs_a_closure_in_manual_optimization(form):
    module = Manual(net=two_passes.net(torch.float32))
    module.form = form
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    data = two_passes.samples(8, torch.float32)
    name = {"hand": "descend"}.get(form, form)
    with pytest.raises(RuntimeError, match=rf"16-mixed.* scales losses: use step\(closure\) instead of {name}\(\)"):
        fit(module, accumulate_grad_batches=1, gradient_clip_val=None, plugins=[plugin], batches=data)


class Two(SharpnessAwareModule):
    """Two nets, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.nets = torch.nn.ModuleList(two_passes.net() for _ in range(2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        for number, (net, optimizer) in enumerate(zip(self.nets, self.optimizers(), strict=True)):

            def closure(net=net, optimizer=optimizer, number=number):
                loss = self.sharpness_loss(net(x), y, optimizer)
                self.log(f"loss_{number}", loss, on_step=False, on_epoch=True)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

    def configure_optimizers(self):
        of = [bisam.SAM, bisam.BiSAM]
        return [v(two_passes.base_of(n.parameters()), self, rho=RHO) for v, n in zip(of, self.nets, strict=True)]


def test_with_two_optimizers_each_has_its_own_loss_and_the_value_at_the_weights_is_logged():
    module = Two()
    trainer = fit(module, accumulate_grad_batches=1, gradient_clip_val=None, max_steps=2)
    update = two_passes.windows(*two_passes.samples(), count=1)[:1]
    for number, name in enumerate(("SAM", "BiSAM")):
        expected, losses = two_passes.train(two_passes.net(), update, name, divisor=1, clip=None)
        assert_equal_weights(module.nets[number], expected)
        assert float(trainer.callback_metrics[f"loss_{number}"]) == pytest.approx(losses[0], rel=1e-6)


def test_beside_a_plain_optimizer_sharpness_loss_uses_the_sharpness_aware_one():
    class Second(Two):
        def training_step(self, batch, batch_idx):
            x, y = batch
            plain, optimizer = self.optimizers()

            def closure():
                loss = self.sharpness_loss(self.nets[1](x), y)
                self.manual_backward(loss)
                return loss

            def closure_of_plain():
                plain.zero_grad()
                self.manual_backward(torch.nn.functional.cross_entropy(self.nets[0](x), y))

            optimizer.step(closure)
            plain.step(closure_of_plain)

        def configure_optimizers(self):
            base, other = (two_passes.base_of(net.parameters()) for net in self.nets)
            return [base, bisam.BiSAM(other, self, rho=RHO)]

    module = Second()
    fit(module, accumulate_grad_batches=1, gradient_clip_val=None, max_steps=2)
    update = two_passes.windows(*two_passes.samples(), count=1)[:1]
    assert_equal_weights(module.nets[1], two_passes.train(two_passes.net(), update, "BiSAM", divisor=1, clip=None)[0])


# Two processes


def on_a_rank(module, **options):
    with ranks.launched() as rank:
        strategy = DDPStrategy(process_group_backend="gloo")
        options = {"strategy": strategy, "devices": ranks.RANKS, "plugins": [TorchElasticEnvironment()], **options}
        fit(module, batches=two_passes.samples(64), use_distributed_sampler=False, rank=rank, **options)
    return module


def train_on_a_rank(variant, sharpness, form=None):
    options = {"variant": getattr(bisam, variant), "net": two_passes.net(batch_norm=False), "sharpness": sharpness}
    if form is not None:
        module = Manual(**options)
        module.form = form
        return on_a_rank(module, accumulate_grad_batches=1, gradient_clip_val=None).net
    return on_a_rank(Classifier(**options)).net


def shards(x, y, count):
    """The micro-batches of each update, by rank, as torch's sampler deals them out."""
    of_ranks = [two_passes.windows(x[rank :: ranks.RANKS], y[rank :: ranks.RANKS], count=count) for rank in (0, 1)]
    return [list(update) for update in zip(*of_ranks, strict=True)]


@pytest.mark.parametrize(("name", "sharpness"), [("BiSAM", None), ("SAM", "global")])
def test_two_ranks_perturb_locally_or_globally_as_configured(name, sharpness):
    first, second = ranks.run(train_on_a_rank, name, sharpness)
    updates = shards(*two_passes.samples(64), 2)
    expected, _ = two_passes.train(two_passes.net(batch_norm=False), updates, name, sharpness=sharpness or "local")
    for net in (first, second):
        assert_equal_weights(net, expected)


@pytest.mark.parametrize("form", ["step", "minimize"])
def test_two_ranks_in_manual_optimization_perturb_each_by_its_own_gradient(form):
    first, second = ranks.run(train_on_a_rank, "BiSAM", None, form)
    updates = shards(*two_passes.samples(64), 1)
    expected, _ = two_passes.train(two_passes.net(batch_norm=False), updates, "BiSAM", divisor=1, clip=None)
    for net in (first, second):
        assert_equal_weights(net, expected)


# Misuse


def two_step_class(module):
    return bisam.compat.SAM(module.parameters(), torch.optim.SGD, lr=0.1)


def sam(module):
    return bisam.SAM(torch.optim.SGD(module.parameters(), lr=0.1), module)


@pytest.mark.parametrize(
    ("make", "accumulation", "message"),
    [
        (two_step_class, 2, r"compat.SAM.step.*SharpnessAwareModule"),
        (two_step_class, 1, r"compat.SAM.step.*SharpnessAwareModule"),
        (sam, 2, r"found gradients from before.*docs/frameworks.md"),
    ],
)
@pytest.mark.filterwarnings("ignore:Plain runs training_step")
def test_a_plain_module_that_would_mix_gradients_of_batches_or_passes_is_refused(make, accumulation, message):
    module = Plain(make)
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(RuntimeError, match=message):
        fit(module, accumulate_grad_batches=accumulation)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))


def test_a_plain_module_without_accumulation_trains_and_warns():
    module = Plain(sam)
    with pytest.warns(UserWarning, match=r"in both passes.*SharpnessAwareModule"):
        fit(module, accumulate_grad_batches=1)


def test_a_plain_module_in_float16_is_refused_with_a_link_to_the_page_on_frameworks():
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(TypeError, match=r"needs a closure.*docs/frameworks.md"):
        fit(
            Plain(sam).float(),
            accumulate_grad_batches=1,
            plugins=[plugin],
            batches=two_passes.samples(8, torch.float32),
        )


def plain_on_a_rank():
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel wraps.*perturbed alike.*sharpness=.global"):
        on_a_rank(Plain(sam), accumulate_grad_batches=1)


@pytest.mark.filterwarnings("ignore:Plain runs training_step")
def test_a_plain_module_on_two_ranks_is_refused_because_both_would_have_one_perturbation():
    ranks.run(plain_on_a_rank)


def test_a_strategy_that_accumulates_by_itself_is_refused(monkeypatch):
    monkeypatch.setattr(SingleDeviceStrategy, "handles_gradient_accumulation", True)  # as DeepSpeed's has it
    with pytest.raises(RuntimeError, match="SingleDeviceStrategy accumulates gradients by itself"):
        fit(Classifier())


def test_an_optimizer_step_that_does_not_call_super_is_refused():
    class Own(Classifier):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step(closure=optimizer_closure)

    with pytest.raises(RuntimeError, match=r"optimizer_step\(\) of Own.*super\(\)\.optimizer_step"):
        fit(Own())


def test_a_training_step_that_was_replaced_on_the_module_is_refused():
    module = Classifier()

    def training_step(batch, batch_idx):
        return module.loss_of(*batch)

    module.training_step = training_step
    with pytest.raises(RuntimeError, match=r"training_step\(\) of this Classifier.*define it in the class"):
        fit(module, accumulate_grad_batches=1)


def test_a_training_step_that_fetches_its_batches_is_refused():
    with pytest.raises(TypeError, match=r"training_step\(self, batch, batch_idx\)"):

        class Fetching(SharpnessAwareModule):
            def training_step(self, dataloader_iter):
                pass


def test_sharpness_loss_outside_of_fit_is_refused_with_an_explanation():
    with pytest.raises(RuntimeError, match=r"no sharpness-aware one here.*configure_optimizers"):
        Classifier().sharpness_loss(torch.zeros(1, 3), torch.zeros(1).long())
