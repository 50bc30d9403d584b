"""Sweep of an engine's step times: the batches to measure, the prior fitted to them, and the saved file.

`swept_batches` chooses the batches, `StepTimePrior` predicts steps that were not measured yet, and `SavedSweep`
keeps a sweep in a file for each device, tensor parallelism, model and dtype.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

SWEEP_SECONDS = 2.0
"""Time of the measured steps of a sweep."""
SHORT_CONTEXT = 64
"""Longest mean context of a sample, in tokens, that counts as short."""
PROMPT, LONG_PROMPT = 8, 4096
"""Prompt tokens of most steps, and of the steps with a long context."""
# Rows per sample: of a single sample, of one with a long context, of larger batches.
_ALONE, _LONG, _TOGETHER = (2, 3, 4, 6, 9, 13, 17), (9,), (2, 4, 8, 16)
_SMALL = 8
Floats = NDArray[np.float64]
# Weight of the assumption that neighbouring pieces of `by_rows` have the same slope, against measured times. It is
# small, so that it only decides where the measurements leave a choice.
_SMOOTHNESS = 1e-3
# Weight of a plain step among those that verification is fitted to.
_PLAIN_WEIGHT = 0.3
# Least part of the shortest step that the rows take.
_LEAST = 1 / 16
# Without a sweep: the time of a step of one row, and the number of rows of a step that takes twice as long.
_UNKNOWN_SECONDS, _UNKNOWN_ROWS = 1e-2, 256.0
# Tokens of context that take as long to read as a step of one sample: a scale for what is learned of contexts.
_CONTEXT_TOKENS = 32768.0


@dataclass(frozen=True, slots=True)
class SweptBatch:
    """Batch to measure: samples with prompts of this length, and the verified tokens of each step, rising."""

    samples: int
    prompt: int
    rows: Sequence[int]


def swept_batches(
    max_samples: int, max_rows: int, max_length: int, graphs: Sequence[int] = ()
) -> list[SweptBatch]:
    """Return the batches to measure, the most informative first, within the limits of an engine.

    Two seconds are enough to learn how steps grow with rows and samples: small and large batches, plainly and with
    drafts, at the numbers of rows between which times may jump. Contexts are short, because prefilling long ones
    would take longer than all else. One sample with a longer prompt shows the cost of verification by context: the
    longer it is, the less the noise of its steps matters for even longer contexts. A slow engine ends the sweep
    early, and has then measured the most informative steps.

    Args:
        max_samples: largest batch.
        max_rows: most verified tokens of a step.
        max_length: longest sample, in tokens.
        graphs: numbers of verified tokens for which the engine has graphs, rising. Steps between two of them are
            measured at the larger; the largest is measured, and the step beyond it, in which times jump.
    """
    largest = min(max_samples, max_rows)
    powers = [1 << k for k in range(largest.bit_length()) if 1 << k < largest]
    middle = [each for each in powers if each >= _SMALL]
    verified = {largest, *middle[:1], *middle[2:3]}
    order = [1, largest, *sorted({*powers, *verified} - {1, largest}, key=lambda n: (n not in verified, n))]
    widths = {1: _ALONE} | dict.fromkeys(verified - {1}, _TOGETHER)
    batches = [SweptBatch(n, PROMPT, _rows(n, widths.get(n, ()), max_rows, graphs)) for n in order]
    long = SweptBatch(1, min(LONG_PROMPT, max_length // 2), _rows(1, _LONG, max_rows, graphs))
    return [*batches[:2], long, *batches[2:]]


def _rows(samples: int, each: Sequence[int], most: int, graphs: Sequence[int]) -> list[int]:
    """Return the rows of steps: `samples` alone, and with each number of rows per sample in `each`."""
    wanted = {samples * k for k in each}
    if graphs:
        wanted = {graphs[bisect_left(graphs, rows)] if rows <= graphs[-1] else rows for rows in wanted}
        if wanted and samples <= graphs[-1] <= max(wanted):
            wanted |= {graphs[-1], graphs[-1] + 1}
    return sorted(rows for rows in {samples, *wanted} if samples <= rows <= most)


class MeasuredStep(BaseModel):
    """Shape of a step, and the seconds that it took."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: int = Field(ge=1)
    rows: int = Field(ge=1)
    context: int = Field(ge=0)
    seconds: float = Field(gt=0, allow_inf_nan=False)


