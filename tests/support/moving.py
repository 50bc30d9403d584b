"""Samples that move between instances while they are generated: a caller of both, as a gateway would be.

    async with moving(first.address, second.address) as movers:
        await movers.start(0, item(1, prompt, seed=7))
        report = await movers.move(1, 1)
        journey = (await movers.ended(1))[1]

It claims every sample that is moved. It holds the instances to the order of events: nothing is reported twice, by
two instances, or after its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from paceline.internal.v1 import generation_pb2 as pb
from paceline.internal.v1 import generation_pb2_grpc as generation_rpc
from paceline.internal.v1 import migration_pb2
from paceline.internal.v1 import migration_pb2_grpc as migration_rpc
from paceline.v1 import sample_pb2
from tests.support.instances import CALL


@dataclass(slots=True)
class Journey:
    """One sample: what it has become, and the places that it has been to."""

    item: pb.WorkItem
    place: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # The policy version that sampled each token.
    versions: list[int] = field(default_factory=list)
    # Whether each was sampled with KV of several versions.
    mixed: list[bool] = field(default_factory=list)
    finished: pb.Finished | None = None
    refused: pb.Refused | None = None
    moves: int = 0
    resubmissions: int = 0

    @property
    def over(self) -> bool:
        """Whether it ended or was refused."""
        return self.finished is not None or self.refused is not None


class Movers:
    """One Work stream to each of some instances, and their MigrationServices."""

    def __init__(self, addresses: Sequence[str], stack: AsyncExitStack) -> None:
        self.addresses = list(addresses)
        self.journeys: dict[int, Journey] = {}
        self.streams: list[Any] = []
        self.migration: list[Any] = []
        self.generation: list[Any] = []
        self.claims = True
        # Served by the instances.
        self.version = 0
        # Places whose stream has ended.
        self.gone: set[int] = set()
        # Of moves that were reported and not claimed: by handle.
        self.unclaimed: dict[int, pb.Moved] = {}
        # A stream takes one message after the other.
        self._writing = [asyncio.Lock() for _ in self.addresses]
        self._news = asyncio.Event()
        self._readers: list[asyncio.Task[None]] = []
        # Addresses of relays, by which an instance goes as well.
        self.aliases: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._stack = stack

    async def open(self) -> None:
        """Connect."""
        for place, address in enumerate(self.addresses):
            channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(address))
            generation: Any = generation_rpc.GenerationServiceStub(channel)
            self.generation.append(generation)
            self.migration.append(migration_rpc.MigrationServiceStub(channel))
            stream = generation.Work()
            self.streams.append(stream)
            self._readers.append(asyncio.create_task(self._read(place, stream)))

    async def close(self) -> None:
        """End the streams, and with them what is left of the samples."""
        for stream in self.streams:
            stream.cancel()
        # A reader may be writing to a stream that is over, and hear nothing of it.
        for reader in self._readers:
            reader.cancel()
        await asyncio.wait(self._readers)

    async def start(self, place: int, *items: pb.WorkItem) -> None:
        """Start items at an instance."""
        for item in items:
            self.journeys[item.handle] = Journey(item, place)
        await self._write(place, pb.WorkRequest(start=items))

    async def abort(self, handle: int) -> None:
        """Abort a sample where it is."""
        await self._write(self.journeys[handle].place, pb.WorkRequest(abort=[handle]))

    async def abort_when_here(self, handle: int) -> None:
        """Abort a sample as soon as it is somewhere, and wait for its end."""
        await self.until(lambda: self.journeys[handle].place >= 0)
        await self.abort(handle)
        await self.ended(handle)

    async def until(self, holds: Callable[[], Any]) -> None:
        """Wait until the condition holds."""
        async with asyncio.timeout(CALL):
            while not holds():
                if self._failure is not None:
                    raise self._failure
                self._news.clear()
                await self._news.wait()

    async def ended(self, *handles: int) -> dict[int, Journey]:
        """Wait until samples have ended or were refused."""
        await self.until(lambda: all(self.journeys[handle].over for handle in handles))
        return {handle: self.journeys[handle] for handle in handles}

    async def tokens(self, count: int, *handles: int) -> None:
        """Wait until samples have so many tokens, or have ended."""
        await self.until(
            lambda: all(
                len(self.journeys[handle].tokens) >= count or self.journeys[handle].over for handle in handles
            )
        )

    async def pause(self, place: int) -> None:
        """Stop an instance's steps; all that it is asked it still does."""
        await self.generation[place].PauseEngine(pb.PauseEngineRequest(), timeout=CALL)

    async def resume_engine(self, place: int) -> None:
        """Have it go on."""
        await self.generation[place].ResumeEngine(pb.ResumeEngineRequest(), timeout=CALL)

    async def samples(self, place: int) -> migration_pb2.ListSamplesResponse:
        """What an instance has."""
        request = migration_pb2.ListSamplesRequest()
        response: migration_pb2.ListSamplesResponse = await self.migration[place].ListSamples(
            request, timeout=CALL
        )
        return response

    async def key(self, handle: int) -> str:
        """Return the key of a sample at the instance where it is."""
        listed = (await self.samples(self.journeys[handle].place)).samples
        return next((each.key for each in listed if each.handle == handle), "")

    async def move(self, handle: int, to: int, **fields: Any) -> migration_pb2.Migration:
        """Move a sample; what its donor says of it, once its stream has told of it as well."""
        journey = self.journeys[handle]
        donor, moves = journey.place, journey.moves
        report = await self.move_key(donor, await self.key(handle), to, **fields)
        if (report.outcome, report.by) == (migration_pb2.MOVE_OUTCOME_MOVED, migration_pb2.MOVE_BY_KV):
            await self.until(lambda: journey.moves > moves or donor in self.gone)
        return report

    async def move_key(self, donor: int, key: str, to: int, **fields: Any) -> migration_pb2.Migration:
        """Move the sample that has a key at its donor."""
        values = {"receiver_id": str(to), "receiver_address": self.addresses[to]} | fields
        request = migration_pb2.MoveRequest(key=key, **values)
        response: migration_pb2.MoveResponse = await self.migration[donor].Move(request, timeout=CALL)
        return response.migration

    async def claim(self, handle: int, place: int | None = None) -> None:
        """Claim a sample whose move was reported."""
        moved = self.unclaimed[handle]
        claim = pb.Claim(handle=handle, migration_id=moved.migration_id)
        where = self._place_of(moved.address) if place is None else place
        self.journeys[handle].place = where
        await self._write(where, pb.WorkRequest(claim=[claim]))

    async def resume(self, handle: int, place: int) -> None:
        """Go on with a sample by its prefix, under the version that its item names."""
        journey = self.journeys[handle]
        item = pb.WorkItem()
        item.CopyFrom(journey.item)
        del item.prefix_token_ids[:]
        item.prefix_token_ids.extend([*journey.item.prefix_token_ids, *journey.tokens])
        journey.place, journey.finished, journey.refused = place, None, None
        journey.resubmissions += 1
        await self._write(place, pb.WorkRequest(start=[item]))

    def _place_of(self, address: str) -> int:
        return self.aliases[address] if address in self.aliases else self.addresses.index(address)

    async def _write(self, place: int, request: pb.WorkRequest) -> None:
        async with self._writing[place]:
            await self.streams[place].write(request)

    # -- inside -------------------------------------------------------------------------------------------

    async def _read(self, place: int, stream: Any) -> None:
        try:
            async for response in stream:
                await self._take(place, response)
                self._news.set()
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
        except BaseException as error:
            self._failure = error
        self.gone.add(place)
        self._news.set()

    async def _take(self, place: int, response: pb.WorkResponse) -> None:
        for delta in response.deltas:
            journey = self._here(place, delta.handle)
            assert len(delta.tokens.token_ids) == len(delta.tokens.logprobs) > 0
            journey.tokens += delta.tokens.token_ids
            journey.logprobs += delta.tokens.logprobs
            journey.versions += [
                run.policy_version for run in delta.tokens.versions for _ in range(run.tokens)
            ]
            journey.mixed += [run.mixed_kv for run in delta.tokens.versions for _ in range(run.tokens)]
        for moved in response.moved:
            journey = self._here(place, moved.handle)
            assert moved.response_tokens == len(journey.item.prefix_token_ids) + len(journey.tokens)
            journey.moves += 1
            journey.place = -1
            self.unclaimed[moved.handle] = moved
            if self.claims:
                await self.claim(moved.handle)
        for finished in response.finished:
            self._here(place, finished.handle).finished = finished
        for refused in response.refused:
            self._here(place, refused.handle).refused = refused

    def _here(self, place: int, handle: int) -> Journey:
        journey = self.journeys[handle]
        assert journey.place == place, f"{handle} is at {journey.place}, {place} tells of it"
        assert not journey.over, f"{handle} goes on after its end"
        return journey


def reason(journey: Journey) -> str:
    """Why a sample ended: STOP, LENGTH or ABORTED."""
    assert journey.finished is not None, journey.refused
    return sample_pb2.FinishReason.Name(journey.finished.finish_reason).removeprefix("FINISH_REASON_")


def outcome(report: migration_pb2.Migration) -> tuple[str, str]:
    """(MOVED, "") or the outcome and its reason."""
    name = migration_pb2.MoveOutcome.Name(report.outcome).removeprefix("MOVE_OUTCOME_")
    why = migration_pb2.MoveReason.Name(report.reason).removeprefix("MOVE_REASON_")
    return name, "" if why == "UNSPECIFIED" else why


@asynccontextmanager
async def moving(*addresses: str) -> AsyncIterator[Movers]:
    """A caller of some instances."""
    async with AsyncExitStack() as stack:
        movers = Movers(addresses, stack)
        await movers.open()
        try:
            yield movers
        finally:
            await movers.close()
