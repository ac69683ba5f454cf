"""Benchmarks: speed and memory."""
