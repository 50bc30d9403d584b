"""Options of a training run, and their flags; without torch, so that help and wrong flags are answered at once."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from examples.tinymath.curriculum import TINYMATH, Curriculum
from paceline import Exactness, ExactnessLevel, SamplingParams

MODEL = Path(__file__).parent / "model"
_EXACTNESS = (ExactnessLevel.EXACT, ExactnessLevel.COUPLED_HISTORY, ExactnessLevel.LENIENT)
_METAVARS = {int: "N", float: "X"}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a training run: length, problems and sampling."""

    steps: int = 10
    prompts: int = 16
    """Groups of a step."""
    samples: int = 8
    """Samples of a group."""
    pool: int = 16
    """Number of problems; each epoch has them in a new order. If it equals `prompts`, steps are comparable."""
    max_tokens: int = 800
    temperature: float = 1.0
    lr: float = 5e-4
    threads: int = 1
    """CPU threads of the update; more are useful for a larger model, or if the engines leave cores free."""
    seed: int = 0
    exactness: ExactnessLevel = ExactnessLevel.EXACT
    """Use of rollouts of earlier steps: exact, coupled_history or lenient."""
    lenience: float = round(math.exp(0.5), 3)
    """The l of lenient: a cached token is kept with probability min(1, l * p_now / p_then)."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts", "samples", "pool", "max_tokens", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; must be at least 1")
        if not 0 <= self.lr < math.inf:
            raise ValueError(f"--lr is {self.lr}; must be at least 0 and finite")

    @property
    def asked(self) -> Exactness:
        """The exactness of every batch."""
        lenient = self.exactness is ExactnessLevel.LENIENT
        return Exactness(self.exactness, self.lenience if lenient else None)

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of every batch."""
        return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens)


WORDS_OPTIONS = Options(
    steps=4, prompts=8, samples=4, pool=8, max_tokens=400, temperature=0.7, lr=1e-5, threads=2
)
"""Options of a short run on problems in words with a model of some 100 million parameters."""


def usual_options(curriculum: Curriculum) -> Options:
    """Return the default options for a curriculum."""
    return Options() if curriculum is TINYMATH else WORDS_OPTIONS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each field of `Options`."""
    for name, value in asdict(Options()).items():
        words = getattr(WORDS_OPTIONS, name)
        also = "" if words == value else f"; {words} for problems in words"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(value),
            metavar=_METAVARS.get(type(value)),
            choices=_EXACTNESS if isinstance(value, ExactnessLevel) else None,
            help=f"default: {value}{also}",
        )


def read_options(given: argparse.Namespace, usual: Options = Options()) -> Options:
    """Return the given options, and defaults for the others."""
    found = {name: getattr(given, name) for name in asdict(usual)}
    return replace(usual, **{name: value for name, value in found.items() if value is not None})
