"""Measure the overhead of the platform over the bare engine."""
