"""Keras 3 on torch against a step written by hand."""

import importlib
import os
import re
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras is imported, as its users do

import keras
import numpy as np
import pytest
import torch

from bisam.integrations.keras import SharpnessAwareMixin, SharpnessAwareModel

import two_passes
from two_passes import CLIP, DECAY, LR, RHO, assert_equal_weights

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

layers, losses, optimizers = keras.layers, keras.losses, keras.optimizers


def net():
    """The network of `two_passes`, in float32: Keras on torch multiplies matrices in no wider type."""
    return two_passes.net(torch.float32)


def samples(count=32):
    x, y = two_passes.samples(count, torch.float32)
    return x.numpy(), y.numpy()


def windows(samples_=32, **sizes):
    return two_passes.windows(*map(torch.as_tensor, samples(samples_)), **sizes)


def make(cls=SharpnessAwareModel, *, softmax=False, regularizer=None):
    """The network of `two_passes` with its weights, as layers of Keras."""
    start = net()
    inputs = keras.Input((6,))
    x = layers.Dense(8, kernel_regularizer=regularizer)(inputs)
    x = layers.Activation("tanh")(layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x))
    model = cls(inputs, layers.Dense(3, activation="softmax" if softmax else None)(x))
    dense, norm, head = (layer for layer in model.layers if layer.weights)
    for layer, other in ((dense, start[0]), (head, start[3])):
        layer.set_weights([other.weight.detach().numpy().T, other.bias.detach().numpy()])
    assert len(norm.weights) == 4
    return model


def as_torch(model, expected):
    """The trained weights in the network of the reference. Keras keeps the variance without Bessel's correction."""
    found = net()
    dense, norm, head = (layer for layer in model.layers if layer.weights)
    with torch.no_grad():
        for layer, other in ((dense, found[0]), (head, found[3])):
            other.weight.copy_(layer.kernel.value.T)
            other.bias.copy_(layer.bias.value)
        found[1].weight.copy_(norm.gamma.value)
        found[1].bias.copy_(norm.beta.value)
        found[1].running_mean.copy_(norm.moving_mean.value)
        found[1].running_var.copy_(expected[1].running_var)
        found[1].num_batches_tracked.copy_(expected[1].num_batches_tracked)
    return found


def fit(model, data=None, epochs=1, **options):
    x, y = samples() if data is None else data
    return model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **options)


def cross_entropy():
    return losses.SparseCategoricalCrossentropy(from_logits=True)


def weights_of(model):
    return [variable.numpy() for variable in model.weights]


