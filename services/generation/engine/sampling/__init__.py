"""Coupled sampling and verification inside the engine's forward step."""
