"""Helm chart, and what generates parts of it."""
