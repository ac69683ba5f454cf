import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bisam.lab.models import MODELS, build, densenet, resnet, resnet50, wide_resnet

COUNTS = {  # parameters with 10 and with 100 classes
    "densenet121": (6_956_298, 7_048_548),  # 8.0 M with 1000 classes and the first convolution for 224×224
    "resnet20": (269_722, 275_572),  # He et al.: 0.27 M
    "resnet32": (464_154, 470_004),  # He et al.: 0.46 M
    "resnet56": (853_018, 858_868),  # He et al.: 0.85 M
    "resnet50": (23_528_522, 23_712_932),  # 25.6 M with 1000 classes
    "vgg19bn": (20_565_834, 20_612_004),  # 144 M with 1000 classes and linear layers of 4096 units; 20.0 M convolutions
    "wrn28-2": (1_467_610, 1_479_220),  # Oliver et al. 2018: 1.5 M
    "wrn28-10": (36_479_194, 36_536_884),  # Zagoruyko and Komodakis: 36.5 M
}
MULTIPLY_ADDS = {  # millions in a forward pass with 10 classes: strides and poolings, without parameters, show here
    "densenet121": 888.35,
    "resnet20": 40.55,
    "resnet32": 68.86,
    "resnet56": 125.49,
    "resnet50": 4087.16,  # 4.09 G with 1000 classes; 3.8 G in the paper, whose stride is in the 1×1 convolutions
    "vgg19bn": 398.66,
    "wrn28-2": 214.35,
    "wrn28-10": 5243.33,  # 5.2 G
}
LAYERS = {  # convolutions on the main path and linear layers; a WRN counts its three projections and no linear layer
    "densenet121": 121,
    "resnet20": 20,
    "resnet32": 32,
    "resnet56": 56,
    "resnet50": 50,
    "vgg19bn": 19,
    "wrn28-2": 28,
    "wrn28-10": 28,
}
SMALL = [name for name in MODELS if name != "wrn28-10"]  # which is the code of wrn28-2, at 25 times its cost


def on_meta(name, classes=10):
    with torch.device("meta"):
        return build(name, classes)


def images(name, device=None, count=2):
    size = 224 if name == "resnet50" and device == "meta" else 64 if name == "resnet50" else 32
    if name == "digitsnet":
        return torch.randn(count, 1, 8, 8, device=device)
    return torch.randn(count, 3, size, size, device=device)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_published_ones(name):
    assert tuple(parameters(on_meta(name, classes)) for classes in (10, 100)) == COUNTS[name]


def test_parameter_counts_at_imagenet_size_are_the_published_ones():
    assert parameters(on_meta("resnet50", 1000)) == 25_557_032
    first_convolution = 64 * 3 * (7 * 7 - 3 * 3) + 2 * 64  # 7×7 instead of 3×3, and a batch norm after it
    assert parameters(on_meta("densenet121", 1000)) + first_convolution == 7_978_856


@pytest.mark.parametrize("name", MULTIPLY_ADDS)
def test_a_forward_pass_has_the_published_number_of_multiply_adds(name):
    model = on_meta(name)
    with FlopCounterMode(display=False) as flops:
        model(images(name, "meta", count=1))
    assert flops.get_total_flops() / 2e6 == pytest.approx(MULTIPLY_ADDS[name], abs=0.01)


@pytest.mark.parametrize("name", LAYERS)
def test_the_number_in_the_name_is_the_number_of_layers(name):
    modules = list(on_meta(name).modules())
    convolutions = sum(isinstance(m, nn.Conv2d) for m in modules)
    linear = sum(isinstance(m, nn.Linear) for m in modules)
    projections = 4 if name == "resnet50" else 0
    assert convolutions - projections + (0 if name.startswith("wrn") else linear) == LAYERS[name]


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("name", MODELS)
def test_the_output_has_a_row_of_logits_for_each_image(name, classes):
    assert on_meta(name, classes)(images(name, "meta")).shape == (2, classes)