def assert_same(first, second):
    for a, b in zip(weights_of(first), weights_of(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("name", "method"), [("SAM", "sam"), ("BiSAM", "bisam-log")])
def test_accumulation_clipping_and_a_schedule_equal_the_reference(name, method, monkeypatch):
    monkeypatch.setattr(two_passes, "MOMENTUM", 0.0)  # that of Keras keeps old learning rates, and torch's does not
    schedule = optimizers.schedules.ExponentialDecay(LR, decay_steps=2, decay_rate=DECAY, staircase=True)
    base = optimizers.SGD(schedule, clipvalue=CLIP["value"], gradient_accumulation_steps=2)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    model = make()
    model.compile(base, cross_entropy(), metrics=[accuracy], method=method, rho=RHO)
    history = fit(model, epochs=3).history
    updates = windows() * 3
    expected, at_weights = two_passes.train(net(), updates, name, clip="value")
    assert_equal_weights(as_torch(model, expected), expected, tolerance=1e-6)
    np.testing.assert_allclose(history["loss"], np.reshape(at_weights, (3, 4)).mean(1), rtol=1e-6)
    assert float(accuracy.count) == 32  # each sample once
    assert int(base.iterations) == 6


def test_momentum_of_keras_trains_as_that_of_torch_at_a_constant_rate(monkeypatch):
    monkeypatch.setattr(two_passes, "LR", 0.1)  # rounding errors of float32 grow with it
    model = make()
    model.compile(
        optimizers.SGD(two_passes.LR, momentum=two_passes.MOMENTUM), cross_entropy(), method="bisam-log", rho=RHO
    )
    history = fit(model, samples(36), epochs=2).history
    updates = windows(36, count=1) * 2
    expected, at_weights = two_passes.train(net(), updates, "BiSAM", divisor=1, clip=None, decays=0)
    sizes = [8, 8, 8, 8, 4]
    np.testing.assert_allclose(history["loss"], np.reshape(at_weights, (2, 5)) @ sizes / 36, rtol=1e-6)
    assert_equal_weights(as_torch(model, expected), expected, tolerance=1e-6)


def test_the_radius_of_gsam_follows_the_learning_rate_of_keras():
    schedule = optimizers.schedules.ExponentialDecay(0.1, decay_steps=1, decay_rate=0.5)
    model = make()
    model.compile(optimizers.SGD(schedule), cross_entropy(), method="gsam", rho=0.1)
    fit(model)
    ours = model.sharpness_aware
    # the last of four updates has an eighth of the first rate: the least radius is half of rho
    assert ours.perturbation.radius(ours.param_groups[0]) == pytest.approx(0.05 + 0.05 / 8)


def test_rho_zero_is_plain_training_with_keras_bit_for_bit():
    found = []
    for cls, options in ((keras.Model, {}), (SharpnessAwareModel, {"method": "sam", "rho": 0.0})):
        model = make(cls, regularizer="l2")
        base = optimizers.AdamW(
            0.01, weight_decay=0.1, clipnorm=0.5, use_ema=True, gradient_accumulation_steps=2, loss_scale_factor=4.0
        )
        model.compile(base, cross_entropy(), metrics=["accuracy"], **options)
        history = fit(model, epochs=3, sample_weight=np.linspace(0.5, 2.0, 32)).history
        found.append((model, history))
    (plain, expected), (ours, history) = found
    assert_same(ours, plain)
    assert history == expected


@pytest.mark.parametrize(
    ("method", "options"), [("bisam-log", {"every": 3}), ("gsam", {}), ("looksam", {}), ("fsam", {})]
)
def test_a_saved_model_resumes_bit_for_bit(method, options, tmp_path):
    models = []
    for _ in range(2):
        model = make()
        schedule = optimizers.schedules.ExponentialDecay(0.01, decay_steps=1, decay_rate=0.9)
        base = optimizers.Adam(schedule, gradient_accumulation_steps=2)
        model.compile(base, cross_entropy(), metrics=["accuracy"], method=method, rho=0.1, method_options=options)
        models.append(model)
    whole, half = models
    fit(whole, epochs=2)
    fit(half)
    half.save(tmp_path / "half.keras")
    again = keras.saving.load_model(tmp_path / "half.keras")
    assert type(again) is SharpnessAwareModel
    history = fit(again).history
    assert_same(again, whole)
    assert repr(again.sharpness_aware) == repr(whole.sharpness_aware)
    assert history["loss"][0] > 0


def test_a_model_saved_between_two_updates_drops_pending_micro_batches_and_updates_when_keras_does(tmp_path):
    x, y = samples(8)
    found = []
    for count in (2, None):
        model = make()
        base = optimizers.SGD(0.1, gradient_accumulation_steps=count)
        model.compile(base, cross_entropy(), method="bisam-log", rho=0.1)
        if count is not None:
            fit(model, (x, y))  # one micro-batch of two
            model.save(tmp_path / "between.keras")
            model = keras.saving.load_model(tmp_path / "between.keras")
        fit(model, (x[::-1].copy(), y[::-1].copy()))
        found.append(model)
    assert_same(*found)


def test_loading_weights_replaces_the_memory_by_that_of_the_loaded_weights(tmp_path):
    """Between two updates, with a memory, to a state with another memory, and to one without."""
    x, y = samples()
    model = make()
    model.compile(optimizers.SGD(0.1, gradient_accumulation_steps=2), cross_entropy(), method="fsam", rho=0.1)
    model.sharpness_aware  # noqa: B018  # it is made here, with an empty memory
    model.optimizer.build(model.trainable_variables)
    found = []
    for epoch in range(3):
        found.append(weights_of(model))
        model.save_weights(tmp_path / f"{epoch}.weights.h5")
        fit(model)
    for epoch in (1, 0, 1):
        fit(model, (x[:8], y[:8]))
        model.load_weights(tmp_path / f"{epoch}.weights.h5")
        fit(model)
        for a, b in zip(weights_of(model), found[epoch + 1], strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_model_can_be_saved_before_compile_and_loaded_without_compiling(tmp_path):
    model = make()
    model.save(tmp_path / "new.keras")
    assert_same(keras.saving.load_model(tmp_path / "new.keras"), model)
    model.compile(optimizers.SGD(0.1), cross_entropy(), method="looksam")
    fit(model)
    model.save(tmp_path / "trained.keras")
    assert_same(keras.saving.load_model(tmp_path / "trained.keras", compile=False), model)


def test_weights_that_belong_to_no_layer_are_saved_beside_the_memory(tmp_path):
    class Net(SharpnessAwareMixin, keras.Model):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 3))

        def call(self, x):
            return x @ self.kernel

    trained, loaded = Net(), Net()
    for model in (trained, loaded):
        model.compile(optimizers.SGD(0.1), cross_entropy(), method="looksam")
        fit(model)
    trained.save_weights(tmp_path / "own.weights.h5")
    loaded.load_weights(tmp_path / "own.weights.h5")
    assert_same(loaded, trained)


