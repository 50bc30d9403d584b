"""Steps with proposals, edits and masks in any mixture: the kernels decide as the host does, to the bit."""

import numpy as np
import pytest
import torch

from kernels.coupled_sampler.proposals import RowProposals
from kernels.tuning import Tuning, using
from tests.support.proposal_steps import random_step, sampled

SHORT = {0, 3, 5, 12, 16, 20}
"""Steps that have, between them, all that a row can ask for and every outcome."""
SMALL = Tuning(scan_block=64, scan_stages=1, search_block=64)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in SHORT else [pytest.mark.soak]) for seed in range(24)]
)
def test_steps_are_decided_as_on_the_host(seed, device):
    arguments = random_step(seed, width=150, requests=3)
    expected = sampled(arguments, torch.device("cpu"), "reference")
    with using(SMALL):
        found = sampled(arguments, device, "triton")
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.counts.tolist() == expected.counts.tolist()
    assert found.reused.tolist() == expected.reused.tolist()
    if expected.lowest is not None:
        np.testing.assert_array_equal(found.lowest.cpu().numpy(), expected.lowest.numpy())
    for name in ("logprobs", "processed"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), equal_nan=True, rtol=1e-5, atol=1e-4
        )


def test_at_temperature_0_a_proposal_is_accepted_iff_it_is_the_arg_max(device):
    """Whatever its odds are: they are of the sampled distribution, which has one token."""
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 1, (3, 150)).astype(np.float32))
    best = logits.argmax(1)
    arguments = random_step(0, 150, 1, plain=True) | {
        "logits": logits,
        "temperature": torch.zeros(1),
        "drafts": best[:2],
        "cu_rows": torch.tensor([0, 3]),
    }
    wanted, none = torch.stack([best[0], best[1], best[2] - 1]), torch.zeros(1, dtype=torch.bool)
    proposals = RowProposals(wanted, torch.full((3,), 2.0), torch.tensor([True, False, True]), none)
    for where, backend in ((torch.device("cpu"), "reference"), (device, "triton")):
        with using(SMALL):
            found = sampled(arguments | {"proposals": proposals}, where, backend)
        assert (found.tokens.tolist(), found.counts.tolist(), found.reused.tolist()) == (
            best.tolist(),
            [3],
            [2],
        )


def test_the_decision_is_the_same_to_the_last_bit_of_the_odds(device):
    """The least log-odds that reject, found by bisection on the host, reject on the device, those below do not."""
    rng = np.random.default_rng(4)
    width, wrong = 150, []
    logits = torch.from_numpy(rng.normal(0, 2, (1, width)).astype(np.float32))
    arguments = random_step(0, width, 1, plain=True) | {
        "logits": logits,
        "temperature": torch.ones(1),
        "drafts": torch.empty(0, dtype=torch.int64),
        "cu_rows": torch.tensor([0, 1]),
    }
    for token in rng.integers(0, width, 6).tolist():
        low, high = np.float32(-60), np.float32(60)
        while np.nextafter(low, high) < high:
            middle = np.float32((low + high) / 2)
            taken = sampled(proposing(arguments, token, middle), torch.device("cpu"), "reference").reused[0]
            low, high = (middle, high) if taken else (low, middle)
        with using(SMALL):
            found = [
                int(sampled(proposing(arguments, token, s), device, "triton").reused[0]) for s in (low, high)
            ]
        wrong += [] if found == [1, 0] else [(token, low, high, found)]
    assert not wrong


def proposing(arguments, token, odds):
    tokens, none = torch.tensor([token]), torch.zeros(1, dtype=torch.bool)
    return arguments | {"proposals": RowProposals(tokens, torch.tensor([float(odds)]), none, none)}
