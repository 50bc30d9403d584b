"""What the gateway tells Prometheus."""

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_Make = Callable[..., Any]

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400)
_JOURNAL_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5)


class GatewayMetrics:
    """All metrics of the gateway, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline_gateway_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"paceline_gateway_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"paceline_gateway_{name}", text, labels, registry=registry, buckets=buckets)

        self.samples = counter("samples_total", "Samples ended, by status.", "status")
        self.tokens = counter("tokens_total", "Response tokens received from instances.", "instance")
        self.placements = counter("placements_total", "Samples given to instances.", "instance")
        self.refusals = counter("refusals_total", "Samples that instances refused.", "instance", "code")
        self.resubmissions = counter("resubmissions_total", "Samples resumed elsewhere, by cause.", "cause")
        self.losses = counter("instance_losses_total", "Instances lost.", "instance")
        self.queued = gauge("queued_samples", "Samples waiting for an instance.")
        self.running = gauge("running_samples", "Samples on an instance.", "instance")
        self.batches = gauge("batches", "Batches unfinished.")
        self.streams = gauge("streams", "Open StreamRollouts and Generate calls.")
        self.instances = gauge("instances", "Instances by state.", "state")
        self.policy_version = gauge("policy_version", "The published policy version.")
        self.leader = gauge("leader", "1 while this gateway holds the lease.")
        self.journal_errors = counter("journal_errors_total", "Journal round trips that failed.")
        self.journal_seconds = histogram("journal_seconds", "One journal round trip.", _JOURNAL_SECONDS)
        self.batch_seconds = histogram("batch_seconds", "Batches from acceptance to the end.", _SECONDS)
        self.queue_seconds = histogram("queue_seconds", "Samples from acceptance to placement.", _SECONDS)
        self.sample_tokens = histogram(
            "sample_tokens", "Response tokens of samples.", (16, 64, 256, 1024, 4096, 16384, 65536)
        )
        self._reuse(counter)
        self._reports(gauge)
        self._steps(counter, gauge, histogram)
        self.history = counter(
            "history_rollouts_total",
            "Finished samples for the draft store, by outcome: stored; not_stored (refused, or lost in an "
            "outage); dropped (the store did not keep up).",
            "outcome",
        )
        self.update_seconds = histogram("update_seconds", "Phases of weight updates.", _SECONDS, "phase")
        self.updates = counter("updates_total", "Weight updates, by outcome.", "outcome")

    def _reuse(self, counter: _Make) -> None:
        """Of the samples of batches that were completed or truncated, by exactness level. Reuse rate =
        reused_prefix_tokens / whole_sample_tokens; full-reuse ratio = fully_reused_samples / cached_samples."""

        def by_level(name: str, text: str) -> Counter:
            made: Counter = counter(name, text, "level")
            return made

        self.whole_samples = by_level("whole_samples_total", "Samples completed or truncated.")
        self.whole_tokens = by_level("whole_sample_tokens_total", "Response tokens of these samples.")
        self.cached_samples = by_level(
            "cached_samples_total", "Of these samples, those with a cached rollout."
        )
        self.cached_tokens = by_level("cached_tokens_total", "Tokens of these cached rollouts.")
        self.reused_tokens = by_level(
            "reused_prefix_tokens_total",
            "Response tokens before the first that is not the cached rollout's. Reuse rate: this over "
            "whole_sample_tokens_total.",
        )
        self.fully_reused = by_level(
            "fully_reused_samples_total",
            "Samples all of whose tokens are the cached rollout's. Full-reuse ratio: this over "
            "cached_samples_total.",
        )

    def count_whole(self, level: str, tokens: int, cached: int, reused: int) -> None:
        """Counts a sample of a batch that was completed or truncated."""
        self.whole_samples.labels(level).inc()
        self.whole_tokens.labels(level).inc(tokens)
        if cached:
            self.cached_samples.labels(level).inc()
            self.cached_tokens.labels(level).inc(cached)
            self.reused_tokens.labels(level).inc(reused)
            self.fully_reused.labels(level).inc(reused == tokens)

    def _steps(self, counter: _Make, gauge: _Make, histogram: _Make) -> None:
        """Of steps that are over. Coverage = pregenerated_tokens / announced_step_tokens."""
        self.hints: Counter = counter(
            "hints_total",
            "Hints of coming steps: kept, or not because late, far ahead or no room.",
            "outcome",
        )
        self.hinted: Gauge = gauge("hinted_samples", "Samples of coming steps that are announced.")
        self.bubble_seconds: Histogram = histogram(
            "bubble_seconds",
            "Idle time of an instance from its last sample of a step to the step's end, at every step.",
            _SECONDS,
        )
        self.bubble_average: Gauge = gauge(
            "step_bubble_average_seconds", "Mean of these over the instances, of the last step."
        )
        self.bubble_most: Gauge = gauge(
            "step_bubble_max_seconds", "Largest of these over the instances, of the last step."
        )
        self.pregenerated: Counter = counter(
            "pregenerated_tokens_total", "Tokens that there were of a step's samples when it began."
        )
        self.announced: Counter = counter(
            "announced_step_tokens_total", "Response tokens of the steps that were announced."
        )
        self.coverage: Gauge = gauge(
            "step_coverage", "Pre-generated tokens over real tokens, of the last announced step."
        )

    def step_over(self, bubbles: Sequence[float], tokens: int, pregenerated: int | None) -> None:
        """Takes in a step: the idle seconds of its instances, its tokens, and how many were there when it began
        (None: it was not announced)."""
        for seconds in bubbles:
            self.bubble_seconds.observe(seconds)
        if bubbles:
            self.bubble_average.set(sum(bubbles) / len(bubbles))
            self.bubble_most.set(max(bubbles))
        if pregenerated is not None:
            self.pregenerated.inc(pregenerated)
            self.announced.inc(tokens)
            self.coverage.set(pregenerated / tokens if tokens else 0.0)

    def _reports(self, gauge: _Make) -> None:
        self.lenience: Gauge = gauge("lenience", "The l of the run's last LENIENT batch.", "run")
        self.reward: Gauge = gauge("reward", "Mean of the rewards last reported.", "run")
        self.kl: Gauge = gauge(
            "reported_kl", "KL between the policy and the one that sampled, as last reported.", "run"
        )
        self.clip_fraction: Gauge = gauge(
            "reported_clip_fraction", "Share of tokens whose ratio was clipped, as last reported.", "run"
        )
