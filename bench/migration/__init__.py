"""Measure gain and cost of moving running samples."""