class StepTimePrior(NamedTuple):
    """Step time by rows and samples at short contexts, in the form that the compiled functions read.

    The times of the sweep, at some numbers of samples and of verified tokens (rows), are taken as

        plain(samples)                                                  without drafts,
        max(plain(samples), by_rows(rows) + per_sample * samples + v)   with drafts,

    with `plain` and `by_rows` piecewise linear between the measurements and never falling. This is no model of a
    network or a device: the weights that a row touches, tiles, graphs and links are all in the two lines.
    """

    corners: Floats
    """Corners of `by_rows` [2, k]: rows, which rise, and seconds; at least two."""
    plains: Floats
    """Corners of `plain` [2, k]: samples and seconds."""
    per_sample: float
    """Seconds per sample in a verifying step."""
    verifying: float
    """Seconds of any verification, v."""
    per_token: float
    """Scale of the seconds per token of context."""

    @classmethod
    def unknown(cls, seconds: float = _UNKNOWN_SECONDS) -> Self:
        """Return the prior of an engine of which one step is known, or none."""
        line = np.array([[1.0, _UNKNOWN_ROWS], [seconds, 2 * seconds]])
        return cls(line, line, 0.0, 0.0, seconds / _CONTEXT_TOKENS)

    @classmethod
    def of(cls, sweep: Sequence[MeasuredStep]) -> Self:
        """Return the prior that fits a sweep best, by relative least squares."""
        plain = sorted((each.samples, each.seconds) for each in sweep if each.rows == each.samples)
        samples = np.unique([float(each) for each, _ in plain])
        if len(samples) < 2:
            return cls.unknown(plain[0][1]) if plain else cls.unknown()
        seconds = [min(time for n, time in plain if n == each) for each in samples]
        plains = np.array([samples, rising(seconds)])
        corners, per_sample, verifying = _by_rows(sweep)
        return cls(corners, plains, per_sample, verifying, seconds[0] / _CONTEXT_TOKENS)


def rising(values: Sequence[float] | Floats) -> Floats:
    """Return the values with each run that falls replaced by its mean: isotonic regression by pooling neighbours.

    A running maximum would keep each time that noise made too long for all larger steps up to the next longer time.
    """
    # Sum and number of the values that are pooled.
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = float(value), 1
        while pools and pools[-1][0] * count >= total * pools[-1][1]:
            more, number = pools.pop()
            total, count = total + more, count + number
        pools.append((total, count))
    return np.repeat([total / count for total, count in pools], [count for _, count in pools])


def _by_rows(sweep: Sequence[MeasuredStep]) -> tuple[Floats, float, float]:
    """Return the corners of `by_rows`, and the terms of samples and of any verification."""
    shapes = [(each.samples, each.rows, each.seconds) for each in sweep]
    samples, rows, seconds = np.array(shapes, np.float64).T
    corners, verifying = np.unique(rows), rows > samples
    # Hat functions: the share of each corner in the time of a step.
    hats = np.array([np.interp(rows, corners, one) for one in np.eye(len(corners))]).T
    # Measured verification has more weight than plain steps.
    weights = np.where(verifying, 1.0, _PLAIN_WEIGHT) / seconds
    design = np.column_stack([hats, samples, verifying]) * weights[:, None]
    slopes = np.diff(np.eye(len(corners)), axis=0) / np.diff(corners)[:, None]
    bends = np.diff(slopes, axis=0) * corners[1:-1, None] / seconds.min()
    left = np.vstack([design, _SMOOTHNESS * np.pad(bends, ((0, 0), (0, 2)))])
    right = np.concatenate([weights * seconds, np.zeros(len(bends))])
    solved = np.linalg.lstsq(left, right, rcond=None)[0]
    by_rows = np.maximum(rising(solved[:-2]), _LEAST * seconds.min())
    return np.array([corners, by_rows]), float(solved[-2]), float(solved[-1])


class UnusableSweep(ValueError):
    """Raised for a saved sweep that cannot be read."""


class SweepSubject(BaseModel):
    """Subject of a sweep: the steps of another subject take another time."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    """Name of the device itself, such as NVIDIA H100 80GB HBM3; of a CPU with the cores in use."""
    tensor_parallel_size: int = Field(ge=1)
    model: str
    dtype: str

    @classmethod
    def of(cls, model: Path, device: str, tensor_parallel_size: int, dtype: str) -> Self:
        """Return a subject whose model's name has a fingerprint of its config: many folders are called `model`."""
        try:
            config = (model / "config.json").read_bytes()
        except OSError:
            config = b""
        name = f"{model.resolve().name}-{hashlib.sha256(config).hexdigest()[:8]}"
        return cls(device=device, tensor_parallel_size=tensor_parallel_size, model=name, dtype=dtype)

    @property
    def file_name(self) -> str:
        """File name, unique for each subject."""
        parts = (self.model, self.device, f"tp{self.tensor_parallel_size}", self.dtype)
        return "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts) + ".json"


class SavedSweep(BaseModel):
    """Measured steps of a subject."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: SweepSubject
    steps: tuple[MeasuredStep, ...] = Field(min_length=1, repr=False)

    def save(self, folder: Path) -> Path:
        """Write it to a file named after its subject, and return the path; OSError if that fails."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.subject.file_name
        path.write_text(self.model_dump_json(indent=1) + "\n")
        return path

    @classmethod
    def load(cls, path: Path, subject: SweepSubject) -> Self | None:
        """Return the sweep in a file, or in a folder the one of the subject; None where it is of another subject.

        Raises:
            UnusableSweep: the file cannot be read, or there is nothing at the path.
        """
        if path.is_dir():
            path = path / subject.file_name
            if not path.exists():
                return None
        found = cls.read(path)
        return found if found.subject == subject else None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the sweep in a file, whatever its subject. UnusableSweep if it cannot be read."""
        try:
            return cls.model_validate_json(path.read_text())
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            raise UnusableSweep(f"{path} is no saved sweep: {error}") from error
