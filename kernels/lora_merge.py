"""Add a low-rank product to a matrix, with the same result on every machine.

The order of sums in a library's matrix product differs between processors and numbers of threads. Here it is part
of the definition: float32, by ascending rank, each product and each sum rounded once. Rows are done one by one, so
that a row of sums stays in the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.jit import entry, source_fingerprint

Matrix = npt.NDArray[np.floating[Any]]


def add_product_reference(weight: Matrix, b: Matrix, a: Matrix, scale: float) -> None:
    """Add `scale * b @ a` to `weight`, all float32, in place: the same sums in plain numpy."""
    product = np.zeros_like(weight)
    for rank in range(b.shape[1]):
        product += b[:, rank, None] * a[rank]
    weight += np.float32(scale) * product


_FINGERPRINT = source_fingerprint(Path(__file__).parent)


def add_product(weight: Matrix, b: Matrix, a: Matrix, scale: float) -> None:
    """Add `scale * b @ a` to `weight`, in place: C-contiguous float32 of shapes [m, n], [m, r], [r, n].

    Runs on one processor without the GIL.
    """
    _add_product(weight, b, a, np.float32(scale))


@entry(_FINGERPRINT)
def _add_product(weight: Any, b: Any, a: Any, scale: Any) -> None:
    rows, columns = weight.shape
    ranks = a.shape[0]
    product = np.empty(columns, np.float32)
    for row in range(rows):
        product[:] = np.float32(0.0)
        rank = 0
        # Four at a time save loads and stores; the order of the sums is as for one at a time.
        while rank + 4 <= ranks:
            b0, b1, b2, b3 = b[row, rank], b[row, rank + 1], b[row, rank + 2], b[row, rank + 3]
            for column in range(columns):
                total = product[column] + b0 * a[rank, column]
                total += b1 * a[rank + 1, column]
                total += b2 * a[rank + 2, column]
                product[column] = total + b3 * a[rank + 3, column]
            rank += 4
        while rank < ranks:
            factor = b[row, rank]
            for column in range(columns):
                product[column] += factor * a[rank, column]
            rank += 1
        for column in range(columns):
            weight[row, column] += scale * product[column]
