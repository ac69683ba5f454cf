"""The configuration of a run: its learning rates, the limits of its fields, and fields set from text."""

import math

import pytest

from bisam.lab.config import Config, rate, suggestion


def test_the_cosine_begins_after_the_warm_up_and_ends_with_the_training():
    config = Config(epochs=6, warmup_epochs=2, lr=0.2)
    cosine = [0.1 * (1 + math.cos(math.pi * part / 4)) for part in range(4)]
    assert [rate(config, epoch) for epoch in range(6)] == pytest.approx([0.1, 0.2, *cosine])


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        *[("flip", text, True) for text in ("true", "Yes", "1")],
        *[("flip", text, False) for text in ("false", "No", "0")],
        *[("mu", text, None) for text in ("none", "NULL", "")],
        *[("mu", "3", 3.0), ("every", "3", 3), ("model", "none", "none")],
    ],
)
def test_a_field_is_set_from_text(name, text, value):
    changed = getattr(Config(mu=2.0).with_changes({name: text}), name)
    assert (changed, type(changed)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("flip", "on", "flip is true or false, got 'on'"),
        ("epochs", "2.5", "epochs is a whole number, got '2.5'"),
        ("lr", "none", "lr is a number, got 'none'"),
        ("rhoo", "1", "unknown field 'rhoo': the nearest names are rho"),
        ("zzz", "1", "unknown field 'zzz': choose from recipe, title"),
    ],
)
def test_text_that_is_not_a_value_of_the_field_is_refused(name, text, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Config().with_changes({name: text})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("start", 1.0),  # no step would perturb
        ("label_smoothing", 1.0),  # the label would not count
        ("validation", 0.0),  # no sample would choose the weights
        *[(name, 0.0) for name in ("mu", "alpha", "beta", "gamma", "clip_norm")],
        *[(name, 0) for name in ("batch", "micro_batch", "every", "epoch_steps")],
    ],
)
def test_a_value_at_the_excluded_end_of_its_range_is_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name} must lie between "):
        Config(**{name: value})


def test_an_unknown_measure_is_refused():
    with pytest.raises(ValueError, match="acuracy"):
        Config(measures="f1,acuracy")


def test_nearest_names_are_suggested_regardless_of_case():
    assert suggestion("RESNET57", ["resnet56", "vgg"]) == "the nearest names are resnet56"
