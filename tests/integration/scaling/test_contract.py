"""Behaviour of the Kubernetes API that scaling relies on: of the fake, and of a real server if there is one."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from services.policy.metrics import ApiConflict, ApiNotFound
from services.policy.scaling.kubernetes_client import KubernetesClient, LeaseRecord, Scale, connected
from tests.support.kubernetes_api import NAMESPACE, KubernetesApi
from tests.support.kubernetes_server import ApiServer, api_server, is_available


@dataclass(frozen=True, slots=True)
class Contract:
    """An API, and how to make there what controllers and people make."""

    cluster: KubernetesClient
    make_stateful_set: Callable[[str, int], None]
    make_pod: Callable[[str, bool], None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    if not is_available():
        pytest.skip("no real API server: neither KUBEBUILDER_ASSETS nor TEST_KUBERNETES_URL is set")
    with api_server(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(params=["fake", "real"])
async def contract(request: pytest.FixtureRequest) -> AsyncIterator[Contract]:
    if request.param == "real":
        server: ApiServer = request.getfixturevalue("server")
        namespace = f"{NAMESPACE}-{uuid.uuid4().hex[:8]}"
        server.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        async with connected(server.url, namespace, server.ca_file) as cluster:
            yield _real(server, cluster, namespace)
        server.call("DELETE", f"/api/v1/namespaces/{namespace}")
    else:
        async with KubernetesApi() as api, connected(api.url, NAMESPACE) as cluster:
            yield Contract(cluster, api.make_stateful_set, api.make_pod)


def _real(server: ApiServer, cluster: KubernetesClient, namespace: str) -> Contract:
    def make_stateful_set(name: str, replicas: int) -> None:
        labels = {"app": name}
        pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
        spec = {
            "replicas": replicas,
            "serviceName": name,
            "selector": {"matchLabels": labels},
            "template": pod,
        }
        path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets"
        server.call("POST", path, {"metadata": {"name": name}, "spec": spec})

    def make_pod(name: str, ready: bool) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods"
        # For no node, since a kubelet would say itself whether it is ready.
        spec = {
            "containers": [{"name": "c", "image": "i"}],
            "automountServiceAccountToken": False,
            "nodeSelector": {"paceline.io/no-node": "true"},
        }
        pod = server.call("POST", path, {"metadata": {"name": name}, "spec": spec}).json()
        # Whatever a scheduler has written meanwhile.
        del pod["metadata"]["resourceVersion"]
        pod["status"]["conditions"] = [{"type": "Ready", "status": "True" if ready else "False"}]
        server.call("PUT", f"{path}/{name}/status", pod)

    return Contract(cluster, make_stateful_set, make_pod)


async def changed(contract: Contract, replicas: int) -> Scale:
    """Change the scale of "pool" as of its last version, which its controller may change in between."""
    while True:
        with suppress(ApiConflict):
            before = await contract.cluster.scale("pool")
            after = await contract.cluster.set_scale("pool", replicas, before.version)
            assert after.version != before.version
            return after


async def test_a_scale_is_read_and_changed(contract: Contract) -> None:
    contract.make_stateful_set("pool", 2)
    assert (await contract.cluster.scale("pool")).replicas == 2
    for replicas in (5, 0):
        assert (await changed(contract, replicas)).replicas == replicas
        assert (await contract.cluster.scale("pool")).replicas == replicas


async def test_writes_are_recorded_under_the_name_of_the_service() -> None:
    async with KubernetesApi() as api, connected(api.url, NAMESPACE) as cluster:
        api.make_stateful_set("pool", 2)
        await cluster.set_scale("pool", 5, (await cluster.scale("pool")).version)
        await cluster.write_lease("lease", await cluster.write_lease("lease", record("a")))
        assert api.managers == {"paceline-policy"}


async def test_a_scale_that_somebody_else_changed_is_not_changed(contract: Contract) -> None:
    contract.make_stateful_set("pool", 2)
    old = await contract.cluster.scale("pool")
    await changed(contract, 3)
    with pytest.raises(ApiConflict, match="modified"):
        await contract.cluster.set_scale("pool", 4, old.version)
    assert (await contract.cluster.scale("pool")).replicas == 3


async def test_what_is_not_there_is_not_found(contract: Contract) -> None:
    with pytest.raises(ApiNotFound):
        await contract.cluster.scale("nothing")
    with pytest.raises(ApiNotFound):
        await contract.cluster.set_scale("nothing", 1, "1")
    assert await contract.cluster.lease("nothing") == LeaseRecord()
    assert not await contract.cluster.pod_is_ready("nothing-0")


async def test_a_pod_is_ready_or_not(contract: Contract) -> None:
    contract.make_pod("yes", True)
    contract.make_pod("no", False)
    assert await contract.cluster.pod_is_ready("yes")
    assert not await contract.cluster.pod_is_ready("no")


def record(holder: str, **rest: object) -> LeaseRecord:
    return replace(LeaseRecord(holder, datetime.now(UTC).replace(microsecond=1), 15), **rest)  # type: ignore[arg-type]


async def test_a_lease_is_made_by_one_only(contract: Contract) -> None:
    made = await contract.cluster.write_lease("lease", record("a", notes={"paceline.io/x": "pool-1"}))
    assert (made.holder, made.seconds, made.notes) == ("a", 15, {"paceline.io/x": "pool-1"})
    with pytest.raises(ApiConflict):
        await contract.cluster.write_lease("lease", record("b"))
    assert await contract.cluster.lease("lease") == made


async def test_a_lease_is_changed_by_who_has_read_it_last(contract: Contract) -> None:
    first = await contract.cluster.write_lease("lease", record("a"))
    second = await contract.cluster.write_lease(
        "lease", replace(first, holder="b", transitions=1, notes={"n": "1"})
    )
    assert second.version != first.version
    with pytest.raises(ApiConflict):
        await contract.cluster.write_lease("lease", replace(first, seconds=20))
    found = await contract.cluster.lease("lease")
    assert (found.holder, found.transitions, found.notes) == ("b", 1, {"n": "1"})
    emptied = await contract.cluster.write_lease("lease", replace(second, holder="", notes={}))
    assert (emptied.holder, emptied.notes) == ("", {})


async def test_times_survive_to_the_microsecond(contract: Contract) -> None:
    for microsecond in (1, 500_000, 999_999):
        at = (datetime.now(UTC) + timedelta(seconds=1)).replace(microsecond=microsecond)
        name = f"lease-{microsecond}"
        made = await contract.cluster.write_lease(name, record("a", renewed=at))
        assert made.renewed == at


def test_a_server_that_does_not_start_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in (("etcd", "exec sleep 600"), ("kube-apiserver", "echo a wrong key; exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    monkeypatch.delenv("TEST_KUBERNETES_URL", raising=False)
    with (
        pytest.raises(RuntimeError, match="kube-apiserver has ended with status 3: a wrong key"),
        api_server(tmp_path),
    ):
        pass
