"""skorch's nets against a step written by hand."""

import copy
import pickle

import numpy as np
import pytest
import skorch.dataset
import torch
from sklearn.base import clone
from skorch import NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import Callback, Checkpoint, EpochScoring, GradientNormClipping, LRScheduler
from torch import nn

import bisam
from bisam.integrations.skorch import SharpnessAwareClassifier, SharpnessAwareNet

import two_passes
from two_passes import RHO, assert_equal_weights


class Counting(Callback):
    """Counts how often the gradient of an update could be clipped."""

    def initialize(self):
        self.updates_ = 0
        return self

    def on_grad_computed(self, net, named_parameters, **kwargs):
        self.updates_ += 1


def samples():
    x, y = two_passes.samples()
    return x.numpy(), y.numpy()


def make(variant=bisam.BiSAM, epochs=1, callbacks=(), cls=SharpnessAwareClassifier, net=None, **options):
    schedule = LRScheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=two_passes.DECAY, step_every="batch")
    callbacks = [GradientNormClipping(two_passes.CLIP["norm"]), schedule, *callbacks]
    return cls(
        module=two_passes.net() if net is None else net, optimizer=variant, lr=two_passes.LR, max_epochs=epochs,
        batch_size=16, train_split=None, verbose=0, callbacks=callbacks,
        **{
            "criterion": nn.CrossEntropyLoss, "optimizer__momentum": two_passes.MOMENTUM, "optimizer__rho": RHO,
            **options,
        },
    )  # fmt: skip


def reference(variant, epochs=1, size=16, **options):
    """The reference for a net; skorch divides no loss: a batch that is cut into parts has the mean over its samples."""
    updates = two_passes.windows(*two_passes.samples(), size=size, count=1) * epochs
    return two_passes.train(two_passes.net(), updates, variant, divisor=1, **options)


@pytest.mark.parametrize("name", ["SAM", "BiSAM"])
def test_clipping_and_a_schedule_equal_the_reference(name):
    net = make(getattr(bisam, name), epochs=2, callbacks=[Counting()]).fit(*samples())
    expected, losses = reference(name, epochs=2)
    assert_equal_weights(net.module_, expected)
    found = net.history[:, "batches", :, "train_loss"]
    np.testing.assert_allclose([*found[0], *found[1]], losses, rtol=1e-6)
    assert dict(net.callbacks_)["Counting"].updates_ == 6


def test_parts_of_a_batch_equal_the_whole():
    """Without batch norm, whose statistics are those of a part; 36 = 16 + 16 + 4 samples, each in three parts."""
    weights = []
    for parts in (1, 3):
        net = make(net=two_passes.net(batch_norm=False), accumulate=parts).fit(*samples())
        weights.append(net.module_)
    assert_equal_weights(*weights)
    np.testing.assert_allclose(net.history[-1, "batches", :, "train_loss"][0], reference_loss(), rtol=1e-6)


def test_callbacks_get_the_whole_batch_and_the_gradient_of_its_update():
    seen = []

    class Steps(Callback):
        def on_grad_computed(self, net, named_parameters, batch, training):
            seen.append((len(batch[0]), training))

        def on_batch_end(self, net, y_pred, **kwargs):
            seen.append((len(y_pred), all(param.grad is not None for param in net.module_.parameters())))

    make(net=two_passes.net(batch_norm=False), accumulate=3, callbacks=[Steps()]).fit(*samples())
    assert seen == [(16, True)] * 4 + [(4, True)] * 2


def test_a_batch_is_cut_into_the_requested_number_of_parts():
    sizes = []
    module = two_passes.net(batch_norm=False)
    module.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    make(net=module, accumulate=4).fit(*samples())
    assert sizes == [4] * 16 + [1] * 8  # batches of 16, 16 and 4 samples, in two passes each


def test_batches_of_a_module_with_several_outputs_can_be_cut_into_parts():
    class Several(nn.Sequential):
        def forward(self, x):
            return super().forward(x), x

    class FirstIsScored(SharpnessAwareClassifier):
        def get_loss(self, y_pred, *args, **kwargs):
            return super().get_loss(y_pred[0], *args, **kwargs)

    seen = []

    class Predictions(Callback):
        def on_batch_end(self, net, y_pred, **kwargs):
            seen.append([len(part) for part in y_pred])

    module = Several(*two_passes.net(batch_norm=False))
    net = make(net=module, cls=FirstIsScored, accumulate=3, callbacks=[Predictions()]).fit(*samples())
    whole = make(net=two_passes.net(batch_norm=False)).fit(*samples())
    assert_equal_weights(net.module_, whole.module_)
    assert seen == [[16, 16], [16, 16], [4, 4]]


