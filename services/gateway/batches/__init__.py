"""Batches and samples as plain data, and the checks of requests."""
