"""Facts of a run, read from entries of the decision log. Pure.

Times are unix seconds. A trainer that is restarted under the same run repeats steps: these are attempts of one
step, of which only the last one counts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from paceline.files import parse_object
from paceline.times import STEP_PARTS
from paceline.types import BatchStatus, Decision, Instance

MEASURED = ("step", "weights", "reward", "pregeneration")
"""Kinds of entries that are measurements, not decisions."""


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """Share of one instance in a step; begin and end are None without a sample. `counts`: samples by time bin."""

    instance_id: str
    begin: float | None
    end: float | None
    samples: int
    tokens: int
    bubble: float
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InstancePart:
    """Tokens of a sample that one instance generated, with the time."""

    instance_id: str
    begin: float
    end: float
    tokens: int


@dataclass(frozen=True, slots=True)
class SamplePath:
    """Path of a sample through its step, and the seconds of each part of its time."""

    prompt_id: str
    slot: int
    tokens: int
    accepted_at: float
    ended_at: float
    parts: Mapping[str, float]
    decode_steps: int
    verify_steps: int
    restarts: int
    spans: tuple[InstancePart, ...]

    @property
    def seconds(self) -> float:
        """Time from acceptance to the end."""
        return self.ended_at - self.accepted_at


@dataclass(slots=True)
class DraftCounts:
    """Counts of one drafter: verifications, draft tokens, accepted tokens, and drafts by length."""

    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_lengths: list[int] = field(default_factory=list)
    accepted_lengths: list[int] = field(default_factory=list)

    def add(self, sums: Sequence[int], lengths: Sequence[Sequence[int]]) -> None:
        """Add the counts of an entry."""
        self.verifications += int(sums[0])
        self.drafted += int(sums[1])
        self.accepted += int(sums[2])
        for mine, others in zip((self.drafted_lengths, self.accepted_lengths), lengths, strict=False):
            mine += [0] * (len(others) - len(mine))
            for place, count in enumerate(others):
                mine[place] += int(count)

    def positions(self) -> list[tuple[int, int]]:
        """Return the drafted and the accepted tokens at each position of a draft, from the first on."""
        found = []
        for place in range(1, len(self.drafted_lengths)):
            drafted, accepted = sum(self.drafted_lengths[place:]), sum(self.accepted_lengths[place:])
            if not drafted:
                break
            found.append((drafted, accepted))
        return found


@dataclass(slots=True)
class RunStep:
    """One step of the run. Rewards and step times are summed over their entries."""

    step: int
    version: int
    begun: float
    ended: float
    samples: int
    tokens: int
    pregenerated: int | None
    instances: int
    bubble_seconds: float
    bin: float
    rows: tuple[InstanceRow, ...]
    all: tuple[int, ...]
    last: tuple[SamplePath, ...]
    rewards: int = 0
    reward_sum: float = 0.0
    reward_low: float = 0.0
    reward_high: float = 0.0
    engine_steps: int = 0
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Verifications and accepted tokens of each drafter that had any."""
    attempt: int = 1
    """Number of the trainer's start that did the step, from 1 on."""
    replaced: bool = False
    """True if a later attempt repeated the step, or began at an earlier one."""

    @property
    def name(self) -> str:
        """`step 3`, or for a later attempt `step 3, attempt 2`."""
        return f"step {self.step}" + (f", attempt {self.attempt}" if self.attempt > 1 else "")

    @property
    def seconds(self) -> float:
        """Time of the step's rollout."""
        return self.ended - self.begun

    @property
    def reward(self) -> float | None:
        """Mean reward; None if none was reported."""
        return self.reward_sum / self.rewards if self.rewards else None


@dataclass(frozen=True, slots=True)
class Published:
    """A published version of the weights; `started` is when its update began."""

    version: int
    started: float
    published: float


@dataclass(frozen=True, slots=True)
class Filled:
    """Time in which an instance pre-generated."""

    instance_id: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class MoveFact:
    """Samples that were moved from one instance to another, decided at `time`."""

    time: float
    donor: str
    receiver: str
    samples: int


@dataclass(frozen=True, slots=True)
class FleetNow:
    """Present state of the platform, for a live report."""

    time: float
    instances: tuple[Instance, ...]
    batches: tuple[BatchStatus, ...]


@dataclass(slots=True)
class RunFacts:
    """All data of a report. Steps are in order of their ends; `unread` counts entries that could not be read.

    `planned_steps` counts the engine steps of all plans, `lacking_steps` the ones with samples for which the suffix
    index had no room.
    """

    run_id: str
    steps: list[RunStep] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)
    filled: list[Filled] = field(default_factory=list)
    moves: list[MoveFact] = field(default_factory=list)
    drafts: dict[str, DraftCounts] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    planned_steps: int = 0
    lacking_steps: int = 0
    unread: int = 0
    now: FleetNow | None = None
    trouble: str = ""
    """Sentence on why the present state of the platform is unknown, or empty."""


def number_attempts(steps: Sequence[RunStep]) -> None:
    """Set `attempt` and `replaced` of each step; they are in order of their ends.

    An attempt begins with a step whose number, or a higher one, had ended before. Overlapping steps belong to one
    attempt, whatever the order of their ends, and so do several batches of a step under one policy version. An
    attempt replaces the steps of earlier attempts from its lowest number on.
    """
    attempt, ends, highest = 1, list[float](), list[tuple[int, int]]()
    for step in steps:
        before = bisect_right(ends, step.begun)
        if before and _goes_back(step, *highest[before - 1]):
            attempt, ends, highest = attempt + 1, [], []
        step.attempt = attempt
        ends.append(step.ended)
        mine = (step.step, step.version)
        highest.append(max(highest[-1], mine) if highest else mine)
    lowest = float("inf")
    for _, group in groupby(reversed(steps), key=lambda each: each.attempt):
        members = list(group)
        for step in members:
            step.replaced = step.step >= lowest
        lowest = min(lowest, *(step.step for step in members))


