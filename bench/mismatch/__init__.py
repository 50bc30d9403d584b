"""Counts of what drafting loses after a wrong draft token, by recorded runs that are replayed without an engine."""
