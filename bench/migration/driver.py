"""Drive instances directly, as a gateway does: work streams, claims, and resuming by prefix.

The benchmark of moves decides itself where samples begin, and repeats the same moves in another way. It therefore
bypasses the platform's gateway.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

import grpc

from examples.tinymath.tasks import make_problems
from examples.tinymath.tokenizer import prompt_ids
from paceline.internal.v1 import generation_pb2 as pb
from paceline.internal.v1 import generation_pb2_grpc, migration_pb2, migration_pb2_grpc
from paceline.transport.channel import call_metadata
from paceline.v1 import sample_pb2
from services.contracts.seeds import sample_seed

_CALL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Task:
    """A sample to generate, and the instance that it begins on."""

    key: str
    prompt: tuple[int, ...]
    seed: int
    sampling: sample_pb2.SamplingParams
    instance_id: str


@dataclass(frozen=True, slots=True)
class DrivenMove:
    """Migration of a sample after `tokens` response tokens; a move by prefix has no migration id."""

    key: str
    donor: str
    receiver: str
    tokens: int
    migration_id: str = ""

    @property
    def by(self) -> str:
        """Way of the move: kv or prefix."""
        return "kv" if self.migration_id else "prefix"


@dataclass(slots=True, eq=False)
class Track:
    """State of a sample on its way through instances.

    `gaps` has the seconds from the last token before each move to the first one after it, with the kind of move.
    """

    task: Task
    instance_id: str
    handle: int
    tokens: list[int] = field(default_factory=list)
    last_at: float = 0.0
    gaps: list[tuple[str, float]] = field(default_factory=list)
    moving: bool = False
    moved_to: str = ""
    moved_by: str = ""
    finished: pb.Finished | None = None


@dataclass(slots=True)
class LoadResult:
    """Result of running a load."""

    seconds: float
    tracks: dict[str, Track]
    moves: list[DrivenMove]
    lost_claims: int

    @property
    def tokens(self) -> int:
        """Response tokens of all samples."""
        return sum(len(each.tokens) for each in self.tracks.values())

    @property
    def responses(self) -> dict[str, list[int]]:
        """The token ids of each sample."""
        return {key: each.tokens for key, each in self.tracks.items()}

    def gaps(self, *ways: str) -> list[float]:
        """Return the token gaps of all moves of these kinds."""
        return [gap for each in self.tracks.values() for by, gap in each.gaps if by in ways]

    @property
    def moved_again(self) -> int:
        """Moves of samples that had been moved before."""
        return len(self.moves) - len({move.key for move in self.moves})


class Driver:
    """Usage: `async with Driver(addresses, token) as driver: outcome = await driver.run(tasks)`."""

    def __init__(self, addresses: Mapping[str, str], token: str | None = None) -> None:
        self._addresses = addresses
        self._metadata = call_metadata(token)
        self._stack = AsyncExitStack()
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Self:
        for name, address in self._addresses.items():
            channel = grpc.aio.insecure_channel(address)
            self._channels[name] = await self._stack.enter_async_context(channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self, tasks: Iterable[Task], by_prefix: Iterable[DrivenMove] = ()) -> LoadResult:
        """Run all tasks to completion.

        Moves that the instances make are followed. A move in `by_prefix` is made by ending the sample on its
        instance and resuming it on the other with its current tokens.
        """
        calls: dict[str, Any] = {
            name: generation_pb2_grpc.GenerationServiceStub(channel).Work(metadata=self._metadata)  # type: ignore[no-untyped-call]
            for name, channel in self._channels.items()
        }
        return await _Run(calls, list(tasks), list(by_prefix)).finish()

    async def migration(self, move: DrivenMove) -> migration_pb2.Migration:
        """Return the donor's report of a move."""
        stub: Any = migration_pb2_grpc.MigrationServiceStub(self._channels[move.donor])  # type: ignore[no-untyped-call]
        request = migration_pb2.GetMigrationRequest(migration_id=move.migration_id)
        return (await stub.GetMigration(request, timeout=_CALL_SECONDS, metadata=self._metadata)).migration


