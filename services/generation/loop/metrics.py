"""Prometheus metrics of an instance: engine loop, background samples, drafts, and pre-generation.

`EngineMetrics` holds all that the engine thread records; `PregenerationMetrics` is recorded by the event loop.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Mapping
from functools import cache

from prometheus_client import CollectorRegistry, Histogram, Info

from paceline.v1 import fleet_pb2
from services.generation.draft_cache.cache import RolloutMetrics
from services.generation.speculation.planner import PlannerMetrics
from services.platform.observability.metrics import MetricSet, counter, gauge, histogram

_STEP_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.05, 0.1, 0.2, 0.5, 1, 5)
DELAY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
"""Seconds until background samples have ended."""
# Weight of the newest step in the mean step time.
_SMOOTHING = 0.05


def reached(lengths: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return (position, number of drafts longer than it), from counts of drafts by length."""
    longest = max(lengths, default=0)
    return [
        (position, sum(count for length, count in lengths.items() if length > position))
        for position in range(longest)
    ]


class EngineThroughput:
    """Step time and totals of the engine steps that had real samples.

    `step_seconds` is an exponential mean, `tokens` and `steps` are totals.
    """

    def __init__(self) -> None:
        self.step_seconds = 0.0
        self.tokens = 0
        self.steps = 0

    def record(self, seconds: float, tokens: int) -> None:
        """Count one step."""
        self.steps += 1
        self.step_seconds += (seconds - self.step_seconds) * (_SMOOTHING if self.steps > 1 else 1)
        self.tokens += tokens


class BackgroundMetrics(MetricSet, prefix="paceline_generation_"):
    """Metrics of background samples in the engine."""

    samples = gauge("background_samples", "Running samples of a coming step, and their forks.")
    steps = counter(
        "background_steps_total", "Engine steps with background samples, alone or beside others.", "beside"
    )
    seconds = counter(
        "background_seconds_total",
        "Time of engine steps with background samples; alone: bubble time used.",
        "beside",
    )
    tokens = counter("pregenerated_tokens_total", "Tokens of samples of a coming step.")
    forked_tokens = counter("forked_tokens_total", "Tokens of pre-generated samples' forks.")
    yielded = counter("yielded_samples_total", "Background samples ended for real ones.")
    yield_seconds = histogram(
        "yield_seconds", "Time from a real sample's arrival until background samples ended.", DELAY_BUCKETS
    )

    def record_step(self, seconds: float, tokens: int, forked: int, beside_real: bool) -> None:
        """Count an engine step with background samples, and the tokens of these and of their forks."""
        beside = "real" if beside_real else "nothing"
        self.steps.labels(beside).inc()
        self.seconds.labels(beside).inc(seconds)
        self.tokens.inc(tokens)
        self.forked_tokens.inc(forked)


class DraftOutcomeMetrics(MetricSet, prefix="paceline_speculation_"):
    """Metrics of verified drafts by drafter."""

    drafted = counter("drafted_tokens_total", "Draft tokens verified.", "drafter", "position")
    accepted = counter("accepted_tokens_total", "Draft tokens that verification kept.", "drafter", "position")
    verify_steps = counter("verify_steps_total", "Drafts verified, one a sample and step.", "drafter")
    block_efficiency = gauge("block_efficiency", "Tokens per verified draft: accepted + 1.", "drafter")
    faults = counter(
        "drafter_faults_total", "Proposals against the rules; planner: failed decisions.", "drafter"
    )


class ReuseMetrics(MetricSet, prefix="paceline_reuse_"):
    """Metrics of cached rollouts that LENIENT samples take over."""

    tokens = counter("tokens_total", "Tokens reused from cached rollouts by the lenient rule.")
    verify_steps = counter(
        "verify_steps_total", "Verifications of parts of cached rollouts, one a sample and step."
    )
    verified_rows = counter("verified_rows_total", "Rows of logits in verifications of cached rollouts.")


