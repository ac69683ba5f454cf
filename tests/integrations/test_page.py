"""The code that docs/frameworks.md shows runs unchanged, and trains."""

import re
from pathlib import Path

import lightning
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bisam
from bisam.integrations import methods

from two_passes import net, samples

TEXT = (Path(__file__).parents[2] / "docs/frameworks.md").read_text()
SECTIONS = {
    part.splitlines()[0]: re.findall(r"```python\n(.*?)```", part, re.DOTALL) for part in TEXT.split("\n## ")[1:]
}
SILENT = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
OPTIONS = {
    "Lightning": {"accelerator": "cpu", "max_epochs": 1, **SILENT},
    "Lightning Fabric": {"accelerator": "cpu", "devices": 1},
    "skorch": {"max_epochs": 1, "verbose": 0, "train_split": None},
}


@pytest.mark.parametrize("section", ["Lightning", "Lightning Fabric", "Accelerate", "skorch", "timm"])
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec", "ignore::UserWarning:lightning")
def test_the_code_of_each_section_of_the_page_trains(section):
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    model = net(torch.float32)
    x, y = samples(dtype=torch.float32)
    optimizer = bisam.BiSAM(torch.optim.SGD(model.parameters(), lr=0.1), model)
    names = {
        "torch": torch, "bisam": bisam, "lightning": lightning, "model": model, "optimizer": optimizer,
        "x": x.numpy(), "y": y.numpy(), "loader": DataLoader(TensorDataset(x, y), batch_size=18),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "options": OPTIONS.get(section),
        "device": "cpu", "accum_steps": 2,
    }  # fmt: skip
    before = [p.detach().clone() for p in model.parameters()]
    (code,) = SECTIONS[section]
    exec(code, names)
    assert any(not torch.equal(p.cpu(), b) for p, b in zip(model.parameters(), before, strict=True))  # Accelerate's GPU
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_the_page_names_every_method_and_every_variant_has_one():
    listed = re.search(r"`method` is one of (.*?), or a variant", TEXT, re.DOTALL)[1]
    assert sorted(re.findall(r"`([^`]+)`", listed)) == sorted(methods.CLOSURE_METHODS)
    family = {cls for cls in vars(bisam).values() if isinstance(cls, type) and cls.__module__ == "bisam.variants"}
    assert {getattr(method, "func", method) for method in methods.VARIANTS.values()} == family


def test_the_table_of_the_page_has_a_row_for_each_section():
    rows = re.findall(r"^\| \[[^]]+\]\(#([^)]+)\)", TEXT, re.MULTILINE)
    assert rows == [name.lower().replace(" ", "-") for name in SECTIONS]
