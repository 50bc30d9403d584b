"""MigrationService: translation between the protocol and migration, nothing else."""

from __future__ import annotations

from typing import Any

import grpc

from paceline.internal.v1 import migration_pb2 as pb
from paceline.internal.v1 import migration_pb2_grpc as rpc
from services.generation.migration.migration import Migration

_Context = grpc.aio.ServicerContext[Any, Any]


class MigrationService(rpc.MigrationServiceServicer):
    """One instance, as the reallocator and other instances see it."""

    def __init__(self, migration: Migration) -> None:
        self._migration = migration

    async def ListSamples(self, request: pb.ListSamplesRequest, context: _Context) -> pb.ListSamplesResponse:
        """The samples in the engine."""
        return await self._migration.list_samples()

    async def Move(self, request: pb.MoveRequest, context: _Context) -> pb.MoveResponse:
        """Move one of them."""
        return pb.MoveResponse(migration=await self._migration.move(request))

    async def Reserve(self, request: pb.ReserveRequest, context: _Context) -> pb.ReserveResponse:
        """Make room for a sample of another instance."""
        return await self._migration.reserve(request)

    async def Commit(self, request: pb.CommitRequest, context: _Context) -> pb.CommitResponse:
        """Run it."""
        return await self._migration.commit(request)

    async def Cancel(self, request: pb.CancelRequest, context: _Context) -> pb.CancelResponse:
        """Do without it."""
        state = await self._migration.cancel(request.migration_id, disown=request.disown)
        return pb.CancelResponse(state=state)

    async def GetMigration(
        self, request: pb.GetMigrationRequest, context: _Context
    ) -> pb.GetMigrationResponse:
        """What is known of a migration."""
        return pb.GetMigrationResponse(migration=await self._migration.get(request.migration_id))
