"""Trainer of the fleet benchmark: submit a step in parts, stream, acknowledge and check its samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from bench.fleet.workload import GROUP, PROMPT_TOKENS, SimulatedPolicy
from paceline.calls.rollouts import MOST_SAMPLES
from paceline.v1 import rollout_pb2 as pb
from paceline.v1 import rollout_pb2_grpc, sample_pb2

_RUN = "fleet"
_ACK_EVERY = 128
# Seconds, far more than any call takes.
_CALL = 120.0
_WHOLE = (sample_pb2.SAMPLE_STATUS_COMPLETED, sample_pb2.SAMPLE_STATUS_TRUNCATED)
_OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20))


@dataclass(slots=True)
class StepResult:
    """Outcome of a step: `samples` that arrived complete, correct and once; `wrong` ones; their serialised size."""

    samples: int = 0
    wrong: int = 0
    tokens: int = 0
    result_bytes: int = 0
    acknowledged: bool = True
    lost_acknowledgements: int = 0
    seconds: float = 0.0
    submit_seconds: list[float] = field(default_factory=list)


class FleetTrainer:
    """Trainer with a connection to the gateway."""

    def __init__(self, address: str, policy: SimulatedPolicy) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub: Any = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self._policy = policy
        self._result = StepResult()

    async def step(self, samples: int, batch_samples: int) -> StepResult:
        """Run one step of `samples` samples, in parts of `batch_samples`.

        The parts are submitted one after the other and streamed concurrently.
        """
        began = time.perf_counter()
        async with asyncio.TaskGroup() as streams:
            for number, first in enumerate(range(0, samples, batch_samples)):
                groups = _groups(number, min(batch_samples, samples - first))
                request = _batch(number, groups, self._policy.longest)
                asked = time.perf_counter()
                await self._stub.SubmitRollouts(request, timeout=_CALL)
                self._result.submit_seconds.append(time.perf_counter() - asked)
                streams.create_task(self._stream(request))
        self._result.seconds = time.perf_counter() - began
        await self._channel.close()
        return self._result

    async def _stream(self, request: pb.SubmitRolloutsRequest) -> None:
        names = (request.run_id, request.batch_id)
        wanted = {(group.prompt_id, slot) for group in request.groups for slot in range(group.samples)}
        cursor = unacknowledged = 0
        whole = pb.StreamRolloutsRequest(run_id=names[0], batch_id=names[1], most_samples=MOST_SAMPLES)
        async for event in self._stub.StreamRollouts(whole):
            if not event.HasField("sample"):
                continue
            for sample in (*(each.sample for each in event.earlier), event.sample):
                self._take(sample, wanted)
            cursor, unacknowledged = event.cursor, unacknowledged + 1 + len(event.earlier)
            if unacknowledged >= _ACK_EVERY:
                await self._acknowledge(names, cursor)
                unacknowledged = 0
        self._result.wrong += len(wanted)
        await self._acknowledge(names, cursor)

    def _take(self, sample: sample_pb2.Sample, wanted: set[tuple[str, int]]) -> None:
        key, result, length = (sample.prompt_id, sample.slot), self._result, self._policy.length(sample.seed)
        tokens, logprobs = self._policy.slice(sample.seed, 0, length)
        equal = list(sample.tokens.token_ids) == tokens and list(sample.tokens.logprobs) == logprobs
        right = key in wanted and sample.status in _WHOLE and equal
        wanted.discard(key)
        result.samples += right
        result.wrong += not right
        result.tokens += length
        result.result_bytes += sample.ByteSize()

    async def _acknowledge(self, names: tuple[str, str], cursor: int) -> None:
        if not self._result.acknowledged:
            return
        try:
            request = pb.AckRolloutsRequest(run_id=names[0], batch_id=names[1], cursor=cursor)
            await self._stub.AckRollouts(request, timeout=_CALL)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._result.acknowledged = False
            # As in the SDK, a lost acknowledgement only costs memory until the next one.
            elif error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            else:
                self._result.lost_acknowledgements += 1


def _groups(part: int, samples: int) -> list[pb.Group]:
    """Return the groups of a part of a step."""
    return [
        pb.Group(
            prompt_id=f"p{part}-{at}",
            prompt_token_ids=[1 + at] * PROMPT_TOKENS,
            samples=min(GROUP, samples - at * GROUP),
        )
        for at in range(-(-samples // GROUP))
    ]


def _batch(number: int, groups: Sequence[pb.Group], longest: int) -> pb.SubmitRolloutsRequest:
    return pb.SubmitRolloutsRequest(
        run_id=_RUN,
        batch_id=f"part-{number}",
        run_seed=20,
        sampling=sample_pb2.SamplingParams(max_tokens=longest),
        groups=groups,
    )
