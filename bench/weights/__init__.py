"""Benchmark of weights on their way from a trainer to its instances."""
