import pytest
import torch

import bisam

import reference
from contract import Contract
from family import BASES, VARIANTS, ConvNet, assert_close, assert_identical, batch, build, tensors


class TestEveryVariant(Contract):
    """The shared contract, over the whole family."""


@pytest.mark.parametrize("name", reference.VARIANTS)
@pytest.mark.parametrize("base_name", ["SGD(foreach)", "AdamW(fused)"])
def test_fifty_steps_agree_with_the_float64_reference(name, base_name):
    model, optimizer = build(name, base_name, dtype=torch.float64)
    torch.manual_seed(0)
    expected = ConvNet().double()
    base = BASES[base_name](expected.parameters())
    for seed in range(50):
        x, y = batch(seed, size=8, dtype=torch.float64)
        optimizer.minimize(x, y)
        reference.step(expected, base, x, y, *reference.VARIANTS[name])
    assert_close(tensors(model, optimizer), tensors(expected, base), 1e-10)
    sgd = ConvNet().double()
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(sgd.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(("bilevel", "plain"), [("BiSAM(log)", "SAM"), ("ABiSAM(log)", "ASAM")])
def test_bisam_with_cross_entropy_on_both_sides_is_sam_bit_for_bit(bilevel, plain, base):
    model, optimizer = build(bilevel, base, ascent=bisam.CrossEntropy())
    sam, sam_optimizer = build(plain, base)
    other, other_optimizer = build(bilevel, base)
    for seed in range(5):
        for o in (optimizer, sam_optimizer, other_optimizer):
            o.minimize(*batch(seed))
    assert_identical(tensors(model, optimizer), tensors(sam, sam_optimizer))
    assert not torch.equal(other.conv.weight, sam.conv.weight)


def test_any_variant_becomes_bilevel_with_an_ascent_of_its_own():
    model, optimizer = build("ASAM", ascent=bisam.LowerBound("tanh", mu=20))
    twin, twin_optimizer = build("ABiSAM(tanh)", mu=20)
    for seed in range(3):
        optimizer.minimize(*batch(seed))
        twin_optimizer.minimize(*batch(seed))
    assert_identical(tensors(model, optimizer), tensors(twin, twin_optimizer))


def test_defaults_are_the_papers():
    radius = {name: build(name)[1].param_groups[0]["rho"] for name in VARIANTS}
    assert radius == {name: 2.0 if "ASAM" in name or "ABi" in name else 0.05 for name in VARIANTS}
    assert build("BiSAM(log)")[1].criterion.ascent.mu == 1
    assert build("BiSAM(tanh)")[1].criterion.ascent.mu == 10
    assert isinstance(build("BiSAM(log)")[1].criterion.descent, torch.nn.CrossEntropyLoss)
