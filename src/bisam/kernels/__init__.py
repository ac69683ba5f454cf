"""Fused forms of `bisam.objectives`: Triton on CUDA, one pass of torch operations on a CPU."""
