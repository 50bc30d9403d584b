"""The stream of decisions: bounded, in order, and nobody's problem when Redis is away."""

from __future__ import annotations

import asyncio

from services.platform.config import ServiceConfig
from services.platform.redis import decision_log as decisions
from services.platform.redis.connection import connect
from services.platform.redis.decision_log import BEGINNING, DecisionLog, DecisionRecord, stream_key
from tests.integration.policy.conftest import CALL, Fleet, until


async def read(log: DecisionLog, count: int, **how: str) -> list[DecisionRecord]:
    found: list[DecisionRecord] = []
    async with asyncio.timeout(CALL):
        async for decision in log.follow(**how):
            found.append(decision)
            if len(found) == count:
                return found
    raise AssertionError("unreachable")


async def test_decisions_are_read_as_they_were_written(fleet: Fleet) -> None:
    log = fleet.decisions_log
    written = [
        DecisionRecord("toggle", "warum: größer", 0.25, {"a": [1, {"b": None}]}, 12.5, "run"),
        DecisionRecord("scaling", "", 0.0, {}, 13.0),
        DecisionRecord("toggle", "of another run", 0.1, {}, 14.0, "other"),
    ]
    for decision in written:
        assert await log.write(decision)
    assert await read(log, 3, after=BEGINNING) == written
    assert await read(log, 2, after=BEGINNING, run_id="run") == written[:2]
    assert await log.recent(2) == written[1:]


async def test_a_watcher_that_starts_now_sees_what_comes_after(fleet: Fleet) -> None:
    log = fleet.decisions_log
    await log.write(DecisionRecord("knobs", "before"))
    watching = asyncio.create_task(read(log, 1))
    # It reads with a blocking command: then it is where it wants to be.

    async def waits() -> bool:
        return any(each["cmd"] == "xread" for each in await fleet.redis.client_list())

    await until(waits, "the watcher reads")
    await log.write(DecisionRecord("knobs", "after"))
    assert [each.reason for each in await watching] == ["after"]


async def test_the_stream_is_bounded_and_odd_entries_are_passed_over(fleet: Fleet) -> None:
    log = fleet.decisions_log
    key = stream_key(fleet.config.namespace)
    await fleet.redis.xadd(key, {"kind": "no decision"})
    big = DecisionRecord("knobs", "big", details={"text": "x" * 100_000}, predicted_gain=float("inf"))
    await log.write(big)
    (kept,) = await log.recent()
    assert (kept.reason, kept.predicted_gain) == ("big", 0.0)
    assert "100011 bytes" in kept.details["left_out"]
    await log.write(DecisionRecord("knobs", "long" * 10_000))
    assert (await log.recent(1))[0].reason == "long" * 250
    await log.write(DecisionRecord("knobs", "odd", details={"share": float("nan")}))
    assert "left_out" in (await log.recent(1))[0].details, "what is no JSON would end every watch"
    async with fleet.redis.pipeline(transaction=False) as pipe:
        for n in range(decisions.KEPT + 500):
            pipe.xadd(
                key, DecisionRecord("knobs", str(n)).to_fields(), maxlen=decisions.KEPT, approximate=True
            )
        await pipe.execute()
    assert await fleet.redis.xlen(key) < decisions.KEPT + 200


async def test_without_redis_nothing_is_written_and_nothing_fails() -> None:
    redis = connect(ServiceConfig(redis_url="redis://127.0.0.1:1"))
    assert not await DecisionLog(redis, "nowhere").write(DecisionRecord("knobs", "lost"))
    await redis.aclose()
