"""Compiled part of the suffix index (numba): automata, edges, tables and predictions on flat arrays."""
