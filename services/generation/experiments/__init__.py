"""Experiments: modes that did not beat `planner` over all cells of bench/policy. The core finds them by name."""
