"""Trainer of the fleet benchmark: submit a step in parts, stream, acknowledge and check its samples.

Prompts are distributed over several gateways as the SDK distributes them over shards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from bench.fleet.workload import GROUP, PROMPT_TOKENS, SimulatedPolicy
from paceline.calls.rollouts import MOST_SAMPLES
from paceline.shards import Shard, assign
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
    given: list[int] = field(default_factory=list)
    """Samples that each gateway received."""


class FleetTrainer:
    """Trainer with one connection to each gateway."""

    def __init__(self, shards: Sequence[Shard], policy: SimulatedPolicy) -> None:
        """Connect to the gateways."""
        self._shards = shards
        self._channels = [grpc.aio.insecure_channel(shard.address, options=_OPTIONS) for shard in shards]
        self._stubs: list[Any] = [rollout_pb2_grpc.RolloutServiceStub(each) for each in self._channels]
        self._policy = policy
        self._result = StepResult(given=[0] * len(shards))

    async def step(self, samples: int, batch_samples: int) -> StepResult:
        """Run one step of `samples` samples. Its parts are submitted one after the other and streamed concurrently.

        A part has `batch_samples` samples for each gateway, on average.
        """
        began = time.perf_counter()
        groups = _groups(samples, batch_samples)
        size = -(-batch_samples // GROUP) * len(self._shards)
        async with asyncio.TaskGroup() as streams:
            for number, first in enumerate(range(0, len(groups), size)):
                await self._submit(number, groups[first : first + size], streams)
        self._result.seconds = time.perf_counter() - began
        for channel in self._channels:
            await channel.close()
        return self._result

    async def _submit(self, number: int, groups: Sequence[pb.Group], streams: asyncio.TaskGroup) -> None:
        assigned = assign([group.prompt_id for group in groups], self._shards)
        for index, stub in enumerate(self._stubs):
            own = [group for group, owner in zip(groups, assigned, strict=True) if owner == index]
            if not own:
                continue
            request = _batch(number, own, self._policy.longest)
            asked = time.perf_counter()
            await stub.SubmitRollouts(request, timeout=_CALL)
            self._result.submit_seconds.append(time.perf_counter() - asked)
            self._result.given[index] += sum(group.samples for group in own)
            streams.create_task(self._stream(stub, request))

    async def _stream(self, stub: Any, request: pb.SubmitRolloutsRequest) -> None:
        names = (request.run_id, request.batch_id)
        wanted = {(group.prompt_id, slot) for group in request.groups for slot in range(group.samples)}
        cursor = unacknowledged = 0
        whole = pb.StreamRolloutsRequest(run_id=names[0], batch_id=names[1], most_samples=MOST_SAMPLES)
        async for event in stub.StreamRollouts(whole):
            if not event.HasField("sample"):
                continue
            for sample in (*(each.sample for each in event.earlier), event.sample):
                self._take(sample, wanted)
            cursor, unacknowledged = event.cursor, unacknowledged + 1 + len(event.earlier)
            if unacknowledged >= _ACK_EVERY:
                await self._acknowledge(stub, names, cursor)
                unacknowledged = 0
        self._result.wrong += len(wanted)
        await self._acknowledge(stub, names, cursor)

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

    async def _acknowledge(self, stub: Any, names: tuple[str, str], cursor: int) -> None:
        if not self._result.acknowledged:
            return
        try:
            request = pb.AckRolloutsRequest(run_id=names[0], batch_id=names[1], cursor=cursor)
            await stub.AckRollouts(request, timeout=_CALL)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._result.acknowledged = False
            # As in the SDK, a lost acknowledgement only costs memory until the next one.
            elif error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            else:
                self._result.lost_acknowledgements += 1


def _groups(samples: int, batch_samples: int) -> list[pb.Group]:
    """Return the groups of a step, which are the same for any number of gateways."""
    found = list[pb.Group]()
    for block, first in enumerate(range(0, samples, batch_samples)):
        left = min(batch_samples, samples - first)
        for at in range(-(-left // GROUP)):
            found.append(
                pb.Group(
                    prompt_id=f"p{block}-{at}",
                    prompt_token_ids=[1 + at] * PROMPT_TOKENS,
                    samples=min(GROUP, left - at * GROUP),
                )
            )
    return found


def _batch(number: int, groups: Sequence[pb.Group], longest: int) -> pb.SubmitRolloutsRequest:
    return pb.SubmitRolloutsRequest(
        run_id=_RUN,
        batch_id=f"part-{number}",
        run_seed=20,
        sampling=sample_pb2.SamplingParams(max_tokens=longest),
        groups=groups,
    )
