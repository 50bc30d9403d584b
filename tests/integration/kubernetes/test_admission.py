"""Pods under Pod Security's `restricted` and under a quota; test_examples.py tries those of every example."""

from __future__ import annotations

from tests.integration.kubernetes.conftest import SpaceMaker
from tests.integration.kubernetes.release import Space
from tests.integration.kubernetes.test_examples import EXAMPLES
from tests.support.waiting import until


async def _limit_processors(space: Space) -> None:
    path = f"/api/v1/namespaces/{space.name}/resourcequotas"
    hard = {"limits.cpu": "1000"}
    quota = {"metadata": {"name": "processors"}, "spec": {"hard": hard}, "status": {"hard": hard}}
    made = space.server.call("POST", path, quota).json()
    # A controller sets the status, if there is one.
    made["status"] = {"hard": hard, "used": {"limits.cpu": "0"}}
    del made["metadata"]["resourceVersion"]
    space.server.call("PUT", f"{path}/processors/status", made)
    await until(lambda: "must specify" in space.try_pod(_bare()), "the quota counts")


def _bare() -> dict[str, object]:
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "c", "image": "i", "securityContext": context}
    profile = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return {"metadata": {}, "spec": {"containers": [container], "securityContext": profile}}


async def test_under_a_quota_of_processors_every_container_needs_a_limit(make_space: SpaceMaker) -> None:
    space = make_space(4)
    space.install(EXAMPLES["cpu"])
    await _limit_processors(space)
    assert {name: said for name, each in space.templates() if (said := space.try_pod(each))} == {}


async def test_the_defaults_have_none_and_a_quota_refuses_their_pods(make_space: SpaceMaker) -> None:
    space = make_space(4)
    space.install(EXAMPLES["operations"])
    await _limit_processors(space)
    refused = {name: space.try_pod(each) for name, each in space.templates()}
    # The pod of `helm test` has one.
    assert [name for name, said in refused.items() if not said] == ["paceline-test-gateway"]
    del refused["paceline-test-gateway"]
    assert {name for name, said in refused.items() if "must specify limits.cpu" not in said} == set()


def test_a_pod_that_is_not_restricted_is_refused(make_space: SpaceMaker) -> None:
    # Without this nothing above and in test_examples.py would be shown.
    pod = _bare()
    assert make_space(4).try_pod(pod) == ""
    del pod["spec"]["securityContext"]  # type: ignore[attr-defined]
    assert "violates PodSecurity" in make_space(4).try_pod(pod)
