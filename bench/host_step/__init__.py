"""Measure the host's part of an engine step."""
