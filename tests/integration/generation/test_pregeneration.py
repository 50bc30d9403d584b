"""A real instance with a scripted coordinator and a real draft store: what it does in bubbles."""

from __future__ import annotations

import asyncio
import shutil
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import grpc
import pytest
from safetensors.torch import load_file, save_file

from paceline.internal.v1 import bubble_pb2, bubble_pb2_grpc, draft_pb2, draft_pb2_grpc
from paceline.internal.v1 import generation_pb2 as pb
from paceline.times import seconds_of, timestamp
from services.local.child import Child, ProcessSpec
from services.platform.config import ServiceConfig
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import InstanceRecord, Registration
from tests.integration.generation.conftest import ATTEMPTS, PROMPT, Policy, draft_always
from tests.support.instances import CALL, InstanceProcess, calling, stub_of
from tests.support.waiting import until
from tests.support.zygote import launch

SPACE = "pregeneration-tests"
LENGTH = 120
# Long enough that something can happen to a sample while it is generated.
LONG = 512 - PROMPT
POLL_STEPS = 10
SEATS = 32
ASLEEP = "paceline_generation_asleep"


class Poll:
    """A poll that waits for its answer."""

    def __init__(
        self, request: bubble_pb2.PollWorkRequest, epoch: int, owed: dict[int, bubble_pb2.PregenerationTask]
    ) -> None:
        self.request = request
        self.reply: asyncio.Future[bubble_pb2.PollWorkResponse] = asyncio.get_running_loop().create_future()
        self._epoch = epoch
        self._owed = owed

    def answer(self, *items: bubble_pb2.PregenerationTask, **fields: Any) -> None:
        """Answer, with the items that the instance has not heard of yet: it may have given up an earlier poll."""
        fields = {"coordinator_epoch": self._epoch, "poll_steps": POLL_STEPS} | fields
        if fields.get("halt") or fields.get("sleep"):
            self._owed.clear()
        self._owed.update({item.lease: item for item in items})
        tasks = self._owed.values() if self.request.room >= len(self._owed) else ()
        if not self.reply.done():
            self.reply.set_result(bubble_pb2.PollWorkResponse(tasks=tasks, **fields))

    @property
    def tokens(self) -> dict[int, int]:
        return {each.lease: each.tokens for each in self.request.progress}

    @property
    def finished(self) -> set[int]:
        return {each.lease for each in self.request.progress if each.finished}

    @property
    def returned(self) -> set[int]:
        return {each.lease for each in self.request.progress if each.returned}

    @property
    def over(self) -> bool:
        return self.finished | self.returned == self.tokens.keys()


