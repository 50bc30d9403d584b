"""Prometheus metrics of an instance."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from paceline.v1 import fleet_pb2
from services.generation.drafting.own_model_metrics import Eagle3Metrics, SelfW4Metrics
from services.generation.drafting.planner_metrics import PlannerMetrics
from services.generation.rollouts.metrics import RolloutMetrics

_STEP_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.05, 0.1, 0.2, 0.5, 1, 5)


@dataclass(slots=True)
class Tally:
    """Outcomes of one drafter since the last publication: how many drafts had, and kept, how many tokens."""

    drafted: Counts[int] = field(default_factory=Counts)
    accepted: Counts[int] = field(default_factory=Counts)


def reached(lengths: Mapping[int, int]) -> list[tuple[int, int]]:
    """(position, how many lengths go beyond it), from counts by length."""
    longest = max(lengths, default=0)
    return [
        (position, sum(count for length, count in lengths.items() if length > position))
        for position in range(longest)
    ]


class EngineMetrics:
    """What the engine thread reports. Names follow Prometheus's conventions; units are seconds and ratios."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "paceline_generation_"
        self.engine = Info(f"{prefix}engine", "What this instance serves, and on what.", registry=registry)
        self.most_running = Gauge(
            f"{prefix}max_running_samples", "Most samples that run at once.", registry=registry
        )
        self.steps = Histogram(
            f"{prefix}step_seconds", "Engine step time.", buckets=_STEP_BUCKETS, registry=registry
        )
        self.tokens = Counter(f"{prefix}tokens_total", "Tokens generated.", registry=registry)
        self.running = Gauge(f"{prefix}running_samples", "Samples in the running batch.", registry=registry)
        self.waiting = Gauge(f"{prefix}waiting_samples", "Samples waiting for the engine.", registry=registry)
        self.kv_usage = Gauge(
            f"{prefix}kv_usage_ratio", "Share of KV blocks in use, 0 to 1.", registry=registry
        )
        self.policy_version = Gauge(
            f"{prefix}policy_version", "Policy version of the weights that are served.", registry=registry
        )
        self.weight_seconds = Histogram(
            f"{prefix}weight_seconds", "Time to stage or apply weights.", ["phase"], registry=registry
        )

        labels = ["drafter", "position"]
        drafts = "paceline_speculation_"
        self.drafted = Counter(
            f"{drafts}drafted_tokens_total", "Draft tokens verified.", labels, registry=registry
        )
        self.accepted = Counter(
            f"{drafts}accepted_tokens_total",
            "Draft tokens that verification kept.",
            labels,
            registry=registry,
        )
        self.verify_steps = Counter(
            f"{drafts}verify_steps_total",
            "Drafts verified, one a sample and step.",
            ["drafter"],
            registry=registry,
        )
        self.block_efficiency = Gauge(
            f"{drafts}block_efficiency",
            "Tokens per verified draft: accepted + 1.",
            ["drafter"],
            registry=registry,
        )
        self.faults = Counter(
            f"{drafts}drafter_faults_total", "Offers that broke the rules.", ["drafter"], registry=registry
        )
        self.planner = PlannerMetrics(registry)
        self.self_w4 = SelfW4Metrics(registry)
        self.eagle3 = Eagle3Metrics(registry)
        reuse = "paceline_reuse_"
        self.reused_tokens = Counter(
            f"{reuse}tokens_total",
            "Tokens taken over from cached rollouts by the lenient rule.",
            registry=registry,
        )
        self.reuse_verify_steps = Counter(
            f"{reuse}verify_steps_total",
            "Verifications of a part of a cached rollout, one a sample and step.",
            registry=registry,
        )
        self.reuse_verified_rows = Counter(
            f"{reuse}verified_rows_total", "Rows of logits that these took.", registry=registry
        )
        self.rollouts = RolloutMetrics(registry)
        self._tallies: dict[str, Tally] = {}

    def verified(self, drafter: str, drafted: int, accepted: int) -> None:
        """Count one verified draft; published with the next `load`."""
        tally = self._tallies.get(drafter)
        if tally is None:
            tally = self._tallies[drafter] = Tally()
        tally.drafted[drafted] += 1
        tally.accepted[accepted] += 1

    def reused(self, tokens: int, rows: int) -> None:
        """Count one verification of a part of a cached rollout: the tokens taken over and the rows it took."""
        self.reused_tokens.inc(tokens)
        self.reuse_verify_steps.inc()
        self.reuse_verified_rows.inc(rows)

    def fault(self, drafter: str) -> None:
        """Count an offer that broke the rules."""
        self.faults.labels(drafter).inc()

    def _publish(self, drafter: str, tally: Tally) -> None:
        for position, count in reached(tally.drafted):
            self.drafted.labels(drafter, position).inc(count)
        for position, count in reached(tally.accepted):
            self.accepted.labels(drafter, position).inc(count)
        steps = sum(tally.drafted.values())
        kept = sum(length * count for length, count in tally.accepted.items())
        self.verify_steps.labels(drafter).inc(steps)
        self.block_efficiency.labels(drafter).set(kept / steps + 1)

    def step(self, seconds: float, tokens: int) -> None:
        """Count one engine step."""
        self.steps.observe(seconds)
        self.tokens.inc(tokens)

    def load(self, load: fleet_pb2.InstanceLoad) -> None:
        """Publish the load of this moment."""
        self.running.set(load.running)
        self.waiting.set(load.waiting)
        self.kv_usage.set(load.kv_usage)
        for drafter, tally in self._tallies.items():
            self._publish(drafter, tally)
        self._tallies = {}
