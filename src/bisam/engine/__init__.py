"""The step: `SharpnessAware` wraps a base optimizer and runs the passes of one step."""
