"""Times of the phases of a weight update, for the decision log. Pure."""

from __future__ import annotations

from services.platform.redis.decision_log import DecisionRecord

KIND = "weights"
"""Kind of the decision-log entry of a published version."""


class UpdateTimes:
    """Unix seconds at which the phases of the update in progress began, as far as this process has seen them."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}

    def start(self, now: float) -> None:
        """Begin anew with an update that has started."""
        self._times = {"started": now}

    def reach(self, phase: str, now: float) -> None:
        """Record a phase: staged or applying."""
        self._times[phase] = now

    def published(self, version: int, run_id: str, now: float) -> DecisionRecord:
        """Return the decision-log entry of the update, which has ended, and forget it."""
        times, self._times = {**self._times, "published": now}, {}
        seconds = now - min(times.values())
        details = {"version": version, **{phase: round(time, 4) for phase, time in times.items()}}
        return DecisionRecord(KIND, f"version {version} after {seconds:.1f} s", 0.0, details, now, run_id)
