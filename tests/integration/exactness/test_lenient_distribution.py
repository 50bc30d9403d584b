"""How often a cached token is taken over, and what comes in its place: counted over seeds that count up.

Every census has fixed seeds, so a test gives the same figures in every run. 11 tokens, which vLLM pads to 64.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.generation.engine.types import Verifier
from tests.integration.exactness.conftest import Bench
from tests.support.census import Census
from tests.support.chi_square import chi_square
from tests.support.oracle import log_softmax

pytestmark = pytest.mark.timeout(400)

PROMPT, CACHED = (3, 4), (7, 2, 9)
# The acceptance of each cached token: its cached probability is what gives it.
ACCEPTANCE = (0.8, 0.55, 0.9)
# Samples, and a lenience that so many tell from 1 in every run: what the test can miss is smaller.
COUNTS = [
    pytest.param(8_000, 1.08, id="8,000"),
    pytest.param(40_000, 1.03, id="40,000", marks=pytest.mark.soak),
]
# The chance that a test of this kind fails without cause, were its seeds not fixed.
UNLIKELY = 1e-3


@pytest.mark.parametrize(("count", "lenience"), COUNTS)
def test_tokens_are_taken_over_as_often_as_the_rule_says_and_replaced_by_the_policys(
    llama: Bench, count: int, lenience: float
) -> None:
    rows = llama.oracle.logits([*PROMPT, *CACHED])[len(PROMPT) - 1 :]
    policy = np.exp([log_softmax(row) for row in rows])
    now = np.log(policy[np.arange(3), CACHED])
    then = tuple(float(p - math.log(a)) for p, a in zip(now, ACCEPTANCE, strict=True))
    census = Census(PROMPT, count, 4, verifier=Verifier.LENIENT, cached=CACHED, cached_logprobs=then)
    found = llama.host.count(census)
    assert found.drafted > count / 2

    # k tokens are taken over, and position k has a token of the policy, the rejected one included: the noise that
    # draws it is independent of the uniform that rejected.
    survival = np.cumprod((1.0, *ACCEPTANCE))
    ends = survival * (1 - np.array((*ACCEPTANCE, 0)))
    vocab_size = llama.host.vocab_size
    next_token = found.tokens[np.arange(count), found.reused]
    observed = np.zeros((4, vocab_size))
    np.add.at(observed, (found.reused, next_token), 1)
    expected = ends[:, None] * policy * count
    assert chi_square(observed, expected) > UNLIKELY
    for position, acceptance in enumerate(ACCEPTANCE):
        tried, kept = (found.reused >= position).sum(), (found.reused > position).sum()
        deviation = math.sqrt(tried * acceptance * (1 - acceptance))
        assert abs(kept - tried * acceptance) < 4 * deviation, position

    # Neighbouring seeds know nothing of each other.
    for distance in (1, 2, 64):
        pairs = np.zeros((4, 4))
        np.add.at(pairs, (found.reused[:-distance], found.reused[distance:]), 1)
        assert chi_square(pairs, np.outer(ends, ends) * pairs.sum()) > UNLIKELY, distance

    # The test can fail: a little more lenience would show.
    more = lenience * np.array(ACCEPTANCE)
    ends = np.cumprod((1.0, *more)) * (1 - np.array((*more, 0)))
    assert chi_square(observed, ends[:, None] * policy * count) < 1e-6
