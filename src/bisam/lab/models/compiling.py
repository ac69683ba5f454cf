"""Compiled models: by Triton kernels of their own, where there are some, and else by torch.compile."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn

from bisam.lab.models.resnet import ResNet
from bisam.tensors.buckets import is_sharded


def compile_model(model: nn.Module, device: torch.device, *, bf16: bool) -> str:
    """Compile the training passes of a model that runs on this device, under autocast to bfloat16 or not.

    Returns by what, for a receipt.
    """
    if isinstance(model, ResNet) and bf16 and _has_kernels(device) and not _is_shared(model):
        model.fuse()
        return "bisam"
    model.compile(dynamic=False)  # one compilation for each batch size: ESAM has two
    return "torch.compile"


def _is_shared(model: nn.Module) -> bool:
    """Whether several processes share its parameters, or statistics of its norms: kernels take a module's own."""
    of_all = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return of_all or any(map(is_sharded, model.parameters()))


def _has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run there: with tensor cores that multiply bfloat16."""
    is_gpu = device.type == "cuda" and torch.version.hip is None
    return is_gpu and find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
