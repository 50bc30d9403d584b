"""What the service accounts of a release may do, by RBAC, and the scaler with a token of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from kubernetes.aio.config import incluster_config
from prometheus_client import CollectorRegistry

from services.platform.tasks import end
from services.policy.metrics import ApiConflict, ClusterError, ScalingMetrics
from services.policy.scaling.kubernetes_client import Election, KubernetesClient, connected
from tests.integration.kubernetes.conftest import SpaceMaker
from tests.integration.kubernetes.release import Space
from tests.integration.kubernetes.test_examples import EXAMPLES
from tests.support.waiting import until

SCALED, RESERVED = "paceline-generation-burst", "paceline-generation-reserved"
LEASE = "paceline-scaling"


@pytest.fixture(scope="module")
def space(make_space: SpaceMaker) -> Space:
    """A release that scales one of its pools."""
    made = make_space(4)
    values = EXAMPLES["autoscale"]
    # First without a scaler: Kubernetes then notes who writes the number of a pool.
    made.install({**values, "autoscale": {**values["autoscale"], "enabled": False}})
    made.upgrade(values)
    return made


def _token(space: Space, account: str) -> str:
    path = f"/api/v1/namespaces/{space.name}/serviceaccounts/{account}/token"
    answer = space.server.call("POST", path, {"spec": {"expirationSeconds": 3600}})
    return str(answer.json()["status"]["token"])


def _rules(space: Space, account: str) -> set[tuple[str, ...]]:
    """Return each verb, resource and name that an account may use in the namespace."""
    asked = {"spec": {"namespace": space.name}}
    server = replace(space.server, token=_token(space, account))
    path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
    found: dict[str, Any] = server.call("POST", path, asked).json()["status"]
    assert not found["incomplete"]
    return {
        (verb, f"{group}/{resource}", name)
        for rule in found["resourceRules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
    }


def test_an_account_may_do_what_its_service_needs_and_no_more(space: Space) -> None:
    # What every account may do, such as asking what it may do.
    path = f"/api/v1/namespaces/{space.name}/serviceaccounts"
    space.server.call("POST", path, {"metadata": {"name": "nobody"}})
    nobody = _rules(space, "nobody")
    accounts = {each["metadata"]["name"] for each in space.all("serviceaccounts", "v1")}
    assert accounts == {"paceline", "paceline-policy", "nobody"}
    assert _rules(space, "paceline") == nobody
    assert _rules(space, "paceline-policy") - nobody == {
        ("get", "apps/statefulsets/scale", SCALED),
        ("update", "apps/statefulsets/scale", SCALED),
        ("get", "/pods", ""),
        ("create", "coordination.k8s.io/leases", ""),
        ("get", "coordination.k8s.io/leases", LEASE),
        ("update", "coordination.k8s.io/leases", LEASE),
    }


def test_the_server_decides_so(space: Space) -> None:
    def may(account: str, verb: str, group: str, resource: str, name: str) -> bool:
        plural, _, subresource = resource.partition("/")
        attributes = {"namespace": space.name, "verb": verb, "group": group, "resource": plural, "name": name}
        user = f"system:serviceaccount:{space.name}:{account}"
        asked = {"spec": {"user": user, "resourceAttributes": {**attributes, "subresource": subresource}}}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return bool(space.server.call("POST", path, asked).json()["status"]["allowed"])

    allowed = [
        ("update", "apps", "statefulsets/scale", SCALED),
        ("get", "", "pods", f"{SCALED}-0"),
        ("update", "coordination.k8s.io", "leases", LEASE),
    ]
    denied = [
        ("patch", "apps", "statefulsets/scale", SCALED),
        ("update", "apps", "statefulsets", SCALED),
        ("update", "apps", "statefulsets/scale", RESERVED),
        ("list", "", "pods", ""),
        ("update", "coordination.k8s.io", "leases", "another"),
        ("get", "", "secrets", "paceline-token"),
    ]
    assert [may("paceline-policy", *each) for each in allowed] == [True] * len(allowed)
    assert [may("paceline-policy", *each) for each in denied] == [False] * len(denied)
    assert not any(may("paceline", *each) for each in [*allowed, *denied])


@asynccontextmanager
async def _policy(
    space: Space, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[KubernetesClient]:
    """Connect as the policy service does in its pod, with a token for its account."""
    token = folder / "token"
    token.write_text(_token(space, "paceline-policy"))
    address = urlsplit(space.server.url)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(address.hostname))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(address.port))
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(space.server.ca_file))
    async with connected(namespace=space.name) as client:
        yield client


async def test_the_scaler_works_with_a_token_of_its_account(
    space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _policy(space, tmp_path, monkeypatch) as client:
        stale = await client.scale(SCALED)
        space.kubectl("scale", "statefulset", SCALED, "--replicas=2")
        with pytest.raises(ApiConflict, match="modified"):
            await client.set_scale(SCALED, 3, stale.version)
        while True:
            # Its controller may write to the status in between.
            try:
                await client.set_scale(SCALED, 4, (await client.scale(SCALED)).version)
            except ApiConflict:
                continue
            break
        assert space.pools()[SCALED] == 4
        for call in (client.scale(RESERVED), client.set_scale(RESERVED, 9, ""), client.lease("another")):
            with pytest.raises(ClusterError) as refused:
                await call
            assert refused.value.kind == "forbidden"
        assert not await client.pod_is_ready(f"{SCALED}-0")

        election = Election(client, LEASE, "a", 30.0, ScalingMetrics(CollectorRegistry()))
        running = asyncio.create_task(election.run())
        await until(lambda: election.leading, "the Lease is taken")
        await election.note("paceline.io/draining", f"{SCALED}-3")
        assert (await client.lease(LEASE)).notes == {"paceline.io/draining": f"{SCALED}-3"}
        await end([running])
        assert (await client.lease(LEASE)).holder == ""
    owners = {
        (each["manager"], each.get("subresource", ""))
        for each in space.one("statefulsets", SCALED)["metadata"]["managedFields"]
        if "f:replicas" in each["fieldsV1"].get("f:spec", {})
    }
    assert ("paceline-policy", "scale") in owners
