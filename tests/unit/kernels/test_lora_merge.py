"""A low-rank product added to a matrix, bit for bit as the reference says."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.lora_merge import add_product, add_product_reference


@given(
    rows=st.integers(0, 5),
    columns=st.integers(0, 70),
    ranks=st.integers(0, 9),
    scale=st.floats(-4, 4, width=32),
    seed=st.integers(0, 1 << 32),
)
def test_the_sums_are_those_of_the_reference_bit_for_bit(
    rows: int, columns: int, ranks: int, scale: float, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    weight, b, a = (
        (chance.standard_normal(shape) * 10.0 ** chance.integers(-6, 6, shape)).astype(np.float32)
        for shape in ((rows, columns), (rows, ranks), (ranks, columns))
    )
    expected = weight.copy()
    add_product_reference(expected, b, a, scale)
    halves = weight.copy()
    add_product(weight, b, a, scale)
    assert weight.tobytes() == expected.tobytes()
    for part in (slice(0, rows // 2), slice(rows // 2, rows)):
        add_product(halves[part], b[part], a, scale)
    assert halves.tobytes() == expected.tobytes(), "whoever shares the rows gets the same"
