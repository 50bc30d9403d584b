"""An instance and a draft store, both real: what the store has makes samples faster, and never different."""

from __future__ import annotations

import asyncio
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest
from redis import Redis

from paceline.internal.v1 import draft_pb2
from paceline.internal.v1 import draft_pb2_grpc as draft_rpc
from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import sample_pb2
from services.local.child import Child, ProcessSpec
from services.platform.redis.connection import Keys
from tests.integration.generation.conftest import ATTEMPTS, PROMPT, Policy
from tests.support.instances import CALL, Caller, InstanceProcess, Outcome, calling, stub_of
from tests.support.zygote import launch

SPACE = "draft-tests"
LENGTH = 96
WINDOW = 16
# A sample runs long enough that something can happen to it.
LONG = 512 - PROMPT


class Store:
    """A replica of the draft store in a process of its own."""

    def __init__(self, redis_url: str, folder: Path, spawner: ThreadPoolExecutor) -> None:
        self._redis_url = redis_url
        self._folder = folder
        self._spawner = spawner
        self._argv = [
            *(sys.executable, "-m", "services.drafts", "--port=0", "--replica-id=drafts-0"),
            *(f"--redis-url={redis_url}", f"--namespace={SPACE}"),
        ]
        self._child: Child | None = None
        self._starts = 0

    @property
    def _process(self) -> Child:
        assert self._child is not None
        return self._child

    def start(self) -> None:
        """Return when it takes calls."""
        self._starts += 1
        ready = self._folder / f"store.{self._starts}.json"
        log = self._folder / f"store.{self._starts}.log"
        argv = [*self._argv, f"--ready-file={ready}"]
        self._child = Child(ProcessSpec("drafts", argv, log, ready), self._spawner, launch)
        self._child.start()
        self._child.wait_ready(time.monotonic() + CALL)

    def stop(self) -> None:
        """As a crash would end it."""
        self._process.stop(0)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._child is not None and self._child.alive

    @contextmanager
    def silent(self) -> Iterator[None]:
        """It takes calls and does not answer. It is registered all the time, however long that is."""
        self._process.signal(signal.SIGSTOP)
        try:
            with Redis.from_url(self._redis_url) as redis:
                redis.pexpire(Keys(SPACE).registry("drafts", "drafts-0"), int(2 * CALL * 1000))
            yield
        finally:
            self._process.signal(signal.SIGCONT)

    async def put(self, *rollouts: draft_pb2.Rollout) -> None:
        """Store rollouts."""
        assert self._process.ready is not None
        async with grpc.aio.insecure_channel(self._process.ready.address) as channel:
            stub = draft_rpc.DraftServiceStub(channel)
            request = draft_pb2.PutRolloutsRequest(rollouts=rollouts)
            answer = await stub.PutRollouts(iter([request]), timeout=CALL)
        assert answer.stored == len(rollouts)


