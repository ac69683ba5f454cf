"""The plan of a study: what it keeps, what it refuses, and what it trains."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from bisam.lab import spec
from bisam.lab.cli.output import quiet_console
from bisam.lab.data.own import from_parts
from bisam.lab.data.own_source import OwnData
from bisam.lab.fitting import plan as plans
from bisam.lab.fitting import study as studies
from bisam.lab.fitting.rehearsal import Cost
from bisam.lab.fitting.study import Study
from bisam.lab.training.progress import Progress


@pytest.fixture(scope="module")
def source():
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=draws), torch.arange(60) % 2
    return OwnData(from_parts("rows", {"train": (x, y)}, "rows"))


@pytest.fixture
def study(source, tmp_path, monkeypatch):
    """Makes a study in one folder, whose rehearsals take no time."""
    monkeypatch.setattr(studies, "rehearse", lambda *_: Cost(step=0.1, validation=0.1, steps=3))

    def make(methods=("sam",), name="mine", data=source, **options):
        return Study(
            data, "linear", tmp_path, torch.device("cpu"), methods=methods, name=name,
            build=lambda config, source: nn.Linear(4, source.classes), **options,
        )  # fmt: skip

    return make


def test_epochs_that_differ_from_the_plan_are_refused(study):
    plan = study(rho=0.05, changes={"epochs": "2"}).decide(print)
    for same in ({"epochs": "2"}, {}):
        assert study(rho=0.05, changes=same).decide(print) == plan
    with pytest.raises(ValueError, match=r"mine has 2 epochs, got 3: give another --name"):
        study(rho=0.05, changes={"epochs": "3"}).decide(print)
    assert study(rho=0.05, changes={"epochs": "3"}, minutes=1).decide(print) == plan  # minutes may reduce the epochs


@pytest.mark.parametrize("text", ["3", "null", "[]", '"plan"'])
def test_a_plan_that_is_not_a_json_object_is_refused_with_a_remedy(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json cannot be read .*: remove it, and the plan is made anew"):
        plans.read(tmp_path)


def test_runs_of_another_data_file_are_refused_before_the_plan_is_printed(study, source):
    other = OwnData(replace(source.dataset, name="rows.parquet"))
    plan = study(rho=0.05, changes={"epochs": "1"}).decide(print)
    study(rho=0.05, changes={"epochs": "1"}).train(plan, Progress(quiet_console()))
    lines = []
    with pytest.raises(ValueError, match=r"configuration, data: 'rows' there, 'rows.parquet' now: give another --name"):
        study(rho=0.05, changes={"epochs": "1"}, data=other).decide(lines.append)
    assert lines == []


def test_a_base_optimizer_that_differs_from_that_of_the_comparison_is_refused(study):
    """Otherwise SGD would be trained in its place, and SAM with SGD."""
    with pytest.raises(ValueError, match=r"to train with adamw, give --set optimizer=adamw and its --lr \(from Python"):
        study(("adamw", "sam"))
    with pytest.raises(ValueError, match="name base instead of sgd"):
        study(("sgd", "sam"), changes={"optimizer": "adamw"})
    for own in ("adamw", "base"):
        assert study((own, "sam"), changes={"optimizer": "adamw"}).methods == ["adamw", "sam"]


def test_without_a_search_rho_is_the_paper_s(study):
    plan = study(("sam", "bisam-log", "asam", "abisam-log", "msam"), minutes=0.2).decide(print)
    assert plan.given_up[-1] == "no search: ρ is the paper's"
    assert plan.rho == {"sam": 0.05, "bisam-log": 0.05, "asam": 2.0, "abisam-log": 2.0, "msam": 0.3}
    assert plans.read(study().folder) == plan


def test_a_pretrained_model_searches_smaller_values_of_rho(study):
    grids = {False: (0.01, 0.02, 0.05, 0.1, 0.2), True: (0.005, 0.01, 0.02, 0.05, 0.1)}
    for pretrained, grid in grids.items():
        found = study(("sam", "asam"), pretrained=pretrained)
        assert found._grid("sam") == grid
        assert found._grid("asam") == (0.1, 0.5, 1.0, 2.0, 3.0)


def test_a_rho_that_differs_from_the_plan_is_refused(study):
    study(rho=0.05).decide(print)
    with pytest.raises(ValueError, match=r"mine has ρ of SAM 0\.05: remove --rho, or give another --name"):
        study(rho=0.1).decide(print)


def test_a_plan_of_another_version_is_refused(study):
    plan = study(rho=0.05).decide(print)
    path = study().folder / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(ValueError, match=r"plan\.json cannot be read \(it is of another version\): remove it"):
        study(rho=0.05).decide(print)
    plan.save(path.parent)
    assert study(rho=0.05).decide(print) == plan


@pytest.mark.parametrize(("minutes", "epochs", "rising"), [(0.03, 1, 0), (0.2, 5, 1), (1.5, 20, 5)])
def test_fewer_epochs_keep_the_proportion_of_the_warm_up(minutes, epochs, rising, study):
    """A warm-up of 5 epochs would be longer than a training of 1, and all of one of 5."""
    found = study(minutes=minutes, changes={"epochs": "20", "warmup_epochs": "5"}, rho=0.05)
    jobs = found.jobs(found.decide(print))
    assert {(job.config.epochs, job.config.warmup_epochs) for job in jobs} == {(epochs, rising)}


def test_a_plan_without_minutes_keeps_the_configured_warm_up(study):
    changes = {"epochs": "4", "warmup_epochs": "1"}
    plan = study(changes=changes, rho=0.05).decide(print)
    again = study(changes={"warmup_epochs": "1"}, rho=0.05)  # with the epochs of the plan
    for found in (study(changes=changes, rho=0.05), again):
        assert (found.config("sam", plan).epochs, found.config("sam", plan).warmup_epochs) == (4, 1)


def test_a_shorter_search_has_the_ends_and_the_middle_of_the_grid(study):
    lines = []
    # 16 seconds of training; a search of three values takes 3.3, one of five 5.5
    plan = study(minutes=1 / 3, changes={"epochs": "10"}, seeds=range(2)).decide(lines.append)
    assert (plan.budget.grid, plan.budget.repeats) == (3, 1), plan
    (chosen,) = (number for number, line in enumerate(lines) if line.startswith("ρ of"))
    assert lines[chosen] == f"ρ of SAM: {plan.rho['sam']:g}, of 0.01, 0.05, 0.2"
    at_edge = {0.01: "smallest", 0.2: "largest"}.get(plan.rho["sam"])
    assert [f"is the {at_edge} of the grid" in line and "--rho" in line for line in lines[chosen + 1 :]] == [
        True for _ in (at_edge,) if at_edge
    ]


@pytest.mark.parametrize(("together", "remedy"), [(1, "give --batch 4"), (2, "give a smaller --together")])
def test_running_out_of_memory_in_the_training_is_an_error_with_a_remedy(together, remedy, study):
    class Growing(nn.Linear):
        def forward(self, x):
            if self.training and Growing.is_full:
                torch.empty(2**46, dtype=torch.uint8)  # which the real allocator refuses
            return super().forward(x)

    Growing.is_full = False
    found = study(rho=0.05, seeds=[0, 1], changes={"epochs": "1", "batch": "8"})
    found.build = lambda config, source: Growing(4, 2)
    plan = found.decide(print)
    Growing.is_full = True
    with pytest.raises(ValueError, match=f"memory ran out in the training: {remedy}. Finished runs are kept"):
        found.train(plan, Progress(), together=together)
    Growing.is_full = False
    found.train(plan, Progress())
    assert found.conclude(plan).best.config.seed in (0, 1)


def test_changed_settings_are_part_of_the_folder_name(study, source):
    choices = {
        "": {},
        "+lr=0.2": {"changes": {"lr": "0.2"}},
        "+micro_batch=4+rho=0.1": {"changes": {"micro_batch": "4"}, "rho": 0.1},
        "+minutes=0.5": {"minutes": 0.5},
        "+pretrained=true": {"pretrained": True},  # its values of ρ differ
    }
    for text, options in choices.items():
        assert study(name="", **options).name == f"rows-linear{text}"
    labelled = replace(source.dataset, name=spec.data_name("data/rows.csv", {"label": "y", "text": "x"}))
    assert study(name="", data=OwnData(labelled)).name == "rows-linear+label=y+text=x"


def test_a_setting_equal_to_its_default_is_not_part_of_the_folder_name(study):
    assert study(name="", pretrained=False).name == "rows-linear"
