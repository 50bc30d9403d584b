"""JSON schemas are compiled beside the engine: their samples wait for it, and nobody else."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from paceline.internal.v1 import generation_pb2 as pb
from services.contracts.sampling import Sampling
from services.generation.server.sample_intake import SchemaChecks
from tests.unit.generation.test_intake import WAIT, Rig, close, lenient, named, reason, starts

GOOD, BAD, SLOW, BROKEN = '{"const": "good"}', '{"const": "bad"}', '{"const": "slow"}', '{"const": "broken"}'


class Check:
    """A compiler that waits with SLOW schemas, finds fault with BAD ones and fails on BROKEN ones."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.seen: list[tuple[str, list[int]]] = []

    def __call__(self, sampling: Sampling, prefix: Sequence[int]) -> str:
        self.seen.append((sampling.json_schema, list(prefix)))
        if sampling.json_schema == SLOW:
            self.open.wait(WAIT)
        if sampling.json_schema == BROKEN:
            raise RuntimeError("a defect")
        return "is bad" if sampling.json_schema == BAD else ""


@pytest.fixture
def check() -> Iterator[Check]:
    made = Check()
    yield made
    made.open.set()


@pytest.fixture
async def rig(check: Check) -> AsyncIterator[Rig]:
    made = Rig()
    made.intake._schemas = SchemaChecks(check, WAIT)
    yield made
    await close(made)


async def test_a_sample_starts_once_its_schema_is_compiled_and_others_do_not_wait(
    rig: Rig, check: Check
) -> None:
    stream = await rig.open()
    rig.intake.take(stream, starts(named(1, json_schema=SLOW), named(2), named(3, json_schema=GOOD)))
    await rig.started(stream, 2, 3)
    assert list(stream.parked) == [1]
    check.open.set()
    ends = await rig.over(stream, 1, 2, 3)
    assert {reason(end) for end in ends.values()} == {"LENGTH"}


async def test_a_schema_that_cannot_be_served_is_refused_by_name(rig: Rig, check: Check) -> None:
    stream = await rig.open()
    rig.intake.take(
        stream, starts(named(1, json_schema=BAD, prefix_token_ids=[7]), named(2, json_schema=BROKEN))
    )
    ends = await rig.ended(stream, 1, 2)
    for end, says in ((ends[1], "is bad"), (ends[2], "RuntimeError")):
        assert isinstance(end, pb.Refused)
        assert (reason(end), end.field) == ("INVALID_ARGUMENT", "sampling.json_schema")
        assert says in end.message
    assert (BAD, [7]) in check.seen


async def test_a_schema_that_takes_too_long_is_refused(rig: Rig, check: Check) -> None:
    rig.intake._schemas = SchemaChecks(check, 0.01)
    stream = await rig.open()
    rig.intake.take(stream, starts(named(1, json_schema=SLOW)))
    (end,) = (await rig.ended(stream, 1)).values()
    assert isinstance(end, pb.Refused)
    assert "too complicated" in end.message


async def test_an_item_that_is_aborted_meanwhile_has_one_end(rig: Rig, check: Check) -> None:
    stream = await rig.open()
    rig.intake.take(stream, starts(named(1, json_schema=SLOW)))
    rig.intake.take(stream, starts(abort=[1]))
    ends = await rig.ended(stream, 1)
    assert reason(ends[1]) == "ABORTED"
    rig.intake.take(stream, starts(named(2)))
    check.open.set()
    assert set(await rig.over(stream, 2)) == {2}


async def test_a_lenient_one_waits_for_its_rollout_too(rig: Rig) -> None:
    stream = await rig.open()
    rig.intake.take(stream, starts(lenient(1, json_schema=GOOD)))
    await rig.call(lambda: None)
    assert list(stream.parked) == [1]
    rig.answer()
    ends = await rig.over(stream, 1)
    assert reason(ends[1]) == "LENGTH"
