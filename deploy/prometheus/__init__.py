"""Prometheus: configuration of a local server, tests of the alerts, and the list of metrics."""
