"""What README and docs show: their snippets run, their numbers come from the runs they name."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import bisam

from family import ConvNet, TwoInputs, batch, mlp

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md", "docs/index.md", "docs/getting-started.md", "docs/training-loops.md", "docs/speed.md",
    "docs/diagnostics.md", "docs/idea.md", "docs/design.md",
]  # fmt: skip


def snippets():
    for page in PAGES:
        text = (ROOT / page).read_text()
        for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
            yield pytest.param(found.group(1), id=f"{page}:{text[: found.start()].count(chr(10)) + 2}")


@pytest.mark.parametrize("code", list(snippets()))
@pytest.mark.filterwarnings("ignore:a CUDA graph needs")
def test_every_snippet_runs_and_trains(code, tmp_path):
    torch.manual_seed(0)
    x, y = batch()
    model = TwoInputs() if "left" in code else mlp() if "MSELoss" in code else ConvNet()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = bisam.BiSAM(base, model)
    if "bisam.BiSAM(base" in code or "bisam.SAM(base" in code:
        base = torch.optim.SGD(model.parameters(), lr=0.1)  # a base optimizer can be wrapped only once
    names = {
        "torch": torch, "bisam": bisam, "model": model, "base": base, "optimizer": optimizer, "x": x, "y": y,
        "loader": [batch(0), batch(1)], "validation_loader": [batch(2)],
        "criterion": optimizer.criterion, "loss_fn": nn.CrossEntropyLoss(),
        "path": tmp_path / "checkpoint.pt", "left": x, "right": x, "device": "cpu",
    }  # fmt: skip
    if "capture_together" in code:
        names["optimizers"] = [optimizer]
    before = [p.detach().clone() for p in model.parameters()]
    exec(code, names)
    used = names["optimizer"]
    assert used.telemetry is not None
    if re.search(r"minimize\(|step\(|descend\(", code):
        assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    if names.get("loss") is not None:
        assert torch.isfinite(names["loss"])


def test_the_recipe_of_sam_on_perturbs_the_normalisation_layers_and_nothing_else():
    text = (ROOT / "docs/training-loops.md").read_text()
    code = re.search(r"SAM-ON\n\n```python\n(.*?)```", text, re.DOTALL)[1]
    torch.manual_seed(0)
    model = ConvNet()
    x, y = batch()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    passes = []
    model.register_forward_pre_hook(
        lambda *_: passes.append({name: (p - before[name]).norm().item() for name, p in model.named_parameters()})
    )
    exec(code, {"torch": torch, "bisam": bisam, "model": model, "x": x, "y": y})
    at_weights, perturbed = passes
    assert not any(at_weights.values())
    assert {name for name, length in perturbed.items() if length} == {"norm.weight", "norm.bias"}
    assert torch.tensor([*perturbed.values()]).norm().item() == pytest.approx(0.5, rel=1e-5)


def test_links_between_pages_point_to_existing_files():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            built = target == "report.html"  # by make site, which checks the links of its pages too
            assert built or (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.fixture
def tables(monkeypatch):
    """The script that writes the tables of the docs."""
    monkeypatch.syspath_prepend(ROOT / "docs/scripts")
    return importlib.import_module("tables")


def test_tables_of_the_docs_are_up_to_date_with_docstrings_and_measurements(tables):
    for path in tables.PAGES:
        assert tables.page(path) == path.read_text(), f"run make docs: {path.name} is not up to date"
    assert {cls.__name__ for cls in tables.family()} == set(tables.GAINS)


@pytest.mark.parametrize("text", ["<!-- gone -->\nold\n<!-- end -->\n", "no block\n"])
def test_a_block_that_no_table_writes_and_a_table_without_a_block_are_refused(text, tables, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(text)
    monkeypatch.setitem(tables.PAGES, page, {"kept": lambda: "new"})
    with pytest.raises(ValueError, match=r"page.md has the blocks .*, and \['kept'\] are made"):
        tables.page(page)
    page.write_text("before\n<!-- kept -->\nold\n<!-- end -->\nafter\n")
    assert tables.page(page) == "before\n<!-- kept -->\nnew\n<!-- end -->\nafter\n"


def test_the_sentence_about_a_resumed_run_follows_its_records(tables, monkeypatch):
    assert "had the same losses" in tables.lab_on_a_gpu()
    assert "the weights were equal bit for bit" in tables.lab_on_a_gpu()
    monkeypatch.setattr(tables, "_learnt", lambda record: record.folder)
    monkeypatch.setattr(tables, "measured", lambda _: {"bitwise_equal": False})
    assert "had other losses" in tables.lab_on_a_gpu()
    assert "the weights were not equal" in tables.lab_on_a_gpu()


def test_every_public_name_is_on_the_api_page():
    shown = set(re.findall(r"^(?:::: | +heading: )bisam\.(\S+)", (ROOT / "docs/api.md").read_text(), re.MULTILINE))
    shown -= {"capture.steps.capture"}  # `bisam.capture` names the package too, so its page has the full path
    assert shown == {*bisam.__all__, *(f"diagnostics.{name}" for name in bisam.diagnostics.__all__), "compat.SAM"}


def test_the_docstring_of_every_variant_refers_to_the_shared_options():
    from bisam import variants

    family = [value for value in vars(variants).values() if getattr(value, "__module__", "") == variants.__name__]
    for cls in (value for value in family if isinstance(value, type)):
        assert cls.__doc__.count("Other options: see `SharpnessAware`.") == 1, cls.__name__


FIGURES = {
    "lower-bounds": ["lower-bounds"],
    "flips-resnet56": ["flips", "results", "--recipe", "cifar10/resnet56"],
    "flips-vgg19bn": ["flips", "results", "--recipe", "cifar10/vgg19bn"],
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_of_the_docs_are_up_to_date(name, tmp_path, monkeypatch):
    """`make docs` writes them."""
    from bisam.lab.cli import app

    monkeypatch.chdir(ROOT)
    drawn = tmp_path / f"{name}.svg"
    done = CliRunner().invoke(app, ["figure", *FIGURES[name], "--out", str(drawn)])
    assert done.exit_code == 0, done.output
    shown, made = (re.sub(r"clip\d+", "clip", path.read_text()) for path in (ROOT / f"docs/images/{name}.svg", drawn))
    assert shown == made  # but for numbers that continue from one drawing of a process to the next