class Coordinator(bubble_pb2_grpc.BubbleServiceServicer):
    """Answers polls as a test says. It is in the registry from `__aenter__` to `stop`."""

    def __init__(self, redis_url: str, epoch: int = 1) -> None:
        self.epoch = epoch
        self._config = ServiceConfig(redis_url=redis_url, namespace=SPACE)
        self._polls: asyncio.Queue[Poll] = asyncio.Queue()
        self._held: set[Poll] = set()
        # Items that were given and that no poll has named yet, by lease.
        self._owed: dict[int, bubble_pb2.PregenerationTask] = {}
        self._server = grpc.aio.server()
        self._beating: asyncio.Task[None] | None = None

    async def PollWork(self, request: bubble_pb2.PollWorkRequest, context: Any) -> Any:
        for each in request.progress:
            self._owed.pop(each.lease, None)
        poll = Poll(request, self.epoch, self._owed)
        self._polls.put_nowait(poll)
        self._held.add(poll)
        try:
            return await poll.reply
        finally:
            self._held.discard(poll)
            poll.reply.cancel()

    async def next(self, holds: Callable[[Poll], Any] = lambda _: True, **fields: Any) -> Poll:
        """Return the next poll that is so; the ones before it are answered with nothing, or with `fields`."""
        async with asyncio.timeout(CALL):
            while True:
                poll = await self._polls.get()
                if poll.reply.done():
                    continue
                if holds(poll):
                    return poll
                poll.answer(**fields)

    async def give(self, *items: bubble_pb2.PregenerationTask) -> None:
        """Hand out items once the instance has room for all of them."""
        (await self.next(lambda poll: poll.request.room >= len(items))).answer(*items)

    async def finished(self, *leases: int) -> Poll:
        """Return the poll in which the last of these leases was finished."""
        done: set[int] = set()

        def all_done(poll: Poll) -> bool:
            done.update(poll.finished)
            return done >= set(leases)

        return await self.next(all_done)

    async def halt(self) -> None:
        """End what is left of a test."""
        for poll in self._held:
            poll.answer(halt=True)
        (await self.next(lambda poll: poll.over, halt=True)).answer(halt=True)

    async def __aenter__(self) -> Self:
        bubble_pb2_grpc.add_BubbleServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._beating = asyncio.create_task(self._beat(f"127.0.0.1:{port}"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """As a crash would end it, but out of the registry at once."""
        await self._server.stop(0)
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait([self._beating])

    async def _beat(self, address: str) -> None:
        async with connect(self._config) as redis:
            record = InstanceRecord("bubbles", f"bubbles-{self.epoch}", address=address)
            registration = Registration(redis, Keys(SPACE), record)
            await registration.register()
            try:
                await registration.run()
            finally:
                await registration.deregister()


class Store:
    """A replica of the draft store in a process of its own."""

    def __init__(self, redis_url: str, folder: Path, spawner: ThreadPoolExecutor) -> None:
        self._folder = folder
        self._spawner = spawner
        self._argv = [
            *(sys.executable, "-m", "services.drafts", "--port=0", "--replica-id=drafts-0"),
            *(f"--redis-url={redis_url}", f"--namespace={SPACE}"),
        ]
        self._child: Child | None = None
        # As of the last look.
        self.forks: list[draft_pb2.Rollout] = []

    def start(self) -> None:
        """Return when it takes calls."""
        name = uuid4().hex
        ready = self._folder / f"{name}.json"
        argv = [*self._argv, f"--ready-file={ready}"]
        spec = ProcessSpec("drafts", argv, self._folder / f"{name}.log", ready)
        self._child = Child(spec, self._spawner, launch)
        self._child.start()
        self._child.wait_ready(time.monotonic() + CALL)

    def stop(self) -> None:
        """As a crash would end it."""
        if self._child is not None:
            self._child.stop(0)

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.alive

    async def tokens(self, run: str, prompts: Sequence[str]) -> dict[int, list[int]]:
        """Return the pre-generated tokens of a run by slot."""
        return {
            slot: list(struct.unpack(f"<{len(each.token_ids) // 4}I", each.token_ids))
            for slot, each in (await self.rollouts(run, prompts)).items()
        }

    async def rollouts(self, run: str, prompts: Sequence[str]) -> dict[int, draft_pb2.Rollout]:
        assert self._child is not None
        assert self._child.ready is not None
        async with grpc.aio.insecure_channel(self._child.ready.address) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            request = draft_pb2.FetchRolloutsRequest(run_id=run, prompt_ids=prompts)
            answers = [answer async for answer in stub.FetchRollouts(request, timeout=CALL)]
        rollouts = [each for answer in answers for each in answer.rollouts]
        assert all(each.kind == draft_pb2.ROLLOUT_KIND_PREGENERATED for each in rollouts)
        self.forks = [each for each in rollouts if each.fork]
        return {each.slot: each for each in rollouts if not each.fork}

    async def until_tokens(
        self, run: str, prompts: Sequence[str], holds: Callable[[dict[int, list[int]]], bool]
    ) -> dict[int, list[int]]:
        """Wait until the tokens of a run, by slot, are so; return them."""
        found = dict[int, list[int]]()

        async def held() -> bool:
            nonlocal found
            found = await self.tokens(run, prompts)
            return holds(found)

        await until(held, "the store has these tokens")
        return found

    async def until(
        self, run: str, prompts: Sequence[str], slots: set[int], least: int = 1
    ) -> dict[int, list[int]]:
        """Wait until the store has at least `least` tokens of each of these slots."""
        return await self.until_tokens(
            run, prompts, lambda found: all(len(found.get(slot, ())) >= least for slot in slots)
        )

    async def until_finished(self, run: str, prompts: Sequence[str], slots: set[int]) -> None:
        """Wait until the store has each of these slots to its end: what there was before came earlier."""

        async def finished() -> bool:
            rollouts = await self.rollouts(run, prompts)
            return all(slot in rollouts and rollouts[slot].finished for slot in slots)

        await until(finished, "the store has these slots to their ends")


@pytest.fixture(scope="module")
def kept_store(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with ThreadPoolExecutor(1) as spawner:
        made = Store(redis_url, tmp_path_factory.mktemp("store"), spawner)
        yield made
        made.stop()


@pytest.fixture
def store(kept_store: Store) -> Store:
    """A running store; a test may end it."""
    if not kept_store.alive:
        kept_store.start()
    return kept_store


@pytest.fixture(scope="module")
def kept_instance(
    models: tuple[Path, Path], start: Callable[..., InstanceProcess]
) -> Iterator[InstanceProcess]:
    process = start(models[0], "ahead", namespace=SPACE, max_num_seqs=SEATS, forks=0)
    yield process
    process.stop()


@pytest.fixture
def ahead(kept_instance: InstanceProcess, monkeypatch: pytest.MonkeyPatch) -> InstanceProcess:
    """An instance that takes vLLM's way to sleep; a test may end it."""
    if not kept_instance.alive:
        with monkeypatch.context() as environment:
            environment.setenv("PACELINE_SLEEP_MODE", "true")
            kept_instance.launch()
        kept_instance.wait_ready()
    return kept_instance


@pytest.fixture
async def policy(ahead: InstanceProcess, store: Store) -> AsyncIterator[Policy]:
    async with stub_of(ahead.address) as stub:
        policy = Policy(ahead.address, stub)
        await policy.look()
        yield policy


@pytest.fixture
async def coordinator(redis_url: str, policy: Policy) -> AsyncIterator[Coordinator]:
    async with Coordinator(redis_url) as made:
        yield made
        await made.halt()


class Work:
    """Samples of one run, to pre-generate and for real: handle, lease and slot are the same number."""

    def __init__(self, policy: Policy, length: int = LENGTH) -> None:
        self.run = f"run-{uuid4().hex[:8]}"
        self._policy = policy
        self._length = length

    def prompt_id(self, number: int) -> str:
        return f"prompt-{number % 3}"

    @property
    def prompts(self) -> list[str]:
        return [f"prompt-{each}" for each in range(3)]

    def real(self, number: int, **fields: Any) -> pb.WorkItem:
        own = {"run_id": self.run, "prompt_id": self.prompt_id(number), "slot": number, "step": 7}
        return self._policy.item(number, max_tokens=self._length, ignore_eos=True, **(own | fields))

    def plain(self, number: int) -> pb.WorkItem:
        """Return the same sample without a name: nothing is known of it."""
        return self.real(number, run_id="", prompt_id="")

    def item(self, number: int) -> bubble_pb2.PregenerationTask:
        real = self.real(number)
        return bubble_pb2.PregenerationTask(
            lease=number,
            run_id=real.run_id,
            prompt_id=real.prompt_id,
            slot=real.slot,
            step=real.step,
            seed=real.seed,
            prompt_token_ids=real.prompt_token_ids,
            sampling=real.sampling,
        )

    async def truth(self, numbers: Sequence[int]) -> dict[int, list[int]]:
        """What the samples are, by the policy of now, generated for real and without drafts."""
        outcomes = await self._policy.ask(*[self.plain(number) for number in numbers])
        return {number: outcome.tokens for number, outcome in outcomes.items()}


async def midway(
    policy: Policy, coordinator: Coordinator, ahead: InstanceProcess, first: int, count: int
) -> tuple[Work, list[int], Poll]:
    """Long tasks that are half done, their numbers from `first` on, and the poll that reported them.

    The engine is paused, and asks for nothing more.

    An item may end before the pause is heard: then others are begun, of another run.
    """
    for attempt in range(ATTEMPTS):
        work = Work(policy, LONG)
        numbers = [first + 1000 * attempt + n for n in range(count)]
        await coordinator.give(*map(work.item, numbers))
        poll = await coordinator.next(lambda poll: poll.tokens and min(poll.tokens.values()) > POLL_STEPS)
        await policy.pause()
        if ahead.metrics()["paceline_generation_background_samples"] == count:
            return work, numbers, poll
        await policy.resume()
        await coordinator.halt()
    pytest.fail("items always ended before the engine could be paused")


async def until_asleep(coordinator: Coordinator, ahead: InstanceProcess) -> Poll:
    """Tell the instance to sleep until it does; its next poll, while which waits no such answer is under way."""
    return await coordinator.next(lambda _: ahead.metrics()[ASLEEP], sleep=True)


async def test_what_is_pregenerated_is_what_the_real_samples_will_be(
    policy: Policy, store: Store, coordinator: Coordinator, ahead: InstanceProcess
) -> None:
    work, numbers = Work(policy), [1, 2, 3, 4, 5, 6]
    await draft_always(ahead.address, work.run)
    await coordinator.give(*map(work.item, numbers))
    poll = await coordinator.finished(*numbers)
    assert poll.request.instance_id == "ahead"
    assert poll.request.policy_version == policy.version
    assert not poll.request.serving
    await store.until_finished(work.run, work.prompts, set(numbers))
    found = await store.tokens(work.run, work.prompts)
    rollouts = await store.rollouts(work.run, work.prompts)
    assert all(each.finished and each.step == 7 for each in rollouts.values())
    assert {number: each.seed for number, each in rollouts.items()} == {n: 1000 + n for n in numbers}
    truth = await policy.ask(*[work.plain(number) for number in numbers])
    assert found == {number: truth[number].tokens for number in numbers}
    for number, each in rollouts.items():
        logprobs = struct.unpack(f"<{len(each.logprobs) // 4}f", each.logprobs)
        assert list(logprobs) == pytest.approx(truth[number].logprobs, abs=1e-4)
    # At its step a sample is verified, not decoded.
    real = await policy.ask(*[work.real(number) for number in numbers])
    for number in numbers:
        ended = real[number].finished
        assert ended is not None
        assert real[number].tokens == truth[number].tokens
        assert (ended.cached_tokens, ended.reused_prefix) == (LENGTH, LENGTH)
        assert ended.decode_steps < LENGTH / 4
        assert {source.drafter for source in ended.draft_sources} <= {"pregenerated", "suffix"}
    metrics = ahead.metrics()
    assert metrics["paceline_generation_pregenerated_tokens_total"] >= len(numbers) * LENGTH
    assert metrics['paceline_generation_pregenerated_samples_total{outcome="finished"}'] >= len(numbers)
    assert metrics['paceline_generation_background_seconds_total{beside="nothing"}'] > 0
    assert metrics["paceline_generation_background_samples"] == 0


async def test_real_work_ends_it_at_once_and_it_goes_on_later(
    policy: Policy, store: Store, coordinator: Coordinator, ahead: InstanceProcess
) -> None:
    real = [101, 102, 103]
    work, ahead_of_time, _ = await midway(policy, coordinator, ahead, 11, 4)
    async with calling(policy.address) as caller:
        await caller.send([work.plain(number) for number in real])
        given_back = await coordinator.next(lambda poll: poll.returned >= set(ahead_of_time))
        assert given_back.request.room == 0
        assert given_back.request.serving
        given_back.answer()
        await policy.resume()
        outcomes = await caller.ended(*real)
        loads = [response.load.running + response.load.waiting for response in caller.responses]
    truth = await work.truth([*real, *ahead_of_time])
    assert {number: outcome.tokens for number, outcome in outcomes.items()} == {n: truth[n] for n in real}
    assert max(loads) <= len(real)
    partial = await store.until(work.run, work.prompts, set(ahead_of_time), POLL_STEPS + 1)
    for number, tokens in partial.items():
        assert POLL_STEPS < len(tokens) < LONG
        assert tokens == truth[number][: len(tokens)]
    assert ahead.metrics()["paceline_generation_yield_seconds_count"] >= 1
    # The same policy, so it goes on behind the tokens that there are.
    await coordinator.give(*map(work.item, ahead_of_time))
    poll = await coordinator.next(lambda poll: poll.tokens.keys() >= set(ahead_of_time))
    assert all(poll.tokens[number] >= len(partial[number]) for number in ahead_of_time)
    poll.answer()
    await coordinator.finished(*set(ahead_of_time) - poll.finished)
    wanted = {n: truth[n] for n in ahead_of_time}
    await store.until_tokens(work.run, work.prompts, lambda found: found == wanted)


async def test_weights_are_applied_while_it_goes_on(
    policy: Policy, store: Store, coordinator: Coordinator, ahead: InstanceProcess, models: tuple[Path, Path]
) -> None:
    await policy.stage(policy.version + 1, models[1])
    work, numbers, before = await midway(policy, coordinator, ahead, 21, 3)
    applied = await policy.apply(policy.version + 1)
    assert 0 < seconds_of(applied.halt_time) < seconds_of(applied.apply_time)
    await policy.resume()
    poll = await coordinator.next(lambda poll: poll.returned >= set(numbers))
    ended = {number: poll.tokens[number] for number in numbers}
    assert all(ended[number] >= before.tokens[number] for number in numbers)
    if poll.request.policy_version != policy.version:
        # It was sent in the middle of the update; one with the new version follows.
        poll.answer()
        poll = await coordinator.next(lambda poll: poll.request.policy_version == policy.version)
    # All of it goes to the store: the next step's samples may be anywhere.
    drafts = await store.until_tokens(
        work.run,
        work.prompts,
        lambda found: {number: len(tokens) for number, tokens in found.items()} == ended,
    )
    new = await work.truth(numbers)
    outcomes = await policy.ask(*[work.real(number) for number in numbers])
    for number in numbers:
        end = outcomes[number].finished
        assert end is not None
        assert outcomes[number].tokens == new[number], "a draft of the old policy is only a draft"
        assert end.cached_tokens == ended[number]
        assert end.reused_prefix < end.cached_tokens
    poll.answer()
    await policy.update(models[0])
    old = await work.truth(numbers)
    assert new != old
    assert drafts == {number: old[number][: len(drafts[number])] for number in numbers}


async def test_a_halt_leaves_nothing_running(
    policy: Policy, store: Store, coordinator: Coordinator, ahead: InstanceProcess
) -> None:
    work = Work(policy, LONG)
    before = ahead.metrics().get("paceline_generation_halt_delay_seconds_count", 0)
    for attempt in range(ATTEMPTS):
        numbers = {31 + 1000 * attempt, 32 + 1000 * attempt}
        await coordinator.give(*map(work.item, numbers))
        poll = await coordinator.next(lambda poll: poll.tokens and min(poll.tokens.values()) > POLL_STEPS)
        left = numbers - poll.finished
        poll.answer(halt=True, halted_at=timestamp(time.time()))
        if not left:
            continue
        poll = await coordinator.next(lambda poll: poll.returned | poll.finished >= left)  # noqa: B023
        if poll.returned >= numbers:
            break
        # Some ended before they were told to: the others were counted.
        before += bool(poll.returned)
        poll.answer()
    else:
        pytest.fail("items always ended before they could be halted")
    metrics = ahead.metrics()
    assert metrics["paceline_generation_background_samples"] == 0
    assert metrics["paceline_generation_halt_delay_seconds_count"] == before + 1
    assert poll.request.room == SEATS
    poll.answer()


async def test_a_sleeping_instance_wakes_for_whatever_needs_it(
    policy: Policy, coordinator: Coordinator, ahead: InstanceProcess, models: tuple[Path, Path]
) -> None:
    work, numbers = Work(policy), [41, 42]
    truth = await work.truth(numbers)
    await coordinator.give(work.item(43))
    (await coordinator.next(lambda poll: poll.tokens)).answer(sleep=True)
    await until_asleep(coordinator, ahead)
    assert ahead.metrics()["paceline_generation_background_samples"] == 0
    # Real work, while that is the coordinator's last word.
    assert await work.truth(numbers) == truth
    assert ahead.metrics()[ASLEEP] == 0
    # New weights.
    await until_asleep(coordinator, ahead)
    await policy.update(models[0])
    assert ahead.metrics()[ASLEEP] == 0
    # An answer that says nothing of sleep.
    (await until_asleep(coordinator, ahead)).answer()
    await coordinator.next(lambda _: not ahead.metrics()[ASLEEP])
    assert await work.truth(numbers) == truth


async def test_without_a_coordinator_it_ends_what_it_has(
    policy: Policy, store: Store, redis_url: str, ahead: InstanceProcess
) -> None:
    work, numbers = Work(policy, LONG), [51, 52]
    truth = await work.truth([*numbers, 53])
    async with Coordinator(redis_url, epoch=101) as first:
        await first.give(*map(work.item, numbers))
        await first.next(lambda poll: poll.tokens and min(poll.tokens.values()) > POLL_STEPS)
    wanted = {n: truth[n] for n in numbers}
    await store.until_tokens(work.run, work.prompts, lambda found: found == wanted)
    async with Coordinator(redis_url, epoch=102) as second:
        poll = await second.next()
        assert poll.request.coordinator_epoch == 101
        poll.answer(work.item(53))
        poll = await second.finished(53)
        assert poll.request.coordinator_epoch == 102
        assert not set(poll.tokens) & set(numbers), "leases of another coordinator are void"
        poll.answer()


async def test_without_a_store_the_instance_has_its_own_drafts(
    policy: Policy, store: Store, coordinator: Coordinator, ahead: InstanceProcess
) -> None:
    work, numbers = Work(policy), [61, 62, 63]
    await draft_always(ahead.address, work.run)
    truth = await work.truth(numbers)
    store.stop()
    await coordinator.give(*map(work.item, numbers))
    (await coordinator.finished(*numbers)).answer()
    outcomes = await policy.ask(*[work.real(number) for number in numbers])
    for number in numbers:
        ended = outcomes[number].finished
        assert ended is not None
        assert outcomes[number].tokens == truth[number]
        assert ended.cached_tokens == LENGTH
        assert ended.decode_steps < LENGTH / 2


async def test_an_instance_that_is_killed_costs_only_its_last_tokens(
    policy: Policy, store: Store, redis_url: str, ahead: InstanceProcess
) -> None:
    work, numbers = Work(policy, LONG), [71, 72]
    truth = await work.truth(numbers)
    async with Coordinator(redis_url, epoch=103) as coordinator:
        await coordinator.give(*map(work.item, numbers))
        poll = await coordinator.next(lambda poll: poll.tokens and min(poll.tokens.values()) > LONG / 2)
        # What was reported is put at the same time.
        least = min(poll.tokens.values())
        await store.until(work.run, work.prompts, set(numbers), least)
        ahead.kill()
    found = await store.tokens(work.run, work.prompts)
    for number in numbers:
        assert found[number] == truth[number][: len(found[number])]
        assert len(found[number]) >= least


def _warmer(model: Path, folder: Path) -> Path:
    """A model whose logits are a little larger: it decides near-ties otherwise, and hardly anything else."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 1.03
    save_file(weights, folder / "model.safetensors")
    return folder


async def test_near_ties_are_forked_and_the_updated_policy_goes_on_along_the_forks(
    models: tuple[Path, Path],
    start: Callable[..., InstanceProcess],
    redis_url: str,
    store: Store,
    tmp_path: Path,
) -> None:
    forking = {"forks": 4, "fork_margin": 0.5, "fork_slowdown": 9.0}
    with start(models[0], "forking", namespace=SPACE, max_num_seqs=SEATS, **forking) as instance:
        async with stub_of(instance.address) as stub, Coordinator(redis_url, epoch=104) as coordinator:
            policy = Policy(instance.address, stub)
            await policy.look()
            work, numbers = Work(policy), [81, 82, 83, 84]
            await draft_always(instance.address, work.run)
            await coordinator.give(*map(work.item, numbers))
            (await coordinator.finished(*numbers)).answer()

            async def forked() -> bool:
                await store.rollouts(work.run, work.prompts)
                ended = sum(each.finished for each in store.forks)
                running = instance.metrics()["paceline_generation_background_samples"]
                return ended >= 4 * len(numbers) and not running

            await until(forked, "every sample has its forks")
            found, forks = await store.tokens(work.run, work.prompts), store.forks
            assert found == await work.truth(numbers)
            for number, each in enumerate(forks, 200):
                tokens = list(struct.unpack(f"<{len(each.token_ids) // 4}I", each.token_ids))
                at = each.fork - 1
                assert tokens[:at] == found[each.slot][:at]
                assert tokens[at] != found[each.slot][at]
                # What follows is what the policy says behind it.
                item = work.plain(each.slot)
                item.handle = number
                item.prefix_token_ids.extend(tokens[: each.fork])
                outcome = (await policy.ask(item))[number]
                rest = tokens[each.fork :]
                assert outcome.tokens[: len(rest)] == rest
            counted = instance.metrics()
            assert counted["paceline_generation_pregenerated_forks_total"] >= len(forks)
            assert counted["paceline_generation_forked_tokens_total"] > LENGTH
            await policy.update(_warmer(models[0], tmp_path / "warmer"))
            real = await policy.ask(*[work.real(number) for number in numbers])
            taken = instance.metrics()["paceline_speculation_forks_taken_total"]
            truth = await work.truth(numbers)
            assert {number: outcome.tokens for number, outcome in real.items()} == truth
            left = [number for number in numbers if truth[number] != found[number]]
            assert left, "some near-tie is decided otherwise"
            assert taken >= 1
            texts = {
                (each.slot, *struct.unpack(f"<{len(each.token_ids) // 4}I", each.token_ids)) for each in forks
            }
            for number in left:
                ended = real[number].finished
                assert ended is not None
                if (number, *truth[number]) in texts:
                    assert ended.decode_steps < LENGTH / 4
