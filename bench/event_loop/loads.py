"""The same samples for an engine: without a client, and by a gateway's batch and Generate streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline import AsyncClient, Group, Sample, SampleRequest, SamplingParams
from paceline.internal.v1 import generation_pb2 as pb
from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineRequest

_EACH = 16
"""Samples of a prompt."""


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """Samples that clients ask for: of one batch, and by Generate streams, whose callers read along."""

    batch: int
    streams: int


def prompts(samples: int) -> list[tuple[str, list[int]]]:
    """Return the prompts of so many samples, each for 16 of them."""
    from examples.tinymath.tasks import make_problems
    from examples.tinymath.tokenizer import prompt_ids

    problems = make_problems(seed=1, n=-(-samples // _EACH))
    return [(problem.id, prompt_ids(problem.question)) for problem in problems]


def requests(next_id: Callable[[], str], samples: int, tokens: int) -> Iterator[EngineRequest]:
    """Yield the samples as requests of an engine."""
    chosen = prompts(samples)
    for i in range(samples):
        prompt = tuple(chosen[i // _EACH][1])
        yield EngineRequest(next_id(), prompt, (), Sampling(max_tokens=tokens, ignore_eos=True), i)


async def run_load(client: AsyncClient, load: ClientLoad, tokens: int, number: int) -> None:
    """Get the samples of a load by a gateway. Every sample has `tokens` tokens."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    chosen = prompts(load.batch + load.streams)
    keys = [(name, prompt, slot) for name, prompt in chosen for slot in range(_EACH)]
    read_along = keys[: load.streams]
    groups = [
        Group(f"{name}-batch", prompt, sum(each == name for each, _, _ in keys[load.streams :]))
        for name, prompt in chosen
    ]
    async with asyncio.TaskGroup() as tasks:
        for name, prompt, slot in read_along:
            request = SampleRequest(
                f"along-{number}", name, prompt, slot=slot, sampling=sampling, run_seed=number
            )
            tasks.create_task(_read(client, request))
        tasks.create_task(_batch(client, [group for group in groups if group.samples], sampling, number))


async def _read(client: AsyncClient, request: SampleRequest) -> None:
    async for event in client.generate(request):
        if isinstance(event, Sample):
            return
    raise RuntimeError("a stream ended without its sample")


async def _batch(client: AsyncClient, groups: list[Group], sampling: SamplingParams, number: int) -> None:
    if not groups:
        return
    async with client.run(f"batch-{number}", seed=number) as run:
        rollout = await run.rollout(0, groups, sampling)
        async for _ in rollout:
            pass


class SilentStream:
    """Stream of an engine loop whose samples nobody is told of; `over` is set when all have ended."""

    background = False

    def __init__(self, events: asyncio.AbstractEventLoop) -> None:
        self.samples: dict[int, Any] = {}
        self.over = asyncio.Event()
        self._events = events

    def add(self, sample: Any, now: float) -> None:
        """Take in a sample."""
        self.samples[sample.handle] = sample

    def reached(self, sample: Any) -> None:
        """Do nothing."""

    def finish(self, sample: Any, event: pb.Finished) -> None:
        """Forget a sample."""
        self.samples.pop(sample.handle, None)
        if not self.samples:
            self._events.call_soon_threadsafe(self.over.set)

    def refuse(self, event: pb.Refused) -> None:
        """Raise: a benchmark asks for nothing that is refused."""
        raise RuntimeError(event.message)

    def flush(self, load: Any, policy_version: int, now: float, *, everything: bool = False) -> None:
        """Do nothing."""

    def put(self, event: Exception | None) -> None:
        """Do nothing."""
