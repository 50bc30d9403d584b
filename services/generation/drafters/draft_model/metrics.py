"""Prometheus metrics of the draft models."""

from __future__ import annotations

from services.platform.observability.metric_set import MetricSet, counter, gauge, histogram

_REFRESH_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class DraftModelMetrics(MetricSet):
    """Cost of one draft model. Used by the engine thread only."""

    gain = gauge(
        "predicted_gain_ratio",
        "Predicted tokens per second over doing without the draft model, of the latest step; 1: it did not run.",
    )
    memory_bytes = gauge("memory_bytes", "Memory of the draft model's weights.")
    draft_tokens = counter("draft_tokens_total", "Tokens drafted.")
    draft_steps = counter("draft_steps_total", "Draft steps.")
    draft_seconds = counter("draft_seconds_total", "Time of draft steps.")

    def built(self, work: float, wall: float, nbytes: int) -> None:
        """Record that the model became ready in `wall` seconds, `work` of them spent on it; 0: at the start."""
        self.memory_bytes.set(nbytes)

    def decided(self, gain: float) -> None:
        """Record the predicted gain of running the model, as a factor; 1 if it does not run or is not predicted."""
        self.gain.set(gain)

    def drafted(self, tokens: int, steps: int, seconds: float, caught_up: int) -> None:
        """Record drafted tokens, draft steps (one token per sample each) and the tokens prefilled before them."""
        self.draft_tokens.inc(tokens)
        self.draft_steps.inc(steps)
        self.draft_seconds.inc(seconds)

    def swapped(self, version: int) -> None:
        """Record the version of new weights."""


class QuantizedDrafterMetrics(DraftModelMetrics, prefix="paceline_quantized_"):
    """Cost of the quantized self-draft, whose weights are quantized again with every policy version."""

    refresh_seconds = histogram(
        "refresh_seconds",
        "Time to quantize the weights after an update: time spent on it (work), time until it was done (wall).",
        _REFRESH_BUCKETS,
        "time",
    )

    def built(self, work: float, wall: float, nbytes: int) -> None:
        """Record that the quantized weights became ready."""
        super().built(work, wall, nbytes)
        if wall:
            self.refresh_seconds.labels("work").observe(work)
            self.refresh_seconds.labels("wall").observe(wall)


class Eagle3Metrics(DraftModelMetrics, prefix="paceline_eagle3_"):
    """Cost of the EAGLE-3 head, which is trained online and has versions of its own."""

    version = gauge(
        "drafter_version", "Version of the EAGLE-3 head that drafts; 0: the one the instance started with."
    )
    swaps = counter("swaps_total", "Heads that replaced another in the running engine.")
    refused = counter("refused_total", "Heads that were refused: broken, or not for this model.")
    caught_up = counter(
        "caught_up_tokens_total",
        "Tokens that the head prefilled before drafting, those that a step had added included.",
    )

    def drafted(self, tokens: int, steps: int, seconds: float, caught_up: int) -> None:
        """Record draft steps and the tokens prefilled before them."""
        super().drafted(tokens, steps, seconds, caught_up)
        self.caught_up.inc(caught_up)

    def swapped(self, version: int) -> None:
        """Record the version of the new head."""
        self.version.set(version)
        self.swaps.inc()
