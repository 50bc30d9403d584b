"""Measured steps of a sweep over batch sizes, context lengths and draft lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel, ConfigDict, Field


class Point(BaseModel):
    """A cell of the sweep: what the step was, its median time, and whether the fit may see it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests: int = Field(ge=1)
    rows: int = Field(ge=1)
    context: int = Field(ge=0)
    seconds: float = Field(gt=0, allow_inf_nan=False)
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class Sweep:
    """Points as columns, [n] each."""

    points: tuple[Point, ...]

    def column(self, name: str) -> np.ndarray:
        """A field of every point."""
        return np.array([getattr(point, name) for point in self.points], np.float64)

    @property
    def held_out(self) -> np.ndarray:
        """Which points the fit does not see."""
        return np.array([point.held_out for point in self.points], bool)

    @property
    def plain(self) -> np.ndarray:
        """Which points are plain decoding."""
        return np.array([point.rows == point.requests for point in self.points], bool)
