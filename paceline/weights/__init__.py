"""Weights from a trainer to the fleet: files, transports, and pushes."""
