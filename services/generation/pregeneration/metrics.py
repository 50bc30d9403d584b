"""Prometheus metrics of pre-generation."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_DELAYS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class PregenerationMetrics:
    """What an instance does in bubbles. Written by the engine thread and by the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "paceline_generation_"
        self._running = Gauge(
            f"{prefix}background_samples",
            "Samples of a coming step that are being generated.",
            registry=registry,
        )
        self._asleep = Gauge(
            f"{prefix}asleep", "1 while the device is left to the trainer.", registry=registry
        )
        self._steps = Counter(
            f"{prefix}background_steps_total",
            "Engine steps with such samples, alone or beside samples of the step.",
            ["beside"],
            registry=registry,
        )
        self._seconds = Counter(
            f"{prefix}background_seconds_total",
            "Time of these steps; alone: bubble time that was used.",
            ["beside"],
            registry=registry,
        )
        self._tokens = Counter(
            f"{prefix}pregenerated_tokens_total", "Tokens generated for a coming step.", registry=registry
        )
        self._samples = Counter(
            f"{prefix}pregenerated_samples_total",
            "Samples of a coming step by how they ended: finished, partial (with tokens), empty.",
            ["outcome"],
            registry=registry,
        )
        self._yielded = Counter(
            f"{prefix}yielded_samples_total", "Background samples ended for real ones.", registry=registry
        )
        self._yields = Histogram(
            f"{prefix}yield_seconds",
            "Time from the arrival of a real sample until background samples had ended.",
            buckets=_DELAYS,
            registry=registry,
        )
        self._halts = Histogram(
            f"{prefix}halt_delay_seconds",
            "Time from the end of the step (by the gateway's clock) until pre-generation had stopped.",
            buckets=_DELAYS,
            registry=registry,
        )
        self._update_halts = Histogram(
            f"{prefix}update_halt_seconds",
            "Time from the call for a weight update until pre-generation had stopped.",
            buckets=_DELAYS,
            registry=registry,
        )
        self._polls = Counter(
            f"{prefix}bubble_polls_total",
            "Polls of the coordinator: answered, interrupted, failed.",
            ["outcome"],
            registry=registry,
        )
        self._puts = Counter(
            f"{prefix}draft_puts_total",
            "Rollouts sent to the draft store: stored, or else refused or lost.",
            ["outcome"],
            registry=registry,
        )
        self._put_tokens = Counter(
            f"{prefix}draft_put_tokens_total", "Tokens of these rollouts.", registry=registry
        )

    def running(self, samples: int) -> None:
        """So many background samples are in the engine."""
        self._running.set(samples)

    def watch_sleep(self, asleep: Callable[[], bool]) -> None:
        """Show whether the engine sleeps; `asleep` is asked when metrics are read."""
        self._asleep.set_function(lambda: float(asleep()))

    def stepped(self, seconds: float, tokens: int, beside_real: bool) -> None:
        """An engine step with background samples, and the tokens it gave them."""
        beside = "real" if beside_real else "nothing"
        self._steps.labels(beside).inc()
        self._seconds.labels(beside).inc(seconds)
        self._tokens.inc(tokens)

    def yielded(self, samples: int, seconds: float) -> None:
        """Background samples were ended so long after a real one arrived."""
        self._yielded.inc(samples)
        self._yields.observe(seconds)

    def ended(self, finished: bool, tokens: int) -> None:
        """A sample of a coming step ended with so many tokens."""
        self._samples.labels("finished" if finished else "partial" if tokens else "empty").inc()

    def halted(self, seconds: float) -> None:
        """Pre-generation stopped so long after the end of the step; clocks may differ a little."""
        self._halts.observe(max(0.0, seconds))

    def halted_for_update(self, seconds: float) -> None:
        """Pre-generation stopped so long after weights were to be applied."""
        self._update_halts.observe(seconds)

    def polled(self, outcome: str) -> None:
        """A poll was answered, interrupted or failed."""
        self._polls.labels(outcome).inc()

    def put(self, rollouts: int, stored: int, tokens: int) -> None:
        """Rollouts were sent to the store, which took `stored` of them."""
        self._puts.labels("stored").inc(stored)
        self._puts.labels("lost").inc(rollouts - stored)
        self._put_tokens.inc(tokens)
