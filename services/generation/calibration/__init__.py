"""Measure step times of a live engine and fit the step-time model to them."""
