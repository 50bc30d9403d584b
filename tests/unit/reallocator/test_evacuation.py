"""Whose samples an evacuation lists: a few instances with room, and others after a round that moved nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from paceline.v1 import fleet_pb2
from services.platform.redis.registry import INSTANCES, InstanceRecord
from services.reallocator.members import PolledInstance
from services.reallocator.moves import Evacuation, MoveOutcome, UnreachableReceivers
from services.reallocator.planning.decision_scope import MOST_LISTED, in_turn
from services.reallocator.planning.records import InstanceView, ReallocationRules, Transfer
from services.reallocator.planning.throughput import Architecture, Roofline, StepTime
from tests.unit.reallocator.fleets import view

LIMIT = 60.0
STEP_TIME = StepTime(
    architecture=Architecture(weight_bytes=1e9, kv_bytes=1e5, dense_flops=1e9, attention_flops=1e4)
)


class Rig:
    """An evacuation of instance `leaving`; the moves of a round succeed once its receivers are `willing`."""

    def __init__(self, samples: int) -> None:
        self.known: dict[str, PolledInstance] = {}
        self.left = samples
        self.willing: set[str] = set()
        self.listed: list[list[str]] = []
        # What happens once, during the first "listing" or the first "move".
        self.meanwhile: dict[str, Callable[[], None]] = {}
        self.add("leaving", samples, state=fleet_pb2.INSTANCE_STATE_DRAINING)
        self.unreachable = UnreachableReceivers()
        members: Any = SimpleNamespace(known=self.known)
        self.evacuation = Evacuation(members, self, ReallocationRules, self.list_views, self.report)  # type: ignore[arg-type]

    def add(
        self,
        name: str,
        samples: int,
        *,
        state: fleet_pb2.InstanceState = fleet_pb2.INSTANCE_STATE_SERVING,
        version: int = 1,
        model: str = "m",
        most: int = 64,
    ) -> None:
        record = InstanceRecord(INSTANCES, name, model=model, max_running=most)
        channel = grpc.aio.insecure_channel("127.0.0.1:1")
        member = PolledInstance(record, channel, Roofline(STEP_TIME.seconds, most))
        load = fleet_pb2.InstanceLoad(running=samples)
        member.status = fleet_pb2.Instance(instance_id=name, state=state, policy_version=version, load=load)
        self.known[name] = member

    async def list_views(self, members: list[PolledInstance]) -> list[InstanceView]:
        names = [member.instance_id for member in members]
        self.listed.append(names)
        self.meanwhile.pop("listing", lambda: None)()
        return [view(name, self.left if name == "leaving" else self.known[name].samples) for name in names]

    async def report(self, transfer: Transfer, outcome: MoveOutcome) -> None:
        pass

    async def carry_out(self, transfer: Transfer) -> MoveOutcome:
        outcome = MoveOutcome()
        if transfer.receiver in self.willing:
            outcome.done.extend(transfer.moves)
            self.left -= len(transfer.moves)
        self.meanwhile.pop("move", lambda: None)()
        return outcome

    def resume(self) -> None:
        """Serve again; the gateway places 5 samples there."""
        status = self.known["leaving"].status
        assert status is not None
        status.state = fleet_pb2.INSTANCE_STATE_SERVING
        self.left += 5

    async def run(self) -> Sequence[Sequence[str]]:
        self.evacuation.watch()
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*self.evacuation.tasks.values())
        # The last listing finds that nothing is left.
        return [names[1:] for names in self.listed]


@pytest.mark.parametrize(
    ("turn", "found"), [(0, [0, 1, 2]), (1, [3, 4, 5]), (2, [6, 0, 1]), (3, [2, 3, 4]), (7, [0, 1, 2])]
)
def test_a_turn_begins_where_the_one_before_it_ended(turn: int, found: list[int]) -> None:
    assert list(in_turn(range(7), 3, turn)) == found
    assert list(in_turn(range(3), 3, turn)) == [0, 1, 2]
    assert list(in_turn([], 3, turn)) == []


async def test_of_a_large_fleet_the_emptiest_that_could_take_samples_are_listed() -> None:
    rig = Rig(30)
    for number in range(200):
        rig.add(f"i{number:03d}", 50 - number // 5)
    rig.add("other-version", 0, version=2)
    rig.add("other-model", 0, model="n")
    rig.add("full", 0, most=0)
    rig.add("paused", 0, state=fleet_pb2.INSTANCE_STATE_PAUSED)
    rig.willing = set(rig.known)
    first, last = await rig.run()
    able = [f"i{number:03d}" for number in range(200)]
    assert first == sorted(able, key=lambda name: (rig.known[name].samples, name))[:MOST_LISTED]
    assert rig.left == 0
    assert first == last


async def test_after_a_round_that_moved_nothing_others_are_listed_until_some_take_samples() -> None:
    rig = Rig(20)
    for number in range(2 * MOST_LISTED):
        rig.add(f"i{number:03d}", 0)
    rig.willing = {f"i{number:03d}" for number in range(MOST_LISTED, MOST_LISTED + 10)}
    first, second, *rest = await rig.run()
    assert first == [f"i{number:03d}" for number in range(MOST_LISTED)]
    assert second == [f"i{number:03d}" for number in range(MOST_LISTED, 2 * MOST_LISTED)]
    assert rig.left == 0
    assert all(listed == second for listed in rest[:1]), "the round that moved some is followed by the same"


@pytest.mark.parametrize(("during", "kept"), [("listing", 25), ("move", 5)])
async def test_a_resumed_instance_keeps_its_samples(during: str, kept: int) -> None:
    rig = Rig(20)
    rig.add("other", 0)
    rig.willing = {"other"}
    rig.meanwhile[during] = rig.resume
    assert await rig.run() == [["other"]]
    assert rig.left == kept


async def test_an_instance_that_does_not_answer_may_still_drain() -> None:
    rig = Rig(20)
    rig.add("other", 0)
    rig.willing = {"other"}

    def fall_silent() -> None:
        rig.known["leaving"].status = None

    rig.meanwhile["listing"] = fall_silent
    await rig.run()
    assert rig.left == 0
