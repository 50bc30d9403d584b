"""Draft from the suffix index over all known rollouts of a prompt."""
