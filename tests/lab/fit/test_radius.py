"""The search of ρ has the schedule of the run."""

import pytest

from bisam.lab.config import Config, rate
from bisam.lab.fitting import radius
from bisam.lab.fitting.code import lines

SCHEDULES = {
    "cosine": Config(epochs=8),
    "cosine after a warm-up": Config(epochs=8, warmup_epochs=2),
    "linear": Config(epochs=8, schedule="linear", warmup=0.25),
}


@pytest.mark.parametrize("config", SCHEDULES.values(), ids=SCHEDULES)
def test_the_search_has_the_whole_schedule_of_a_run_in_its_steps(config):
    """With a step in the place of each epoch."""
    of_run = [rate(config, epoch) for epoch in range(config.epochs)]
    assert [radius._rate(config, step, config.epochs) for step in range(config.epochs)] == pytest.approx(of_run)
    assert radius._rate(config, config.epochs, config.epochs) == 0  # the step hook sets it after the last step too


def test_the_lines_of_python_name_the_warm_up():
    assert "# 8 epochs, lr up in 2 epochs, then by a cosine to 0" in lines(SCHEDULES["cosine after a warm-up"])
