"""What the learner tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
DROPS = ("surplus", "passed_over", "lost", "failed", "unreadable", "repeated")
"""Why samples are not learned from."""


class DrafterMetrics:
    """All metrics of the service, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "paceline_drafter_"

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{prefix}{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}{name}", text, labels, registry=registry)

        self.leader = gauge("leader", "1 while this process leads.")
        self.version = gauge("version", "Version of the published drafter; 0: none.")
        self.published_at = gauge("published_timestamp_seconds", "Unix time of its publication.")
        self.policy_version = gauge("policy_version", "Policy version that was learned from last.")
        self.kd_loss = gauge("kd_loss", "KL of drafter from policy in nats per token, of the last update.")
        self.acceptance_length = gauge(
            "acceptance_length",
            "Tokens a verification on held-out samples: of the candidate, and of the one in use (current).",
            "drafter",
        )
        self.live_acceptance_length = gauge(
            "live_acceptance_length", "Tokens a verification of the published version, as instances tell."
        )
        self.instances = gauge(
            "instances", "Instances by state: current, behind, refused, without (drafter).", "state"
        )
        self.updates = counter("updates_total", "Updates, by outcome: done or failed.", "outcome")
        self.update_seconds = Histogram(
            f"{prefix}update_seconds", "Training of one update.", registry=registry, buckets=_SECONDS
        )
        self.training_seconds = counter(
            "training_seconds_total",
            "Seconds of training and evaluation, hidden (true) by generation or the trainer's work, or not.",
            "hidden",
        )
        self.samples_used = counter("samples_used_total", "Samples learned from.")
        self.tokens_used = counter("tokens_used_total", "Response tokens learned from.")
        self.samples = counter(
            "samples_total", "Samples that came, with their reward or without (neutral).", "reward"
        )
        self.dropped = counter(
            "dropped_samples_total",
            "Samples not learned from: surplus (they came faster), passed_over (the rest of the 1/I), lost in the "
            "bounded stream, failed updates, unreadable, repeated.",
            "cause",
        )
        self.unmatched = counter("unmatched_rewards_total", "Rewards whose sample never came.")
        self.buffered = gauge("buffered_tokens", "Tokens in the replay buffer.")
        self.held_out = gauge("held_out_samples", "Held-out samples.")
        self.waiting = gauge("waiting_samples", "Samples that wait for their reward.")
        self.backlog = gauge("backlog_entries", "Entries of the stream that are not acknowledged.")
        self.policy_missed = counter(
            "policy_missed_samples_total",
            "Samples whose policy's weights were gone; another version's were used.",
        )
        self.candidates = counter(
            "candidates_total", "Candidates, by what became of them: published or rejected.", "outcome"
        )
        self.roll_backs = counter(
            "roll_backs_total", "Drafters taken back, by cause: collapsed, refused, asked.", "cause"
        )
        self.loads = counter("loads_total", "Drafters sent to instances, by outcome.", "outcome")
        self.restarts = counter("trainer_restarts_total", "Training processes that died and were replaced.")
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """A series that begins at 1 hides its first increase from rate()."""
        for cause in DROPS:
            self.dropped.labels(cause)
        for cause in ("collapsed", "refused", "asked"):
            self.roll_backs.labels(cause)
        for hidden in ("true", "false"):
            self.training_seconds.labels(hidden)
        for outcome in ("published", "rejected"):
            self.candidates.labels(outcome)
        for outcome in ("done", "failed"):
            self.updates.labels(outcome)
        for outcome in ("loaded", "refused", "failed"):
            self.loads.labels(outcome)
        for reward in ("rewarded", "neutral"):
            self.samples.labels(reward)
