"""ResNets as Triton kernels against their own modules: interpreted in float32 on a CPU, in bfloat16 on CUDA."""

import copy
from dataclasses import replace
from statistics import mean
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bisam
from bisam.lab.models import compiling
from bisam.lab.models.compiling import compile_model
from bisam.lab.models.resnet import ResNet
from bisam.lab.models.vgg import VGG

pytest.importorskip("triton", reason="Triton is not on this platform")
from bisam.lab.models.fused import residual
from bisam.lab.models.fused.residual import Launch

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch.compile's own imports
CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def network(depth=8, seed=0):
    """A ResNet whose norms scale and shift, channels_last, in training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ResNet(depth, 10).to(memory_format=torch.channels_last)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return model


def images(count, side, seed=1):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def relative_errors(found, wanted):
    """Relative distances between two lists of tensors."""
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, wanted, strict=True)]


def gradient_errors(model, exact):
    return relative_errors(*([p.grad for p in each.parameters()] for each in (model, exact)))


def buffer_errors(model, exact):
    return relative_errors(model.buffers(), exact.buffers())


# three images of 8×8 are 192, 48 and 12 pixels: full and partial tiles; one and three positions of a weight at a time
LAUNCHES = {
    "CONVOLVE": {16: Launch(128, 3, 2), 32: Launch(32, 1, 2), 64: Launch(16, 1, 2)},
    "OF_INPUT": {16: Launch(128, 3, 2), 32: Launch(32, 1, 2), 64: Launch(16, 3, 2)},
    "OF_WEIGHT": {16: Launch(64, 3, 2, parts=2), 32: Launch(32, 3, 2, parts=4), 64: Launch(16, 1, 2, parts=4)},
}


@pytest.fixture(scope="module")
def passes():
    """A pass of ResNet-8 by the kernels in float32, and by the modules in float64."""
    if CUDA:
        pytest.skip("interpreted on a CPU only: in float32 a GPU would be given launches that are not for it")
    fused, exact = network(), network().double()
    kernels = replace(fused.as_kernels(), dtype=torch.float32)
    x, weights = images(3, 8), torch.randn(3, 10, generator=torch.Generator().manual_seed(2))
    with pytest.MonkeyPatch.context() as patch:
        for name, launches in LAUNCHES.items():
            patch.setattr(residual, name, launches)
        outputs = fused.classifier(kernels(x)), exact(x.double())
        for output in outputs:
            (output * weights).sum().backward()
    return fused, exact, outputs


def test_the_kernels_give_the_outputs_of_the_modules(passes):
    fused, wanted = passes[2]
    torch.testing.assert_close(fused.double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_kernels_give_the_gradient_of_every_parameter(passes):
    fused, exact, _ = passes
    assert max(gradient_errors(fused, exact)) < 1e-5
    assert all(param.grad.stride() == param.stride() for param in fused.parameters())


def test_the_kernels_update_the_running_statistics(passes):
    fused, exact, _ = passes
    assert max(buffer_errors(fused, exact)) < 1e-6
    assert fused.norm.num_batches_tracked.item() == 1
    assert not torch.equal(fused.norm.running_var, torch.ones(16))


def test_on_a_cpu_a_fused_network_runs_its_modules():
    fused, plain = network(), network()
    fused.fuse()
    x = images(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused(x), plain(x))
    assert fused.state_dict().keys() == plain.state_dict().keys()


def test_a_copy_of_a_fused_network_computes_with_its_own_parameters():
    fused = network()
    fused.fuse()
    twin = copy.deepcopy(fused)
    assert twin.is_fused
    assert {id(p) for p in twin.as_kernels().parameters()} <= {id(p) for p in twin.parameters()}


def test_a_module_replaced_after_fusing_is_the_one_that_the_kernels_use():
    fused = network()
    fused.fuse()
    fused.norm = nn.BatchNorm2d(16)
    assert fused.as_kernels().layers[0].norm is fused.norm


def test_nan_stays_nan_in_every_output_and_gradient():
    """As with the modules: otherwise a diverged training would look finite."""
    if CUDA:
        pytest.skip("interpreted on a CPU only; a GPU has a test of its own")
    found = []
    for use in ("kernels", "modules"):
        model = network()
        with torch.no_grad():
            model.conv.weight[:] = torch.nan
        kernels = replace(model.as_kernels(), dtype=torch.float32)
        with pytest.MonkeyPatch.context() as patch:
            for name, launches in LAUNCHES.items():
                patch.setattr(residual, name, launches)
            output = model.classifier(kernels(images(2, 4))) if use == "kernels" else model(images(2, 4))
            output.sum().backward()
        found.append([output, *(param.grad for param in model.parameters())])
    assert sum(by_modules.isnan().any().item() for by_modules in found[1]) > 20
    for by_kernels, by_modules in zip(*found, strict=True):
        assert by_kernels[by_modules.isnan()].isnan().all()


@pytest.fixture
def autocast_of_cuda():
    """Autocast to bfloat16 on CUDA, enabled even if there is no such device."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


