"""Fused forms of what `bisam.objectives` says in plain torch: Triton on CUDA, one pass of torch operations on a CPU."""
