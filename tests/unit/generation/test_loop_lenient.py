"""LENIENT samples in the engine loop: chunks of their rollouts whatever the speculation, and what is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import generation_pb2 as pb
from services.generation.draft_cache.lenient_reuse import CACHED_SOURCE, Reuse
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.engine.types import EngineLoad, EngineSampleState, SampleStep, Verifier
from services.generation.loop.metrics import EngineMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.loop.work_stream import WorkStream
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.speculation import Speculation
from tests.unit.generation.scripted import REFUSED, ScriptedEngine, sample_request, scripted_loop, settled

WAIT = 60.0
CHUNK = 3


class Rig:
    """A loop over a scripted engine, and one stream."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.registry = CollectorRegistry()
        self.metrics = EngineMetrics(self.registry)
        self.drafts = SampleDrafts(self.metrics, reuse=Reuse(CHUNK))
        self.loop = scripted_loop(
            self.engine,
            self.drafts,
            self.metrics,
            flush_interval=50.0,
            max_waiting=64,
            clock=self.engine.clock,
        )
        self.stream = WorkStream(asyncio.get_running_loop())
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.verified: dict[int, list[float]] = {}
        self.finished: dict[int, pb.Finished] = {}

    async def run(self, handle: int, *requests: dict[str, Any]) -> None:
        """Start samples with handles from `handle` on, step until all have ended, and read what came out."""
        loop = self.loop

        def start() -> None:
            loop.open(self.stream)
            for i, fields in enumerate(requests):
                request = sample_request(loop.next_sample_id(), **fields)
                loop.start_sample(self.stream, handle + i, request)
            self.engine.allow(100)

        await self.call(start)
        while await self.call(lambda: bool(loop.samples)):
            pass
        await asyncio.sleep(0)
        while not self.stream.outbox.empty():
            self._read(self.stream.outbox.get_nowait())

    async def call(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wait_for(asyncio.wrap_future(self.loop.call(function)), WAIT)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def _read(self, event: pb.WorkResponse | Exception | None) -> None:
        assert isinstance(event, pb.WorkResponse)
        for delta in event.deltas:
            # The tokens that were taken over come first, in each delta and in the response.
            before = len(self.tokens.get(delta.handle, []))
            if delta.verified_logprobs:
                assert before == len(self.verified.get(delta.handle, []))
            self.tokens.setdefault(delta.handle, []).extend(delta.tokens.token_ids)
            self.logprobs.setdefault(delta.handle, []).extend(delta.tokens.logprobs)
            self.verified.setdefault(delta.handle, []).extend(delta.verified_logprobs)
        self.finished |= {finished.handle: finished for finished in event.finished}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    made.loop.start()
    await asyncio.wait_for(asyncio.wrap_future(made.loop.ready), WAIT)
    yield made
    made.loop.stop()
    made.loop.join(WAIT)
    assert not made.loop.is_alive()


def lenient(cached: list[int], **fields: Any) -> dict[str, Any]:
    """Fields of a request that takes over a rollout; its p_then is half a nat below p_now."""
    return {
        "verifier": Verifier.LENIENT,
        "cached": tuple(cached),
        "cached_logprobs": tuple(-token - 0.5 for token in cached),
        **fields,
    }


def speculate(rig: Rig) -> None:
    rig.drafts.speculation = Speculation(
        [ReferenceDrafter()], FixedLengthPlanner(window=4, floor=0.5), 512, rig.metrics
    )


@pytest.mark.parametrize("speculating", [False, True])
async def test_a_rollout_is_taken_over_in_chunks_whatever_the_speculation(
    rig: Rig, speculating: bool
) -> None:
    if speculating:
        speculate(rig)
    cached = [40, 41, 42, 43, 44, 45, REFUSED, 47, 48]
    await rig.run(1, lenient(cached, max_tokens=12))
    assert rig.tokens[1] == [40, 41, 42, 43, 44, 45, 6, 7, 8, 9, 10, 11]
    assert rig.logprobs[1] == [-40.5, -41.5, -42.5, -43.5, -44.5, -45.5, -6, -7, -8, -9, -10, -11]
    assert rig.verified[1] == [-40, -41, -42, -43, -44, -45]
    finished = rig.finished[1]
    assert (finished.reused_prefix, finished.cached_tokens) == (6, len(cached))
    # Two chunks of three drafts: all of the first is kept and its last row too, of the second two.
    (source,) = (s for s in finished.draft_sources if s.drafter == CACHED_SOURCE)
    assert (source.drafted, source.accepted) == (6, 5)
    assert rig.value("paceline_reuse_tokens_total") == 6
    assert rig.value("paceline_reuse_verify_steps_total") == 2
    assert rig.value("paceline_reuse_verified_rows_total") == 8
    if not speculating:
        assert (finished.verify_steps, finished.decode_steps) == (2, 2 + 5)


async def test_a_sample_that_has_left_its_rollout_drafts_from_the_rest_of_it(rig: Rig) -> None:
    """What the policy samples from position 2 on is in the rollout."""
    speculate(rig)
    await rig.run(1, lenient([40, REFUSED, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=10))
    assert rig.tokens[1] == [40, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    sources = {s.drafter: (s.drafted, s.accepted) for s in rig.finished[1].draft_sources}
    assert sources[CACHED_SOURCE][1] >= 1 + 4
    assert rig.finished[1].decode_steps < 8
    # Only what was verified by the coupled rule is speculation.
    assert (
        rig.value("paceline_speculation_verify_steps_total", drafter=CACHED_SOURCE)
        == rig.finished[1].verify_steps - 1
    )
    assert rig.value("paceline_reuse_verify_steps_total") == 1
    assert rig.finished[1].reused_prefix == 1


async def test_samples_of_all_kinds_run_side_by_side(rig: Rig) -> None:
    speculate(rig)
    whole = list(range(60, 80))
    await rig.run(
        1,
        lenient(whole, max_tokens=20),
        {"max_tokens": 9, "given": tuple(range(9))},
        lenient([], max_tokens=5),
        lenient(whole, max_tokens=6, prefix=(0, 1)),
    )
    assert rig.tokens == {1: whole, 2: list(range(9)), 3: [0, 1, 2, 3, 4], 4: [2, 3, 4, 5]}
    assert {handle: f.reused_prefix for handle, f in rig.finished.items()} == {1: 20, 2: 0, 3: 0, 4: 0}
    assert {handle: f.cached_tokens for handle, f in rig.finished.items()} == {1: 20, 2: 0, 3: 0, 4: 20}
    assert not rig.verified[2] + rig.verified[3] + rig.verified[4]
    assert {s.drafter for s in rig.finished[2].draft_sources} == {"reference"}
    # 20 tokens in chunks of three and a row each.
    assert rig.finished[1].decode_steps == 5
    assert len(rig.drafts.reuse) == 0


async def test_an_aborted_sample_is_followed_no_more(rig: Rig) -> None:
    def start() -> None:
        rig.loop.open(rig.stream)
        rig.loop.start_sample(
            rig.stream, 1, sample_request("a", max_tokens=50, **lenient(list(range(60, 90))))
        )
        rig.engine.allow(2)

    await rig.call(start)
    while not await rig.call(lambda: settled(rig.loop)):
        pass
    assert "a" in rig.drafts.reuse
    assert await rig.call(rig.loop.abort_all) == 1
    assert not rig.drafts.reuse
    while 1 not in rig.finished:
        rig._read(await asyncio.wait_for(rig.stream.outbox.get(), WAIT))
    assert rig.tokens[1] == list(range(60, 68))
    assert rig.finished[1].reused_prefix == 8


def test_a_chunk_in_flight_when_its_sample_leaves_the_rollout_is_one_of_the_rollout() -> None:
    """An engine that schedules ahead verifies one more chunk before the refusal in the last one is known."""
    registry = CollectorRegistry()
    drafts = SampleDrafts(EngineMetrics(registry), reuse=Reuse(2))
    drafts.reuse.begin(sample_request("a", **lenient(list(range(10, 30)))))
    response = [9]
    engine: Any = SimpleNamespace(
        decoding=lambda: [EngineSampleState("a", [1], response, 40, 1 + len(response))],
        load=EngineLoad(1, 0, 0.0),
        row_capacity=100,
        prompt_rows=0,
        put_drafts=lambda made: made,
    )

    def outcome(tokens: list[int], accepted: int, reused: int) -> list[str]:
        response.extend(tokens)
        step = SampleStep("a", tokens, [-1.0] * len(tokens), None, 2, accepted, reused)
        return drafts.learn([step], later=1)

    drafts.put(engine)
    drafts.put(engine)
    assert outcome([10, 99], accepted=1, reused=1) == [CACHED_SOURCE]
    assert "a" not in drafts.reuse
    drafts.put(engine)
    assert outcome([98], accepted=0, reused=0) == [CACHED_SOURCE]
    drafts.put(engine)
    assert drafts.learn([SampleStep("a", [97], [-1.0])], later=1) == [""]
    assert registry.get_sample_value("paceline_reuse_verified_rows_total") == 6
