"""Does it help on my data? Defaults, budget, ρ, the runs, and the answer."""
