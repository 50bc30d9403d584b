"""Simulator of a rollout cluster on the decision code of the services."""
