"""The policy service without Redis: nothing is promised, nothing ends, and it goes on when Redis is back."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from paceline.convert.fleet import knobs_from_proto
from services.platform.redis.embedded import EmbeddedRedis
from tests.integration.policy.conftest import Fleet, until
from tests.integration.policy.test_service import tally


async def test_knobs_are_refused_while_redis_is_away_and_instances_keep_theirs(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    fleet = Fleet(server.start(), "outage")
    try:
        instance = await fleet.instance("i0")
        # It leads as long as the test is without Redis, however long that takes.
        policy = await fleet.policy(lease_seconds=30)
        before = await policy.set(0, {"mode": "toggle"})
        await fleet.linked(policy, 1)
        server.kill()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await policy.set(before.revision, {"mode": "fixed"})
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert knobs_from_proto((await policy.get()).knobs) == {"mode": "toggle"}, (
            "what is known is still told"
        )
        assert instance.knobs == {"mode": "toggle"}
        # A step that ends meanwhile is explained when that is possible again, or never; nobody waits for it.
        instance.report.steps.extend([tally(0, 100)])
        server.start()

        async def set_again() -> bool:
            try:
                revision = (await policy.get()).revision
                await policy.set(revision, {"mode": "planner"})
            except grpc.aio.AioRpcError:
                return False
            return True

        await until(set_again, "knobs can be set again")
        await until(lambda: instance.knobs == {"mode": "planner"}, "the instance has them")
    finally:
        await fleet.stack.aclose()
        await fleet.redis.aclose()
        server.stop()
