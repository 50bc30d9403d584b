"""Saved sweeps: one file for each device, tensor parallelism, model and dtype."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.step_time.prior import MeasuredStep


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
