"""Acceptance probability of proposed tokens, learned online."""
