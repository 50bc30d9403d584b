"""Deployment of Paceline on more than one machine: images, Ray, Prometheus and Grafana."""
