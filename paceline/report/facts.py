"""Facts of a run: what a report shows of it. Times are unix seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.types import BatchStatus, Decision, Instance

PARTS = ("queue", "prefill", "plain", "verified", "moves", "between")
"""Parts of a sample's time, in order."""


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """Part of one instance in a step; begin and end are None where it had no sample. `counts`: samples by bin."""

    instance_id: str
    begin: float | None
    end: float | None
    samples: int
    tokens: int
    bubble: float
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InstancePart:
    """Tokens of a sample that one instance generated, and when."""

    instance_id: str
    begin: float
    end: float
    tokens: int


@dataclass(frozen=True, slots=True)
class SamplePath:
    """Way of a sample through its step, and the seconds of each part of its time."""

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
    """Verifications of one drafter: draft tokens, accepted ones, and counts by length (`drafted_lengths[n]`)."""

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
        """Return, for each position from the first on, the tokens drafted and accepted there."""
        found = []
        for place in range(1, len(self.drafted_lengths)):
            drafted, accepted = sum(self.drafted_lengths[place:]), sum(self.accepted_lengths[place:])
            if not drafted:
                break
            found.append((drafted, accepted))
        return found


@dataclass(slots=True)
class RunStep:
    """One step of the run. Sums of rewards and plans are of all their entries."""

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
    attempt: int = 1
    """Which start of the trainer did it, from 1 on."""
    replaced: bool = False
    """A later attempt did it again, or came back before it."""

    @property
    def name(self) -> str:
        """Words for it: `step 3`, and later `step 3, attempt 2`."""
        return f"step {self.step}" + (f", attempt {self.attempt}" if self.attempt > 1 else "")

    @property
    def seconds(self) -> float:
        """Time of the step's rollout."""
        return self.ended - self.begun

    @property
    def reward(self) -> float | None:
        """Mean reward; None where none was reported."""
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
    """State of the platform while the run goes on."""

    time: float
    instances: tuple[Instance, ...]
    batches: tuple[BatchStatus, ...]


@dataclass(slots=True)
class RunFacts:
    """Everything that a report shows. Steps are in order of their ends; `unread` entries could not be read."""

    run_id: str
    steps: list[RunStep] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)
    filled: list[Filled] = field(default_factory=list)
    moves: list[MoveFact] = field(default_factory=list)
    drafts: dict[str, DraftCounts] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    unread: int = 0
    now: FleetNow | None = None
    trouble: str = ""
    """Sentence on why the platform could not be asked for what goes on."""
