"""Grafana's dashboards, made by a program: `python -m deploy.grafana.build`."""
