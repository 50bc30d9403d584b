"""Tinymath: a small language model that reasons about arithmetic, and the tasks that reward it."""
