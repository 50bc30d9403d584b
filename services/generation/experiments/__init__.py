"""Experiments, found by name: modes that did not beat `planner` over all cells of bench/policy, and draft trees."""
