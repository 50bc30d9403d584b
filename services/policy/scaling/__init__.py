"""Autoscaling of instances: recommends replicas and, if configured, applies them through Kubernetes."""
