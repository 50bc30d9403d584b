"""Results do not depend on what a minimum or a maximum makes of NaN: versions of Triton do not agree on it.

Compiled code passes NaN over, and so does the interpreter of Triton 3.9. Those of 3.6 and 3.7 pass it on.
"""

import numpy as np
import pytest
import torch

from kernels.coupled_sampler.reference import floors
from kernels.coupled_sampler.reference import thresholds as specified
from kernels.coupled_sampler.triton_sample import LogitPart, thresholds
from kernels.tuning import Tuning, using
from kernels.w4a16 import quantise

WIDTH = 70
HIGHEST = np.finfo(np.float32).max
MASKS = [(0, 0.0, 0.0), (WIDTH - 1, 1.0, 0.0), (7, 0.9, 1e-3), (3, 1e-30, 1.0)]
"""top_k, top_p and min_p of a row."""


@pytest.fixture(params=["passed over", "passed on"], autouse=True)
def nan(request, device, monkeypatch):
    """Let the interpreter's minima and maxima pass NaN over, or on."""
    if device.type == "cuda":
        pytest.skip("what the interpreter does is replaced, and a device has its own instructions")
    from triton.runtime.interpreter import InterpreterBuilder

    low, high = (np.fmin, np.fmax) if request.param == "passed over" else (np.minimum, np.maximum)
    monkeypatch.setattr(InterpreterBuilder, "create_minnumf", lambda self, a, b: self.binary_op(a, b, low))
    monkeypatch.setattr(InterpreterBuilder, "create_maxnumf", lambda self, a, b: self.binary_op(a, b, high))


def extremes(rng):
    """Rows [R, WIDTH] of what float32 has: equal, huge, denormal and masked entries, and invalid rows."""
    flat = rng.normal(0, 3, WIDTH)
    even = np.arange(WIDTH) % 2 == 0
    rows = [
        np.full(WIDTH, HIGHEST),
        np.full(WIDTH, -HIGHEST),
        np.where(even, HIGHEST, -HIGHEST),
        np.where(even, flat * 1e30, -np.inf),
        np.where(np.arange(WIDTH) == 9, -2.5, -np.inf),
        np.where(even, -0.0, 0.0),
        rng.integers(-(2**23), 2**23, WIDTH) * 2.0**-149,
        np.where(even, flat, np.nan),
        np.where(even, flat, np.inf),
        np.full(WIDTH, -np.inf),
    ]
    return np.array(rows).astype(np.float32)


def test_thresholds_of_extreme_rows_are_the_specifications_to_the_bit(device):
    rows = extremes(np.random.default_rng(0))
    logits = np.repeat(rows, len(MASKS), axis=0)
    top_k, top_p, min_p = (np.array(mask * len(rows)) for mask in zip(*MASKS, strict=True))
    given = {
        "temperature": np.tile(np.array([1.0, 0.5], np.float32), len(logits) // 2),
        "top_k": top_k,
        "top_p": top_p.astype(np.float32),
        "floors": floors(min_p.astype(np.float32)),
        "owners": np.arange(len(logits)),
    }
    there = {name: torch.from_numpy(vector).to(device) for name, vector in given.items()}
    out = torch.empty(len(logits), device=device)
    part = LogitPart(torch.from_numpy(logits).to(device), there["owners"], there["owners"])
    with using(Tuning(search_block=128)):
        thresholds([part], there, out)
    scaled = logits / given["temperature"][:, None]
    expected = specified(scaled, top_k, given["top_p"], given["floors"])
    np.testing.assert_array_equal(out.cpu().numpy(), expected)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_groups_that_are_not_finite_are_refused_and_make_no_integers(bad, symmetric, device):
    weight = torch.randn(4, 64, device=device)
    weight[1] = bad
    with pytest.raises(ValueError, match="finite"):
        quantise(weight, 32, symmetric=symmetric, backend="triton")
