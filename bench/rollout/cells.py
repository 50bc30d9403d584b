"""Define the cells of the benchmark: a system in a regime in a round.

This module has the figures of steps, the files that keep them, the order of cells, and the estimated remaining
time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from bench.report import keep
from bench.rollout.modelled import ModelledStep
from bench.rollout.registry import PLAIN


class CellName(NamedTuple):
    """System, regime and round."""

    system: str
    regime: str
    round: int

    @property
    def file(self) -> str:
        """Return the name of the cell's file."""
        return f"{self.system}-{self.regime}-{self.round}.json".replace(" ", "_")


class InstanceLoad(NamedTuple):
    """Work of an instance for a step of the run."""

    steps: int
    """Engine steps."""
    rows: int
    """Tokens computed by these steps: of prompts, draft tokens, and the newest one of each sample."""
    seconds: float
    """Seconds from the begin of its first sample to the end of its last one."""


class AbsentReason(StrEnum):
    """Reason for which a cell has no figures."""

    PACKAGE_MISSING = "package missing"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of one training step. Times are in seconds; None if a system has no such figure."""

    step: int
    rollout_seconds: float
    push_seconds: float
    tokens: int
    length_max: int
    decode_steps_mean: float
    decode_steps_max: int
    drafted: int
    accepted: int
    verified: int
    """Decode steps of samples that verified a draft."""
    covered: int | None
    """Tokens that were pre-generated when the step began."""
    bubble_seconds_mean: float
    """Time in which an instance had no work of the step left, until the step ended."""
    bubble_seconds_max: float
    moved_bytes: float
    """KV of samples that moved between instances."""
    reward: float
    compared: int
    """Tokens with the same prefix as the recorded response."""
    differing: int
    """Samples that differ from the recorded ones."""
    planned: Mapping[str, float]
    """Engine steps by the outcome of draft planning; empty without a planner."""
    last_steps: int
    """Decode steps of the sample that ended last: the critical path."""
    last_seconds: float
    """Time of the last sample, from its submission to its end."""
    modelled: Mapping[str, ModelledStep]
    """Times that its engine steps would take on other devices, by device."""
    loads: tuple[InstanceLoad, ...] = ()
    """Load of each instance that had samples of the step."""
    samples: int = 0


@dataclass(frozen=True, slots=True)
class TableCell:
    """A measured cell, or the reason why it was not measured."""

    name: CellName
    key: str
    """Hash of the inputs that its figures depend on."""
    update_seconds: float
    """Seconds of the trainer's update, the same for all systems of a regime."""
    seconds: float
    """Wall time of the whole cell."""
    steps: tuple[StepFigures, ...] = ()
    absent: AbsentReason | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return dict(_CELLS.dump_python(self, mode="json"))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TableCell:
        """Return a cell from plain data. ValueError for data of another form."""
        return _CELLS.validate_python(data)


_CELLS = TypeAdapter(TableCell)


class CellFolder:
    """Cells on disk, one file each; a file is written atomically."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, name: CellName) -> TableCell | None:
        """Return a cell with any key; None if there is none, or it cannot be read."""
        try:
            return TableCell.from_json(json.loads((self._folder / name.file).read_text()))
        except (OSError, ValueError):
            return None

    def keep(self, cell: TableCell) -> None:
        """Write a cell, replacing an earlier one."""
        keep(self._folder / cell.name.file, cell.to_json(), indent=1)


def code_hash(sources: Iterable[Path], without: Iterable[Path] = ()) -> str:
    """Return the hash of the named Python files, and of all Python files in the named folders."""
    digest, left_out = hashlib.sha256(), set(without)
    for source in sources:
        for path in sorted(source.rglob("*.py")) if source.is_dir() else (source,):
            if path not in left_out:
                digest.update(f"{path}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cell_key(*parts: object) -> str:
    """Return the hash of the inputs of a cell's figures; parts are distinguished by their `repr`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


_FIRST_GUESS = 90.0
"""Estimated seconds of a cell while none of its kind has been measured."""


def planned(systems: Sequence[str], regimes: Sequence[str], rounds: int) -> list[CellName]:
    """Return the cells in their order: all systems of a regime in a row, so that a round is paired in time.

    Plain decoding leads the first round, because the trainer's time is derived from it. Every other round runs the
    systems in reverse order.
    """
    others = [name for name in systems if name != PLAIN]
    order = [PLAIN, *others]
    return [
        CellName(system, regime, number)
        for number in range(rounds)
        for regime in regimes
        for system in (reversed(order) if number % 2 else order)
    ]


def seconds_left(left: Iterable[CellName], known: Mapping[CellName, float]) -> float:
    """Return the estimated time of cells, by the same cell of another round, or else by the other cells."""
    like: dict[tuple[str, str], float] = {(name.system, name.regime): took for name, took in known.items()}
    typical = fmean(known.values()) if known else _FIRST_GUESS
    return sum(like.get((name.system, name.regime), typical) for name in left)