class EngineMetrics(MetricSet, prefix="paceline_generation_"):
    """All metrics that the engine thread reports. Units are seconds and ratios."""

    most_running = gauge("max_running_samples", "Most samples that run at once.")
    steps = histogram("step_seconds", "Engine step time.", _STEP_BUCKETS)
    tokens = counter("tokens_total", "Tokens generated.")
    running = gauge("running_samples", "Samples in the running batch.")
    waiting = gauge("waiting_samples", "Samples waiting for the engine.")
    kv_usage = gauge("kv_usage_ratio", "Share of KV blocks in use.")
    context = counter(
        "context_tokens_total", "Prompt and response tokens of samples that entered the running batch."
    )
    cached_context = counter(
        "cached_context_tokens_total", "Context tokens whose KV was in the prefix cache."
    )
    preemptions = counter(
        "preemptions_total",
        "Samples that entered the batch again after losing their KV to others or to new weights.",
    )
    policy_version = gauge("policy_version", "Policy version of the weights that are served.")
    kernels_left_out = gauge(
        "kernels_left_out", "1 for kernels left out after a failed check at the start.", "kernels"
    )
    features_refused = gauge(
        "features_refused", "1 for features that this model is not known to allow.", "feature"
    )
    weight_seconds = histogram(
        "weight_seconds", "Time to stage or apply weights.", Histogram.DEFAULT_BUCKETS, "phase"
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.registry = registry
        """For the metrics of drafters, which are made with them."""
        self.engine = Info(
            "paceline_generation_engine", "What this instance serves, and on what.", registry=registry
        )
        self.background = BackgroundMetrics(registry)
        self.drafts = DraftOutcomeMetrics(registry)
        self.planner = PlannerMetrics(registry)
        self.reuse = ReuseMetrics(registry)
        self.rollouts = RolloutMetrics(registry)
        # Counts of drafts since the last `load`, for each drafter, by length drafted and by length kept.
        self._drafted: defaultdict[str, Counts[int]] = defaultdict(Counts)
        self._accepted: defaultdict[str, Counts[int]] = defaultdict(Counts)
        # Finding the counter of a position takes longer than counting, and every flush needs dozens of them.
        self._drafted_at = cache(self.drafts.drafted.labels)
        self._accepted_at = cache(self.drafts.accepted.labels)

    def verified(self, drafter: str, drafted: int, accepted: int, count: int = 1) -> None:
        """Count verified drafts with this outcome; published with the next `load`."""
        self._drafted[drafter][drafted] += count
        self._accepted[drafter][accepted] += count

    def reused(self, tokens: int, rows: int) -> None:
        """Count one verification of a part of a cached rollout: the tokens taken over and the rows it took."""
        self.reuse.tokens.inc(tokens)
        self.reuse.verify_steps.inc()
        self.reuse.verified_rows.inc(rows)

    def entered(self, tokens: int, cached: int, again: bool) -> None:
        """Count a sample that entered the running batch with this context; `again` if it had run before."""
        self.context.inc(tokens)
        self.cached_context.inc(cached)
        self.preemptions.inc(again)

    def fault(self, drafter: str) -> None:
        """Count a proposal that broke the rules."""
        self.drafts.faults.labels(drafter).inc()

    def step(self, seconds: float, tokens: int) -> None:
        """Count one engine step."""
        self.steps.observe(seconds)
        self.tokens.inc(tokens)

    def load(self, load: fleet_pb2.InstanceLoad) -> None:
        """Publish the current load, and the outcomes of drafts since the last call."""
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.kv_usage.set(load.kv_usage)
        for drafter, drafted in self._drafted.items():
            self._publish(drafter, drafted, self._accepted[drafter])
        self._drafted.clear()
        self._accepted.clear()

    def _publish(self, drafter: str, drafted: Counts[int], accepted: Counts[int]) -> None:
        for position, count in reached(drafted):
            self._drafted_at(drafter, position).inc(count)
        for position, count in reached(accepted):
            self._accepted_at(drafter, position).inc(count)
        steps = drafted.total()
        kept = sum(length * count for length, count in accepted.items())
        self.drafts.verify_steps.labels(drafter).inc(steps)
        self.drafts.block_efficiency.labels(drafter).set(kept / steps + 1)


class PregenerationMetrics(MetricSet, prefix="paceline_generation_"):
    """Metrics of pre-generation outside of the engine loop, which has `BackgroundMetrics`."""

    asleep = gauge("asleep", "1 while the device is left to the trainer.")
    samples = counter(
        "pregenerated_samples_total",
        "Ended samples of a coming step: finished, partial (with tokens), empty.",
        "outcome",
    )
    forks = counter("pregenerated_forks_total", "Forks of pre-generated samples.")
    halts = histogram(
        "halt_delay_seconds",
        "Time from the step's end (gateway's clock) until pre-generation stopped.",
        DELAY_BUCKETS,
    )
    update_halt_seconds = histogram(
        "update_halt_seconds",
        "Time from the call for a weight update until pre-generation stopped.",
        DELAY_BUCKETS,
    )
    polls = counter(
        "bubble_polls_total", "Polls of the coordinator: answered, interrupted, failed.", "outcome"
    )
    puts = counter(
        "draft_puts_total", "Rollouts sent to the draft store: stored, or else refused or lost.", "outcome"
    )
    put_tokens = counter("draft_put_tokens_total", "Tokens of rollouts sent to the draft store.")

    def ended(self, finished: bool, tokens: int) -> None:
        """Count a sample of a coming step that ended with this number of tokens."""
        self.samples.labels("finished" if finished else "partial" if tokens else "empty").inc()

    def put(self, rollouts: int, stored: int, tokens: int) -> None:
        """Count rollouts that were sent to the store, which took `stored` of them."""
        self.puts.labels("stored").inc(stored)
        self.puts.labels("lost").inc(rollouts - stored)
        self.put_tokens.inc(tokens)
