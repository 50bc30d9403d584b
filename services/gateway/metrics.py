"""What the gateway tells Prometheus."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from google.rpc import code_pb2
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.gateway.run_gauges import RunGauges

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

        # `instance_id` and not `instance`, which is Prometheus's own name for who was scraped.
        self.samples = counter("samples_total", "Samples ended, by status.", "status")
        self.expired = counter("expired_samples_total", "Samples ended by the deadline of their batch.")
        self.tokens = counter("tokens_total", "Response tokens received from instances.", "instance_id")
        self.placements = counter("placements_total", "Samples given to instances.", "instance_id")
        self.refusals = counter("refusals_total", "Samples that instances refused.", "instance_id", "code")
        self.resubmissions = counter("resubmissions_total", "Samples resumed elsewhere, by cause.", "cause")
        self.moves = counter(
            "moves_total",
            "Samples that instances moved to others, by what came of it: claimed; by_prefix where they were to go "
            "on so; refused (the claim), no_link, no_place or tokens_missing, and resumed by their prefix "
            "anywhere; unwanted (ended or cancelled meanwhile).",
            "outcome",
        )
        self.losses = counter("instance_losses_total", "Instances lost.", "instance_id")
        self.instance_up = gauge("instance_up", "1, or 0 for an instance that is lost.", "instance_id")
        self.queued = gauge("queued_samples", "Samples waiting for an instance.")
        self.running = gauge("running_samples", "Samples on an instance.", "instance_id")
        self.batches = gauge("batches", "Batches unfinished.")
        self.oldest_batch = gauge(
            "oldest_batch_timestamp_seconds",
            "Unix time at which the oldest unfinished batch of SubmitRollouts was accepted; 0: there is none.",
        )
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
        self.runs = RunGauges(registry)
        self._steps(counter, gauge, histogram)
        self.history = counter(
            "history_rollouts_total",
            "Finished samples for the draft store, by outcome: stored; not_stored (refused, or lost in an "
            "outage); dropped (the store did not keep up).",
            "outcome",
        )
        self.learner_feed = counter(
            "learner_feed_entries_total",
            "Finished samples and reports of rewards for the learner of the drafter, by outcome: fed; refused by "
            "Redis; dropped (Redis did not keep up).",
            "outcome",
        )
        self.update_seconds = histogram("update_seconds", "Phases of weight updates.", _SECONDS, "phase")
        self.updates = counter(
            "updates_total",
            "Weight updates, by outcome: published; aborted by the trainer; failed; abandoned by a trainer "
            "that went silent.",
            "outcome",
        )
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """A series that begins at 1 hides its first increase from rate()."""
        for status in ("completed", "truncated", "aborted", "failed"):
            self.samples.labels(status)
        for outcome in ("published", "aborted", "failed", "abandoned"):
            self.updates.labels(outcome)
        for cause in ("lost", "handed_over", "moved"):
            self.resubmissions.labels(cause)
        for outcome in ("claimed", "by_prefix"):
            self.moves.labels(outcome)
        for outcome in ("fed", "refused", "dropped"):
            self.learner_feed.labels(outcome)
        for level in ("exact", "coupled_history", "lenient", "rejection"):
            self.count_whole(level, 0, 0, 0, samples=0)

    def refused(self, instance_id: str, code: int) -> None:
        """Counts a sample that an instance refused with this google.rpc.Code."""
        known = code in code_pb2.Code.values()
        self.refusals.labels(instance_id, code_pb2.Code.Name(code) if known else str(code)).inc()

    def show_instances(self, up: dict[str, bool], gone: Collection[str]) -> None:
        """Shows who is lost, and nothing more of those that are forgotten."""
        for instance_id, alive in up.items():
            self.instance_up.labels(instance_id).set(alive)
        for instance_id in gone:
            self.instance_up.remove(instance_id)
            self.running.remove(instance_id)

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

    def count_whole(self, level: str, tokens: int, cached: int, reused: int, samples: int = 1) -> None:
        """Counts a sample of a batch that was completed or truncated; no `samples` only makes the series."""
        self.whole_samples.labels(level).inc(samples)
        self.whole_tokens.labels(level).inc(tokens)
        self.cached_samples.labels(level).inc(samples if cached else 0)
        self.cached_tokens.labels(level).inc(cached)
        self.reused_tokens.labels(level).inc(reused if cached else 0)
        self.fully_reused.labels(level).inc(samples if cached and reused == tokens else 0)

    def _steps(self, counter: _Make, gauge: _Make, histogram: _Make) -> None:
        """Of steps that are over. Coverage = pregenerated_tokens / announced_step_tokens."""
        self.hints: Counter = counter(
            "hints_total",
            "Hints of coming steps: kept, or not because late, far ahead or no room.",
            "outcome",
        )
        self.hinted: Gauge = gauge("hinted_samples", "Samples of coming steps that are announced.")
        self.step_seconds: Histogram = histogram(
            "step_seconds", "Steps from their first sample's acceptance to their last one's end.", _SECONDS
        )
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
            "step_coverage_ratio", "Pre-generated tokens over real tokens, of the last announced step."
        )

    def step_over(
        self, seconds: float, bubbles: Sequence[float], tokens: int, pregenerated: int | None
    ) -> None:
        """Takes in a step: how long it took, the idle seconds of its instances, its tokens, and how many were
        there when it began (None: it was not announced)."""
        self.step_seconds.observe(seconds)
        for seconds in bubbles:
            self.bubble_seconds.observe(seconds)
        if bubbles:
            self.bubble_average.set(sum(bubbles) / len(bubbles))
            self.bubble_most.set(max(bubbles))
        if pregenerated is not None:
            self.pregenerated.inc(pregenerated)
            self.announced.inc(tokens)
            self.coverage.set(pregenerated / tokens if tokens else 0.0)
