"""Norms and inner products over many tensors."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bisam
from bisam.tensors import buckets


class Operations(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("other", [torch.contiguous_format, torch.channels_last])
def test_a_dot_product_does_not_depend_on_the_memory_layout(layout, other):
    a = [torch.randn(8, 4, 3, 3).to(memory_format=layout), torch.randn(5)]
    b = [torch.randn(8, 4, 3, 3).to(memory_format=other), torch.randn(5)]
    expected = sum((x.double() * y.double()).sum() for x, y in zip(a, b, strict=True))
    torch.testing.assert_close(buckets.dot(a, b).double(), expected, rtol=1e-5, atol=1e-5)


def test_tensors_in_channels_last_are_not_copied_for_a_dot_product():
    a, b = (torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last) for _ in range(2))
    with Operations() as seen:
        buckets.dot([a], [b])
    assert not {"clone", "copy_", "_to_copy"} & set(seen.names)


def test_the_norm_of_tensors_of_several_types_is_that_of_all_their_numbers():
    tensors = [torch.randn(7), torch.randn(3, 2, dtype=torch.float64), torch.randn(4).bfloat16(), torch.randn(2)]
    expected = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    torch.testing.assert_close(buckets.norm(tensors).double(), expected, rtol=1e-5, atol=0.0)


def test_the_number_of_operations_of_a_plain_looksam_step_does_not_grow_with_the_number_of_tensors():
    counts = []
    for layers in (2, 12):
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
        base = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        optimizer = bisam.LookSAM(base, model, every=2)
        x, y = torch.randn(8, 4), torch.randint(4, (8,))
        optimizer.minimize(x, y)
        with Operations() as seen, torch.no_grad():
            optimizer.merge.plain([*model.parameters()])
        counts.append(len(seen.names))
    assert counts[0] == counts[1]
