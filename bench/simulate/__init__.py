"""Simulate the capacity of clusters."""
