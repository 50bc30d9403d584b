"""DraftModelService: translation between the protocol and the eagle3 head of this instance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from paceline.internal.v1 import drafter_pb2 as pb
from paceline.internal.v1 import drafter_pb2_grpc as rpc
from services.generation.draft_models import DraftModels

Context = grpc.aio.ServicerContext[Any, Any]


class DraftModelService(rpc.DraftModelServiceServicer):
    """One instance, as the drafter service sees it."""

    def __init__(self, models: DraftModels) -> None:
        self._models = models

    async def LoadDraftModel(
        self, request: pb.LoadDraftModelRequest, context: Context
    ) -> pb.LoadDraftModelResponse:
        """Draft with another head from the next engine step on."""
        previous = await self._models.load(request.version, Path(request.path), request.sha256)
        return pb.LoadDraftModelResponse(previous_version=previous)

    async def GetDraftModel(
        self, request: pb.GetDraftModelRequest, context: Context
    ) -> pb.GetDraftModelResponse:
        """The head in use, and what became of its drafts."""
        found = await self._models.in_use()
        return pb.GetDraftModelResponse(
            version=found.version,
            sha256=found.sha256,
            drafts=found.compared.drafts,
            draft_tokens=found.compared.tokens,
            accepted_tokens=found.compared.accepted,
        )
