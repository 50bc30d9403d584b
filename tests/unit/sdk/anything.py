"""Values that somebody might give for a field, right or wrong."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from paceline import types as t

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 3)
    | st.floats()
    | st.text(st.characters(), max_size=3)
    | st.binary(max_size=3)
    | st.sampled_from(
        [
            np.int8(-1),
            np.uint64(2**64 - 1),
            np.float32("nan"),
            np.float64(3.0),
            np.bool_(True),
            1j,
            object(),
            "\ud83d",
        ]
    )
)
arrays = st.sampled_from(
    [
        np.array(5),
        np.array([[1, 2]]),
        np.array([[1], [2]]),
        np.array([1.5, 2.0]),
        np.array([3.0, 4.0]),
        np.array(["a"]),
        np.array([None, 1], object),
        np.array([], np.float32),
        np.array([2**63], np.uint64),
        np.array([True]),
        np.array(["2020-01-01"], "datetime64[D]"),
    ]
)
anything = (
    scalars
    | arrays
    | st.lists(scalars, max_size=3)
    | st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2)
    | st.dictionaries(st.text(max_size=2), scalars, max_size=2)
    | st.frozensets(st.integers(0, 9), max_size=2)
    | st.just(range(3))
    | st.builds(lambda: (each for each in (1, 2)))
    | st.sampled_from(
        [t.SamplingParams(), t.Group("p", [1], 2), t.Stale.REFUSE, t.ExactnessLevel.EXACT, t.Group]
    )
)
"""Anything that somebody might give for a field."""
