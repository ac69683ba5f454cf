"""Residual networks with batch norm as a few Triton kernels a layer."""
