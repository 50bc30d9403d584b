"""Integrations with trainers, and their errors. Each needs the packages of its trainer, unlike `import paceline`.

Errors of calls to the platform are `PacelineError`.
"""


class UnsupportedTrainerError(ValueError):
    """Raised for a trainer with a configuration that its rollouts do not support."""


class RolloutFailedError(RuntimeError):
    """Raised when samples of a step could not be generated, in every process of the trainer."""
