"""Groups and sessions of an open batch after a call to add them that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
import pytest

from paceline import AsyncOpenBatch, Batch, Group, PacelineError
from paceline.batches.parts import runs_of
from paceline.batches.sessions import AsyncSessions
from paceline.calls import GatewayCalls
from paceline.calls.caller import RetryPolicy
from paceline.transport.interface import Unary
from paceline.v1 import rollout_pb2, sample_pb2
from tests.unit.sdk.scripted_transport import ScriptedFailure, ScriptedTransport

GROUPS = [Group(name, [1], 1) for name in ("p0", "p1")]
ADDED = rollout_pb2.AddSamplesResponse(added=1)
REFUSED = ScriptedFailure(grpc.StatusCode.RESOURCE_EXHAUSTED)
UNANSWERED = ScriptedFailure(grpc.StatusCode.DEADLINE_EXCEEDED)


@pytest.fixture(autouse=True)
def _a_message_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group is sent in a message of its own."""
    monkeypatch.setattr("paceline.batches.parts.runs_of", partial(runs_of, most_samples=1))


def events(*prompt_ids: str) -> list[rollout_pb2.StreamRolloutsResponse]:
    """Return the answers of a stream that has the samples of a closed batch."""
    total = len(prompt_ids)
    return [rollout_pb2.StreamRolloutsResponse(total=total)] + [
        rollout_pb2.StreamRolloutsResponse(
            cursor=number, sample=sample_pb2.Sample(prompt_id=each), finished=number, total=total
        )
        for number, each in enumerate(prompt_ids, 1)
    ]


async def begun(additions: list[Any], *accepted: str) -> tuple[AsyncOpenBatch, list[str]]:
    """Return an open batch whose gateway has the samples of `accepted`, and the prompts noted as added."""
    transport = ScriptedTransport(
        {
            "OpenBatch": rollout_pb2.OpenBatchResponse(),
            "AddSamples": additions,
            "StreamRollouts": [events(*accepted)],
        }
    )
    noted: list[str] = []
    return await opened_on(transport, lambda groups: noted.extend(group.prompt_id for group in groups)), noted


async def opened_on(
    transport: ScriptedTransport, added: Callable[[Sequence[Group]], None] = lambda groups: None
) -> AsyncOpenBatch:
    batch = AsyncOpenBatch(
        GatewayCalls(transport, RetryPolicy(seconds=0)), Batch("run", "batch", 0, 0, ()), added
    )
    await batch.begin()
    return batch


async def given(batch: AsyncOpenBatch) -> list[str]:
    return [samples[0].prompt_id async for samples in batch.by_group()]


@pytest.mark.parametrize(
    ("additions", "accepted"),
    [
        pytest.param([ADDED, REFUSED], ["p0"], id="the second message is refused"),
        pytest.param([REFUSED], [], id="all is refused"),
        pytest.param([ADDED, UNANSWERED], ["p0", "p1"], id="the second message arrives without an answer"),
        pytest.param([UNANSWERED], ["p0"], id="the first message arrives without an answer"),
    ],
)
async def test_a_call_that_fails_keeps_the_groups_that_the_gateway_may_have(
    additions: list[Any], accepted: list[str]
) -> None:
    batch, noted = await begun(additions, *accepted)
    with pytest.raises(PacelineError, match="by the script"):
        await batch.add(GROUPS)
    assert (len(batch), noted) == (len(accepted), accepted)
    assert await given(batch) == accepted


@pytest.mark.parametrize("failure", [REFUSED, UNANSWERED])
async def test_a_call_that_failed_may_be_repeated(failure: ScriptedFailure) -> None:
    batch, noted = await begun([ADDED, failure, rollout_pb2.AddSamplesResponse(), ADDED], "p0", "p1")
    with pytest.raises(PacelineError, match="by the script"):
        await batch.add(GROUPS)
    assert await batch.add(GROUPS) == 1
    assert (len(batch), noted) == (2, ["p0", "p1"])
    assert await given(batch) == ["p0", "p1"]


class LateTransport(ScriptedTransport):
    """Answers additions after `read` is set."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__(answers)
        self.arrived, self.read = asyncio.Event(), asyncio.Event()

    async def send(self, unary: Unary) -> Any:
        if unary.method == "AddSamples":
            self.arrived.set()
            await self.read.wait()
        return await super().send(unary)


async def test_sessions_that_are_begun_again_keep_the_turns_of_a_call_that_failed() -> None:
    transport = LateTransport(
        {
            "OpenBatch": rollout_pb2.OpenBatchResponse(),
            "AddSamples": [UNANSWERED, rollout_pb2.AddSamplesResponse()],
            "StreamRollouts": [events("p0")],
        }
    )
    batch = await opened_on(transport)
    sessions = AsyncSessions(batch)
    async with asyncio.timeout(60):
        begin = asyncio.create_task(sessions.begin(GROUPS[0]))
        await transport.arrived.wait()
        turns = []
        async for session, turn in sessions.turns():
            turns.append((session.key.prompt_id, turn.done))
            transport.read.set()
            with pytest.raises(PacelineError, match="by the script"):
                await begin
        assert turns == [("p0", True)]
        (again,) = await sessions.begin(GROUPS[0])
        assert again is session
        assert again.sample is not None
        assert [each async for each in sessions.turns()] == []
