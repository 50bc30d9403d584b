"""Capacity of clusters, simulated."""
