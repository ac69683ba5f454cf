"""Sharpness-aware training inside of frameworks: one module for each, which imports its framework.

They share one idea. A framework accumulates gradients by running micro-batches as they arrive, but a step of two passes
needs all of them twice. Micro-batches therefore wait until the update is due. Then `SharpnessAware.backward` runs both
passes over all of them and leaves the gradient in `.grad`. The framework clips, unscales, steps and schedules
as always.
"""
