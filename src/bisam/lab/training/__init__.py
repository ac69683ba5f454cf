"""Training runs: the loop, a run, the jobs of a recipe or a grid, and how their progress is shown."""
