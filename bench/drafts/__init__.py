"""The suffix index, and the reuse of earlier rollouts."""
