"""Benchmark a recorded run by the step times of a device that is not available."""