def shaped(*shape, **changes):
    """A stand-in with the attributes of a tensor on a GPU that `fits` reads."""
    usual = {
        "is_cuda": True, "dtype": torch.float32, "dim": lambda: len(shape), "shape": shape, "requires_grad": False,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **changes})


@pytest.mark.parametrize(
    ("x", "fits"),
    [
        (shaped(2, 3, 32, 32), True),
        (shaped(2, 3, 32, 32, dtype=torch.bfloat16), True),
        (shaped(2, 3, 32, 32, dtype=torch.uint8), False),  # which the modules refuse
        (shaped(2, 1, 32, 32), False),  # likewise
        (shaped(1, 3, 4, 4), False),  # likewise: one pixel in the last layer
        (shaped(0, 3, 32, 32), False),
        (shaped(2**17 - 1, 3, 32, 32), True),
        (shaped(2**17, 3, 32, 32), False),  # 2³¹ numbers in the first layer
        (shaped(2, 3, 30, 32), False),  # a stride would leave half a pixel
        (shaped(2, 4, 32, 32), False),
        (shaped(3, 32, 32), False),
        (shaped(2, 3, 32, 32, is_cuda=False), False),
        (shaped(2, 3, 32, 32, requires_grad=True), False),  # the kernels compute no gradient of the images
    ],
)
def test_the_kernels_apply_only_to_rgb_images_of_suitable_size_on_a_gpu(autocast_of_cuda, x, fits):
    model = network()
    model.fuse()
    assert model.as_kernels().fits(x) is fits


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.eval(),
        lambda model: model.blocks[1].norm2.eval(),
        lambda model: setattr(model.norm, "momentum", None),
        lambda model: setattr(model.norm, "track_running_stats", False),
        lambda model: nn.SyncBatchNorm.convert_sync_batchnorm(model),
        lambda model: nn.utils.parametrizations.weight_norm(model.conv),
        lambda model: model.blocks[1].register_forward_hook(lambda *_: None),
        lambda model: model.conv.register_full_backward_hook(lambda *_: None),
        lambda _: torch.set_autocast_enabled("cuda", False),
        lambda _: torch.set_autocast_dtype("cuda", torch.float16),
    ],
    ids=[
        "evaluation",
        "a norm in evaluation",
        "cumulative averages",
        "no running ones",
        "statistics of all ranks",
        "a parametrization",
        "a hook",
        "a backward hook",
        "no autocast",
        "autocast to another type",
    ],
)
def test_the_kernels_apply_only_to_plain_training_in_bfloat16(autocast_of_cuda, change):
    model = network()
    model.fuse()
    assert model.as_kernels().fits(shaped(2, 3, 32, 32))
    change(model)
    assert not model.as_kernels().fits(shaped(2, 3, 32, 32))