class _Run:
    def __init__(self, calls: dict[str, Any], tasks: list[Task], by_prefix: list[DrivenMove]) -> None:
        self._calls = calls
        self._tasks = tasks
        self._wanted = {move.key: move for move in by_prefix}
        self._handles = count(1)
        self._tracks: dict[str, Track] = {}
        self._by_handle: dict[tuple[str, int], Track] = {}
        self._moves: list[DrivenMove] = []
        self._lost_claims = 0
        self._left = len(tasks)
        self._done = asyncio.Event()

    async def finish(self) -> LoadResult:
        """Run the load to completion and return its result."""
        starts: dict[str, list[pb.WorkItem]] = {name: [] for name in self._calls}
        for task in self._tasks:
            track = Track(task, task.instance_id, next(self._handles))
            self._tracks[task.key] = track
            self._by_handle[track.instance_id, track.handle] = track
            starts[task.instance_id].append(_item(track))
        began = time.perf_counter()
        readers = [asyncio.create_task(self._read(name)) for name in self._calls]
        done = asyncio.create_task(self._done.wait())
        try:
            for name, items in starts.items():
                if items:
                    await self._calls[name].write(pb.WorkRequest(start=items))
            finished, _ = await asyncio.wait({done, *readers}, return_when=asyncio.FIRST_COMPLETED)
            for task_ in finished - {done}:
                task_.result()
            seconds = time.perf_counter() - began
        finally:
            for each in (done, *readers):
                each.cancel()
            for call in self._calls.values():
                call.cancel()
        if self._left:
            raise RuntimeError(f"a work stream ended with {self._left} samples unfinished")
        return LoadResult(seconds, self._tracks, self._moves, self._lost_claims)

    async def _read(self, name: str) -> None:
        async for response in self._calls[name]:
            await self._take(name, response, time.perf_counter())

    async def _take(self, name: str, response: pb.WorkResponse, now: float) -> None:
        request = pb.WorkRequest()
        for delta in response.deltas:
            track = self._by_handle.get((name, delta.handle))
            if track is not None:
                self._extend(track, delta, now, request)
        for finished in response.finished:
            track = self._by_handle.pop((name, finished.handle), None)
            if track is not None:
                await self._ended(track, finished)
        for refused in response.refused:
            track = self._by_handle.pop((name, refused.handle), None)
            if track is None or not track.moved_to:
                raise RuntimeError(f"{name} refused a sample: {refused.message}")
            self._lost_claims += 1
            await self._resume(track, track.moved_to)
        for moved in response.moved:
            track = self._by_handle.pop((name, moved.handle), None)
            if track is not None:
                await self._claim(track, moved)
        if request.abort:
            await self._calls[name].write(request)

    def _extend(self, track: Track, delta: pb.Delta, now: float, request: pb.WorkRequest) -> None:
        if track.moved_to and track.last_at:
            track.gaps.append((track.moved_by, now - track.last_at))
            track.moved_to = ""
        track.tokens.extend(delta.tokens.token_ids)
        track.last_at = now
        move = self._wanted.get(track.task.key)
        here = move is not None and move.donor == track.instance_id and not track.moving
        if here and move is not None and len(track.tokens) >= move.tokens:
            track.moving = True
            request.abort.append(track.handle)

    async def _ended(self, track: Track, finished: pb.Finished) -> None:
        aborted = finished.finish_reason == sample_pb2.FINISH_REASON_ABORTED
        if aborted and track.moving:
            move = self._wanted.pop(track.task.key)
            track.moving = False
            self._moves.append(DrivenMove(move.key, move.donor, move.receiver, len(track.tokens)))
            await self._resume(track, move.receiver)
            return
        if aborted and finished.resume_on:
            # The reallocator moves it by its prefix.
            move = DrivenMove(track.task.key, track.instance_id, finished.resume_on, len(track.tokens))
            self._moves.append(move)
            await self._resume(track, finished.resume_on)
            return
        track.finished = finished
        self._left -= 1
        if not self._left:
            self._done.set()

    async def _resume(self, track: Track, instance_id: str) -> None:
        # As in the gateway, the last token is sampled again.
        del track.tokens[-1:]
        track.instance_id, track.handle, track.moved_to = instance_id, next(self._handles), instance_id
        track.moved_by = "prefix"
        self._by_handle[instance_id, track.handle] = track
        await self._calls[instance_id].write(pb.WorkRequest(start=[_item(track)]))

    async def _claim(self, track: Track, moved: pb.Moved) -> None:
        donor, track.instance_id, track.handle = track.instance_id, moved.instance_id, next(self._handles)
        track.moved_to, track.moved_by = moved.instance_id, "kv"
        self._by_handle[track.instance_id, track.handle] = track
        self._moves.append(
            DrivenMove(track.task.key, donor, moved.instance_id, len(track.tokens), moved.migration_id)
        )
        claim = pb.Claim(handle=track.handle, migration_id=moved.migration_id)
        await self._calls[moved.instance_id].write(pb.WorkRequest(claim=[claim]))


def _item(track: Track) -> pb.WorkItem:
    task = track.task
    return pb.WorkItem(
        handle=track.handle,
        prompt_token_ids=task.prompt,
        prefix_token_ids=track.tokens,
        sampling=task.sampling,
        exactness=sample_pb2.Exactness(level=sample_pb2.EXACTNESS_LEVEL_EXACT),
        seed=task.seed,
        # Stream each token, because gaps are measured and moves are made by the tokens that have arrived.
        streamed=True,
    )


PROMPT_TOKENS = 24
"""Prompt tokens of a sample of Figure 5's load."""
_SEED = 11


def figure_5(tokens: int) -> list[Task]:
    """Return 24 samples on one instance and 1 on the other, all of the same length."""
    sampling = sample_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [
        Task(
            f"figure/{n}",
            tuple(3 + (7 * n + place) % 500 for place in range(PROMPT_TOKENS)),
            sample_seed(_SEED, 0, "figure", n),
            sampling,
            "instance-0" if n < 24 else "instance-1",
        )
        for n in range(25)
    ]


def long_tail(plain: LoadResult | None) -> list[Task]:
    """Return samples of tinymath; the half with the longer measured responses begins on the first instance."""
    problems = make_problems(seed=1, n=12)
    sampling = sample_pb2.SamplingParams(max_tokens=800)
    lengths: dict[str, int] = defaultdict(int)
    if plain is not None:
        for track in plain.tracks.values():
            lengths[track.task.key.partition("/")[0]] += len(track.tokens)
    ranked = sorted((problem.id for problem in problems), key=lambda name: (-lengths[name], name))
    first = set(ranked[: len(ranked) // 2])
    return [
        Task(
            f"{problem.id}/{slot}",
            tuple(prompt_ids(problem.question)),
            sample_seed(_SEED, 1, problem.id, slot),
            sampling,
            "instance-0" if problem.id in first else "instance-1",
        )
        for problem in problems
        for slot in range(8)
    ]
