"""Prometheus: configuration of a local one, tests of the alerts, and the list of metrics."""
