"""Gauges of runs. A run that has been silent for long is shown no more."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

_GAUGES = {
    "step": "The step of the run that was begun last.",
    "lenience": "The l of the run's last LENIENT batch.",
    "reward": "Mean of the rewards last reported.",
    "reported_kl": "KL between the policy and the one that sampled, as last reported.",
    "reported_clip_fraction": "Share of tokens whose ratio was clipped, as last reported.",
}


class RunGauges:
    """What is known of each run, by its id. Times are seconds of one clock, whichever."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges = {
            name: Gauge(f"paceline_gateway_{name}", text, ["run"], registry=registry)
            for name, text in _GAUGES.items()
        }
        self._shown_at: dict[str, float] = {}

    def show(self, run_id: str, now: float, **values: float) -> None:
        """Sets gauges of a run, named as above."""
        self._shown_at[run_id] = now
        for name, value in values.items():
            self._gauges[name].labels(run_id).set(value)

    def forget(self, before: float) -> None:
        """Removes the gauges of the runs for which none has been set since."""
        for run_id in [run_id for run_id, at in self._shown_at.items() if at < before]:
            del self._shown_at[run_id]
            for gauge in self._gauges.values():
                gauge.remove(run_id)
