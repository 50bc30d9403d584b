"""One of several controllers has the Lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.platform.tasks import end
from services.policy.metrics import ApiConflict, ScalingMetrics
from services.policy.scaling.kubernetes_client import (
    Election,
    KubernetesClient,
    LeaseRecord,
    connected,
    may_take,
)
from tests.support.kubernetes_api import NAMESPACE, KubernetesApi

SECONDS = 1.0


class Clock:
    """Seconds that pass when the test says so, on top of those that do."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with KubernetesApi() as api:
        yield api


@pytest.fixture
async def cluster(api: KubernetesApi) -> AsyncIterator[KubernetesClient]:
    async with connected(api.url, NAMESPACE) as cluster:
        yield cluster


def candidate(
    cluster: KubernetesClient, name: str, clock: Clock | None = None, seconds: float = SECONDS
) -> Election:
    metrics = ScalingMetrics(CollectorRegistry())
    return Election(cluster, "lease", name, seconds, metrics, clock or Clock())


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def holder(api: KubernetesApi) -> str:
    return str(api.leases["lease"]["spec"].get("holderIdentity", ""))


def renewed(api: KubernetesApi) -> str:
    return str(api.leases["lease"]["spec"]["renewTime"])


@pytest.mark.parametrize(
    ("record", "age", "expected"),
    [
        (LeaseRecord(), 0, True),
        (LeaseRecord("me", seconds=10), 0, True),
        (LeaseRecord("other", seconds=10), 9.9, False),
        (LeaseRecord("other", seconds=10), 10, True),
        (LeaseRecord("", seconds=10), 0, True),
    ],
)
def test_a_lease_is_taken_when_it_is_free_or_over(record: LeaseRecord, age: float, expected: bool) -> None:
    assert may_take(record, "me", age) is expected


async def test_one_leads_and_the_other_takes_over_when_it_leaves(
    api: KubernetesApi, cluster: KubernetesClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Renewed often, and not over because the machine is slow.
    monkeypatch.setattr("services.policy.scaling.kubernetes_client._RENEW", 1 / 200)
    clock, seconds = Clock(), 12.0
    first, second = candidate(cluster, "first", seconds=seconds), candidate(cluster, "second", clock, seconds)
    leading = asyncio.create_task(first.run())
    await until(lambda: first.leading)
    standing_by = asyncio.create_task(second.run())
    # For the other, much more time passes than the Lease lasts, but never so much between two renewals.
    for _ in range(12):
        before = renewed(api)
        await until(lambda before=before: renewed(api) != before)
        clock.ahead += seconds / 4
    assert (first.leading, second.leading, holder(api)) == (True, False, "first")
    await end([leading])
    assert not first.leading
    await until(lambda: second.leading)
    assert holder(api) == "second"
    assert api.leases["lease"]["spec"]["leaseTransitions"] >= 1
    await end([standing_by])
    assert holder(api) == ""


async def test_two_that_begin_together_do_not_both_lead(
    api: KubernetesApi, cluster: KubernetesClient
) -> None:
    all_of_them = [candidate(cluster, f"c{n}") for n in range(5)]
    tasks = [asyncio.create_task(each.run()) for each in all_of_them]
    await until(lambda: any(each.leading for each in all_of_them))
    looks = api.lease_reads

    def all_have_looked_again() -> bool:
        assert sum(each.leading for each in all_of_them) <= 1
        return api.lease_reads >= looks + 3 * len(all_of_them)

    await until(all_have_looked_again)
    await end(tasks)


async def test_who_cannot_renew_stops_before_the_others_may_begin(
    api: KubernetesApi, cluster: KubernetesClient
) -> None:
    clock = Clock()
    first, second = candidate(cluster, "first", clock), candidate(cluster, "second", clock)
    leading = asyncio.create_task(first.run())
    await until(lambda: first.leading)
    api.faults[("PUT", "lease")] = 500
    standing_by = asyncio.create_task(second.run())
    await until(lambda: not first.leading)
    assert not second.leading
    api.faults.clear()
    api.faults[("GET", "lease")] = 0
    await until(lambda: first.leading or second.leading)
    assert not (first.leading and second.leading)
    await end([leading, standing_by])


async def test_a_dead_leader_is_succeeded(api: KubernetesApi, cluster: KubernetesClient) -> None:
    await cluster.write_lease("lease", LeaseRecord("dead", seconds=1, notes={"n": "x"}))
    clock = Clock()
    second = candidate(cluster, "second", clock)
    standing_by = asyncio.create_task(second.run())
    await until(lambda: second.leading)
    assert second.notes == {"n": "x"}, "what the former leader left"
    await end([standing_by])


async def test_a_note_of_one_who_was_succeeded_is_refused(
    api: KubernetesApi, cluster: KubernetesClient
) -> None:
    first = candidate(cluster, "first")
    leading = asyncio.create_task(first.run())
    await until(lambda: first.leading)
    await end([leading])
    await cluster.write_lease(
        "lease", LeaseRecord("x", seconds=1, version=(await cluster.lease("lease")).version)
    )
    with pytest.raises(ApiConflict):
        await first.note("a", "b")
    assert "annotations" not in api.leases["lease"]["metadata"]
