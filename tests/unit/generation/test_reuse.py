"""Which parts of cached rollouts are verified: chunks in order, within the budget, until the first refusal."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.sampling import Sampling
from services.generation.draft_cache.lenient_reuse import CACHED_SOURCE, Reuse, fair_shares, guess_of
from services.generation.engine.types import EngineRequest, EngineSampleState, SampleStep, Verifier

BUDGET = 1 << 20


def request(sample_id: str, cached: list[int], **fields: object) -> EngineRequest:
    made = EngineRequest(
        sample_id,
        (5,),
        (),
        Sampling(),
        1,
        verifier=Verifier.LENIENT,
        cached=tuple(cached),
        cached_logprobs=(-1.0,) * len(cached),
    )
    return made if not fields else EngineRequest(**{n: getattr(made, n) for n in made.__slots__} | fields)


def state(sample_id: str, response: list[int], room: int = 1000) -> EngineSampleState:
    return EngineSampleState(sample_id, [5], response, room, 1 + len(response))


def step(sample_id: str, tokens: list[int], reused: int, drafted: int = 0) -> SampleStep:
    return SampleStep(sample_id, tokens, [-1.0] * len(tokens), drafted=drafted, reused=reused)


@given(
    rollout=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    chunk=st.integers(1, 20),
    refused=st.integers(0, 70),
    cuts=st.lists(st.integers(0, 20), max_size=80),
)
def test_a_rollout_is_offered_in_order_until_a_token_of_it_is_refused(
    rollout: list[int], chunk: int, refused: int, cuts: list[int]
) -> None:
    """Whatever vLLM leaves of a chunk (`cuts`)."""
    reuse = Reuse(chunk)
    reuse.begin(request("a", rollout))
    response: list[int] = []
    most = min(refused, len(rollout))
    while "a" in reuse:
        here = len(response)
        offered = reuse.drafts([state("a", response)], BUDGET).get("a", []) if here else []
        assert offered == rollout[here : here + len(offered)]
        # The last token of the rollout needs no draft of its own.
        assert len(offered) == (min(chunk, len(rollout) - 1 - here) if here else 0)
        verified = offered[: cuts.pop()] if cuts else offered
        kept = min(most - here, len(verified) + 1)
        tokens = rollout[here : here + kept] + ([] if kept == len(verified) + 1 else [77])
        done = reuse.learn(step("a", tokens, kept, len(verified)))
        assert done == (kept, len(verified) + 1)
        response += tokens
    assert response[:most] == rollout[:most]
    assert len(response) == most + (most < len(rollout))
    assert reuse.learn(step("a", [1, 2], 0, 1)) is None
    assert reuse.drafts([state("a", response)], BUDGET) == {}
    assert not reuse


@pytest.mark.parametrize("chunk", [1, 3, 8, 128])
def test_a_rollout_that_is_kept_takes_a_step_for_each_chunk_and_its_last_row(chunk: int) -> None:
    reuse, rollout = Reuse(chunk), list(range(100))
    reuse.begin(request("a", rollout))
    reuse.learn(step("a", rollout[:1], 1))
    position, steps = 1, 1
    while "a" in reuse:
        count = len(reuse.drafts([state("a", rollout[:position])], BUDGET).get("a", [])) + 1
        reuse.learn(step("a", rollout[position : position + count], count, count - 1))
        position, steps = position + count, steps + 1
    assert (position, steps) == (100, 1 + math.ceil(99 / (chunk + 1)))


def test_the_length_limit_of_a_sample_bounds_its_chunk() -> None:
    reuse = Reuse(8)
    reuse.begin(request("a", list(range(30))))
    reuse.learn(step("a", [0], 1))
    assert reuse.drafts([state("a", [0], room=3)], BUDGET) == {"a": [1, 2, 3]}
    assert reuse.drafts([state("a", [0], room=0)], BUDGET) == {}
    assert reuse.drafts([state("a", [0], room=-1)], BUDGET) == {}


def test_only_lenient_samples_that_start_afresh_with_a_rollout_follow_one() -> None:
    reuse = Reuse()
    for other in (
        request("a", []),
        request("b", [1, 2], prefix=(1,)),
        request("c", [1, 2], verifier=Verifier.COUPLED),
    ):
        reuse.begin(other)
        assert other.sample_id not in reuse
    assert len(reuse) == 0
    reuse.begin(request("d", [1, 2]))
    assert "d" in reuse
    reuse.end("d")
    reuse.end("unknown")
    assert not reuse


def test_samples_that_follow_nothing_get_nothing() -> None:
    reuse = Reuse(4)
    reuse.begin(request("a", list(range(9))))
    reuse.learn(step("a", [0], 1))
    assert reuse.drafts([state("b", [3]), state("a", [0])], BUDGET) == {"a": [1, 2, 3, 4]}


def test_chunks_share_what_the_step_has_left() -> None:
    reuse = Reuse(chunk=128)
    states = []
    for i in range(4):
        reuse.begin(request(f"s{i}", list(range(10 if i == 0 else 200))))
        reuse.learn(step(f"s{i}", [0], 1))
        states.append(state(f"s{i}", [0]))
    lengths = {name: len(tokens) for name, tokens in reuse.drafts(states, 50).items()}
    assert lengths == {"s0": 8, "s1": 14, "s2": 14, "s3": 14}
    assert reuse.drafts(states, 0) == reuse.drafts(states, -35) == {}


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 200), max_size=20), st.integers(0, 2000))
def test_shares_are_even_and_nothing_is_left_over(wanted: dict[str, int], budget: int) -> None:
    given_out = fair_shares(wanted, budget)
    assert given_out.keys() == wanted.keys()
    assert all(0 <= given_out[name] <= wanted[name] for name in wanted)
    assert sum(given_out.values()) == min(budget, sum(wanted.values()))
    poorest = min((given_out[name] for name in wanted if given_out[name] < wanted[name]), default=None)
    assert poorest is None or max(given_out.values()) <= poorest + 1


def test_drafters_get_the_rollout_where_nothing_else_was_given() -> None:
    assert guess_of(request("a", [1, 2])) == ((1, 2), CACHED_SOURCE)
    assert guess_of(request("a", [1, 2], given=(3,))) == ((3,), "reference")
    assert guess_of(request("a", [])) == ((), "reference")
