"""The budget for messages that are parsed and handled: what waits, who goes first, who is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from paceline.v1 import rollout_pb2
from services.contracts.errors import InvalidArgument, ResourceExhausted
from services.platform.grpc import parse_budget
from services.platform.grpc.parse_budget import (
    FIELD_BYTES,
    LEAST_MESSAGE_BYTES,
    SLICE_FIELDS,
    SMALL_BYTES,
    ParseBudget,
    shape_of,
)

SHAPE = shape_of(rollout_pb2.SubmitRolloutsRequest.DESCRIPTOR)
MOST = 8 << 20
WAIT = 30.0


def text(size: int) -> bytes:
    """Return a message with an id of so many bytes."""
    return rollout_pb2.SubmitRolloutsRequest(run_id="r" * size).SerializeToString()


def groups(number: int) -> bytes:
    """Return a message of so many empty groups."""
    return b"\x2a\x00" * number


def budget(most: int = MOST) -> ParseBudget:
    return ParseBudget(most, 1 << 20)


async def take(budget: ParseBudget, request: bytes, caller: str = "one") -> int:
    return await budget.take(request, SHAPE, lambda: caller)


@asynccontextmanager
async def in_line(budget: ParseBudget, *waiting: tuple[str, bytes]) -> AsyncIterator[list[asyncio.Task[int]]]:
    """Fill the budget, and let messages of callers wait for room; the first one's is given back at the end."""
    first = await take(budget, text(MOST))
    tasks = []
    for caller, request in waiting:
        tasks.append(asyncio.create_task(take(budget, request, caller)))
        # A message is in line, or refused, after its first turn.
        await asyncio.sleep(0)
    yield tasks
    budget.give_back(first)


async def test_a_message_is_counted_until_it_is_given_back() -> None:
    room = budget()
    taken = [await take(room, text(100_000)) for _ in range(3)]
    assert room.held == sum(taken) == 3 * (100_004 + FIELD_BYTES)
    for each in taken:
        room.give_back(each)
    assert room.held == 0


async def test_a_small_message_never_waits() -> None:
    room = budget()
    async with in_line(room, ("one", text(SMALL_BYTES))) as (large,), asyncio.timeout(WAIT):
        room.give_back(await take(room, text(100)))
        assert not large.done()
    room.give_back(await large)


async def test_one_message_above_the_budget_is_let_in_alone() -> None:
    room = budget()
    taken = await take(room, text(3 * MOST))
    assert taken > 3 * MOST
    room.give_back(taken)


async def test_callers_take_turns() -> None:
    room, order = budget(), list[str]()

    def told(caller: str, _: asyncio.Task[int]) -> None:
        order.append(caller)

    line = [("many", text(MOST // 12))] * 4 + [("few", text(MOST // 12))]
    async with in_line(room, *line) as tasks:
        for (caller, _), task in zip(line, tasks, strict=True):
            task.add_done_callback(partial(told, caller))
        # There is room for one at a time.
        room.held += MOST - MOST // 8
    async with asyncio.timeout(WAIT):
        for number in range(1, 6):
            while len(order) < number:  # noqa: ASYNC110 (no event is set)
                await asyncio.sleep(0)
            assert len(order) == number
            room.give_back(await tasks[0])
    assert order == ["many", "few", "many", "many", "many"]


async def test_the_last_of_the_caller_with_most_in_line_is_refused() -> None:
    room = budget()
    third = text(MOST // 6 - 100)
    line = [("many", third), ("many", third), ("few", third), ("few", third)]
    async with in_line(room, *line) as tasks:
        with pytest.raises(ResourceExhausted, match="others wait") as refused:
            await tasks[1]
        assert refused.value.details[-1].retry_delay.ToSeconds() >= 1  # type: ignore[attr-defined]
        assert [task.done() for task in tasks] == [False, True, False, False]
    for task in (tasks[0], *tasks[2:]):
        room.give_back(await task)
    assert (room.held, room.waiting) == (0, 0)


async def test_who_waits_too_long_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse_budget, "WAIT_SECONDS", 0.01)
    room = budget()
    async with in_line(room, ("one", text(MOST // 4))) as (task,):
        with pytest.raises(ResourceExhausted, match="got no room"):
            await task
    assert (room.held, room.waiting) == (0, 0)


@pytest.mark.parametrize("given_back", [False, True])
async def test_who_leaves_gives_its_room_back(given_back: bool) -> None:
    room = budget()
    async with in_line(room, ("one", text(MOST // 4)), ("two", text(MOST // 4))) as (leaver, stayer):
        if not given_back:
            leaver.cancel()
    if given_back:
        # It has room by now, and has not run since.
        leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    room.give_back(await stayer)
    assert (room.held, room.waiting) == (0, 0)


async def test_a_long_count_lets_others_run() -> None:
    room = budget(LEAST_MESSAGE_BYTES)
    counting = [asyncio.create_task(take(room, groups(20 * SLICE_FIELDS))) for _ in range(3)]
    turns = 0
    while not all(task.done() for task in counting):
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 3 * 19
    for task in counting:
        room.give_back(await task)
    assert (room.held, room.waiting) == (0, 0)


async def test_a_message_of_too_many_fields_is_refused() -> None:
    room = budget()
    with pytest.raises(InvalidArgument, match=f"more than {LEAST_MESSAGE_BYTES} bytes"):
        await take(room, groups(LEAST_MESSAGE_BYTES // FIELD_BYTES))
    assert (room.held, room.waiting) == (0, 0)


@pytest.mark.parametrize("garbage", [b"\xff" * 1000, groups(10 * SLICE_FIELDS) + b"\x2a\x01"])
async def test_bytes_that_are_no_message_are_refused(garbage: bytes) -> None:
    room = budget()
    with pytest.raises(InvalidArgument, match="is not an encoded message"):
        await take(room, garbage)
    assert (room.held, room.waiting) == (0, 0)


async def test_the_largest_packed_and_the_largest_listed_requests_have_room() -> None:
    most = 16 << 20
    room = ParseBudget(512 << 20, most)
    ids = rollout_pb2.GenerateRequest(prompt_token_ids=[1]).SerializeToString()[:1]
    length = bytes([most & 127 | 128, most >> 7 & 127 | 128, most >> 14 & 127 | 128, most >> 21])
    kind = shape_of(rollout_pb2.GenerateRequest.DESCRIPTOR)
    taken = await room.take(ids + length + b"\x01" * most, kind, str)
    room.give_back(taken)
    # As many as may be queued.
    report = rollout_pb2.ReportRewardsRequest(run_id="run", batch_id="batch")
    report.rewards.add(prompt_id="prompt-100000", slot=7, reward=1.0)
    one = report.SerializeToString()
    kind = shape_of(rollout_pb2.ReportRewardsRequest.DESCRIPTOR)
    rewards = one[one.index(b"\x1a") :] * 262_144
    room.give_back(await room.take(rewards, kind, str))
    assert room.held == 0
