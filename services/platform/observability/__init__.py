"""Logs, Prometheus metrics and traces."""
