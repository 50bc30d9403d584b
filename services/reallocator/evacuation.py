"""Empty draining instances: move every sample off them that can be moved, round after round."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from paceline.v1 import fleet_pb2
from services.platform.backoff import ExponentialBackoff
from services.reallocator.members import PolledInstance, PolledInstances
from services.reallocator.moves import MoveOutcome, Mover
from services.reallocator.planning.plan import evacuate
from services.reallocator.planning.records import InstanceView, ReallocationRules, Transfer

log = structlog.get_logger(__name__)

# Seconds between two rounds, after one that moved nothing and after many in a row.
_FIRST_DELAY, _LONGEST_DELAY = 0.05, 1.0


class Evacuation:
    """One task per draining instance; it ends when the instance is empty or gone."""

    def __init__(
        self,
        members: PolledInstances,
        mover: Mover,
        rules: Callable[[], ReallocationRules],
        look: Callable[[list[PolledInstance]], Awaitable[list[InstanceView]]],
        tell: Callable[[Transfer, MoveOutcome], Awaitable[None]],
    ) -> None:
        """Take `look`, which lists instances, and `tell`, which is called with the outcome of each transfer."""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._members = members
        self._mover = mover
        self._rules = rules
        self._look = look
        self._tell = tell

    def watch(self) -> None:
        """Start a task for every instance that has begun to drain."""
        self.tasks = {name: task for name, task in self.tasks.items() if not task.done()}
        for member in self._members.known.values():
            leaving = member.is_in(fleet_pb2.INSTANCE_STATE_DRAINING) and member.samples
            if leaving and member.instance_id not in self.tasks:
                task = asyncio.create_task(self._empty(member), name=f"evacuate-{member.instance_id}")
                self.tasks[member.instance_id] = task

    async def _empty(self, member: PolledInstance) -> None:
        log.info("evacuating", instance=member.instance_id, samples=member.samples)
        moved, backoff = 0, ExponentialBackoff(_FIRST_DELAY, _LONGEST_DELAY)
        while self._members.known.get(member.instance_id) is member:
            others = [
                each
                for each in self._members.known.values()
                if each.is_in(fleet_pb2.INSTANCE_STATE_SERVING) and each is not member
            ]
            views = {each.instance_id: each for each in await self._look([member, *others])}
            donor = views.pop(member.instance_id, None)
            if donor is None or not donor.samples:
                break
            took = sum(await asyncio.gather(*map(self._round, self._plan(donor, views))))
            moved += took
            if took:
                backoff.succeeded()
                continue
            await asyncio.sleep(backoff.failed())
        log.info("evacuated", instance=member.instance_id, moved=moved)

    def _plan(self, donor: InstanceView, others: dict[str, InstanceView]) -> list[Transfer]:
        # The cooldown does not apply: these samples have to go somewhere.
        now = asyncio.get_running_loop().time()
        free = [replace(each, receives=not self._is_shunned(name, now)) for name, each in others.items()]
        return evacuate(donor, free, self._rules())

    def _is_shunned(self, instance_id: str, now: float) -> bool:
        member = self._members.known.get(instance_id)
        return member is None or self._mover.shunned.is_shunned(instance_id, member.record.epoch, now)

    async def _round(self, transfer: Transfer) -> int:
        outcome = await self._mover.carry_out(transfer)
        await self._tell(transfer, outcome)
        return outcome.moved
