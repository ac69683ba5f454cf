"""timm's calls of a loss scaler against a step written by hand; timm itself where it can be imported."""

import copy
import importlib
import pickle
from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import bisam
from bisam.integrations.timm import SharpnessAwareScaler

import ranks
import two_passes
from two_passes import RHO, assert_equal_weights


def timm():
    """The package, or a skip with the reason: it needs torchvision, which has no build for a torch without CUDA."""
    try:
        return importlib.import_module("timm")
    except Exception as error:
        pytest.skip(f"timm cannot be imported here: {error}")


def train(net, updates, variant="BiSAM", scaler=None, clip="norm", model=None, **options):
    """As timm's training script does: losses are divided, and updated at the last of each accumulation."""
    model = net if model is None else model
    optimizer = getattr(bisam, variant)(two_passes.base_of(net.parameters()), model, **{"rho": RHO, **options})
    scaler = SharpnessAwareScaler("cpu", enabled=False) if scaler is None else scaler
    losses = []

    def loss_of(x, y):
        return optimizer.criterion(model(x), y) / 2

    for update in updates:
        for number, (x, y) in enumerate(update, start=1):
            loss = scaler(
                partial(loss_of, x, y), optimizer, clip_grad=two_passes.CLIP[clip], clip_mode=clip,
                parameters=net.parameters(), need_update=number == len(update),
            )  # fmt: skip
            losses.append(loss)
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= two_passes.DECAY
    return losses, optimizer


@pytest.mark.parametrize(("name", "clip"), [("SAM", "norm"), ("BiSAM", "norm"), ("BiSAM", "value")])
@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_accumulation_clipping_and_a_schedule_equal_the_reference(name, clip, scale):
    net = two_passes.net()
    start = copy.deepcopy(net)
    scaler = None
    if scale is not None:
        scaler = SharpnessAwareScaler("cpu")
        scaler._scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    updates = two_passes.windows(*two_passes.samples())
    found, _ = train(net, updates, name, scaler, clip)
    expected, losses = two_passes.train(start, updates, name, clip=clip)
    assert_equal_weights(net, expected)
    assert [loss is None for loss in found] == [True, False, True, False, False]
    means = [sum(losses[:2]) / 2, sum(losses[2:4]) / 2, losses[4]]
    assert [float(loss) for loss in found if loss is not None] == pytest.approx(means, rel=1e-6)


def test_a_loss_without_the_criterion_is_returned_as_the_mean_over_the_micro_batches():
    net = two_passes.net()
    optimizer = bisam.SAM(two_passes.base_of(net.parameters()), net, rho=RHO)
    scaler = SharpnessAwareScaler("cpu", enabled=False)
    [update, *_] = two_passes.windows(*two_passes.samples())
    losses = [torch.nn.functional.cross_entropy(net(x), y).item() for x, y in update]
    found = [
        scaler(
            partial(lambda x, y: torch.nn.functional.cross_entropy(net(x), y), x, y), optimizer,
            parameters=net.parameters(), need_update=last,  # as timm's script gives them, also where it does not clip
        )
        for (x, y), last in zip(update, (False, True), strict=True)
    ]  # fmt: skip
    assert found[0] is None
    assert found[1].item() == pytest.approx(sum(losses) / 2)


def test_without_an_ascent_pass_the_loss_is_that_of_the_only_pass():
    updates = two_passes.windows(*two_passes.samples())
    found, optimizer = train(two_passes.net(), updates[:1], "MSAM")
    assert float(found[-1]) == float(optimizer.telemetry.perturbed_loss)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_loss_that_overflows_skips_the_step_and_halves_the_scale(enabled):
    net, (x, y) = two_passes.net(), two_passes.samples(8)
    before = copy.deepcopy(net.state_dict())
    optimizer = bisam.BiSAM(two_passes.base_of(net.parameters()), net, rho=RHO)
    scaler = SharpnessAwareScaler("cpu", enabled=enabled)
    scale = scaler._scaler.get_scale()
    assert scale == (2.0**16 if enabled else 1.0)
    if enabled:
        scaler(partial(lambda x, y: 1e305 * optimizer.criterion(net(x), y), x, y), optimizer)
        optimizer.zero_grad()
        assert scaler._scaler.get_scale() == scale / 2
        weights = [name for name, _ in net.named_parameters()]
        assert all(torch.equal(net.state_dict()[name], before[name]) for name in weights)
    slopes = torch.autograd.grad(optimizer.criterion.ascent(net(x), y), [*net.parameters()])
    scaler(partial(lambda x, y: optimizer.criterion(net(x), y), x=x, y=y), optimizer)  # the batch by name
    norm = torch.cat([slope.flatten() for slope in slopes]).norm().item()
    assert optimizer.telemetry.ascent_norm.item() == pytest.approx(norm)  # not scaled
    assert not torch.equal(net.state_dict()["0.weight"], before["0.weight"])


