"""What controllers do next, and whom Services lead to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster.controllers import Seen, Step, deployment, revision_of, stateful_set
from tests.support.cluster.dns import Peer, Route, hosts, routes

NEW = {"metadata": {}, "spec": {"v": 2}}
NOW, OLD = revision_of(NEW), revision_of({"metadata": {}, "spec": {"v": 1}})


ROLLING = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def deployed(replicas: int = 1, strategy: dict[str, Any] = ROLLING) -> dict[str, Any]:
    return {"replicas": replicas, "template": NEW, "strategy": strategy}


def test_a_deployment_creates_what_it_lacks_and_removes_what_is_too_much() -> None:
    assert deployment(deployed(2), []) == Step(count=2)
    pods = [Seen("a", NOW, True), Seen("b", NOW, False), Seen("c", NOW, True)]
    assert deployment(deployed(2), pods) == Step(delete=("b",))
    assert deployment(deployed(1), [Seen("a", NOW, True, ending=True)]) == Step(count=1)


def test_an_update_waits_for_the_new_pod() -> None:
    old = Seen("old", OLD, True)
    assert deployment(deployed(), [old]) == Step(count=1)
    assert deployment(deployed(), [old, Seen("new", NOW, False)]) == Step()
    assert deployment(deployed(), [old, Seen("new", NOW, True)]) == Step(delete=("old",))


def test_of_two_old_pods_the_one_that_is_not_ready_is_nobodys_loss() -> None:
    old = [Seen("leader", OLD, True), Seen("broken", OLD, False)]
    assert deployment(deployed(2), old) == Step(count=1, delete=("broken",))


def test_recreate_waits_for_the_old_pod_to_be_gone() -> None:
    spec = deployed(1, {"type": "Recreate"})
    assert deployment(spec, [Seen("old", OLD, True)]) == Step(delete=("old",))
    assert deployment(spec, [Seen("old", OLD, True, ending=True)]) == Step()
    assert deployment(spec, []) == Step(count=1)


def stateful(replicas: int, **more: Any) -> dict[str, Any]:
    return {"replicas": replicas, "template": NEW, "podManagementPolicy": "Parallel", **more}


def test_a_stateful_set_names_its_pods() -> None:
    assert stateful_set("s", stateful(2), []) == Step(create=("s-0", "s-1"))
    waits = [Seen("s-0", NOW, False)]
    assert stateful_set("s", stateful(2), waits) == Step(create=("s-1",))


def test_a_pod_that_ends_keeps_its_name() -> None:
    assert stateful_set("s", stateful(1), [Seen("s-0", NOW, True, ending=True)]) == Step()


def test_scaling_down_ends_the_highest() -> None:
    pods = [Seen(f"s-{n}", NOW, True) for n in (0, 1, 2, 10)]
    assert stateful_set("s", stateful(1), pods) == Step(delete=("s-1", "s-2", "s-10"))


def test_an_update_goes_down_one_by_one_and_waits_for_readiness() -> None:
    pods = [Seen("s-0", OLD, True), Seen("s-1", OLD, True)]
    assert stateful_set("s", stateful(2), pods) == Step(delete=("s-1",))
    assert stateful_set("s", stateful(2), [pods[0], Seen("s-1", NOW, False)]) == Step()
    assert stateful_set("s", stateful(2), [pods[0], Seen("s-1", NOW, True)]) == Step(delete=("s-0",))


def test_other_strategies_are_said() -> None:
    with pytest.raises(ValueError, match="not played"):
        deployment(deployed(1, {"type": "RollingUpdate"}), [])
    for other in ({"podManagementPolicy": "OrderedReady"}, {"updateStrategy": {"type": "OnDelete"}}):
        with pytest.raises(ValueError, match="not played"):
            stateful_set("s", stateful(1, **other), [])


def service(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ml"},
        "spec": {"selector": {"c": name}, "ports": [{"port": 80, "targetPort": "grpc"}], **spec},
    }


def peer(name: str, component: str, *, ready: bool = True) -> Peer:
    return Peer(name, f"10.0.0.{name[-1]}", {"c": component, "pool": "x"}, {"grpc": 7400}, ready, component)


def test_a_service_leads_to_pods_that_are_ready() -> None:
    pods = [peer("a-1", "a"), peer("a-2", "a", ready=False), peer("b-3", "b")]
    addresses = {"a": "10.96.0.1"}
    assert routes([service("a")], addresses, pods) == [Route("10.96.0.1", 80, (("10.0.0.1", 7400),))]
    (both,) = routes([service("a", publishNotReadyAddresses=True)], addresses, pods)
    assert len(both.to) == 2
    assert "10.96.0.1 a a.ml a.ml.svc a.ml.svc.cluster.local" in hosts([service("a")], addresses, pods)


def test_a_headless_service_names_each_pod() -> None:
    headless = service("a", clusterIP="None", publishNotReadyAddresses=True)
    pods = [peer("a-1", "a"), peer("a-2", "a", ready=False)]
    assert routes([headless], {}, pods) == []
    text = hosts([headless], {}, pods)
    assert "10.0.0.2 a-2.a.ml.svc.cluster.local\n" in text
    assert "a-2.a" not in hosts([service("a", clusterIP="None")], {}, pods)