@pytest.mark.parametrize(
    ("softmax", "loss", "one_hot"),
    [
        (True, "sparse_categorical_crossentropy", False),
        (True, losses.CategoricalCrossentropy, True),
        (False, partial(losses.CategoricalCrossentropy, from_logits=True), True),
        (True, lambda: losses.sparse_categorical_crossentropy, False),
    ],
)
def test_probabilities_and_one_hot_labels_train_as_logits_and_classes(softmax, loss, one_hot):
    x, y = samples()
    logits, other = make(), make(softmax=softmax)
    logits.compile(optimizers.SGD(0.1), cross_entropy(), rho=0.1)
    other.compile(optimizers.SGD(0.1), loss if isinstance(loss, str) else loss(), rho=0.1)
    fit(logits)
    fit(other, (x, np.eye(3)[y] if one_hot else y[:, None].astype(np.float32)))
    for a, b in zip(weights_of(logits), weights_of(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_a_probability_of_zero_has_a_gradient_of_zero_as_in_keras():
    model = make(softmax=True)
    model.compile(optimizers.SGD(0.1), "sparse_categorical_crossentropy", rho=0.1)
    probabilities = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]], requires_grad=True)
    model._ascent(model.sharpness_aware, probabilities, torch.tensor([1, 0]), None).backward()
    assert (probabilities.grad.isfinite() & ((probabilities > 0) | (probabilities.grad == 0))).all()


def test_q_ignores_the_class_that_the_loss_ignores():
    model = make()
    model.compile(optimizers.SGD(0.1), losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=9), rho=0.1)
    logits = torch.randn(4, 3, requires_grad=True)
    whole = model._ascent(model.sharpness_aware, logits, torch.tensor([0, 9, 2, 9]), None)
    part = model._ascent(model.sharpness_aware, logits[::2], torch.tensor([0, 2]), None)
    assert whole.item() == pytest.approx(part.item())


@pytest.mark.parametrize("one_hot", [False, True])
def test_q_excludes_what_a_layer_masks_as_the_loss_does(one_hot):
    inputs = keras.Input((5,), dtype="int32")
    model = SharpnessAwareModel(inputs, layers.Dense(3)(layers.Embedding(7, 4, mask_zero=True)(inputs)))
    loss = losses.CategoricalCrossentropy if one_hot else losses.SparseCategoricalCrossentropy
    model.compile(optimizers.SGD(0.1), loss(from_logits=True), rho=0.1)
    y_pred = model(torch.tensor([[1, 2, 3, 0, 0], [4, 5, 0, 0, 0]]))
    for padding in (0, 2):  # of the labels
        y = torch.tensor([[0, 1, 2, padding, padding], [2, 1, padding, padding, padding]])
        targets = torch.nn.functional.one_hot(y, 3) if one_hot else y
        whole = model._ascent(model.sharpness_aware, y_pred, targets, None)
        kept = y_pred[[0, 0, 0, 1, 1], [0, 1, 2, 0, 1]]
        part = model._ascent(model.sharpness_aware, kept, torch.tensor([0, 1, 2, 2, 1]), None)
        assert whole.item() == pytest.approx(part.item())


def test_sequential_and_subclassed_models_take_the_mixin_and_frozen_layers_are_unchanged():
    class Ours(SharpnessAwareMixin, keras.Sequential):
        pass

    model = Ours([keras.Input((6,)), layers.Dense(8), layers.Dense(1)])
    model.layers[0].trainable = False
    model.compile(optimizers.SGD(0.05), "mse", method="sam", rho=0.01)
    before = weights_of(model)
    x, _ = samples()
    history = fit(model, (x, x[:, :1]), epochs=5).history["loss"]
    assert history[-1] < history[0]
    after = weights_of(model)
    assert [np.array_equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, False]
    model.layers[0].trainable = True
    model.compile(optimizers.SGD(0.05), "mse", method="sam", rho=0.01)
    fit(model, (x, x[:, :1]))
    assert not np.array_equal(before[0], weights_of(model)[0])


def test_train_on_batch_trains_as_fit_does():
    x, y = samples(8)
    whole, single = make(), make()
    for model in (whole, single):
        model.compile(optimizers.SGD(0.1), cross_entropy(), metrics=["accuracy"], rho=0.1)
    history = fit(whole, (x, y)).history
    logs = single.train_on_batch(x, y, return_dict=True)
    assert_same(single, whole)
    assert logs == {name: value for name, [value] in history.items()}


def test_the_losses_of_several_outputs_are_logged_at_w():
    inputs = keras.Input((6,))
    outputs = [layers.Dense(size, name=name)(inputs) for name, size in (("kind", 3), ("size", 1))]
    model = SharpnessAwareModel(inputs, outputs)
    model.compile(optimizers.SGD(0.1), [cross_entropy(), "mse"], loss_weights=[1.0, 0.5], method="sam", rho=1.0)
    x, y = samples(8)
    expected = model.evaluate(x, [y, x[:, :1]], verbose=0, return_dict=True)
    history = model.fit(x, [y, x[:, :1]], verbose=0).history
    assert {name: value for name, [value] in history.items()} == pytest.approx(expected)


