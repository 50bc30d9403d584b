"""Prometheus metrics of the learner."""

from __future__ import annotations

from services.platform.observability.metrics import MetricSet, counter, gauge, histogram

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_DROPS = ("surplus", "passed_over", "lost", "failed", "unreadable", "repeated")


class DrafterMetrics(MetricSet, prefix="paceline_drafter_"):
    """All metrics of the service."""

    leader = gauge("leader", "1 while this process leads.")
    version = gauge("version", "Version of the published drafter; 0: none.")
    published_at = gauge("published_timestamp_seconds", "Unix time of the published drafter's publication.")
    policy_version = gauge("policy_version", "Policy version learned from last.")
    kd_loss = gauge("kd_loss", "KL of drafter from policy in nats per token, of the last update.")
    acceptance_length = gauge(
        "acceptance_length",
        "Tokens per verification on held-out samples: candidate, and drafter in use (current).",
        "drafter",
    )
    live_acceptance_length = gauge(
        "live_acceptance_length", "Tokens per verification of the published version, as instances report."
    )
    instances = gauge(
        "instances", "Instances by status: current, behind, refused, without (drafter).", "state"
    )
    updates = counter("updates_total", "Updates done or failed.", "outcome", values=("done", "failed"))
    update_seconds = histogram("update_seconds", "Training time of one update.", _SECONDS)
    training_seconds = counter(
        "training_seconds_total",
        "Seconds of training and evaluation, hidden (true) by generation or the trainer's work or not.",
        "hidden",
        values=("true", "false"),
    )
    samples_used = counter("samples_used_total", "Samples learned from.")
    tokens_used = counter("tokens_used_total", "Response tokens learned from.")
    samples = counter(
        "samples_total",
        "Samples received, with their reward or without (neutral).",
        "reward",
        values=("rewarded", "neutral"),
    )
    dropped = counter(
        "dropped_samples_total",
        "Samples not learned from: surplus (they arrived faster), passed_over (outside the share of 1/I), lost in "
        "the bounded stream, failed updates, unreadable, repeated.",
        "cause",
        values=_DROPS,
    )
    unmatched = counter("unmatched_rewards_total", "Rewards whose sample never arrived.")
    buffered = gauge("buffered_tokens", "Tokens in the replay buffer.")
    held_out = gauge("held_out_samples", "Held-out samples.")
    waiting = gauge("waiting_samples", "Samples waiting for their reward.")
    backlog = gauge("backlog_entries", "Unacknowledged entries of the feed.")
    policy_missed = counter(
        "policy_missed_samples_total",
        "Samples learned from with another policy version's weights, as their own were gone.",
    )
    candidates = counter(
        "candidates_total", "Candidates published or rejected.", "outcome", values=("published", "rejected")
    )
    rollbacks = counter(
        "rollbacks_total",
        "Drafters rolled back: collapsed, refused, asked.",
        "cause",
        values=("collapsed", "refused", "asked"),
    )
    loads = counter(
        "loads_total",
        "Drafters sent to instances, by outcome.",
        "outcome",
        values=("loaded", "refused", "failed"),
    )
    restarts = counter("trainer_restarts_total", "Training processes that died and were replaced.")
