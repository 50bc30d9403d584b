"""Instances of the fleet: their work streams, health and weight updates."""
