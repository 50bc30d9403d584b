"""A calibration as it is kept: one file for each model, machine and dtype."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.policy.calibration import Errors, Fit
from services.policy.step_time import Architecture, StepTime
from services.policy.sweep import Point, Sweep


class UnusableCalibration(ValueError):
    """A calibration that cannot be read, or that is of another model or dtype."""


class Subject(BaseModel):
    """What was measured: a model by name and architecture, in a dtype, on a machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    machine: str
    dtype: str

    @classmethod
    def of(cls, name: str, architecture: Architecture, machine: str, dtype: str) -> Self:
        """Many folders are called `model`: the name goes with a fingerprint of the architecture."""
        fingerprint = hashlib.sha256(architecture.model_dump_json().encode()).hexdigest()[:8]
        return cls(model=f"{name}-{fingerprint}", machine=machine, dtype=dtype)

    @property
    def file_name(self) -> str:
        """A name of its own for each subject."""
        parts = (
            re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in (self.model, self.machine, self.dtype)
        )
        return "_".join(parts) + ".json"


class Calibration(BaseModel):
    """A fitted step-time model, the sweep it is from, and how far off it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: Subject
    step_time: StepTime
    fitted: Errors
    held_out: Errors
    points: tuple[Point, ...] = Field(repr=False)
    predicted: tuple[float, ...] = Field(repr=False)
    """Seconds, for each point."""

    @classmethod
    def of(cls, subject: Subject, fit: Fit, sweep: Sweep) -> Self:
        """What a fit found."""
        predicted = tuple(float(each) for each in fit.predicted)
        return cls(
            subject=subject,
            step_time=fit.step_time,
            fitted=fit.fitted,
            held_out=fit.held_out,
            points=sweep.points,
            predicted=predicted,
        )

    def save(self, folder: Path) -> Path:
        """Write it under its subject's name; the path. OSError where that cannot be done."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.subject.file_name
        path.write_text(self.model_dump_json(indent=1) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read one. Raises `UnusableCalibration`."""
        try:
            return cls.model_validate_json(path.read_text())
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            raise UnusableCalibration(f"{path} is no calibration: {error}") from error

    def require(self, architecture: Architecture, dtype: str) -> None:
        """Refuse a calibration of another model or dtype. Raises `UnusableCalibration`."""
        if self.step_time.architecture != architecture or self.subject.dtype != dtype:
            of = f"{self.subject.model} in {self.subject.dtype}"
            raise UnusableCalibration(f"the calibration is of {of}; this is another model or dtype")
