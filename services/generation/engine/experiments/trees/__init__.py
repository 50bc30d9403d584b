"""Draft trees: an experiment, off by default."""
