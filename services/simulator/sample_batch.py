"""Samples that run together on a simulated instance, advanced by many steps at once. Pure.

Samples with the same sources of drafts are a cohort: each step brings every one of them the same tokens, on
average. So a cohort has one counter of tokens, its members are ordered by the count at which they end, and a step
costs nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import ceil

# Tokens by which a sample may be short of its end and have reached it: counters are sums of fractions.
_ROUNDING = 1e-6


@dataclass(slots=True, eq=False)
class SimulatedSample:
    """A sample. Lengths are in tokens; `covered` of its response are in a draft of its own.

    `decode_steps` are those that it took part in. `lease` is that of a pre-generated sample, 0 for others.
    """

    prompt: int
    slot: int
    prompt_tokens: int
    length: int
    number: int = 0
    covered: int = 0
    generated: float = 0.0
    decode_steps: int = 0
    lease: int = 0
    predicted: float = 0.0
    ends: int = 0
    ended_at: float = 0.0

    @property
    def kind(self) -> str:
        """Cohort that it belongs to now: background, covered by its own draft, or open."""
        if self.lease:
            return "background"
        return "covered" if self.generated + _ROUNDING < min(self.covered, self.length) else "open"

    @property
    def context(self) -> float:
        """Tokens of prompt and response."""
        return self.prompt_tokens + self.generated


@dataclass(slots=True, eq=False)
class _Cohort:
    progress: float = 0.0
    steps: int = 0
    # Context of all members if the counter were 0.
    base: float = 0.0
    # Counter and steps at which a member joined, and the number of its joining.
    members: dict[SimulatedSample, tuple[float, int, int]] = field(default_factory=dict)
    # (counter at which something changes for a member, number of its joining, it)
    changes: list[tuple[float, int, SimulatedSample]] = field(default_factory=list)
    joined: int = 0

    def add(self, sample: SimulatedSample, until: int) -> None:
        self.joined += 1
        self.members[sample] = (self.progress, self.steps, self.joined)
        self.base += sample.context - self.progress
        heapq.heappush(self.changes, (self.progress + until - sample.generated, self.joined, sample))

    def remove(self, sample: SimulatedSample) -> None:
        progress, steps, _ = self.members.pop(sample)
        self.base -= sample.context - progress
        sample.generated += self.progress - progress
        sample.decode_steps += self.steps - steps
        if not self.members:
            self.progress, self.base = 0.0, 0.0
            self.changes.clear()

    def next_change(self) -> float:
        """Return the tokens until something changes for a member."""
        while True:
            change, joined, sample = self.changes[0]
            if sample in self.members and self.members[sample][2] == joined:
                return change - self.progress
            heapq.heappop(self.changes)

    @property
    def context(self) -> float:
        return self.base + len(self.members) * self.progress


class SampleBatch:
    """Running samples by cohort."""

    def __init__(self) -> None:
        self._cohorts: dict[str, _Cohort] = {}
        self._of: dict[SimulatedSample, str] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, sample: SimulatedSample) -> bool:
        return sample in self._of

    @property
    def samples(self) -> list[SimulatedSample]:
        """The samples in the order in which they joined; their counters are as of then (see `generated`)."""
        return list(self._of)

    @property
    def context(self) -> float:
        """Tokens of all prompts and responses."""
        return sum(each.context for each in self._cohorts.values() if each.members)

    def counts(self) -> dict[str, int]:
        """Return the samples of each cohort that has any."""
        return {kind: len(each.members) for kind, each in sorted(self._cohorts.items()) if each.members}

    def add(self, sample: SimulatedSample) -> None:
        """Let a sample join."""
        kind = sample.kind
        until = min(sample.covered, sample.length) if kind == "covered" else sample.length
        self._cohorts.setdefault(kind, _Cohort()).add(sample, until)
        self._of[sample] = kind

    def remove(self, sample: SimulatedSample) -> None:
        """Let a sample leave; it then knows what it has generated."""
        self._cohorts[self._of.pop(sample)].remove(sample)

    def kind(self, sample: SimulatedSample) -> str:
        """Return the cohort of a sample."""
        return self._of[sample]

    def generated(self, sample: SimulatedSample) -> float:
        """Return the response tokens of a sample by now."""
        cohort = self._cohorts[self._of[sample]]
        return sample.generated + cohort.progress - cohort.members[sample][0]

    def steps_to_change(self, tokens: dict[str, float]) -> int:
        """Return the steps until a sample ends or its draft does, at so many tokens a step for each cohort."""
        return min(
            max(1, ceil((cohort.next_change() - _ROUNDING) / tokens[kind]))
            for kind, cohort in self._cohorts.items()
            if cohort.members
        )

    def advance(self, steps: int, tokens: dict[str, float]) -> list[SimulatedSample]:
        """Do steps; return the samples that have ended, which are gone, in the order of their ends."""
        changed = []
        for kind, cohort in self._cohorts.items():
            if not cohort.members:
                continue
            cohort.progress += steps * tokens[kind]
            cohort.steps += steps
            while cohort.members and cohort.next_change() <= _ROUNDING:
                sample = cohort.changes[0][2]
                self.remove(sample)
                changed.append(sample)
        ended = []
        for sample in changed:
            if sample.generated + _ROUNDING >= sample.length:
                sample.generated = float(sample.length)
                ended.append(sample)
            else:
                self.add(sample)
        return ended
