"""A proposal is accepted iff its probability exceeds the bound: against float64, and how often."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.coupled_sampler.noise import Purpose, uniform
from kernels.coupled_sampler.proposals import LEAST, RowProposals, accepts, log_odds, uniforms
from kernels.coupled_sampler.sample import Edited, sample


def accepted(row, token, theta):
    odds = log_odds(torch.tensor([theta], dtype=torch.float64)).numpy()
    return bool(accepts(row[None], np.array([token]), odds)[0])


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 300), spread=st.sampled_from([0.1, 2.0, 15.0]))
def test_acceptance_is_that_of_the_probability_in_float64(seed, size, spread):
    rng = np.random.default_rng(seed)
    row = rng.normal(0, spread, size).astype(np.float32)
    row[rng.random(size) < 0.2] = -np.inf
    token = int(rng.integers(size))
    weights = np.exp(row.astype(np.float64) - max(row.max(), -1e30))
    p = weights[token] / max(weights.sum(), 1e-300)
    theta = float(rng.choice([rng.random(), p * 0.9999, p * 1.0001, 1e-9]))
    # Rounding of a difference of logits, relative to p, and of what is left beside it.
    if abs(theta - p) <= 2e-5 * max(p, 1e-12):
        return
    assert accepted(row, token, theta) == (p > theta and row[token] > -np.inf)


def test_the_only_token_is_accepted_whatever_is_drawn():
    row = np.array([-np.inf, 3.0, -np.inf], np.float32)
    for theta in (0.0, 2.0**-33, 0.5, 1 - 2.0**-33):
        assert accepted(row, 1, theta)
    for theta in (1.0, 1.5, np.nan):
        assert not accepted(row, 1, theta)


def test_log_odds_end_where_probabilities_do():
    found = log_odds(torch.tensor([-1.0, 0.0, 0.5, 1.0, np.inf, np.nan], dtype=torch.float64))
    assert found.dtype == torch.float32
    assert found[:5].tolist() == [LEAST, LEAST, 0.0, np.inf, np.inf]
    assert found[5].isnan()


def arguments(rows=3, **changes):
    ids = torch.zeros(2, dtype=torch.int64)
    given = {
        "logits": torch.zeros(rows, 8),
        "seeds": ids,
        "positions": ids,
        "temperature": torch.ones(2),
        "drafts": torch.zeros(1, dtype=torch.int64),
        "cu_rows": torch.tensor([0, 1, 3]),
    }
    return given | changes


def proposals(**changes):
    given = {
        "tokens": torch.tensor([-1, 0, -1]),
        "log_odds": torch.zeros(3),
        "raw": torch.zeros(3, dtype=torch.bool),
        "residual": torch.zeros(2, dtype=torch.bool),
    }
    return RowProposals(**given | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"proposals": proposals(tokens=torch.tensor([-1, 8, 0]))},
            r"proposals.tokens must be -1 or in 0..7",
        ),
        (
            {"proposals": proposals(tokens=torch.tensor([-2, 0, 0]))},
            r"proposals.tokens must be -1 or in 0..7",
        ),
        ({"proposals": proposals(log_odds=torch.zeros(2))}, r"proposals.log_odds must have shape \[3\]"),
        ({"proposals": proposals(residual=torch.zeros(2))}, "proposals.residual must be bool"),
        (
            {"proposals": proposals(raw=torch.zeros(3, dtype=torch.bool, device="meta"))},
            "proposals.raw must be on cpu",
        ),
        (
            {"proposals": proposals(log_odds=torch.zeros(3, device="meta"))},
            "proposals.log_odds must be on cpu",
        ),
        ({"edited": Edited(torch.tensor([1, 1]), torch.zeros(2, 8))}, "edited.rows must ascend"),
        (
            {"edited": Edited(torch.tensor([3]), torch.zeros(1, 8))},
            "edited.rows must ascend within the 3 rows",
        ),
        ({"edited": Edited(torch.tensor([0]), torch.zeros(1, 7))}, r"edited.logits must have shape \[1, 8\]"),
        ({"min_p": torch.zeros(3)}, r"min_p must have shape \[2\]"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        sample(**arguments(**change))


def test_a_rejected_draft_is_left_out_of_the_residual():
    logits = torch.full((2000, 8), -torch.inf)
    logits[:, :2] = torch.tensor([3.0, 0.0])
    cu = torch.arange(0, 2001, 2)
    seeds = torch.arange(1000)
    drafted = torch.zeros(2000, dtype=torch.int64)
    drafted[1::2] = -1
    none = torch.zeros(2000, dtype=torch.bool)
    # Bounds of 2 reject everything; token 0 has a probability of 0.95.
    rejected = RowProposals(drafted, torch.full((2000,), torch.inf), none, torch.ones(1000, dtype=torch.bool))
    drafts = torch.zeros(1000, dtype=torch.int64)
    found = sample(logits, seeds, seeds * 0, torch.ones(1000), drafts, cu, proposals=rejected)
    assert (found.tokens[::2] == 1).all()
    assert (found.counts == 1).all()
    assert (found.reused == 0).all()


_PAIRS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))


@settings(deadline=None)
@given(
    pairs=st.lists(_PAIRS, min_size=1).map(lambda more: [(0, 0), (2**64 - 1, 2**32 - 1), *more]),
    purpose=st.sampled_from(Purpose),
)
def test_many_uniforms_are_the_single_ones(pairs, purpose):
    seeds = torch.from_numpy(np.array([seed for seed, _ in pairs], np.uint64).view(np.int64))
    positions = torch.tensor([position for _, position in pairs])
    assert uniforms(seeds, positions, purpose).tolist() == [uniform(*pair, purpose) for pair in pairs]
