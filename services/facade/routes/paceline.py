"""Routes of Paceline's own: hints of coming prompts, and rewards."""

from __future__ import annotations

from fastapi import APIRouter, Request

from paceline.errors import Violation
from paceline.transport import Unary
from paceline.v1 import rollout_pb2
from services.contracts.errors import InvalidArgument
from services.facade.dialects import paceline
from services.facade.dialects.parameters import run_seed
from services.facade.routes.worked import worked_router
from services.facade.serving import Facade


def paceline_routes(facade: Facade) -> APIRouter:
    """Return the routes."""
    router = worked_router(facade, "Paceline", "/paceline/v1")

    @router.post("/hint")
    async def hint(body: paceline.HintBody, request: Request) -> dict[str, int]:
        """Announce the prompts of a coming step, for idle instances; 0 samples if nothing can be made of it."""
        announced = rollout_pb2.HintNextBatchRequest.FromString(body.announced)
        announced.run_id, announced.run_seed = facade.run_id(request), _hinted_seed(facade, body.seed)
        facade.forecasts.announced(announced.run_id, announced.step)
        return {
            "samples": int((await facade.client().call(Unary("Rollout", "HintNextBatch", announced))).samples)
        }

    @router.post("/rewards")
    async def rewards(body: paceline.RewardsBody, request: Request) -> dict[str, int]:
        """Report rewards of finished samples, for the drafter; `matched` of them are known."""
        reported = rollout_pb2.ReportRewardsRequest.FromString(body.reported)
        reported.run_id = facade.run_id(request)
        return {
            "matched": int((await facade.client().call(Unary("Rollout", "ReportRewards", reported))).matched)
        }

    return router


def _hinted_seed(facade: Facade, seed: int | None) -> int:
    """Return the seed of the requests to come: without one, they have that of the facade that they come to."""
    given = run_seed(seed)
    if given is None and not facade.config.alone:
        found = "is needed where there are several facades, and so in the requests to come"
        raise InvalidArgument([Violation("seed", found)])
    return facade.names.seed if given is None else given
