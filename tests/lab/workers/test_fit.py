"""`bisam fit` with workers: its data and network by name, its plan in the storage."""

import numpy as np
import pytest


@pytest.mark.usefixtures("forked_workers")
def test_fit_trains_in_workers_and_another_machine_resumes_its_plan_from_the_storage(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from bisam.lab.cli import app

    monkeypatch.chdir(tmp_path)
    draws = np.random.default_rng(0)
    rows = [f"{value + 2 * label:.3f},{label}" for label in (0, 1) for value in draws.normal(size=60)]
    (tmp_path / "rows.csv").write_text("\n".join(["x,label", *rows]))

    def fit(*options):
        arguments = ["fit", "rows.csv", "--methods", "sam", "--rho", "0.05", "--seeds", "0,1", "--epochs", "2"]
        return CliRunner().invoke(app, [*arguments, *map(str, options)], env={"COLUMNS": "200"})

    storage = (tmp_path / "bucket").as_uri()
    done = fit("--runs", storage)
    assert done.exit_code == 0, done.output
    (mirror,) = (tmp_path / "runs").iterdir()
    assert [path.parent.name for path in (tmp_path / "bucket").rglob("plan.json")] == [
        "rows-perceptron+epochs=2+rho=0.05"
    ]

    mirror.rename(tmp_path / "before")
    again = fit("--runs", storage)
    assert again.exit_code == 0, again.output
    assert "has the plan: 2 epochs, 2 seeds" in again.output
    assert "4 of 4 runs are done already" in again.output
    assert again.output.splitlines()[-1] == done.output.splitlines()[-1]  # the answer
