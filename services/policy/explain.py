"""Decision records of the policy service, in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.internal.v1 import policy_pb2 as pb
from services.contracts.knob_store import Rung
from services.contracts.knobs import KnobScope, Setting, changes
from services.platform.redis.decision_log import DecisionRecord
from services.policy.ladder import LadderMove
from services.policy.steps import StepEnd

KNOBS, SPECULATION, DRAFT_CAP, TOGGLE = "knobs", "speculation", "draft_cap", "toggle"
"""Kinds of decision of this service."""
DRAFTED = ("drafts", "fixed", "adaptive", "toggled_on", "table", "explored")
"""Reasons of engine steps that verified drafts."""
WORDS = {
    "drafts": "drafts paid",
    "backoff": "drafters were not queried, because drafting had not paid for its overhead",
    "plain_is_best": "no draft would have paid",
    "within_margin": "the gain was within the margin",
    "explored": "exploration: drafts that were predicted not to pay were measured",
    "explored_plain": "exploration: a plain step was measured",
    "no_proposals": "no drafter proposed a token",
    "fixed": "drafts of fixed length",
    "adaptive": "drafts of the length that acceptance suggests",
    "toggled_on": "drafts of the given length paid",
    "toggled_off": "drafts of the given length would not have paid",
    "table": "the table has drafts for the batch",
    "table_plain": "the table has none for the batch",
    "off": "speculation is switched off",
}
"""Reasons of engine steps in words."""


def knobs_set(
    scope: KnobScope, before: Setting, after: Setting, revision: int, pending: Sequence[str], now: float
) -> DecisionRecord:
    """Explain a change of knobs."""
    changed = list(changes(before, after))
    words = ", ".join(f"{name} {_shown(old)} -> {_shown(new)}" for name, old, new in changed)
    details: dict[str, Any] = {
        "scope": scope.key,
        "revision": revision,
        "knobs": dict(after),
        "pending": list(pending),
    }
    run_id = scope.name if scope.kind == "run" else ""
    return DecisionRecord(KNOBS, f"{scope}: {words or 'nothing changed'}", 0.0, details, now, run_id)


def step_ended(end: StepEnd, now: float) -> DecisionRecord:
    """Explain how a step was speculated. The gain is the mean of those predicted over plain decoding."""
    totals = end.totals
    steps, acceptance = totals.engine_steps, totals.acceptance
    drafted = sum(totals.reasons[reason] for reason in DRAFTED)
    others = [
        f"{WORDS.get(reason, reason)} in {count}"
        for reason, count in totals.reasons.most_common()
        if reason not in DRAFTED
    ]
    words = f"step {end.step}: {drafted} of {steps} engine steps verified drafts"
    if acceptance.verifications:
        words += f", {acceptance.block_efficiency:.2f} tokens a verification"
    details = {
        "step": end.step,
        "mode": totals.mode,
        "instances": end.instances,
        "engine_steps": steps,
        "reasons": dict(totals.reasons),
        "planned_tokens": totals.planned_tokens,
        "expected_tokens": round(totals.expected_tokens, 1),
        "predicted_seconds": round(totals.predicted_seconds, 4),
        "measured_seconds": round(totals.measured_seconds, 4),
        "block_efficiency": round(acceptance.block_efficiency, 3),
        "drafts": {
            name: [each.verifications, each.drafted, each.accepted] for name, each in totals.drafts.items()
        },
        "lengths": {
            name: [each.drafted_lengths, each.accepted_lengths] for name, each in totals.drafts.items()
        },
    }
    gain = totals.predicted_gain / steps if steps else 0.0
    return DecisionRecord(SPECULATION, "; ".join([words, *others]), gain, details, now, end.run_id)


def cap_moved(end: StepEnd, before: Rung, move: LadderMove, now: float) -> DecisionRecord:
    """Explain a move on a ladder. The gain is that of tokens per verification if acceptance stays as it was."""
    cap, acceptance = move.rung.cap, end.totals.acceptance
    words = f"step {end.step}: cap {before.cap} -> {cap} tokens: {move.reason}"
    details = {"step": end.step, "from": before.cap, "to": cap, "fullness": round(acceptance.fullness, 4)}
    per_token = acceptance.accepted / acceptance.drafted if acceptance.drafted else 0.0
    gain = (cap - before.cap) * per_token / acceptance.block_efficiency if cap > before.cap else 0.0
    return DecisionRecord(DRAFT_CAP, words, gain, details, now, end.run_id)


def switched(switch: pb.Switch, instance_id: str) -> DecisionRecord:
    """Explain that speculation was switched on or off on an instance."""
    words = (
        f"step {switch.step}: {'on' if switch.on else 'off'} at {switch.requests} samples: "
        f"predicted {switch.predicted_speedup:.2f} of plain decoding"
    )
    details = {"step": switch.step, "on": switch.on, "requests": switch.requests, "instance": instance_id}
    at = switch.time.ToNanoseconds() / 1e9
    return DecisionRecord(TOGGLE, words, switch.predicted_speedup - 1.0, details, at, switch.run_id)


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
