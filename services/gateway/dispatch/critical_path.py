"""Critical path of a step: where the time of the samples that ended last went. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from services.gateway.batches.sample import GatewaySample

PARTS = ("queue", "prefill", "plain", "verified", "moves", "between")
"""Parts of a sample's time, in this order: until its first engine step; the step that brought the first token;
steps without and with a verified draft; moves and restarts; between engine steps, and until its end was known."""
_MOST_SPANS = 12
_MOST_NAME = 64


class TimedSample(NamedTuple):
    """A sample that has ended: its state and prompt, its number of tokens, and unix seconds of begin and end."""

    sample: GatewaySample
    prompt_id: str
    tokens: int
    accepted_at: float
    ended_at: float


def time_parts(ended: TimedSample) -> dict[str, float]:
    """Return the seconds of each part; they add up to the time from acceptance to the end.

    Instances measure their steps by their own clocks. Where they say more than there was, all of it is scaled down.
    """
    sample = ended.sample
    whole = max(0.0, ended.ended_at - ended.accepted_at)
    first = min(max(sample.first_step_at or ended.ended_at, ended.accepted_at), ended.ended_at)
    left = whole - (queue := first - ended.accepted_at)
    steps = {
        "prefill": sample.prefill_seconds,
        "plain": sample.plain_seconds,
        "verified": sample.verify_seconds,
    }
    said = max(sample.generation_seconds, sum(steps.values()))
    scale = min(1.0, left / said) if said else 0.0
    steps = {name: seconds * scale for name, seconds in steps.items()}
    outside = left - said * scale
    moved = outside if len(sample.spans) > 1 else 0.0
    between = max(0.0, left - sum(steps.values()) - moved)
    return {"queue": queue, **steps, "moves": moved, "between": between}


def path_of(ended: TimedSample) -> dict[str, Any]:
    """Return what is recorded of a sample; of many spans the last ones. Times are unix seconds, parts seconds."""
    sample = ended.sample
    return {
        "prompt": ended.prompt_id[:_MOST_NAME],
        "slot": sample.slot,
        "tokens": ended.tokens,
        "accepted": round(ended.accepted_at, 4),
        "ended": round(ended.ended_at, 4),
        "parts": {name: round(seconds, 4) for name, seconds in time_parts(ended).items()},
        "decode_steps": sample.decode_steps,
        "verify_steps": sample.verify_steps,
        "restarts": sample.resubmissions,
        "spans": [
            [span.instance_id, round(span.begin, 3), round(span.end, 3), span.end_token - span.begin_token]
            for span in sample.spans[-_MOST_SPANS:]
        ],
    }
