"""Responses that the fleet benchmark replays, and when its instances report them."""

from __future__ import annotations

import asyncio
import itertools
import statistics

from hypothesis import given
from hypothesis import strategies as st

from bench.fleet.simulated_instance import EngineClock
from bench.fleet.workload import MAX_TOKENS, Reporting, SimulatedPolicy
from paceline.internal.v1 import generation_pb2 as pb
from services.generation.loop.work_stream import CheckpointRules

POLICY = SimulatedPolicy.create()


def test_lengths_are_the_same_in_every_process_and_have_a_long_tail() -> None:
    assert SimulatedPolicy.create() == POLICY
    ordered = sorted(POLICY.lengths)
    assert 300 < statistics.median(ordered) < 340
    assert 400 < statistics.mean(ordered) < 460
    assert 1500 < ordered[len(ordered) * 99 // 100] <= ordered[-1] == MAX_TOKENS


def test_responses_may_be_long() -> None:
    policy = SimulatedPolicy.create(32_768, 32_768)
    ordered = sorted(policy.lengths)
    assert ordered[len(ordered) * 6 // 10] == ordered[-1] == policy.longest == 32_768
    assert 20_000 < statistics.mean(ordered) < 28_000
    tokens, logprobs = policy.slice((1 << 64) - 1, 0, 32_768)
    assert len(tokens) == len(logprobs) == 32_768


@given(seed=st.integers(0, 2**64 - 1), cuts=st.lists(st.integers(0, MAX_TOKENS), max_size=4))
def test_a_response_is_the_same_in_however_many_parts_it_is_read(seed: int, cuts: list[int]) -> None:
    length = POLICY.length(seed)
    bounds = [0, *sorted(min(cut, length) for cut in cuts), length]
    parts = [POLICY.slice(seed, begin, end) for begin, end in itertools.pairwise(bounds)]
    tokens, logprobs = POLICY.slice(seed, 0, length)
    assert [token for part, _ in parts for token in part] == tokens
    assert [logprob for _, part in parts for logprob in part] == logprobs
    assert len(tokens) == len(logprobs) == length


def test_time_may_run_faster() -> None:
    usual, quick = Reporting.checkpoints(50, 1), Reporting.checkpoints(50, 10)
    assert (usual.speed, usual.rules) == (50, CheckpointRules())
    assert (quick.speed, quick.rules.seconds) == (500, CheckpointRules().seconds / 10)


async def test_simulated_engines_report_every_token_once_and_every_end() -> None:
    clock = EngineClock(POLICY, Reporting.checkpoints(20_000.0, 1.0))
    stream = clock.open()
    stream.report_every(0.02)
    seeds = {handle: handle << 20 | handle for handle in range(20)}
    for handle, seed in seeds.items():
        clock.begin(stream, pb.WorkItem(handle=handle, seed=seed))
    tokens: dict[int, list[int]] = {handle: [] for handle in seeds}
    ended = list[int]()
    async with asyncio.timeout(60):
        running = asyncio.create_task(clock.run())
        while len(ended) < len(seeds):
            response = await stream.outbox.get()
            assert isinstance(response, pb.WorkResponse)
            for delta in response.deltas:
                assert delta.handle not in ended
                tokens[delta.handle].extend(delta.tokens.token_ids)
            ended.extend(finished.handle for finished in response.finished)
        running.cancel()
    assert sorted(ended) == list(seeds)
    assert tokens == {handle: POLICY.slice(seed, 0, POLICY.length(seed))[0] for handle, seed in seeds.items()}
