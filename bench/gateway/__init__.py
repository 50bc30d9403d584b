"""Overhead of the platform against the bare engine."""
