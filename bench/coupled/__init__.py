"""Coupled sampling and its drafters against plain vLLM."""
