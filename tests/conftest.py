import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from family import ALIKE_WHEN_CAPTURED, BASES, BY_HAND, VARIANTS, WITH_CLOSURE, WITHOUT_MEMORY, pairs

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: they run on the CPU then

torch.set_num_threads(1)  # tests run beside each other

# the same examples in every run, and no time limit: a busy machine is no fault of the code
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


def pytest_generate_tests(metafunc):
    """Whatever asks for a variant, a base optimizer or a device runs over all there are."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    known = {
        "variant": VARIANTS,
        "closure_variant": WITH_CLOSURE,
        "hand_variant": BY_HAND,
        "variant_alike_when_captured": ALIKE_WHEN_CAPTURED,
        "plain_variant": WITHOUT_MEMORY,
        "base": BASES,
        "device": devices,
    }
    for name, values in known.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values)


def pytest_report_header():
    return f"contract: {len(VARIANTS)} variants, {len(BASES)} base optimizers, {len(pairs(VARIANTS))} pairs"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
