"""The sums of `add_product` in plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.floating[Any]]


def add_product(weight: Matrix, b: Matrix, a: Matrix, scale: float) -> None:
    """Add `scale * b @ a` to `weight`, all of them float32, in place."""
    product = np.zeros_like(weight)
    for rank in range(b.shape[1]):
        product += b[:, rank, None] * a[rank]
    weight += np.float32(scale) * product
