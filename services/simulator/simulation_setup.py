"""Setup of a simulation: the cluster, its settings, its sources of drafts, and its workload.

Response lengths are drawn from a distribution or taken from a trace.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import log
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.bubbles.config import BubblesConfig
from services.contracts.knobs import Knobs
from services.reallocator.config import ReallocatorConfig
from services.simulator.device_tables import DeviceTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PREGENERATED = "pregenerated"
"""Name of the source of pre-generated drafts, which a sample has up to the end of its draft."""


@dataclass(frozen=True, slots=True)
class SimulatedSource:
    """Source of drafts with the same acceptance for all samples.

    `acceptance` is the probability that a token is accepted if all before it in its draft are; a sequence has one
    for each position, the last of which applies to all later ones. `passes` are the step times of a draft model,
    which makes a token a pass; None for a source that looks tokens up, which takes no time.
    """

    name: str
    acceptance: float | tuple[float, ...]
    passes: DeviceTable | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.each or not all(0 <= each <= 1 for each in self.each):
            raise ValueError(
                f"acceptance of {self.name or 'a source'} must be between 0 and 1, not {self.acceptance}"
            )

    @property
    def each(self) -> tuple[float, ...]:
        """Acceptance by position."""
        return self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,)

    def by_position(self, width: int) -> Floats:
        """Return the acceptance of the first `width` positions."""
        places = np.minimum(np.arange(width), len(self.each) - 1)
        return np.array(self.each, np.float64)[places]


@dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """Log-normal lengths, cut at a limit.

    `median` is in tokens and `spread` the standard deviation of the logarithm; `alike` is the share of its variance
    that the samples of a prompt have in common. A share `endless` of the samples runs to the limit.
    """

    median: float
    spread: float
    limit: int
    alike: float = 0.5
    endless: float = 0.0

    def __post_init__(self) -> None:
        for name in ("median", "limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.spread < 10:
            raise ValueError(f"spread must be between 0 and 10, not {self.spread}")
        for name in ("alike", "endless"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, not {getattr(self, name)}")

    def draw(self, prompts: int, samples: int, random: np.random.Generator) -> Ints:
        """Return tokens [prompts, samples], each at least 1."""
        common, own = random.standard_normal((prompts, 1)), random.standard_normal((prompts, samples))
        drawn = np.exp(
            log(self.median) + self.spread * (self.alike**0.5 * common + (1 - self.alike) ** 0.5 * own)
        )
        drawn[random.random((prompts, samples)) < self.endless] = self.limit
        return np.clip(drawn, 1, self.limit).astype(np.int64)


@dataclass(frozen=True, slots=True)
class TracedLengths:
    """Lengths of a recorded run: draw prompts with replacement, and for each some of its recorded lengths."""

    groups: tuple[tuple[int, ...], ...]

    def draw(self, prompts: int, samples: int, random: np.random.Generator) -> Ints:
        """Return tokens [prompts, samples]."""
        picked = [self.groups[group] for group in random.integers(len(self.groups), size=prompts)]
        drawn = [random.choice(each, samples, replace=samples > len(each)) for each in picked]
        return np.array(drawn, np.int64)


Lengths = LogNormalLengths | TracedLengths
"""Response lengths of a step."""


def read_trace(path: Path) -> TracedLengths:
    """Return the lengths of a trace: JSON Lines, each a list of the response lengths of one prompt, in tokens.

    Raises:
        ValueError: a line is no such list (the message has its number), or there are no lines.
    """
    groups = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            groups.append(_group(line, f"{path}, line {number}"))
    if not groups:
        raise ValueError(f"{path} has no lengths")
    return TracedLengths(tuple(groups))


def _group(line: str, where: str) -> tuple[int, ...]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not isinstance(found, list) or not found or not all(type(each) is int and each > 0 for each in found):
        raise ValueError(f"{where}: not a list of response lengths in tokens, each at least 1")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """Steps of a run: `prompts` of `prompt_tokens`, each with `samples`, and how long responses are."""

    lengths: Lengths
    prompts: int
    samples: int
    prompt_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("prompts", "samples", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def drawn(self, steps: int, seed: int) -> list[tuple[Ints, Ints]]:
        """Return the lengths [prompts, samples] of each step, and its prompts' lengths in an earlier epoch."""
        random = np.random.default_rng(seed)
        both = [self.lengths.draw(self.prompts, 2 * self.samples, random) for _ in range(steps)]
        return [(each[:, : self.samples], each[:, self.samples :]) for each in both]


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """A cluster and what it does. Times are in seconds.

    `bubbles` and `reallocation` are off if None. `foreseen`: the gateway has seen the prompts in an earlier epoch.
    `room_factor`, `affinity_slack` and `draft_cost` are the gateway's. `kv_seconds` is the time to send the KV of a
    token from one instance to another, while the sample decodes.
    """

    device: DeviceTable
    instances: int
    workload: SimulatedWorkload
    steps: int = 1
    knobs: Knobs = field(default_factory=Knobs)
    sources: tuple[SimulatedSource, ...] = ()
    pregenerated: SimulatedSource | None = None
    bubbles: BubblesConfig | None = None
    reallocation: ReallocatorConfig | None = None
    update_seconds: float = 0.0
    max_running: int = 256
    foreseen: bool = True
    room_factor: float = 1.25
    affinity_slack: float = 1.0
    draft_cost: float = 0.15
    kv_seconds: float = 3e-6
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("instances", "steps", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.update_seconds >= 0:
            raise ValueError(f"update_seconds must not be negative, as {self.update_seconds} is")

    @property
    def samples(self) -> int:
        """Samples of all steps together."""
        return self.steps * self.workload.prompts * self.workload.samples
