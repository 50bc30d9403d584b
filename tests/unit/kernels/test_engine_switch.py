"""The engine's way through the kernels gives what its own way gives.

The kernels' entry function is called here with its reference, which test_triton.py compares the kernels with.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels import backend
from kernels.backend import Backend, BackendUnavailable
from services.generation.engine.attention.kernel_choice import use_kernels
from services.generation.engine.sampling import device_sampler
from services.generation.engine.sampling.noise import SampleNoise
from services.generation.engine.sampling.rows import Rows
from services.generation.engine.sampling.sampler import sample
from services.generation.engine.types import Verifier


@pytest.fixture(autouse=True)
def switch(monkeypatch):
    monkeypatch.setattr(backend, "_chosen", Backend.AUTO)


def verified(logits, masks, noise):
    rows = Rows(np.array([0, 1, 4, 6]), np.array([0, 7, 100]), np.array([1, 2, 3]))
    metadata = SimpleNamespace(
        all_greedy=False, temperature=torch.tensor([1.0, 0.0, 0.7]), no_penalties=True, **masks
    )
    return sample(logits, rows, metadata, noise, {})


@pytest.mark.parametrize(
    ("top_k", "top_p", "of_noise", "drawn"),
    [
        (None, None, {}, True),
        ([5, 300, 40], [0.9, 1.0, 0.4], {"processed_logprobs": True}, True),
        (None, [0.9, 1.0, 0.4], {"min_p": 0.01, "processed_logprobs": True}, True),
        (None, None, {"min_tokens": 102, "forbidden": (1, 2, 3)}, True),
        (None, None, {"verifier": Verifier.REJECTION}, False),
    ],
    ids=["plain", "masks", "min-p", "min-tokens", "rejection"],
)
def test_both_ways_give_the_same(top_k, top_p, of_noise, drawn, monkeypatch):
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (6, 300))).float()
    before = logits.clone()
    masks = {
        "top_k": None if top_k is None else torch.tensor(top_k),
        "top_p": None if top_p is None else torch.tensor(top_p),
    }
    noise = [SampleNoise(seed=seed, **of_noise) for seed in (3, 2**64 - 1, 5)]
    expected = verified(logits, masks, noise)

    calls = []
    real = device_sampler.draw
    monkeypatch.setattr(device_sampler, "choose", lambda _: Backend.TRITON)
    monkeypatch.setattr(device_sampler, "draw", lambda *a: calls.append(a) or real(*a))
    found = verified(logits, masks, noise)
    assert bool(calls) is drawn
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.counts, expected.counts)
    np.testing.assert_array_equal(found.reused, expected.reused)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)


def test_a_row_that_cannot_be_sampled_is_marked(monkeypatch):
    logits = torch.zeros(6, 10)
    logits[0] = torch.nan
    monkeypatch.setattr(device_sampler, "choose", lambda _: Backend.TRITON)
    found = verified(logits, {"top_k": None, "top_p": None}, [SampleNoise(seed=i) for i in range(3)])
    assert found.counts[0] == 1
    assert np.isnan(found.logprobs[0])


def test_on_cpu_auto_is_the_reference_and_triton_is_refused():
    assert use_kernels("auto", torch.device("cpu")) is Backend.AUTO
    with pytest.raises(BackendUnavailable, match="allowed here: auto, reference"):
        use_kernels("triton", torch.device("cpu"))
