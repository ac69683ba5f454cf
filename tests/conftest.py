import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from family import ALIKE_WHEN_CAPTURED, BASES, BY_HAND, CAPTURED_BASES, VARIANTS, WITH_CLOSURE, WITHOUT_MEMORY, pairs

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: they run on the CPU then

torch.set_num_threads(1)  # tests run beside each other

# the same examples in every run, and no time limit: a busy machine is no fault of the code
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


def pytest_generate_tests(metafunc):
    """Tests that take a variant, a base optimizer or a device run over all of them."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    values_of = {
        "variant": VARIANTS,
        "closure_variant": WITH_CLOSURE,
        "hand_variant": BY_HAND,
        "variant_alike_when_captured": ALIKE_WHEN_CAPTURED,
        "plain_variant": WITHOUT_MEMORY,
        "base": BASES,
        "captured_base": CAPTURED_BASES,
        "device": devices,
    }
    for name, values in values_of.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values)


LONGEST = [
    "test_ray.py", "test_variants.py", "test_loop.py", "test_page_in_browser.py", "test_transformers.py",
    "test_crashes.py", "test_examples.py", "test_fit.py", "test_fit_on_ranks.py", "test_processes.py",
]  # fmt: skip


def pytest_collection_modifyitems(items):
    """The longest files come first, so that two workers end at about the same time."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_report_header():
    return f"contract: {len(VARIANTS)} variants, {len(BASES)} base optimizers, {len(pairs(VARIANTS))} pairs"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
