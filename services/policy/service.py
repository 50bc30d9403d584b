"""PolicyService: translation between the protocol and the controller, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from paceline.internal.v1 import policy_pb2 as pb
from paceline.internal.v1 import policy_pb2_grpc as rpc
from services.platform.errors import Unavailable
from services.platform.store import OUTAGES
from services.policy.controller import Controller
from services.policy.convert import from_struct, to_struct
from services.policy.knobs import Scope

Context = grpc.aio.ServicerContext[Any, Any]


class PolicyService(rpc.PolicyServiceServicer):
    """`leading` gives the controller, or raises Unavailable while another process leads."""

    def __init__(self, leading: Callable[[], Controller]) -> None:
        self._leading = leading

    async def GetKnobs(self, request: pb.GetKnobsRequest, context: Context) -> pb.GetKnobsResponse:
        """A scope's own setting."""
        controller = self._leading()
        stored = controller.get(Scope.asked(request.run_id, request.model, request.pool))
        rung = controller.known.rungs.get(request.run_id) if request.run_id else None
        return pb.GetKnobsResponse(
            revision=stored.revision,
            knobs=to_struct(stored.knobs),
            ladder_cap=rung.cap if rung is not None else 0,
        )

    async def SetKnobs(self, request: pb.SetKnobsRequest, context: Context) -> pb.SetKnobsResponse:
        """Keeps a setting, and brings it to the instances before it answers, if they can be reached."""
        controller = self._leading()
        scope = Scope.asked(request.run_id, request.model, request.pool)
        try:
            revision, applied, pending = await controller.set(
                scope, request.revision, from_struct(request.knobs)
            )
        except OUTAGES as error:
            raise Unavailable(f"the knobs could not be kept: {error}") from error
        return pb.SetKnobsResponse(revision=revision, applied=applied, pending=pending)
