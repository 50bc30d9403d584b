"""Benchmark the distribution of weights from a trainer to its instances."""
