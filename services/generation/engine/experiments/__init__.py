"""Experiments in the engine, off by default. The rest of the engine imports them only by name, from registries."""
