"""Benchmark: a recorded run on the clock of a device that is not at hand."""
