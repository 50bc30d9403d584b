"""Integrations with trainers. Each needs the trainer's own packages, which `import paceline` does not."""