def test_validation_and_evaluation_are_those_of_keras():
    model = make()
    model.compile(optimizers.SGD(0.1), cross_entropy(), metrics=["accuracy"])
    x, y = samples()
    history = model.fit(x, y, validation_data=(x, y), batch_size=8, verbose=0, shuffle=False).history
    assert history["val_loss"][0] == pytest.approx(model.evaluate(x, y, batch_size=8, verbose=0)[0])
    assert model.sharpness_aware.telemetry.ascent_norm > 0


def test_training_in_bfloat16_keeps_the_weights_in_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = make()
    finally:
        keras.config.set_dtype_policy("float32")
    model.compile(optimizers.SGD(0.1), cross_entropy())
    history = fit(model, epochs=4).history["loss"]
    assert history[-1] < history[0]
    assert {weight.dtype for weight in model.weights} == {"float32"}


def test_the_code_of_the_page_trains():
    page = (Path(__file__).parents[2] / "docs/frameworks.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page.split("## Keras 3\n")[1].split("\n## ")[0], re.DOTALL)
    x, y = samples()
    names = {"x": x, "y": y, "options": {"verbose": 0, "batch_size": 8}}
    exec(code, names)
    assert names["model"].sharpness_aware.telemetry.ascent_norm > 0
    assert names["model"].history.history["loss"][0] > 0


# Misuse


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "sma"}, ValueError, "unknown method 'sma'"),
        ({"method": "msam"}, ValueError, "MSAM perturbs by the momentum of a torch optimizer"),
        ({"method": torch.optim.SGD}, TypeError, "method must be a name"),
        ({"jit_compile": True}, ValueError, "jit_compile=True compiles a step of one pass: remove it"),
        ({"method_options": {"same_dropout": True}}, ValueError, "same_dropout has no effect in Keras"),
        ({"method_options": {"descent": "mse"}}, ValueError, "descent has no effect in Keras, where the loss"),
    ],
)
def test_compile_refuses_invalid_methods_and_options(options, error, message):
    with pytest.raises(error, match=message):
        make().compile(optimizers.SGD(0.1), cross_entropy(), **options)


def test_loss_scaling_of_float16_is_refused(monkeypatch):
    monkeypatch.setattr(keras.Model, "dtype_policy", keras.DTypePolicy("mixed_float16"))
    with pytest.raises(ValueError, match="mixed_float16 scales the loss anew"):
        make().compile(optimizers.SGD(0.1), cross_entropy())


def test_losses_and_weights_that_q_cannot_take_are_refused_and_no_weight_changes():
    x, y = samples()
    for loss, target, options, message in (
        ("mse", np.eye(3)[y], {}, 'the loss mse does not show where they are.*method="sam", which takes any loss'),
        (losses.CategoricalCrossentropy(from_logits=True, axis=0), np.eye(3)[y], {}, "needs logits, classes last"),
        (cross_entropy(), y, {"sample_weight": np.ones(32)}, "remove sample_weight and class_weight"),
        (cross_entropy(), y, {"class_weight": {0: 1.0, 1: 2.0, 2: 1.0}}, "remove sample_weight and class_weight"),
    ):
        model = make()
        before = weights_of(model)
        model.compile(optimizers.SGD(0.1), loss)
        with pytest.raises(ValueError, match=message):
            fit(model, (x, target), **options)
        trained = [variable.numpy() for variable in model.trainable_weights]
        assert all(any(np.array_equal(one, other) for other in before) for one in trained)


def test_the_variant_needs_a_compiled_model_with_trainable_weights():
    model = make()
    with pytest.raises(RuntimeError, match=r"call model\.compile\(\.\.\.\) first"):
        model.sharpness_aware  # noqa: B018
    model.trainable = False
    model.compile(optimizers.SGD(0.1), cross_entropy())
    with pytest.raises(ValueError, match=r"no trainable weights.*layer\.trainable = True"):
        fit(model)


@pytest.mark.parametrize("is_imported", [True, False])
def test_the_torch_backend_is_set_before_keras_is_imported_and_another_backend_is_refused(is_imported, monkeypatch):
    """Only torch is installed of the backends: Keras is patched to report another."""
    monkeypatch.delenv("KERAS_BACKEND")
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    if not is_imported:
        monkeypatch.delitem(sys.modules, "keras")
    with pytest.raises(ImportError, match=r"Keras runs on jax here.*KERAS_BACKEND=torch"):
        importlib.reload(sys.modules["bisam.integrations.keras"])
    assert os.environ.get("KERAS_BACKEND") == (None if is_imported else "torch")
