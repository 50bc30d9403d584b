"""Items that wait for their rollouts: whatever comes first, each gets one answer, and only one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from google.rpc import code_pb2
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import sample_pb2
from services.contracts.rollout import RolloutKind, StoredRollout
from services.contracts.sampling import ModelLimits
from services.drafts.client import Fetched
from services.generation.draft_cache.cache import DraftCache, Shards
from services.generation.draft_cache.fetcher import ShardFetcher
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.loop.metrics import EngineMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.loop.work_items import AdmissionTerms
from services.generation.loop.work_stream import WorkStream
from services.generation.server.sample_intake import SampleIntake
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.speculation import Speculation
from tests.support.instances import item
from tests.unit.generation.rollouts import rollout
from tests.unit.generation.scripted import ScriptedEngine, scripted_loop
from tests.unit.generation.test_fetcher import Store

WAIT = 60.0
LENIENT = {"level": sample_pb2.EXACTNESS_LEVEL_LENIENT, "lenience": 2.0}
TOKENS = 12


class Rig:
    """An intake over a scripted engine that steps when it is allowed to, and a store that answers when told."""

    def __init__(self, wait_seconds: float = 3600) -> None:
        self.engine = ScriptedEngine()
        self.registry = CollectorRegistry()
        metrics = EngineMetrics(self.registry)
        self.cache = DraftCache(512, 1 << 30)
        speculation = Speculation([ReferenceDrafter()], FixedLengthPlanner(4), 512, metrics)
        self.drafts = SampleDrafts(metrics, self.cache, speculation)
        self.loop = scripted_loop(self.engine, self.drafts, metrics, flush_interval=1, max_waiting=8)
        self.loop.start()
        self.loop.ready.result(WAIT)
        self.version = 0
        limits = ModelLimits(512, 64, has_text=True)
        self.store = Store()

        async def deliver(shards: Shards) -> None:
            await self.loop.execute(lambda: self.loop.drafts.add_shards(shards, self.loop.samples))

        fetched_for = self.cache.fetched_for
        self.fetcher = ShardFetcher(self.store, fetched_for, deliver, metrics.rollouts)  # type: ignore[arg-type]
        self.intake = SampleIntake(
            self.loop,
            lambda: AdmissionTerms(self.version, limits),
            self.fetcher,
            lambda stream, claim: None,
            metrics.rollouts,
            wait_seconds,
        )
        self.responses: list[pb.WorkResponse] = []

    async def open(self) -> WorkStream:
        stream = WorkStream(asyncio.get_running_loop())
        await self.call(lambda: self.loop.open(stream))
        return stream

    async def call(self, function: Any) -> Any:
        return await asyncio.wait_for(asyncio.wrap_future(self.loop.call(function)), WAIT)

    def answer(self, *rollouts: StoredRollout) -> None:
        """Let the store answer."""
        self.store.rollouts = list(rollouts)
        self.store.open.set()

    async def started(self, stream: WorkStream, *handles: int) -> None:
        async with asyncio.timeout(WAIT):
            while not set(handles) <= set(await self.call(lambda: list(stream.samples))):
                pass

    async def following(self, stream: WorkStream, handle: int) -> None:
        """Wait until a sample runs and has a rollout of its own seed."""
        await self.started(stream, handle)
        async with asyncio.timeout(WAIT):
            while stream.samples[handle].rollout is None:
                await self.call(lambda: None)

    async def stepped(self, steps: int) -> None:
        """Let the engine step so often, and wait until it has."""
        await self.call(lambda: self.engine.allow(steps))
        async with asyncio.timeout(WAIT):
            while await self.call(lambda: self.engine.permits):
                pass

    async def over(self, stream: WorkStream, *handles: int) -> dict[int, pb.Finished | pb.Refused]:
        """Return the ends of these, and of whatever else has ended until then, once the engine steps."""
        await self.call(lambda: self.engine.allow(1000))
        return await self.ended(stream, *handles)

    async def ended(self, stream: WorkStream, *handles: int) -> dict[int, pb.Finished | pb.Refused]:
        """As `over`, with the engine as it is."""
        ends: dict[int, pb.Finished | pb.Refused] = {}
        async with asyncio.timeout(WAIT):
            while not set(handles) <= ends.keys():
                response = await stream.outbox.get()
                assert isinstance(response, pb.WorkResponse)
                self.responses.append(response)
                for each in [*response.finished, *response.refused]:
                    assert each.handle not in ends or isinstance(each, pb.Refused), "two ends"
                    ends[each.handle] = each
        return ends

    def tokens(self, handle: int) -> list[int]:
        deltas = [each for response in self.responses for each in response.deltas if each.handle == handle]
        return [token for each in deltas for token in each.tokens.token_ids]

    def value(self, name: str) -> float | None:
        return self.registry.get_sample_value(name)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await close(made)


async def close(rig: Rig) -> None:
    await rig.fetcher.close()
    for task in list(rig.intake._waits):
        task.cancel()
    rig.loop.stop()
    rig.loop.join(WAIT)


def lenient(handle: int, prompt_id: str = "p", **fields: Any) -> pb.WorkItem:
    return named(handle, prompt_id, **({"exactness": LENIENT} | fields))


def named(handle: int, prompt_id: str = "p", **fields: Any) -> pb.WorkItem:
    known = {"run_id": "r", "prompt_id": prompt_id, "step": 3, "seed": 100 + handle, "max_tokens": TOKENS}
    return item(handle, [1, 2], **(known | fields))


def starts(*items: pb.WorkItem, abort: Sequence[int] = ()) -> pb.WorkRequest:
    return pb.WorkRequest(start=items, abort=abort)


def reason(end: pb.Finished | pb.Refused) -> str:
    if isinstance(end, pb.Refused):
        return code_pb2.Code.Name(end.code)
    return sample_pb2.FinishReason.Name(end.finish_reason).removeprefix("FINISH_REASON_")


async def test_a_lenient_sample_starts_with_its_cached_rollout_once_that_is_here(rig: Rig) -> None:
    stream = await rig.open()
    rig.intake.take(stream, starts(lenient(1)))
    await rig.call(lambda: None)
    assert list(stream.parked) == [1]
    assert rig.loop.samples.real_count == 0
    rig.answer(rollout([7, 8], logprobs=[-1, -2]))
    await rig.started(stream, 1)
    request = stream.samples[1].request
    assert (request.cached, request.cached_logprobs, request.lenience) == ((7, 8), (-1, -2), 2.0)
    (end,) = (await rig.over(stream, 1)).values()
    assert isinstance(end, pb.Finished)
    assert end.cached_tokens == 2
    assert rig.value("paceline_drafts_waits_expired_total") == 0


async def test_the_others_of_a_request_do_not_wait(rig: Rig) -> None:
    stream = await rig.open()
    rig.intake.take(stream, starts(lenient(1), named(2), lenient(3, prefix_token_ids=[0]), lenient(4)))
    await rig.call(lambda: None)
    assert sorted(stream.samples) == [2, 3]
    assert sorted(stream.parked) == [1, 4]
    rig.answer()
    ends = await rig.over(stream, 1, 2, 3, 4)
    assert {reason(end) for end in ends.values()} == {"LENGTH"}


async def test_after_the_longest_wait_a_lenient_sample_starts_without() -> None:
    rig = Rig(wait_seconds=0.01)
    stream = await rig.open()
    rig.intake.take(stream, starts(lenient(1), lenient(2)))
    ends = await rig.over(stream, 1, 2)
    assert {reason(end) for end in ends.values()} == {"LENGTH"}
    assert rig.value("paceline_drafts_waits_expired_total") == 2
    assert all(isinstance(end, pb.Finished) and not end.cached_tokens for end in ends.values())
    await close(rig)


async def test_without_a_store_nothing_waits(rig: Rig) -> None:
    stream = await rig.open()
    rig.store.available = False
    rig.intake.take(stream, starts(lenient(1), lenient(2, run_id="")))
    await rig.call(lambda: None)
    assert sorted(stream.samples) == [1, 2]
    rig.intake._fetcher = None
    rig.intake.take(stream, starts(lenient(3)))
    await rig.call(lambda: None)
    assert sorted(stream.samples) == [1, 2, 3]


async def test_what_is_in_the_cache_for_the_step_is_not_waited_for(rig: Rig) -> None:
    stream = await rig.open()
    rig.answer(rollout([7, 8]))
    rig.intake.take(stream, starts(lenient(1)))
    await rig.started(stream, 1)
    rig.store.open.clear()
    rig.intake.take(stream, starts(lenient(2)))
    await rig.call(lambda: None)
    assert stream.samples[2].request.cached == (7, 8)


async def test_an_item_that_is_aborted_while_it_waits_never_starts(rig: Rig) -> None:
    stream = await rig.open()
    rig.intake.take(stream, starts(lenient(1), lenient(2)))
    rig.intake.take(stream, starts(abort=[1]))
    ends = await rig.ended(stream, 1)
    assert {handle: reason(end) for handle, end in ends.items()} == {1: "ABORTED"}
    rig.answer()
    ends = await rig.over(stream, 2)
    assert {handle: reason(end) for handle, end in ends.items()} == {2: "LENGTH"}
    assert rig.tokens(1) == []


async def test_an_abort_in_the_same_request_ends_what_it_started(rig: Rig) -> None:
    stream = await rig.open()
    rig.intake.take(stream, starts(lenient(1), named(2), abort=[1, 2]))
    ends = await rig.over(stream, 1, 2)
    assert [reason(end) for end in ends.values()] == ["ABORTED"] * 2
    assert rig.engine.responses == {}


async def test_a_handle_that_was_aborted_while_it_waited_can_be_used_again(rig: Rig) -> None:
    stream = await rig.open()
    rig.intake.take(stream, starts(lenient(1, seed=5)))
    rig.intake.take(stream, starts(abort=[1]))
    await rig.ended(stream, 1)
    rig.intake.take(stream, starts(lenient(1, seed=6)))
    await rig.call(lambda: None)
    assert stream.parked[1].seed == 6
    rig.answer()
    await rig.started(stream, 1)
    assert stream.samples[1].request.seed == 6
    ends = await rig.over(stream, 1)
    assert reason(ends[1]) == "LENGTH"
    assert len(rig.tokens(1)) == TOKENS


@pytest.mark.parametrize("second", ["lenient", "plain"])
async def test_the_handle_of_an_item_that_waits_is_taken(rig: Rig, second: str) -> None:
    stream = await rig.open()
    again = lenient(1, seed=9) if second == "lenient" else named(1)
    rig.intake.take(stream, starts(lenient(1, seed=5), again))
    ends = await rig.ended(stream, 1)
    assert reason(ends[1]) == "INVALID_ARGUMENT"
    rig.answer()
    await rig.started(stream, 1)
    assert stream.samples[1].request.seed == 5


async def test_a_running_samples_handle_is_taken_for_one_that_would_wait(rig: Rig) -> None:
    stream = await rig.open()
    rig.intake.take(stream, starts(named(1)))
    rig.intake.take(stream, starts(lenient(1)))
    ends = await rig.ended(stream, 1)
    assert reason(ends[1]) == "INVALID_ARGUMENT"
    # An abort is the running one's.
    rig.intake.take(stream, starts(abort=[1]))
    assert stream.parked == {}


async def test_bad_input_is_refused_without_a_wait(rig: Rig) -> None:
    stream = await rig.open()
    rig.intake.take(stream, starts(lenient(1, exactness=LENIENT | {"lenience": 0.5})))
    ends = await rig.over(stream, 1)
    assert isinstance(ends[1], pb.Refused)
    assert ends[1].field == "exactness.lenience"


async def test_terms_that_change_during_the_wait_are_those_that_count(rig: Rig) -> None:
    stream = await rig.open()
    rig.intake.take(stream, starts(lenient(1)))
    await rig.call(lambda: None)
    rig.version = 4
    rig.answer()
    ends = await rig.over(stream, 1)
    assert reason(ends[1]) == "FAILED_PRECONDITION"


async def test_a_stream_that_ends_takes_what_waits_along(rig: Rig) -> None:
    gone, stays = await rig.open(), await rig.open()
    rig.intake.take(gone, starts(lenient(1)))
    rig.intake.take(stays, starts(lenient(1)))
    rig.intake.close(gone)
    rig.answer()
    await rig.started(stays, 1)
    await asyncio.gather(*rig.intake._waits)
    await rig.call(lambda: None)
    assert (gone.samples, gone.parked) == ({}, {})
    assert rig.loop.samples.real_count == 1
    await rig.over(stays, 1)


async def test_each_prompt_is_waited_for_by_itself(rig: Rig) -> None:
    stream = await rig.open()
    gates = {"p": asyncio.Event(), "q": asyncio.Event()}

    async def fetch(run_id: str, prompt_ids: Sequence[str], *, whole: bool) -> Fetched:
        await gates[prompt_ids[0]].wait()
        return Fetched([])

    rig.store.fetch = fetch  # type: ignore[method-assign]
    # Prompts of different steps are fetched apart.
    rig.intake.take(stream, starts(lenient(1, "p", step=1), lenient(2, "q", step=2)))
    gates["q"].set()
    await rig.started(stream, 2)
    assert list(stream.parked) == [1]
    gates["p"].set()
    await rig.started(stream, 1)


# -- drafts that come late ------------------------------------------------------------------------------------


async def test_a_running_sample_follows_a_rollout_that_arrives_and_counts_what_agrees(rig: Rig) -> None:
    stream = await rig.open()
    rig.intake.take(stream, starts(named(1), named(2)))
    await rig.started(stream, 1, 2)
    # A rollout that came between these steps would let the sample end before it is seen to follow.
    await rig.stepped(3)
    # Tokens of a scripted response are their positions.
    true = list(range(TOKENS))
    ahead = rollout([*true[:8], 99, *true[9:]], seed=101, kind=RolloutKind.PREGENERATED, step=3)
    rig.answer(ahead, rollout(true, seed=102, slot=5))
    await rig.following(stream, 1)
    ends = await rig.over(stream, 1, 2)
    assert rig.tokens(1) == rig.tokens(2) == true
    first, second = ends[1], ends[2]
    assert isinstance(first, pb.Finished)
    assert isinstance(second, pb.Finished)
    assert (first.cached_tokens, first.reused_prefix) == (TOKENS, 8)
    assert [source.drafter for source in first.draft_sources] == ["pregenerated"]
    assert first.decode_steps < second.decode_steps
    # Its seed belongs to another slot.
    assert (second.cached_tokens, second.reused_prefix) == (0, 0)


async def test_a_resumed_sample_counts_its_prefix(rig: Rig) -> None:
    stream = await rig.open()
    rig.answer(rollout([0, 1, 2, 3, 4, 99], seed=101))
    rig.intake.take(stream, starts(named(1, prefix_token_ids=[0, 1, 2])))
    await rig.following(stream, 1)
    ends = await rig.over(stream, 1)
    assert isinstance(ends[1], pb.Finished)
    assert (ends[1].cached_tokens, ends[1].reused_prefix) == (6, 5)
    assert [source.drafter for source in ends[1].draft_sources] == ["history"]


async def test_a_guess_of_the_callers_goes_before_a_cached_rollout_which_is_counted_all_the_same(
    rig: Rig,
) -> None:
    stream = await rig.open()
    rig.answer(rollout([0, 1, 99], seed=101))
    rig.intake.take(stream, starts(named(1, reference_token_ids=list(range(TOKENS)))))
    await rig.following(stream, 1)
    ends = await rig.over(stream, 1)
    assert isinstance(ends[1], pb.Finished)
    assert (ends[1].cached_tokens, ends[1].reused_prefix) == (3, 2)
    assert [source.drafter for source in ends[1].draft_sources] == ["reference"]


async def test_levels_that_live_on_history_ask_for_all_of_it(rig: Rig) -> None:
    stream = await rig.open()
    rig.store.open.set()
    coupled = {"level": sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY}
    rig.intake.take(stream, starts(named(1, "p"), lenient(2, "q"), named(3, "r", exactness=coupled)))
    await rig.started(stream, 2)
    asked = [(prompts, whole) for (_, prompts), whole in zip(rig.store.calls, rig.store.whole, strict=True)]
    assert asked == [(["p"], False), (["q", "r"], True)]


async def test_with_speculation_off_only_lenient_samples_have_rollouts_fetched(rig: Rig) -> None:
    rig.drafts.speculation = None
    stream = await rig.open()
    rig.intake.take(stream, starts(named(1)))
    await rig.started(stream, 1)
    assert rig.store.calls == []
    rig.answer(rollout([7]))
    rig.intake.take(stream, starts(lenient(2)))
    await rig.started(stream, 2)
    assert stream.samples[2].request.cached == (7,)
