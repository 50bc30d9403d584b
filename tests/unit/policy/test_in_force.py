"""Knobs in force: every change gets a revision that no instance has yet."""

from __future__ import annotations

from typing import Any, cast

from prometheus_client import CollectorRegistry

from paceline.internal.v1 import policy_pb2 as pb
from services.contracts.knob_store import KnobRecords, KnobStore, Rung
from services.contracts.knobs import KnobScope, knobs_from_proto
from services.policy.knobs_in_force import KnobsInForce
from services.policy.metrics import PolicyMetrics

RAISED = 42


class LateAnswers:
    """Store that counts in order, and whose answers to changes come after all that happened meanwhile."""

    def __init__(self) -> None:
        self.revision = 0
        self.in_force: KnobsInForce | None = None

    async def set(self, *_: Any) -> int:
        return await self._change()

    async def climb(self, *_: Any) -> int:
        return await self._change()

    async def raise_to(self, least: int) -> int:
        self.revision = max(self.revision, least)
        return self.revision

    async def _change(self) -> int:
        self.revision += 1
        made = self.revision
        assert self.in_force is not None
        # An instance has a later revision, gets one above it, and so the knobs without this change.
        await self.in_force.exceed(RAISED - 1)
        return made


def in_force() -> KnobsInForce:
    store = LateAnswers()
    store.in_force = KnobsInForce(cast(KnobStore, store), KnobRecords(), PolicyMetrics(CollectorRegistry()))
    return store.in_force


async def test_a_setting_that_was_stored_before_the_revision_was_raised_is_sent() -> None:
    knobs = in_force()
    assert await knobs.set(KnobScope(), 0, {"mode": "fixed"}) == 1
    assert knobs.revision > RAISED
    request = knobs.request_for(pb.GetSpeculationReportResponse())
    assert request.revision == knobs.revision
    assert knobs_from_proto(request.knobs) == {"mode": "fixed"}


async def test_a_step_on_the_ladder_that_was_stored_before_the_revision_was_raised_is_sent() -> None:
    knobs = in_force()
    await knobs.climb("run", Rung(4), True)
    assert knobs.revision > RAISED
    await knobs.climb("run", Rung(4, streak=1), False)
    assert knobs.revision == RAISED + 1, "nothing has changed for instances"