@pytest.fixture(scope="module")
def store(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The store of this module; a test may end it, the next one finds it running again."""
    with ThreadPoolExecutor(1) as spawner:
        made = Store(redis_url, tmp_path_factory.mktemp("store"), spawner)
        made.start()
        yield made
        made.stop()


@pytest.fixture(scope="module")
def drafting(
    models: tuple[Path, Path], start: Callable[..., InstanceProcess], store: Store
) -> Iterator[InstanceProcess]:
    """The instance of this module."""
    # A planner on a busy machine may find, rightly or not, that drafts do not pay.
    settings = {
        "draft_window": WINDOW,
        "draft_fetch_seconds": CALL,
        "draft_wait_seconds": 1,
        "speculation": "fixed",
    }
    with start(models[0], "drafting", namespace=SPACE, **settings) as process:
        yield process


@pytest.fixture
async def policy(drafting: InstanceProcess, store: Store) -> AsyncIterator[Policy]:
    """The instance as a caller sees it, once it has found the store."""
    if not store.alive:
        store.start()
    async with stub_of(drafting.address) as stub:
        policy = Policy(drafting.address, stub)
        await policy.look()
        await until_fetched(policy, drafting)
        yield policy


async def until_fetched(policy: Policy, instance: InstanceProcess) -> None:
    """Wait until the instance gets answers from the store."""
    before = instance.metrics()["paceline_drafts_fetch_seconds_count"]
    async with asyncio.timeout(CALL):
        while instance.metrics()["paceline_drafts_fetch_seconds_count"] == before:
            await policy.ask(named(policy, new_run(), 1, max_tokens=1))


def new_run() -> str:
    return f"run-{uuid4().hex[:8]}"


def named(policy: Policy, run: str, handle: int, **fields: Any) -> pb.WorkItem:
    """Return an item with a place in a run: slot and prompt are the handle's."""
    own = {"run_id": run, "prompt_id": f"prompt-{handle}", "slot": handle, "step": 1}
    return policy.item(handle, **({"max_tokens": LENGTH, "ignore_eos": True} | own | fields))


def rollout(item: pb.WorkItem, tokens: Sequence[int], **fields: Any) -> draft_pb2.Rollout:
    """Return a rollout of the sample that an item asks for."""
    logprobs = fields.pop("logprobs", ())
    known: dict[str, Any] = {
        "run_id": item.run_id,
        "prompt_id": item.prompt_id,
        "slot": item.slot,
        "policy_version": item.policy_version,
        "kind": draft_pb2.ROLLOUT_KIND_PREGENERATED,
        "step": item.step,
        "seed": item.seed,
        "finished": True,
    }
    return draft_pb2.Rollout(
        token_ids=struct.pack(f"<{len(tokens)}I", *tokens),
        logprobs=struct.pack(f"<{len(logprobs)}f", *logprobs),
        **(known | fields),
    )


def end_of(outcome: Outcome) -> pb.Finished:
    assert outcome.refused is None, outcome.refused
    assert outcome.finished is not None
    return outcome.finished


def accepted(outcome: Outcome) -> dict[str, int]:
    """Accepted tokens by the source of the draft."""
    return {source.drafter: source.accepted for source in end_of(outcome).draft_sources}


async def plain(policy: Policy, handles: Sequence[int], **fields: Any) -> dict[int, Outcome]:
    """What samples are without any draft: of no run, one after the other."""
    found: dict[int, Outcome] = {}
    for handle in handles:
        item = named(policy, "", handle, **fields)
        item.prompt_id = f"plain-{uuid4().hex}"
        found |= await policy.ask(item)
    return found


async def ask_known(policy: Policy, drafting: InstanceProcess, *items: pb.WorkItem) -> dict[int, Outcome]:
    """Outcomes of items whose rollouts the store has: the instance has them too before the first step."""
    async with calling(policy.address) as caller:
        await policy.pause()
        before = drafting.metrics()
        await caller.send(items)
        await until_grown(drafting, "cache_bytes", before)
        await policy.resume()
        return await caller.ended(*[item.handle for item in items])


# -- drafts that are there ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PREGENERATED", "HISTORY"])
async def test_a_rollout_of_the_same_seed_is_verified_many_tokens_a_step(
    policy: Policy, store: Store, drafting: InstanceProcess, kind: str
) -> None:
    handles = [1, 2, 3]
    truth = await plain(policy, handles)
    run = new_run()
    items = [named(policy, run, handle) for handle in handles]
    fields = {"kind": draft_pb2.RolloutKind.Value(f"ROLLOUT_KIND_{kind}")}
    await store.put(
        *[
            rollout(item, truth[item.handle].tokens, logprobs=truth[item.handle].logprobs, **fields)
            for item in items
        ]
    )
    outcomes = await ask_known(policy, drafting, *items)
    for handle in handles:
        assert outcomes[handle].tokens == truth[handle].tokens
        assert outcomes[handle].logprobs == pytest.approx(truth[handle].logprobs, abs=1e-4)
        end = end_of(outcomes[handle])
        assert (end.cached_tokens, end.reused_prefix) == (LENGTH, LENGTH)
        assert end.decode_steps < LENGTH / 2
        # The index has the rollout as well, and may be the one that is believed.
        assert accepted(outcomes[handle]).keys() <= {kind.lower(), "suffix"}
        assert sum(accepted(outcomes[handle]).values()) > LENGTH / 2


async def test_a_rollout_of_another_policy_changes_no_token(
    policy: Policy, store: Store, drafting: InstanceProcess
) -> None:
    truth = (await plain(policy, [4]))[4].tokens
    item = named(policy, new_run(), 4)
    other = [*truth[:30], (truth[30] + 1) % 512, *truth[31:60], *truth[62:]]
    await store.put(rollout(item, other))
    outcome = (await ask_known(policy, drafting, item))[4]
    assert outcome.tokens == truth
    assert (end_of(outcome).cached_tokens, end_of(outcome).reused_prefix) == (len(other), 30)


async def test_rollouts_of_the_group_are_drafted_from_where_the_seed_is_another(
    policy: Policy, store: Store
) -> None:
    run = new_run()
    truth = (await plain(policy, [5]))[5].tokens
    item = named(policy, run, 5)
    await store.put(rollout(item, truth, slot=99, seed=1, policy_version=policy.version))
    async with calling(policy.address) as caller:
        await policy.pause()
        await caller.send([item])
        await policy.until_samples(1)
        # While the engine is paused the index takes in what the store has.
        await policy.resume()
        outcome = (await caller.ended(5))[5]
    assert outcome.tokens == truth
    assert (end_of(outcome).cached_tokens, end_of(outcome).reused_prefix) == (0, 0)


async def test_a_rollout_that_comes_late_is_adopted_by_the_running_sample(
    policy: Policy, store: Store, drafting: InstanceProcess
) -> None:
    fields = {"max_tokens": LONG}
    truth = (await plain(policy, [6], **fields))[6]
    assert end_of(truth).decode_steps > LONG / 2
    for _ in range(ATTEMPTS):
        item = named(policy, new_run(), 6, **fields)
        await store.put(rollout(item, truth.tokens))
        begun = (await policy.look()).instance.load
        async with calling(policy.address) as caller:
            with store.silent():
                await caller.send([item])
                await caller.started(6, tokens=8)
                await policy.pause()
                load = (await policy.look()).instance.load
                empty = drafting.metrics()
            before = load.generated_tokens - begun.generated_tokens
            midway = load.running == 1 and load.steps - begun.steps < LONG / 4
            if midway:
                await until_grown(drafting, "cache_bytes", empty)
            await policy.resume()
            outcome = (await caller.ended(6))[6]
        assert outcome.tokens == truth.tokens
        if midway:
            break
    else:
        pytest.fail("the sample had always ended before its engine could be paused")
    end = end_of(outcome)
    assert (end.cached_tokens, end.reused_prefix) == (LONG, LONG)
    assert sum(accepted(outcome).values()) > (LONG - before) / 2
    assert end.decode_steps < LONG / 2


async def until_grown(instance: InstanceProcess, name: str, before: dict[str, float]) -> None:
    """Wait until a metric of drafts is above what it was."""
    name = f"paceline_drafts_{name}"
    async with asyncio.timeout(CALL):
        while instance.metrics()[name] <= before[name]:  # noqa: ASYNC110 (it is in another process)
            await asyncio.sleep(0.01)


# -- a store that is not there --------------------------------------------------------------------------------


async def test_a_store_that_dies_costs_drafts_and_is_used_again_when_it_is_back(
    policy: Policy, store: Store, drafting: InstanceProcess
) -> None:
    handles = [7, 8]
    truth = await plain(policy, handles, max_tokens=LONG)
    run = new_run()
    async with calling(policy.address) as caller:
        await caller.send([named(policy, run, handle, max_tokens=LONG) for handle in handles])
        await caller.started(*handles)
        store.stop()
        outcomes = await caller.ended(*handles)
    assert {handle: each.tokens for handle, each in outcomes.items()} == {h: truth[h].tokens for h in handles}
    # Neither plain nor lenient work waits for what is gone.
    items = [named(policy, run, handle, step=2, max_tokens=LONG) for handle in handles]
    lenient = named(policy, run, 9, exactness=LENIENT)
    outcomes = await policy.ask(*items, lenient)
    assert {handle: outcomes[handle].tokens for handle in handles} == {h: truth[h].tokens for h in handles}
    assert outcomes[9].reason == "LENGTH"
    assert not any(end_of(outcome).cached_tokens for outcome in outcomes.values())
    store.start()
    await until_fetched(policy, drafting)
    items = [named(policy, run, handle, step=3, max_tokens=LONG) for handle in handles]
    await store.put(*[rollout(item, truth[item.handle].tokens) for item in items])
    outcomes = await ask_known(policy, drafting, *items)
    for handle in handles:
        assert outcomes[handle].tokens == truth[handle].tokens
        end = end_of(outcomes[handle])
        assert (end.cached_tokens, end.reused_prefix) == (LONG, LONG)
        # The index knows the text too, from the first step: which of the two is asked is the plan's affair.
        assert accepted(outcomes[handle])["pregenerated"] > 0
        assert end.decode_steps < LONG / 2


# -- lenient samples ------------------------------------------------------------------------------------------

LENIENT = {"level": sample_pb2.EXACTNESS_LEVEL_LENIENT, "lenience": 1.5}
HISTORY = draft_pb2.ROLLOUT_KIND_HISTORY
FETCHED, EXPIRED = "paceline_drafts_fetched_rollouts_total", "paceline_drafts_waits_expired_total"


async def ask_lenient(
    policy: Policy,
    store: Store,
    drafting: InstanceProcess,
    handle: int,
    tokens: Sequence[int],
    logprobs: Sequence[float],
) -> tuple[Outcome, list[float]]:
    """Outcome of a lenient sample with a cached rollout, and its verified log-probabilities.

    The rollout may arrive after the sample has waited as long as it may: then another sample is asked for.
    """
    for attempt in range(ATTEMPTS):
        item = named(policy, new_run(), handle, exactness=LENIENT, seed=4711 + attempt, step=2)
        await store.put(rollout(item, tokens, logprobs=logprobs, kind=HISTORY, seed=1, step=1))
        before = drafting.metrics()
        async with calling(policy.address) as caller:
            await caller.send([item])
            outcome = (await caller.ended(handle))[handle]
        after = drafting.metrics()
        fetched = after[FETCHED] - before[FETCHED]
        if fetched and after[EXPIRED] == before[EXPIRED]:
            deltas = [delta for each in caller.responses for delta in each.deltas]
            return outcome, [value for delta in deltas for value in delta.verified_logprobs]
    pytest.fail("no rollout was fetched in the time that a lenient sample waits")


async def test_a_lenient_sample_takes_over_what_the_policy_still_says(
    policy: Policy, store: Store, drafting: InstanceProcess
) -> None:
    known = (await plain(policy, [10]))[10]
    outcome, verified = await ask_lenient(policy, store, drafting, 10, known.tokens, known.logprobs)
    end = end_of(outcome)
    # The policy is the same one, so every token is as likely as it was.
    assert outcome.tokens == known.tokens
    assert (end.cached_tokens, end.reused_prefix) == (LENGTH, LENGTH)
    assert outcome.logprobs == pytest.approx(known.logprobs, abs=1e-6)
    assert verified == pytest.approx(known.logprobs, abs=1e-3)
    assert end.decode_steps <= 3


async def test_a_lenient_sample_leaves_a_rollout_that_the_policy_would_not_say(
    policy: Policy, store: Store, drafting: InstanceProcess
) -> None:
    exact = (await plain(policy, [11]))[11]
    # What was certain then is not now.
    wrong = [(token + 1) % 512 for token in exact.tokens]
    outcome, _ = await ask_lenient(policy, store, drafting, 11, wrong, [0.0] * LENGTH)
    assert end_of(outcome).cached_tokens == LENGTH
    assert end_of(outcome).reused_prefix < LENGTH / 4
    assert len(outcome.tokens) == LENGTH


async def test_a_lenient_sample_without_a_rollout_is_an_exact_one(policy: Policy) -> None:
    exact = (await plain(policy, [12]))[12]
    outcome = (await policy.ask(named(policy, new_run(), 12, exactness=LENIENT)))[12]
    assert outcome.tokens == exact.tokens
    assert (end_of(outcome).cached_tokens, end_of(outcome).reused_prefix) == (0, 0)


async def test_a_lenient_sample_waits_no_longer_than_it_may(
    policy: Policy, store: Store, drafting: InstanceProcess
) -> None:
    exact = (await plain(policy, [13]))[13]
    before = drafting.metrics()
    with store.silent():
        outcome = (await policy.ask(named(policy, new_run(), 13, exactness=LENIENT)))[13]
    assert outcome.tokens == exact.tokens
    assert drafting.metrics()[EXPIRED] == before[EXPIRED] + 1


async def test_a_lenient_sample_that_is_aborted_while_it_waits_never_runs(
    policy: Policy, store: Store, drafting: InstanceProcess
) -> None:
    async with calling(policy.address) as caller:
        with store.silent():
            # In one request: it is taken before it has waited as long as it may.
            items = [named(policy, new_run(), 14, exactness=LENIENT), named(policy, "", 15)]
            await caller.send(items, abort=[14])
            await caller.ended(14)
        await caller.ended(15)
    assert caller.of(14).reason == "ABORTED"
    assert caller.of(14).tokens == []
    assert caller.of(15).reason == "LENGTH"
    assert idle((await policy.look()).instance.load)


async def test_a_caller_that_goes_away_takes_what_waits_along(
    policy: Policy, store: Store, drafting: InstanceProcess
) -> None:
    before = drafting.metrics()
    with store.silent():
        async with calling(policy.address) as caller:
            await caller.send([named(policy, new_run(), 16, exactness=LENIENT)])
            await answered(caller, policy)
        # By then it would have started without.
        await until_grown(drafting, "waits_expired_total", before)
    await policy.until_samples(0)
    # The token of the item that showed that the request was read.
    name = "paceline_generation_tokens_total"
    assert drafting.metrics()[name] == before[name] + 1


async def answered(caller: Caller, policy: Policy) -> None:
    """Wait until what was sent before has been read."""
    await caller.send([named(policy, "", 99, max_tokens=1)])
    await caller.ended(99)


def idle(load: Any) -> bool:
    return load.running + load.waiting == 0
