import pytest
import torch

from family import BASES, VARIANTS

torch.set_num_threads(1)  # tests run beside each other


def pytest_generate_tests(metafunc):
    """Whatever asks for a variant, a base optimizer or a device runs over all there are."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for name, values in {"variant": VARIANTS, "base": BASES, "device": devices}.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
