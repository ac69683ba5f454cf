"""The outer ring: what the paper's experiments need around the optimizers, written with their public interface."""
