"""Names of prompts and rollouts, and token arrays, with their checks."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Name: TypeAlias = "str | int | tuple[str | int, ...]"
"""A string, an integer, or a flat tuple of such: it can be saved and loaded unchanged."""


def check_name(name: Any) -> None:
    """Raise TypeError if `name` is no Name."""
    parts = name if type(name) is tuple else (name,)
    if not all(type(part) in (str, int) for part in parts):
        raise TypeError(f"a name is a str, an int or a tuple of such, not {name!r}")


def check_version(version: Any) -> None:
    """Raise TypeError or ValueError if `version` is no policy version."""
    if type(version) is not int:
        raise TypeError(f"a version is an int, not {version!r}")
    if abs(version) >= 1 << 53:
        raise ValueError(f"version {version} is beyond 2**53")


def token_array(tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Return token ids as a new int32 array; ValueError unless they are integers in [0, 2**31), in one row."""
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens must be one row, got shape {list(array.shape)}")
    if not array.size:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers, got {array.dtype}")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= 1 << 31:
        raise ValueError(f"token ids must be in [0, 2**31), got {lowest if lowest < 0 else highest}")
    return np.array(array, np.int32)
