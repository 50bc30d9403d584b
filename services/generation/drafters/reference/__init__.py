"""Draft from a reference sequence: a complete earlier rollout of the same prompt."""
