"""Errors that integrations raise themselves; those of calls are `PacelineError`."""


class UnsupportedTrainerError(ValueError):
    """Raised when a trainer is configured for something that its rollouts cannot do."""


class RolloutFailedError(RuntimeError):
    """Raised when samples of a step could not be had, on every process of the trainer."""