@pytest.mark.parametrize(
    ("build", "on_gpu", "bf16", "fused"),
    [
        (lambda: ResNet(8, 10), True, True, True),
        (lambda: ResNet(8, 10), True, False, False),
        (lambda: ResNet(8, 10), False, True, False),
        (lambda: VGG(10), True, True, False),
        (lambda: nn.SyncBatchNorm.convert_sync_batchnorm(ResNet(8, 10)), True, True, False),
    ],
)
def test_resnets_in_bf16_on_a_gpu_use_own_kernels_and_others_torch_compile(monkeypatch, build, on_gpu, bf16, fused):
    monkeypatch.setattr(compiling, "_has_kernels", lambda device: on_gpu)
    model = build()
    assert compile_model(model, torch.device("cpu"), bf16=bf16) == ("bisam" if fused else "torch.compile")
    assert getattr(model, "is_fused", False) is fused
    assert (model._compiled_call_impl is not None) is not fused


def test_a_cpu_has_no_kernels():
    assert not compiling._has_kernels(torch.device("cpu"))


# On CUDA.


def on_cuda(depth, seed=0):
    return network(depth, seed).to("cuda", memory_format=torch.channels_last)


@needs_cuda
@pytest.mark.parametrize(("depth", "count", "side"), [(8, 128, 32), (20, 45, 12)])
def test_on_cuda_the_kernels_are_about_as_close_to_float64_as_autocast(depth, count, side):
    fused, plain = on_cuda(depth), on_cuda(depth)
    exact = on_cuda(depth).double()
    fused.fuse()
    x, y = images(count, side).to("cuda", memory_format=torch.channels_last), torch.arange(count, device="cuda") % 10
    with torch.autocast("cuda", torch.bfloat16):
        assert fused.as_kernels().fits(x)
        for model in (fused, plain):
            F.cross_entropy(model(x), y).backward()
    F.cross_entropy(exact(x.double()), y).backward()
    # on average: the rounding errors of a single parameter's gradient differ more between algorithms
    assert mean(gradient_errors(fused, exact)) < 1.25 * mean(gradient_errors(plain, exact))
    assert max(buffer_errors(fused, exact)) < 1.5 * max(buffer_errors(plain, exact))


@needs_cuda
def test_on_cuda_a_diverged_network_gives_nan():
    model = on_cuda(8)
    model.fuse()
    with torch.no_grad():
        model.conv.weight[:] = torch.nan
    with torch.autocast("cuda", torch.bfloat16):
        output = model(images(8, 32).cuda())
    output.float().sum().backward()
    assert output.isnan().all()
    assert all(param.grad.isnan().all() for param in (model.conv.weight, model.norm.weight, model.norm.bias))


@needs_cuda
def test_on_cuda_repeated_passes_are_bitwise_equal():
    x, y = images(128, 32).to("cuda", memory_format=torch.channels_last), torch.arange(128, device="cuda") % 10
    found = []
    for _ in range(2):
        model = on_cuda(8)
        model.fuse()
        with torch.autocast("cuda", torch.bfloat16):
            F.cross_entropy(model(x), y).backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_cuda
@pytest.mark.parametrize("count", [1, 3])
def test_on_cuda_captured_steps_match_eager_steps(count):
    def trainings():
        models = [on_cuda(8, seed) for seed in range(count)]
        for model in models:
            model.fuse()
        bases = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True) for model in models]
        optimizers = [
            bisam.BiSAM(base, model, autocast=torch.bfloat16) for base, model in zip(bases, models, strict=True)
        ]
        return models, optimizers

    (models, optimizers), (eager_models, eager_optimizers) = trainings(), trainings()
    step = bisam.capture_together(optimizers)
    assert step.eager_because is None
    for number in range(6):
        x, y = images(64, 32, seed=number).cuda(), torch.arange(64, device="cuda") % 10
        losses = step([(x, y)] * count)
        wanted = [optimizer.minimize(x, y) for optimizer in eager_optimizers]
        torch.testing.assert_close(losses, wanted, rtol=1e-3, atol=1e-3)
    for model, eager in zip(models, eager_models, strict=True):
        assert (
            max(relative_errors(model.parameters(), eager.parameters())) < 1e-3
        )  # ρ and the rate are rounded differently on the device
