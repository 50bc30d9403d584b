"""Compare the tokens of two runs of the same samples, and judge their first differences. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.coupled.engine_process import RunnerUp


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """Tokens of a run by sample, and the runner-up of each token."""

    tokens: Mapping[str, Sequence[int]]
    runners_up: Mapping[str, Sequence[RunnerUp]]


@dataclass(frozen=True, slots=True)
class Divergence:
    """First difference of a sample: each run's margin, and whether each drew the other's runner-up."""

    sample: str
    position: int
    margin: float
    """The larger margin of the two runs, in nats."""
    swapped: bool


@dataclass(frozen=True, slots=True)
class Differences:
    """Comparison of two runs. Tokens after a sample's first difference have another context and do not count."""

    compared: int
    samples: int
    found: tuple[Divergence, ...]

    @property
    def per_thousand(self) -> float:
        """Return the number of tokens in a thousand that differ although all tokens before them are equal."""
        return 1000 * len(self.found) / self.compared if self.compared else 0.0

    @property
    def largest_margin(self) -> float:
        """Return the largest margin of a difference, in nats; 0 without differences."""
        return max((each.margin for each in self.found), default=0.0)

    @property
    def no_near_ties(self) -> int:
        """Return the number of differences in which a run's other token was not the runner-up."""
        return sum(not each.swapped for each in self.found)


def compare(base: JudgedRun, other: JudgedRun) -> Differences:
    """Compare two runs of the same samples. ValueError if their samples differ, or one lacks runners-up."""
    if base.tokens.keys() != other.tokens.keys():
        raise ValueError(
            f"the runs have other samples: {sorted(base.tokens.keys() ^ other.tokens.keys())[:5]}"
        )
    compared, found = 0, list[Divergence]()
    for name, ours in base.tokens.items():
        theirs = other.tokens[name]
        for run in (base, other):
            if len(run.runners_up[name]) != len(run.tokens[name]):
                raise ValueError(f"sample {name} has {len(run.runners_up[name])} runners-up")
        both = range(min(len(ours), len(theirs)))
        at = next((place for place in both if ours[place] != theirs[place]), None)
        if at is None:
            compared += len(both)
            continue
        compared += at + 1
        here, there = base.runners_up[name][at], other.runners_up[name][at]
        swapped = here.token == theirs[at] and there.token == ours[at]
        found.append(Divergence(name, at, max(here.margin, there.margin), swapped))
    return Differences(compared, len(base.tokens), tuple(found))


def joined(parts: Iterable[Differences]) -> Differences:
    """Return the sum of several comparisons."""
    known = list(parts)
    return Differences(
        sum(each.compared for each in known),
        sum(each.samples for each in known),
        tuple(one for each in known for one in each.found),
    )


def same_share(per_thousand: float, length: int) -> float:
    """Return the share of samples of `length` tokens without a difference, if each token differs alike."""
    share: float = (1 - per_thousand / 1000) ** length
    return share
