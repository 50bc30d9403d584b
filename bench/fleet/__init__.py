"""Benchmark the control plane with up to a thousand simulated instances."""