def counted(steps: Sequence[RunStep]) -> list[RunStep]:
    """Return the steps that no later attempt replaced."""
    return [step for step in steps if not step.replaced]


def _goes_back(step: RunStep, number: int, version: int) -> bool:
    return step.step < number or (step.step == number and step.version != version)


def parsed(lines: Iterable[str]) -> list[Decision]:
    """Parse entries from lines of JSON, as `paceline policy watch --json` prints them.

    ValueError: a line is not an entry; it is named.
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
    """Return the run whose step ended last; empty if there is none."""
    steps = [entry for entry in entries if entry.kind == "step"]
    return max(steps, key=lambda entry: entry.time).run_id if steps else ""


def read_facts(entries: Sequence[Decision], run_id: str = "") -> RunFacts:
    """Return the facts of a run, by default the newest one, and of the fleet during that run."""
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
    details = entry.details
    rows = tuple(
        InstanceRow(name, begin, end, int(samples), int(tokens), float(bubble), tuple(map(int, counts)))
        for name, begin, end, samples, tokens, bubble, counts in details["rows"]
    )
    pregenerated = details["pregenerated"]
    facts.steps.append(
        RunStep(
            step=int(details["step"]),
            version=int(details["version"]),
            begun=float(details["begun"]),
            ended=float(details["ended"]),
            samples=int(details["samples"]),
            tokens=int(details["tokens"]),
            pregenerated=None if pregenerated is None else int(pregenerated),
            instances=int(details["instances"]),
            bubble_seconds=float(details["bubble_seconds"]),
            bin=float(details["bin"]),
            rows=rows,
            all=tuple(map(int, details["all"])),
            last=tuple(map(_path, details["last"])),
        )
    )


def _path(details: Mapping[str, Any]) -> SamplePath:
    return SamplePath(
        prompt_id=str(details["prompt"]),
        slot=int(details["slot"]),
        tokens=int(details["tokens"]),
        accepted_at=float(details["accepted"]),
        ended_at=float(details["ended"]),
        parts={part: float(details["parts"][part]) for part in STEP_PARTS},
        decode_steps=int(details["decode_steps"]),
        verify_steps=int(details["verify_steps"]),
        restarts=int(details["restarts"]),
        spans=tuple(
            InstancePart(name, begin, end, int(tokens)) for name, begin, end, tokens in details["spans"]
        ),
    )


def _read_reward(facts: RunFacts, entry: Decision) -> None:
    details, step = entry.details, _step_of(facts, entry)
    if step is None:
        return
    low, high = float(details["low"]), float(details["high"])
    if not math.isfinite(high - low):
        raise ValueError("a chart cannot show rewards without bounds")
    step.reward_low = min(step.reward_low, low) if step.rewards else low
    step.reward_high = max(step.reward_high, high) if step.rewards else high
    step.rewards += int(details["count"])
    step.reward_sum += float(details["sum"])


def _read_plan(facts: RunFacts, entry: Decision) -> None:
    details, step = entry.details, _step_of(facts, entry)
    if step is not None:
        step.engine_steps += int(details["engine_steps"])
        step.predicted_seconds += float(details["predicted_seconds"])
        step.measured_seconds += float(details["measured_seconds"])
        for name, (verified, _, accepted) in details["drafts"].items():
            if verified:
                before = step.drafts.get(name, (0, 0))
                step.drafts[name] = before[0] + int(verified), before[1] + int(accepted)
    facts.planned_steps += int(details["engine_steps"])
    facts.lacking_steps += int(details.get("lacking_steps", 0))
    lengths = details.get("lengths", {})
    for name, sums in details["drafts"].items():
        facts.drafts.setdefault(name, DraftCounts()).add(sums, lengths.get(name, ()))


def _step_of(facts: RunFacts, entry: Decision) -> RunStep | None:
    """Return the step to which an entry belongs; None if the step has not ended.

    Of several steps with the entry's number it is the one that had begun last at the time of the entry.
    """
    number = int(entry.details["step"])
    found = [step for step in facts.steps if step.step == number]
    return next((step for step in reversed(found) if step.begun <= entry.time), found[0] if found else None)


def _read_weights(facts: RunFacts, entry: Decision) -> None:
    details = entry.details
    end = float(details["published"])
    facts.published.append(Published(int(details["version"]), float(details.get("started", end)), end))


def _read_filled(facts: RunFacts, entry: Decision) -> None:
    facts.filled += [
        Filled(str(name), float(begin), float(end)) for name, begin, end in entry.details["filled"]
    ]


def _read_move(facts: RunFacts, entry: Decision) -> None:
    details = entry.details
    samples = int(details.get("moved", details["samples"]))
    if samples:
        facts.moves.append(MoveFact(entry.time, str(details["donor"]), str(details["receiver"]), samples))


_READERS = {
    "step": _read_step,
    "reward": _read_reward,
    "speculation": _read_plan,
    "weights": _read_weights,
    "pregeneration": _read_filled,
    "migration": _read_move,
}
