"""Reading of facts from entries of the decision log. Pure.

What is read: `step`, `weights` and `reward` of the gateway, `pregeneration` of the bubble coordinator,
`speculation` of the policy service, and `migration` of the reallocator; all others are listed only. An entry that
lacks something, because it was too large or another release wrote it, is passed over and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.foreign_json import parse_object
from paceline.report.attempts import number_attempts
from paceline.report.facts import (
    PARTS,
    DraftCounts,
    Filled,
    InstancePart,
    InstanceRow,
    MoveFact,
    Published,
    RunFacts,
    RunStep,
    SamplePath,
)
from paceline.types import Decision

MEASURED = ("step", "weights", "reward", "pregeneration")
"""Kinds of entries that measure and decide nothing."""


def parsed(lines: Iterable[str]) -> list[Decision]:
    """Return entries from lines of JSON, as `paceline policy watch --json` prints them.

    ValueError names a bad line.
    """
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(Decision(**parse_object(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"line {number} is no entry of the decision log: {error}") from error
    return found


def newest_run(entries: Iterable[Decision]) -> str:
    """Return the run of which a step ended last; empty if there is none."""
    steps = [entry for entry in entries if entry.kind == "step"]
    return max(steps, key=lambda entry: entry.time).run_id if steps else ""


def read_facts(entries: Sequence[Decision], run_id: str = "") -> RunFacts:
    """Return the facts of a run, and of the whole fleet in its time; of the newest run if none is named."""
    facts = RunFacts(run_id or newest_run(entries))
    mine = sorted(
        (entry for entry in entries if entry.run_id in ("", facts.run_id)), key=lambda each: each.time
    )
    _read(facts, [entry for entry in mine if entry.kind == "step"])
    facts.steps.sort(key=lambda step: step.ended)
    number_attempts(facts.steps)
    # Rewards and plans of a step come after it.
    _read(facts, [entry for entry in mine if entry.kind != "step"])
    return facts


def _read(facts: RunFacts, entries: Iterable[Decision]) -> None:
    for entry in entries:
        if entry.kind not in MEASURED:
            facts.decisions.append(entry)
        reader = _READERS.get(entry.kind)
        if reader is None:
            continue
        try:
            reader(facts, entry)
        except (KeyError, TypeError, ValueError, IndexError):
            facts.unread += 1


def _read_step(facts: RunFacts, entry: Decision) -> None:
    told = entry.details
    rows = tuple(
        InstanceRow(name, begin, end, int(samples), int(tokens), float(bubble), tuple(map(int, counts)))
        for name, begin, end, samples, tokens, bubble, counts in told["rows"]
    )
    pregenerated = told["pregenerated"]
    facts.steps.append(
        RunStep(
            step=int(told["step"]),
            version=int(told["version"]),
            begun=float(told["begun"]),
            ended=float(told["ended"]),
            samples=int(told["samples"]),
            tokens=int(told["tokens"]),
            pregenerated=None if pregenerated is None else int(pregenerated),
            instances=int(told["instances"]),
            bubble_seconds=float(told["bubble_seconds"]),
            bin=float(told["bin"]),
            rows=rows,
            all=tuple(map(int, told["all"])),
            last=tuple(map(_path, told["last"])),
        )
    )


def _path(told: Mapping[str, Any]) -> SamplePath:
    return SamplePath(
        prompt_id=str(told["prompt"]),
        slot=int(told["slot"]),
        tokens=int(told["tokens"]),
        accepted_at=float(told["accepted"]),
        ended_at=float(told["ended"]),
        parts={part: float(told["parts"][part]) for part in PARTS},
        decode_steps=int(told["decode_steps"]),
        verify_steps=int(told["verify_steps"]),
        restarts=int(told["restarts"]),
        spans=tuple(
            InstancePart(name, begin, end, int(tokens)) for name, begin, end, tokens in told["spans"]
        ),
    )


def _read_reward(facts: RunFacts, entry: Decision) -> None:
    told, step = entry.details, _step_of(facts, entry)
    if step is None:
        return
    low, high = float(told["low"]), float(told["high"])
    if not math.isfinite(high - low):
        raise ValueError("rewards without bounds have no place in a chart")
    step.reward_low = min(step.reward_low, low) if step.rewards else low
    step.reward_high = max(step.reward_high, high) if step.rewards else high
    step.rewards += int(told["count"])
    step.reward_sum += float(told["sum"])


def _read_plan(facts: RunFacts, entry: Decision) -> None:
    told, step = entry.details, _step_of(facts, entry)
    if step is not None:
        step.engine_steps += int(told["engine_steps"])
        step.predicted_seconds += float(told["predicted_seconds"])
        step.measured_seconds += float(told["measured_seconds"])
    lengths = told.get("lengths", {})
    for name, sums in told["drafts"].items():
        facts.drafts.setdefault(name, DraftCounts()).add(sums, lengths.get(name, ()))


def _step_of(facts: RunFacts, entry: Decision) -> RunStep | None:
    """Return the step that an entry is about: of several with its number the one that had begun last by then.

    None if it is not over.
    """
    number = int(entry.details["step"])
    found = [step for step in facts.steps if step.step == number]
    return next((step for step in reversed(found) if step.begun <= entry.time), found[0] if found else None)


def _read_weights(facts: RunFacts, entry: Decision) -> None:
    told = entry.details
    end = float(told["published"])
    facts.published.append(Published(int(told["version"]), float(told.get("started", end)), end))


def _read_filled(facts: RunFacts, entry: Decision) -> None:
    facts.filled += [
        Filled(str(name), float(begin), float(end)) for name, begin, end in entry.details["filled"]
    ]


def _read_move(facts: RunFacts, entry: Decision) -> None:
    told = entry.details
    samples = int(told.get("moved", told["samples"]))
    if samples:
        facts.moves.append(MoveFact(entry.time, str(told["donor"]), str(told["receiver"]), samples))


_READERS = {
    "step": _read_step,
    "reward": _read_reward,
    "speculation": _read_plan,
    "weights": _read_weights,
    "pregeneration": _read_filled,
    "migration": _read_move,
}
