"""MigrationService of fake instances: what the reallocator is tested against.

It keeps the contract of the donor's side; the KV that it does not have moves in no time. A move runs the fake's own
`move`, so a gateway beside it sees what it would see of real instances.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from paceline.internal.v1 import migration_pb2 as pb
from paceline.internal.v1 import migration_pb2_grpc as rpc
from paceline.times import duration
from tests.support.fake_instance import MAX_MODEL_LEN, FakeInstance

BLOCK = 16
Refuse = Callable[[pb.MoveRequest], "pb.MoveReason | None"]


class FakeMigration(rpc.MigrationServiceServicer):
    """Of one fake; `peers` has all of them by id. Its controls may be set at any time."""

    def __init__(self, fake: FakeInstance, peers: dict[str, FakeInstance]) -> None:
        self.fake = fake
        self.peers = peers
        # Controls ---------------------------------------------------------------------------------------
        self.free_blocks = 1000
        # None: nothing is wrong with it.
        self.refuse: Refuse = lambda request: None
        # Moves wait for it.
        self.gate = asyncio.Event()
        self.gate.set()
        # What happened ----------------------------------------------------------------------------------
        self.moves: list[tuple[str, str, pb.MoveOutcome]] = []
        self.at_once = self.most_at_once = 0
        self.listings = 0
        peers[fake.instance_id] = fake

    def _samples(self) -> dict[str, Any]:
        """Those that somebody has claimed."""
        return {_key(s): s for stream in self.fake.streams for s in stream.samples.values()}

    async def ListSamples(
        self, request: pb.ListSamplesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListSamplesResponse:
        self.listings += 1
        movable = self._samples()
        return pb.ListSamplesResponse(
            samples=[
                pb.ListedSample(
                    key=_key(sample),
                    handle=sample.item.handle,
                    prompt_tokens=len(sample.item.prompt_token_ids),
                    response_tokens=sample.length,
                    max_tokens=sample.item.sampling.max_tokens or MAX_MODEL_LEN,
                    kv_blocks=sample.length // BLOCK + 1,
                    immovable=(
                        pb.MOVE_REASON_UNSPECIFIED if _key(sample) in movable else pb.MOVE_REASON_IN_TRANSIT
                    ),
                )
                for sample in self.fake.running()
            ],
            block_size=BLOCK,
            free_blocks=self.free_blocks,
            total_blocks=1000,
            max_running=self.fake.max_running,
            free_capacity=max(0, self.fake.max_running - len(self.fake.running())),
            policy_version=self.fake.version,
        )

    async def Move(self, request: pb.MoveRequest, context: grpc.aio.ServicerContext) -> pb.MoveResponse:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.gate.wait()
            migration = self._move(request)
        finally:
            self.at_once -= 1
        self.moves.append((request.key, request.receiver_id, migration.outcome))
        return pb.MoveResponse(migration=migration)

    def _move(self, request: pb.MoveRequest) -> pb.Migration:
        migration = pb.Migration(migration_id=request.migration_id, key=request.key)
        sample, receiver = self._samples().get(request.key), self.peers.get(request.receiver_id)
        reason = self.refuse(request)
        if sample is None:
            reason = pb.MOVE_REASON_UNKNOWN_SAMPLE
        if receiver is None or receiver.draining:
            reason = pb.MOVE_REASON_CLOSED
        if reason is not None:
            failed = reason >= pb.MOVE_REASON_FINISHED
            migration.outcome = pb.MOVE_OUTCOME_FAILED if failed else pb.MOVE_OUTCOME_REFUSED
            migration.reason = reason
            return migration
        migration.by = request.by or pb.MOVE_BY_KV
        migration.outcome = pb.MOVE_OUTCOME_MOVED
        if request.by == pb.MOVE_BY_PREFIX:
            self.fake.hand_back(sample, request.receiver_id)
            return migration
        self.fake.move(sample, request.migration_id, receiver)
        migration.copied_bytes, migration.stall_steps = 4096, 1.5
        migration.stall_time.CopyFrom(duration(0.002))
        return migration


def _key(sample: Any) -> str:
    return f"{sample.item.prompt_id}/{sample.item.slot}"