def test_a_checkpoint_resumes_bit_for_bit():
    updates = two_passes.windows(*two_passes.samples())
    whole, half = two_passes.net(), two_passes.net()
    train(whole, [*updates, *updates], scaler=SharpnessAwareScaler("cpu"))
    scaler = SharpnessAwareScaler("cpu")
    _, optimizer = train(half, updates, scaler=scaler)
    state = {"optimizer": optimizer.state_dict(), scaler.state_dict_key: scaler.state_dict()}
    resumed = bisam.BiSAM(two_passes.base_of(half.parameters()), half, rho=RHO)
    resumed.load_state_dict(state["optimizer"])
    again = SharpnessAwareScaler("cpu")
    again.load_state_dict(state["amp_scaler"])
    assert again.state_dict() == scaler.state_dict() != SharpnessAwareScaler("cpu").state_dict()

    def loss_of(x, y):
        return resumed.criterion(half(x), y) / 2

    for update in updates:
        for number, (x, y) in enumerate(update, start=1):
            again(
                partial(loss_of, x, y), resumed, clip_grad=two_passes.CLIP["norm"], parameters=half.parameters(),
                need_update=number == len(update),
            )  # fmt: skip
        for group in resumed.param_groups:
            group["lr"] *= two_passes.DECAY
    for a, b in zip(whole.state_dict().values(), half.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def train_on_a_rank():
    net = two_passes.net(batch_norm=False)
    model = DistributedDataParallel(net)
    updates = [[tuple(ranks.mine(t) for t in batch) for batch in update] for update in windows()]
    train(net, updates, model=model)
    return net


def windows():
    return two_passes.windows(*two_passes.samples(64), size=16)


def test_two_ranks_perturb_each_by_its_own_gradient():
    first, second = ranks.run(train_on_a_rank)
    updates = [
        [[(x.chunk(2)[rank], y.chunk(2)[rank]) for x, y in update] for rank in range(ranks.RANKS)]
        for update in windows()
    ]
    expected, _ = two_passes.train(two_passes.net(batch_norm=False), updates, "BiSAM")
    for net in (first, second):
        assert_equal_weights(net, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="float16 with a scaler needs a GPU")
def test_float16_trains_on_a_gpu():
    net = two_passes.net(torch.float32).cuda()
    before = copy.deepcopy(net)
    updates = [
        [(x.cuda(), y.cuda()) for x, y in update]
        for update in two_passes.windows(*two_passes.samples(dtype=torch.float32))
    ]
    with torch.autocast("cuda", torch.float16):
        train(net, updates, scaler=SharpnessAwareScaler("cuda"))
    assert all(p.isfinite().all() for p in net.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(net.parameters(), before.parameters(), strict=True))


# Misuse


def test_wrong_arguments_of_the_scaler_are_refused():
    net = two_passes.net()
    optimizer = bisam.SAM(two_passes.base_of(net.parameters()), net)
    scaler = SharpnessAwareScaler("cpu", enabled=False)
    loss = torch.zeros((), requires_grad=True)
    for wrong, name in ((loss, "Tensor"), (lambda: loss, "function"), (partial(lambda: loss), "partial")):
        with pytest.raises(TypeError, match=rf"must be functools.partial\(loss_of, x, y\), got {name}"):
            scaler(wrong, optimizer)
    given = partial(lambda x: x, loss)
    with pytest.raises(TypeError, match=r"must be a sharpness-aware one.*got SGD"):
        scaler(given, optimizer.base)
    with pytest.raises(ValueError, match="create_graph"):
        scaler(given, optimizer, create_graph=True)
    with pytest.raises(ValueError, match="needs the parameters to clip"):
        scaler(given, optimizer, clip_grad=1.0)
    with pytest.raises(ValueError, match=r'clip_mode must be "norm", "value" or "agc", got .other.'):
        scaler(partial(lambda x: net(x).sum(), two_passes.samples(8)[0]), optimizer, 1.0, "other", net.parameters())


# With timm


def test_the_signature_of_the_call_is_that_of_native_scaler():
    import inspect

    timm()
    from timm.utils import NativeScaler

    ours, theirs = (inspect.signature(cls.__call__).parameters for cls in (SharpnessAwareScaler, NativeScaler))
    assert list(ours) == list(theirs)
    assert SharpnessAwareScaler.state_dict_key == NativeScaler.state_dict_key


def test_a_model_of_timm_trains_with_adaptive_clipping():
    model = timm().create_model("test_resnet", num_classes=3)
    optimizer = bisam.BiSAM(torch.optim.AdamW(model.parameters(), lr=1e-3), model, rho=0.05)
    scaler = SharpnessAwareScaler("cpu", enabled=False)
    x, y = torch.randn(8, 3, 32, 32), torch.randint(3, (8,))
    losses = [
        float(
            scaler(
                partial(lambda x, y: optimizer.criterion(model(x), y), x, y), optimizer, clip_grad=0.1,
                clip_mode="agc", parameters=model.parameters(),
            )
        )
        for _ in range(5)
    ]  # fmt: skip
    assert losses[-1] < losses[0]


def test_a_pickled_or_copied_scaler_is_independent_of_the_original():
    scaler = SharpnessAwareScaler("cpu")
    for twin in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert twin._waiting._backward.__self__ is twin
