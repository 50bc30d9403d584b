"""The step-time model that an engine starts with."""

from __future__ import annotations

import json
from pathlib import Path

from services.policy.correction import CorrectedStepTime, Correction
from services.policy.step_time import Architecture, StepTime, UnsupportedArchitecture
from services.policy.stored import Calibration

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a weight and of a value in the KV, by dtype."""
# How far measured steps may correct a model: one that was fitted here, and a guess.
_FITTED_LIMIT, _GUESSED_LIMIT = 4.0, 64.0


def architecture_of(model: Path, dtype: str) -> Architecture:
    """Of a model folder in Hugging Face layout.

    Raises:
        UnsupportedArchitecture: no dense model, a config that cannot be read, or a dtype of unknown size.
    """
    if dtype not in VALUE_BYTES:
        raise UnsupportedArchitecture(f"the size of {dtype} is not known")
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UnsupportedArchitecture(f"{model} has no config to read: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedArchitecture(f"the config of {model} is no object")
    return Architecture.of(config, VALUE_BYTES[dtype])


def step_time_for(model: Path, dtype: str, calibration: Path | None) -> CorrectedStepTime:
    """A model's step time by its calibration, or without one by a guess that measured steps correct further.

    Raises:
        UnsupportedArchitecture: the model has no step-time model.
        UnusableCalibration: the calibration cannot be read or is of another model.
    """
    architecture = architecture_of(model, dtype)
    if calibration is None:
        return CorrectedStepTime(StepTime.prior(architecture), Correction(_GUESSED_LIMIT))
    found = Calibration.load(calibration)
    found.require(architecture, dtype)
    return CorrectedStepTime(found.step_time, Correction(_FITTED_LIMIT))
