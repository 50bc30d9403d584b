"""LearnerService: translation between the protocol and the controller, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from paceline.internal.v1 import drafter_pb2 as pb
from paceline.internal.v1 import drafter_pb2_grpc as rpc
from services.drafter.controller import Controller

Context = grpc.aio.ServicerContext[Any, Any]


class LearnerService(rpc.LearnerServiceServicer):
    """`leading` gives the controller, or raises Unavailable while another process leads."""

    def __init__(self, leading: Callable[[], Controller]) -> None:
        self._leading = leading

    async def GetLearner(self, request: pb.GetLearnerRequest, context: Context) -> pb.GetLearnerResponse:
        """What was learned, and what is published."""
        controller = self._leading()
        manifest, current = controller.study.manifest, controller.release.published
        compared = controller.release.compared
        response = pb.GetLearnerResponse(
            policy_version=manifest.policy_version,
            updates=manifest.updates,
            samples_used=manifest.samples_used,
            tokens_used=manifest.tokens_used,
            kd_loss=manifest.kd_loss,
            rejected_candidates=manifest.rejected,
            roll_backs=manifest.roll_backs,
        )
        if compared is not None:
            response.candidate_acceptance_length = compared.candidate
            response.current_acceptance_length = compared.current or 0.0
        if current is not None:
            response.version, response.path, response.sha256 = current.version, current.path, current.sha256
            response.published.FromMicroseconds(int(current.at * 1e6))
        return response

    async def RollBack(self, request: pb.RollBackRequest, context: Context) -> pb.RollBackResponse:
        """Publishes the drafter before."""
        published = await self._leading().release.roll_back(request.reason, request.version)
        return pb.RollBackResponse(version=published.version)
