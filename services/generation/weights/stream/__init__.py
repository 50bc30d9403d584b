"""Receive the bytes of a version from a trainer or another instance, and serve them to others meanwhile."""
