"""Integrations with trainers. Each needs the packages of its trainer, unlike `import paceline`."""
