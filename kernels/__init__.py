"""Compute kernels, each with a plain reference that defines its result."""
