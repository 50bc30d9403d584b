"""Fetching shards: once per prompt and step, a few calls at a time, and never in anybody's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.contracts.errors import Unavailable
from services.contracts.rollout import StoredRollout
from services.drafts.client import Fetched
from services.generation.draft_cache.cache import DraftCache, RolloutMetrics, ShardQuery, Shards
from services.generation.draft_cache.fetcher import ShardFetcher
from services.generation.draft_cache.origin import Origin
from tests.unit.generation.rollouts import rollout

WAIT = 60.0
CALLS = 4
PROMPTS = 16


class Store:
    """A draft store that answers when it is told to."""

    def __init__(self) -> None:
        self.available = True
        self.calls: list[tuple[str, list[str]]] = []
        self.whole: list[bool] = []
        self.rollouts: list[StoredRollout] = []
        self.open = asyncio.Event()
        self.fault: Exception | None = None
        self.missed: set[str] = set()

    async def fetch(self, run_id: str, prompt_ids: Sequence[str], *, whole: bool) -> Fetched:
        self.calls.append((run_id, list(prompt_ids)))
        self.whole.append(whole)
        await self.open.wait()
        if self.fault is not None:
            raise self.fault
        found = [each for each in self.rollouts if each.run_id == run_id and each.prompt_id in prompt_ids]
        return Fetched(found, self.missed.intersection(prompt_ids))


class Rig:
    """A fetcher between a store and a cache."""

    def __init__(self) -> None:
        self.store = Store()
        self.cache = DraftCache(1000, 1 << 30)
        self.registry = CollectorRegistry()
        self.deliveries: list[Shards] = []
        self.refusal: Exception | None = None
        self.fetcher = ShardFetcher(
            self.store,  # type: ignore[arg-type]
            self.cache.fetched_for,
            self._deliver,
            RolloutMetrics(self.registry),
        )

    async def _deliver(self, shards: Shards) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.deliveries.append(shards)
        self.cache.add_shards(shards)

    def want(
        self, prompt: str = "p", step: int = 1, run: str = "r", whole: bool = False
    ) -> asyncio.Future[None] | None:
        return self.fetcher.want(Origin(run, prompt, 0, step), whole=whole)

    async def until(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0)

    def value(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"paceline_drafts_{name}")


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await made.fetcher.close()


async def arrived(*futures: asyncio.Future[None] | None) -> None:
    async with asyncio.timeout(WAIT):
        for future in futures:
            assert future is not None
            await future


async def test_what_the_store_has_is_in_the_cache_when_the_wait_ends(rig: Rig) -> None:
    rig.store.rollouts = [rollout([1, 2]), rollout([3], slot=1), rollout([4], prompt_id="q")]
    future = rig.want()
    assert future is not None
    assert not future.done()
    rig.store.open.set()
    await arrived(future)
    assert sorted(each.tokens.tolist() for each in rig.cache.all(("r", "p"))) == [[1, 2], [3]]
    assert rig.cache.all(("r", "q")) == []
    assert (rig.value("fetched_rollouts_total"), rig.value("fetched_tokens_total")) == (2, 3)
    assert rig.value("fetch_seconds_count") == 1


async def test_a_prompt_is_fetched_once_for_a_step_and_again_for_the_next(rig: Rig) -> None:
    first = rig.want()
    assert rig.want() is first
    await rig.until(lambda: rig.store.calls)
    assert rig.want() is first
    rig.store.open.set()
    await arrived(first)
    assert rig.want() is None
    await arrived(rig.want(step=2))
    assert rig.want(step=2) is None
    assert rig.store.calls == [("r", ["p"])] * 2


async def test_covered_history_is_fetched_for_those_alone_who_need_it(rig: Rig) -> None:
    rig.store.open.set()
    await arrived(rig.want())
    await arrived(rig.want(whole=True))
    assert rig.want() is None, "there is more than it asks for"
    assert rig.want(whole=True) is None
    await arrived(rig.want("a", whole=True), rig.want("b"), rig.want("c", whole=True))
    assert [prompts for _, prompts in rig.store.calls] == [["p"], ["p"], ["a", "c"], ["b"]]
    assert rig.store.whole == [False, True, True, False]


async def test_a_prompt_that_the_cache_has_dropped_is_fetched_again(rig: Rig) -> None:
    rig.store.open.set()
    await arrived(rig.want())
    rig.cache = DraftCache(1000, 1 << 30)
    rig.fetcher._fetched_for = rig.cache.fetched_for
    await arrived(rig.want())
    assert len(rig.store.calls) == 2


async def test_prompts_wanted_together_are_asked_for_together(rig: Rig) -> None:
    rig.store.open.set()
    wanted = [rig.want(f"p{i}") for i in range(PROMPTS * 2 + 3)]
    await arrived(*wanted)
    assert sorted(len(prompts) for _, prompts in rig.store.calls) == [3, PROMPTS, PROMPTS]
    assert sorted(prompt for _, prompts in rig.store.calls for prompt in prompts) == sorted(
        f"p{i}" for i in range(PROMPTS * 2 + 3)
    )


async def test_a_call_is_for_one_run_and_one_step(rig: Rig) -> None:
    rig.store.open.set()
    await arrived(rig.want("a", run="r"), rig.want("b", run="s"), rig.want("c", run="r"), rig.want("a", 2))
    assert sorted(rig.store.calls) == [("r", ["a"]), ("r", ["a", "c"]), ("s", ["b"])]
    assert rig.cache.fetched_for(("s", "b")) == ShardQuery(1, whole=False)


async def test_only_a_few_calls_are_under_way_and_the_rest_follows(rig: Rig) -> None:
    wanted = [rig.want("p", run=f"r{i}") for i in range(CALLS + 3)]
    await rig.until(lambda: len(rig.store.calls) == CALLS)
    await asyncio.sleep(0)
    assert len(rig.store.calls) == CALLS
    rig.store.open.set()
    await arrived(*wanted)
    assert len(rig.store.calls) == CALLS + 3


async def test_there_is_nothing_to_wait_for_without_a_store_or_a_name(rig: Rig) -> None:
    assert rig.want(run="") is None
    assert rig.want(prompt="") is None
    rig.store.available = False
    assert rig.want() is None
    assert rig.store.calls == []


async def test_a_store_that_dies_meanwhile_ends_the_wait_and_is_asked_again_later(rig: Rig) -> None:
    future = rig.want()
    await rig.until(lambda: rig.store.calls)
    rig.store.missed = {"p"}
    rig.store.open.set()
    await arrived(future)
    assert rig.deliveries == []
    assert rig.value("fetch_failures_total") == 1
    assert rig.value("fetch_seconds_count") == 0
    rig.store.missed = set()
    rig.store.rollouts = [rollout([1, 2])]
    await arrived(rig.want())
    assert len(rig.cache.all(("r", "p"))) == 1
    assert rig.want() is None


async def test_only_the_prompts_of_a_replica_that_failed_are_asked_for_again(rig: Rig) -> None:
    rig.store.rollouts = [rollout([1], prompt_id="a"), rollout([2], prompt_id="b")]
    rig.store.open.set()
    await arrived(rig.want("a"), rig.want("b"), rig.want("c"))
    # What is known of a prompt stays, whatever arrived of it before its replica failed.
    rig.store.rollouts = [rollout([3], prompt_id="a"), rollout([4], prompt_id="b", slot=1)]
    rig.store.missed = {"b", "c"}
    await arrived(rig.want("a", 2), rig.want("b", 2), rig.want("c", 2))
    assert [each.tokens.tolist() for each in rig.cache.all(("r", "a"))] == [[3]]
    assert [each.tokens.tolist() for each in rig.cache.all(("r", "b"))] == [[2], [4]]
    assert rig.value("fetch_failures_total") == 1
    rig.store.missed = set()
    assert rig.want("a", 2) is None
    await arrived(rig.want("b", 2), rig.want("c", 2))
    assert rig.store.calls[-1] == ("r", ["b", "c"])
    assert [each.tokens.tolist() for each in rig.cache.all(("r", "b"))] == [[4]]


async def test_a_store_that_has_nothing_is_not_asked_twice(rig: Rig) -> None:
    rig.store.open.set()
    await arrived(rig.want())
    assert rig.want() is None


async def test_an_engine_that_has_stopped_ends_the_wait(rig: Rig) -> None:
    rig.refusal = Unavailable("stopped")
    rig.store.open.set()
    await arrived(rig.want("a"), rig.want("b", run="s"))
    assert rig.want("a") is not None


async def test_rollouts_that_nobody_asked_for_are_passed_over(rig: Rig) -> None:
    rig.store.rollouts = [rollout([1])]
    stray = rollout([2], prompt_id="stray")

    async def fetch(run_id: str, prompt_ids: Sequence[str]) -> Fetched:
        return Fetched([*rig.store.rollouts, stray])

    rig.store.fetch = fetch  # type: ignore[method-assign]
    await arrived(rig.want())
    assert rig.cache.all(("r", "stray")) == []


async def test_close_ends_every_wait(rig: Rig) -> None:
    wanted = [rig.want("p", run=f"r{i}") for i in range(CALLS + 2)]
    await rig.until(lambda: len(rig.store.calls) == CALLS)
    await rig.fetcher.close()
    await arrived(*wanted)
    assert rig.deliveries == []


async def test_a_defect_in_the_store_costs_drafts_and_ends_the_wait(rig: Rig) -> None:
    rig.store.fault = RuntimeError("defect")
    rig.store.open.set()
    await arrived(*[rig.want("p", run=f"r{i}") for i in range(CALLS + 2)])
    assert rig.deliveries == []
    rig.store.fault = None
    await arrived(rig.want())
    assert len(rig.deliveries) == 1
