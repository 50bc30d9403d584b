"""Ids of the batches of a step: each its own, and the same again in a run that is resumed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from paceline import Group, UnavailableError
from paceline.batches.run_rollouts import RunRollouts
from paceline.blocking import finish
from paceline.calls import GatewayCalls
from paceline.calls.caller import RetryPolicy
from paceline.transport.interface import Unary
from paceline.v1 import rollout_pb2, weight_pb2
from tests.unit.sdk.scripted_transport import ScriptedFailure, ScriptedTransport

TRAIN, EVAL, OTHER = ([Group(name, [1], 1)] for name in ("train", "eval", "other"))
LOST = ScriptedFailure(grpc.StatusCode.UNAVAILABLE)
LIMIT = 60.0


class MeetingTransport(ScriptedTransport):
    """Answers each call after `meet`, and notes the id of the last batch of each prompt."""

    def __init__(self, meet: Callable[[], Awaitable[object]]) -> None:
        super().__init__({"GetVersions": weight_pb2.GetVersionsResponse(policy_version=3)})
        self.ids: dict[str, str] = {}
        self.failing = ""
        """Prompt whose batch is not accepted."""
        self._meet = meet

    async def send(self, unary: Unary) -> Any:
        await self._meet()
        if unary.method != "SubmitRollouts":
            return await super().send(unary)
        request: Any = unary.request
        (group,) = request.groups
        self.ids[group.prompt_id] = request.batch_id
        if group.prompt_id == self.failing:
            raise LOST
        return rollout_pb2.SubmitRolloutsResponse()


async def at_once() -> None:
    """Meet nobody."""


def run_on(transport: ScriptedTransport) -> RunRollouts:
    return RunRollouts(GatewayCalls(transport, RetryPolicy(seconds=0)), "run", 7)


@pytest.mark.parametrize("version", [None, 3])
async def test_batches_that_are_begun_together_have_ids_of_their_own(version: int | None) -> None:
    # The second call at the barrier gets its answer first.
    transport = MeetingTransport(asyncio.Barrier(2).wait)
    run = run_on(transport)
    async with asyncio.timeout(LIMIT):
        rollouts = await asyncio.gather(
            run.rollout(5, TRAIN, policy_version=version), run.rollout(5, EVAL, policy_version=version)
        )
    assert transport.ids == {"train": "step-000005.v3.0", "eval": "step-000005.v3.1"}
    assert [each.batch.batch_id for each in rollouts] == ["step-000005.v3.0", "step-000005.v3.1"]


def test_batches_that_threads_begin_together_have_ids_of_their_own() -> None:
    barrier = threading.Barrier(2, timeout=LIMIT)

    async def meet() -> None:
        barrier.wait()

    transport = MeetingTransport(meet)
    run = run_on(transport)

    def begin(groups: list[Group]) -> None:
        finish(run.rollout(5, groups))

    threads = [threading.Thread(target=begin, args=(each,)) for each in (TRAIN, EVAL)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(transport.ids.values()) == ["step-000005.v3.0", "step-000005.v3.1"]


async def test_a_batch_that_is_begun_again_has_the_id_that_a_resumed_run_gives_it() -> None:
    transport = MeetingTransport(asyncio.Barrier(2).wait)
    transport.failing = "train"
    run = run_on(transport)
    async with asyncio.timeout(LIMIT):
        failed, _ = await asyncio.gather(run.rollout(5, TRAIN), run.rollout(5, EVAL), return_exceptions=True)
    assert isinstance(failed, UnavailableError)
    transport.failing, transport._meet = "", at_once
    for groups in (TRAIN, OTHER):
        await run.rollout(5, groups)

    resumed = MeetingTransport(at_once)
    run = run_on(resumed)
    for groups in (TRAIN, EVAL, OTHER):
        await run.rollout(5, groups)
    assert transport.ids == resumed.ids
    assert sorted(resumed.ids.values()) == [f"step-000005.v3.{number}" for number in range(3)]


async def test_an_open_batch_that_failed_to_open_leaves_its_id_to_the_next() -> None:
    opened = rollout_pb2.OpenBatchResponse()
    transport = ScriptedTransport({"OpenBatch": [LOST, opened, opened]})
    run, ids = run_on(transport), list[str]()
    for _ in range(3):
        try:
            async with run.open_batch(5, policy_version=3):
                raise KeyError("left open")
        except (KeyError, UnavailableError):
            ids.append(transport.requests["OpenBatch"].batch_id)
    assert ids == ["step-000005.v3.0", "step-000005.v3.0", "step-000005.v3.1"]