def with_random_classifier(model):
    """Draws the weights of a linear layer of zeros, as wide networks begin with: it passes no gradient to the rest."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight)
    return model


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_gets_a_gradient(name, autocast):
    model = with_random_classifier(build(name, 10))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = F.cross_entropy(model(images(name)), torch.tensor([3, 7]))
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert parameter.grad.any() or parameter.ndim == 1  # a bias before a batch norm may have a gradient of 0


@pytest.mark.parametrize("name", SMALL)
def test_channels_last_reaches_every_convolution_and_changes_no_result(name):
    model, x = build(name, 10).eval(), images(name)
    with torch.no_grad():
        expected = model(x)
        model.to(memory_format=torch.channels_last)
        seen = []
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)):
                module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        result = model(x.to(memory_format=torch.channels_last))
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in seen)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["resnet20", "vgg19bn", "wrn28-2"])
def test_torch_compile_captures_the_whole_network_as_one_graph(name):
    model, x = build(name, 10).eval(), images(name)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("name", SMALL)
def test_the_seed_determines_the_weights(name):
    def weights(seed):
        torch.manual_seed(seed)
        return build(name, 10).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first if first[key].ndim > 1 and first[key].any())


def has_std(weight, expected):
    """Whether the weights have this standard deviation, within five of the standard errors of its estimate."""
    return weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * weight.numel()))


INITIAL = {
    "resnet20": lambda fan_in, fan_out: math.sqrt(2 / fan_in),
    "wrn28-2": lambda fan_in, fan_out: math.sqrt(2 / fan_in),
    "vgg19bn": lambda fan_in, fan_out: math.sqrt(2 / fan_out),
    "digitsnet": lambda fan_in, fan_out: math.sqrt(2 / fan_out),
    "resnet50": lambda fan_in, fan_out: math.sqrt(2 / fan_out),
    "densenet121": lambda fan_in, fan_out: math.sqrt(1 / (3 * fan_in)),  # torch's: uniform within ±1/√fan_in
}


@pytest.mark.parametrize("name", INITIAL)
def test_convolutions_are_initialized_as_in_the_authors_code(name):
    for module in build(name, 10).modules():
        if isinstance(module, nn.Conv2d):
            outputs, inputs, height, width = module.weight.shape
            assert has_std(module.weight, INITIAL[name](inputs * height * width, outputs * height * width))
            assert module.bias is None or not module.bias.any()
        elif isinstance(module, nn.BatchNorm2d):
            assert module.weight.eq(1).all()
            assert not module.bias.any()


def test_linear_layers_are_initialized_as_in_the_authors_code():
    assert has_std(build("resnet20", 100).classifier.weight, math.sqrt(2 / 64))  # He, fan in
    wide = build("wrn28-2", 10).classifier
    assert not wide.weight.any()
    assert not wide.bias.any()
    for linear in (build("densenet121", 100).classifier, build("vgg19bn", 10).classifier[1]):
        assert has_std(linear.weight, math.sqrt(1 / (3 * linear.in_features)))  # torch's
        assert linear.bias.any()


@pytest.mark.parametrize("name", SMALL)
def test_evaluation_is_deterministic(name):
    model, x = build(name, 10).eval(), images(name)
    with torch.no_grad():
        assert torch.equal(model(x), model(x))


def test_the_option_a_shortcut_takes_every_second_pixel_and_pads_with_channels_of_zeros():
    x = torch.randn(2, 16, 8, 8)
    expected = torch.zeros(2, 32, 4, 4)
    for row in range(4):
        for column in range(4):
            expected[:, 8:24, row, column] = x[:, :, 2 * row, 2 * column]
    assert torch.equal(resnet.shortcut(x, 32), expected)
    assert resnet.shortcut(x, 16) is x


def test_the_option_a_shortcut_keeps_channels_last_forward_and_backward():
    x = torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    y = resnet.shortcut(x, 32)
    (gradient,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("inputs", [8, 16])
def test_a_block_with_a_zero_branch_equals_its_shortcut(inputs):
    x = torch.randn(2, inputs, 8, 8)
    stride = 16 // inputs

    block = resnet.BasicBlock(inputs, 16)
    nn.init.zeros_(block.norm2.weight)
    assert torch.equal(block(x), F.relu(resnet.shortcut(x, 16)))

    bottleneck = resnet50.Bottleneck(inputs, 4, stride)
    nn.init.zeros_(bottleneck.norm3.weight)
    assert torch.equal(bottleneck(x), F.relu(bottleneck.shortcut(x)))
    assert (len(bottleneck.shortcut) == 0) == (inputs == 16)

    wide = wide_resnet.WideBlock(inputs, 16, stride, dropout=0.0)
    nn.init.zeros_(wide.conv2.weight)
    expected = x if inputs == 16 else wide.projection(F.relu(wide.norm1(x)))
    assert torch.equal(wide(x), expected)


def test_the_output_of_a_dense_layer_begins_with_its_input():
    x = torch.randn(2, 8, 4, 4)
    y = densenet.Layer(8, growth=3)(x)
    assert y.shape == (2, 11, 4, 4)
    assert torch.equal(y[:, :8], x)


def test_dropout_of_a_wide_network_is_active_in_training_only():
    x = images("wrn28-2")
    with torch.no_grad():
        plain, dropping = (with_random_classifier(wide_resnet.WideResNet(10, 1, 10, dropout=p)) for p in (0.0, 0.3))
        assert torch.equal(plain(x), plain(x))
        assert not torch.equal(dropping(x), dropping(x))
        assert torch.equal(dropping.eval()(x), dropping(x))


def test_an_unknown_model_name_is_refused_with_the_nearest_names():
    with pytest.raises(ValueError, match=r"'ResNet-56'.*resnet56"):
        build("ResNet-56", 10)
    with pytest.raises(ValueError, match=r"'wrn28-20'.*wrn28-2.*wrn28-10|'wrn28-20'.*wrn28-10.*wrn28-2"):
        build("wrn28-20", 10)
    with pytest.raises(ValueError, match=", ".join(MODELS)):
        build("", 10)


def test_an_invalid_depth_is_refused():
    with pytest.raises(ValueError, match=r"6n \+ 2.*got 21"):
        resnet.ResNet(21, 10)
    with pytest.raises(ValueError, match=r"6n \+ 4.*got 29"):
        wide_resnet.WideResNet(29, 2, 10)


@pytest.mark.parametrize(
    ("name", "inputs"), [("glue", {"input_ids": (2, 7)}), ("finetune", {"pixel_values": (2, 3, 16, 16)})]
)
def test_a_transformers_folder_is_loaded_in_float32_with_a_classification_head(name, inputs, tiny_networks, tmp_path):
    from transformers import AutoModel

    AutoModel.from_pretrained(tiny_networks[name]).half().save_pretrained(tmp_path)
    model = build(f"transformers:{tmp_path}", 5)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    ((key, shape),) = inputs.items()
    values = torch.zeros(shape, dtype=torch.long if key == "input_ids" else torch.float32)
    assert model(**{key: values}).logits.shape == (2, 5)


def test_a_model_function_from_a_file_gets_the_number_of_classes_if_it_accepts_it(tmp_path):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\nimport beside\n"
        "def with_classes(classes):\n    return nn.Linear(beside.SIZE, classes)\n"
        "def without():\n    return nn.Linear(3, 7)\n"
        "def nothing():\n    return 3\n"
    )
    (tmp_path / "beside.py").write_text("SIZE = 4\n")
    assert build(f"{tmp_path}/nets.py:with_classes", 5).weight.shape == (5, 4)
    assert build(f"{tmp_path}/nets.py:without", 5).weight.shape == (7, 3)
    for name, message in {"nothing": "must return a torch.nn.Module", "absent": "has no function 'absent'"}.items():
        with pytest.raises(ValueError, match=message):
            build(f"{tmp_path}/nets.py:{name}", 5)
    with pytest.raises(ValueError, match="timm:NAME, transformers:NAME-OR-FOLDER or"):
        build("keras:resnet", 5)


def test_code_in_a_transformers_folder_is_not_run(tmp_path, monkeypatch):
    """A record may name any folder: only --run-code runs code."""
    pytest.importorskip("transformers")
    maps = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": maps}))
    (tmp_path / "own.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import PretrainedConfig\n"
        "class OwnConfig(PretrainedConfig):\n    model_type = 'own'\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # to the prompt of transformers
    with pytest.raises(ValueError, match="transformers could not load"):
        build(f"transformers:{tmp_path}", 2)
    assert not (tmp_path / "ran").exists()