def reference_loss():
    x, y = two_passes.samples()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(two_passes.net(batch_norm=False)(x[:16]), y[:16]))


def test_a_module_that_returns_probabilities_trains_as_one_that_returns_logits():
    """skorch's default: the module ends in softmax, and the criterion is NLLLoss on its logarithm."""
    logits = make(net=two_passes.net()).fit(*samples())
    module = nn.Sequential(*two_passes.net(), nn.Softmax(-1))
    probabilities = make(net=module, criterion=nn.NLLLoss).fit(*samples())
    assert_equal_weights(probabilities.module_, logits.module_, 1e-6)


def test_rho_zero_is_plain_training_with_skorch_bit_for_bit():
    ours = make(optimizer__rho=0.0, epochs=2).fit(*samples())
    plain = make(torch.optim.SGD, cls=NeuralNetClassifier, epochs=2)
    del plain.optimizer__rho
    plain._params_to_validate.discard("optimizer__rho")
    plain.fit(*samples())
    for a, b in zip(ours.module_.state_dict().values(), plain.module_.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert ours.history[:, "train_loss"] == plain.history[:, "train_loss"]


def test_a_checkpoint_resumes_bit_for_bit(tmp_path):
    """The schedule is not part of skorch's checkpoint, so there is none here."""
    whole = make(epochs=2, optimizer__every=2).set_params(callbacks__LRScheduler=None).fit(*samples())
    saving = Checkpoint(dirname=str(tmp_path), monitor=None)
    make(optimizer__every=2, callbacks=[saving]).set_params(callbacks__LRScheduler=None).fit(*samples())
    net = make(net=two_passes.net(), optimizer__every=2).set_params(callbacks__LRScheduler=None).initialize()
    net.load_params(checkpoint=saving)
    net.partial_fit(*samples())
    for a, b in zip(whole.module_.state_dict().values(), net.module_.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_options_go_to_the_variant_or_to_the_base_and_can_be_changed():
    net = make(optimizer__base=torch.optim.AdamW, optimizer__momentum=None, optimizer__weight_decay=0.1)
    del net.optimizer__momentum
    net = clone(net)
    net.set_params(optimizer__rho=0.2).initialize()
    assert isinstance(net.optimizer_.base, torch.optim.AdamW)
    assert net.optimizer_.param_groups[0]["rho"] == 0.2
    assert net.optimizer_.param_groups[0]["weight_decay"] == 0.1
    assert net.optimizer_.model is net.module_
    net.set_params(optimizer__rho=0.3)
    assert net.optimizer_.param_groups[0]["rho"] == 0.3
    net.fit(*samples())
    again = pickle.loads(pickle.dumps(net))
    np.testing.assert_array_equal(again.predict(samples()[0]), net.predict(samples()[0]))


@pytest.mark.parametrize("first", [{}, {"optimizer__rho": 0.4}])
def test_options_set_on_an_initialized_net_have_the_effect_of_those_given_at_construction(first):
    """Options of parameter groups change the existing optimizer, others make a new one."""
    later = {"optimizer__every": 2, "optimizer__clip_norm": 0.1, "optimizer__base": torch.optim.RMSprop}
    momentum = {"optimizer__momentum": 0.5}
    net = make(**momentum).initialize()
    net.set_params(**first)
    assert net.set_params(**later) is net
    assert (net.optimizer_.clip_norm, net.optimizer_.every) == (0.1, 2)  # before the next fit
    assert not {"every", "clip_norm", "base"} & net.optimizer_.param_groups[0].keys()
    whole = make(**first, **later, **momentum).initialize()
    for one in (net, whole, net.set_params(max_epochs=2), whole.set_params(max_epochs=2)):
        one.fit(*samples())
        assert isinstance(one.optimizer_.base, torch.optim.RMSprop)
    assert_equal_weights(net.module_, whole.module_, 0.0)
    assert {name: net.get_params()[name] for name in later} == later


def test_setting_rho_on_a_trained_net_keeps_its_optimizer_and_momentum():
    net = make().fit(*samples())
    optimizer = net.optimizer_
    net.set_params(optimizer__rho=0.3, optimizer__momentum=0.1)
    assert net.optimizer_ is optimizer
    assert (optimizer.param_groups[0]["rho"], optimizer.param_groups[0]["momentum"]) == (0.3, 0.1)
    assert net.initialize().optimizer_.param_groups[0]["rho"] == 0.3


WEIGHT = torch.tensor([5.0, 1.0, 0.2], dtype=torch.float64)


def sam_by_function(params, lr, **options):
    return bisam.SAM(torch.optim.SGD(params, lr=lr, momentum=two_passes.MOMENTUM), rho=RHO, **options)


@pytest.mark.parametrize("kind", ["two-step class", "function"])
def test_an_optimizer_from_a_function_or_the_two_step_class_gets_the_criterion_of_the_net(kind):
    options = {"criterion__weight": WEIGHT}
    net = make(bisam.compat.SAM, optimizer__base_optimizer=torch.optim.SGD, **options)
    if kind == "function":
        net = make(sam_by_function, **options)
        del net.optimizer__rho, net.optimizer__momentum
        net._params_to_validate -= {"optimizer__rho", "optimizer__momentum"}
    expected = make(bisam.SAM, **options).fit(*samples())
    assert_equal_weights(net.fit(*samples()).module_, expected.module_, 0.0)  # with the statistics of batch norm


def test_an_optimizer_from_a_function_keeps_a_descent_loss_of_its_own():
    net = make(sam_by_function, optimizer__descent=bisam.CrossEntropy(weight=WEIGHT))
    del net.optimizer__rho, net.optimizer__momentum
    net._params_to_validate -= {"optimizer__rho", "optimizer__momentum"}
    expected = make(bisam.SAM, criterion__weight=WEIGHT).fit(*samples())
    assert_equal_weights(net.fit(*samples()).module_, expected.module_, 0.0)


def test_a_bilevel_optimizer_from_a_function_keeps_its_ascent():
    def bilevel(params, lr):
        return bisam.BiSAM(torch.optim.SGD(params, lr=lr, momentum=two_passes.MOMENTUM), phi="tanh", rho=RHO)

    net = make(bilevel, criterion__label_smoothing=0.1)
    del net.optimizer__rho, net.optimizer__momentum
    net._params_to_validate -= {"optimizer__rho", "optimizer__momentum"}
    expected = make(bisam.BiSAM, optimizer__phi="tanh", criterion__label_smoothing=0.1).fit(*samples())
    assert_equal_weights(net.fit(*samples()).module_, expected.module_, 0.0)


@pytest.mark.parametrize("parts", [1, 2])
def test_scores_of_the_training_data_are_those_of_the_first_pass(parts):
    accuracy = EpochScoring("accuracy", name="train_accuracy", on_train=True, lower_is_better=False)
    module = two_passes.net(batch_norm=False)
    net = make(net=module, callbacks=[accuracy], accumulate=parts).set_params(batch_size=-1)
    x, y = samples()
    with torch.no_grad():
        right = module(torch.as_tensor(x)).argmax(1).numpy() == y
    assert net.fit(x, y).history[0, "train_accuracy"] == pytest.approx(right.mean())


def test_the_validation_loss_is_that_of_skorch():
    split = skorch.dataset.ValidSplit(3, stratified=False)
    ours = make(optimizer__rho=0.0).set_params(train_split=split).fit(*samples())
    plain = make(torch.optim.SGD, cls=NeuralNetClassifier).set_params(train_split=split)
    del plain.optimizer__rho
    plain._params_to_validate.discard("optimizer__rho")
    assert ours.history[:, "valid_loss"] == plain.fit(*samples()).history[:, "valid_loss"]


def test_parameters_of_fit_reach_the_module_in_both_passes():
    seen = []

    class Scaled(nn.Sequential):
        def forward(self, x, factor=1.0):
            seen.append(factor)
            return super().forward(x) * factor

    make(net=Scaled(*two_passes.net())).fit(*samples(), factor=2.0)
    assert seen == [2.0] * 6


def test_a_probability_of_zero_has_a_finite_loss():
    """Its logarithm is that of the machine epsilon, as in skorch."""
    module = two_passes.net(batch_norm=False)
    with torch.no_grad():
        module[-1].bias.copy_(torch.tensor([1e4, 0.0, 0.0]))
    net = make(net=nn.Sequential(*module, nn.Softmax(-1)), criterion=nn.NLLLoss).fit(*samples())
    assert np.isfinite(net.history[0, "train_loss"])


@pytest.mark.parametrize("parts", [1, 2])
def test_a_custom_loss_is_in_the_history(parts):
    class Own(SharpnessAwareClassifier):
        def get_loss(self, y_pred, y_true, *args, **kwargs):
            return 2 * nn.functional.cross_entropy(y_pred, y_true)

    net = make(bisam.SAM, cls=Own, net=two_passes.net(batch_norm=False), accumulate=parts).fit(*samples())
    assert net.history[0, "batches", 0, "train_loss"] == pytest.approx(2 * reference_loss(), rel=1e-6)


def test_other_nets_take_the_mixin_with_their_own_loss():
    class Regressor(SharpnessAwareNet, NeuralNetRegressor):
        pass

    x, _ = two_passes.samples()
    target = x[:, :3].numpy()
    net = make(bisam.SAM, cls=Regressor, net=two_passes.net(), criterion=nn.MSELoss).fit(x.numpy(), target)
    other = two_passes.net()
    base = two_passes.base_of(other.parameters())
    optimizer = bisam.SAM(base, other, rho=RHO, descent=nn.MSELoss(), clip_norm=two_passes.CLIP["norm"])
    for a, b in zip(x.split(16), torch.as_tensor(target).split(16), strict=True):
        optimizer.minimize(a, b)
        base.param_groups[0]["lr"] *= two_passes.DECAY
    assert_equal_weights(net.module_, other)


def test_a_plain_optimizer_and_the_two_step_class_train_in_the_same_net():
    plain = make(torch.optim.SGD)
    del plain.optimizer__rho
    plain._params_to_validate.discard("optimizer__rho")
    with pytest.warns(UserWarning, match="SharpnessAwareClassifier trains with SGD, which does not perturb: give a"):
        plain.fit(*samples())
    two_step = make(bisam.compat.SAM, optimizer__base_optimizer=torch.optim.SGD).fit(*samples())
    assert_equal_weights(two_step.module_, reference("SAM")[0])


# Misuse


def test_skorchs_own_classifier_is_refused_before_the_weights_change():
    """Q needs the optimizer's criterion, and the two-step class a first pass."""
    x, y = samples()
    module = two_passes.net()
    start = copy.deepcopy(module)

    def bilevel(params, lr):
        return bisam.BiSAM(torch.optim.SGD(params, lr=lr), module)

    def two_step(params, lr):
        return bisam.compat.SAM(params, torch.optim.SGD, lr=lr)

    for optimizer, message in ((bilevel, "did not call its criterion"), (two_step, "found no gradients")):
        net = NeuralNetClassifier(module, criterion=nn.CrossEntropyLoss, optimizer=optimizer, verbose=0)
        with pytest.raises(RuntimeError, match=message):
            net.fit(x, y)
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), start.parameters(), strict=True))


@pytest.mark.parametrize("option", [{"autocast": torch.bfloat16}, {"scaler": torch.amp.GradScaler("cpu")}])
def test_autocast_and_scaler_options_are_refused(option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=rf"optimizer__{name} is for minimize\(\).*: remove it"):
        make(**{f"optimizer__{name}": value}).initialize()


def test_a_second_optimizer_is_refused():
    class Two(SharpnessAwareClassifier):
        def initialize_optimizer(self):
            super().initialize_optimizer()
            self.optimizer2_ = torch.optim.SGD(self.module_.parameters(), lr=0.1)
            return self

    with pytest.raises(RuntimeError, match=r"one optimizer, and this net has \['optimizer', 'optimizer2'\]"):
        make(cls=Two).fit(*samples())


def test_accumulate_below_one_is_refused():
    with pytest.raises(ValueError, match="accumulate must be at least 1, got 0"):
        make(accumulate=0).fit(*samples())
