"""Empties instances that are to go: everything off them that can be moved, round after round."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from paceline.v1 import fleet_pb2
from services.reallocator.members import Member, Members
from services.reallocator.moves import Mover, Outcome
from services.reallocator.plan import evacuate
from services.reallocator.records import Rules, Standing, Transfer

log = structlog.get_logger(__name__)

# Between two rounds of which the first moved nothing; doubles while that goes on.
_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class Evacuation:
    """One task for each instance that says it is draining; it ends when that is empty or gone."""

    def __init__(
        self,
        members: Members,
        mover: Mover,
        rules: Callable[[], Rules],
        look: Callable[[list[Member]], Awaitable[list[Standing]]],
        tell: Callable[[Transfer, Outcome], Awaitable[None]],
    ) -> None:
        """`look` asks instances how they stand; `tell` is told what became of each transfer."""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._members = members
        self._mover = mover
        self._rules = rules
        self._look = look
        self._tell = tell

    def watch(self) -> None:
        """Begins with those that have come to be draining."""
        self.tasks = {name: task for name, task in self.tasks.items() if not task.done()}
        for member in self._members.known.values():
            leaving = member.is_in(fleet_pb2.INSTANCE_STATE_DRAINING) and member.samples
            if leaving and member.instance_id not in self.tasks:
                task = asyncio.create_task(self._empty(member), name=f"evacuate-{member.instance_id}")
                self.tasks[member.instance_id] = task

    async def _empty(self, member: Member) -> None:
        log.info("evacuating", instance=member.instance_id, samples=member.samples)
        moved, pause = 0, _PAUSE
        while self._members.known.get(member.instance_id) is member:
            others = [
                each
                for each in self._members.known.values()
                if each.is_in(fleet_pb2.INSTANCE_STATE_SERVING) and each is not member
            ]
            standings = {each.instance_id: each for each in await self._look([member, *others])}
            donor = standings.pop(member.instance_id, None)
            if donor is None or not donor.samples:
                break
            took = sum(await asyncio.gather(*map(self._round, self._plan(donor, standings))))
            moved += took
            if took:
                pause = _PAUSE
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        log.info("evacuated", instance=member.instance_id, moved=moved)

    def _plan(self, donor: Standing, others: dict[str, Standing]) -> list[Transfer]:
        # That one has just given says nothing against its taking these.
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
