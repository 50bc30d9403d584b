"""How fast the engine does real work."""

from __future__ import annotations

# Weight of the newest step in the mean step time.
_SMOOTHING = 0.05


class Pace:
    """Counts the steps that had real samples: `step_seconds` is their mean of late, `tokens` all they generated."""

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self.tokens = 0
        self.steps = 0

    def stepped(self, seconds: float, tokens: int) -> None:
        """A step took so long, and generated so many tokens."""
        self.steps += 1
        self.step_seconds += (seconds - self.step_seconds) * (_SMOOTHING if self.steps > 1 else 1)
        self.tokens += tokens
