"""Experiments: modes that showed no gain over `planner`. The core imports them only by name, from registries."""
