"""Gain and cost of moving running samples."""
