"""Values of `pods`, and those of a component, reach its pods; the chart's own stay unless they are replaced."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.helm.release import COMPONENT, VALUE_SETS, Release, container, render, value_set

EVERYTHING: dict[str, Any] = {
    "drafter": {"enabled": True, "checkpoint": "/weights/first/drafter-000001"},
    "facade": {"enabled": True},
    "model": {"download": {"source": "hf://Qwen/Qwen3-8B"}},
}
"""Values with which there is a pod of each kind."""
HATCHES: dict[str, Any] = {
    "labels": {"team": "rl"},
    "annotations": {"owner": "me"},
    "podLabels": {"cost": "7"},
    "podAnnotations": {"mesh": "off"},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "schedulerName": "gang",
    "priorityClassName": "high",
    "runtimeClassName": "kata",
    "initContainers": [{"name": "before", "image": "a:1"}],
    "extraContainers": [{"name": "beside", "image": "b:1"}],
    "extraEnv": [{"name": "HTTP_PROXY", "value": "http://proxy"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "podSecurityContext": {"runAsUser": None, "supplementalGroups": [7]},
    "securityContext": {"readOnlyRootFilesystem": False},
}


def _workloads(release: Release) -> dict[str, dict[str, Any]]:
    """Return the workloads by component."""
    return {
        each["metadata"]["labels"][COMPONENT]: each for each in (*release.workloads(), *release.all("Job"))
    }


def _has(pod: dict[str, Any], metadata: dict[str, Any], name: str, value: Any) -> bool:
    holder = pod["containers"][0]
    places: dict[str, Any] = {
        "podLabels": metadata["labels"],
        "podAnnotations": metadata.get("annotations", {}),
        "extraContainers": pod["containers"],
        "extraEnv": holder.get("env", []),
        "extraVolumes": pod.get("volumes", []),
        "extraVolumeMounts": holder["volumeMounts"],
    }
    found = places.get(name, pod.get(name))
    if isinstance(value, dict):
        return isinstance(found, dict) and value.items() <= found.items()
    if isinstance(value, list):
        return found is not None and all(each in found for each in value)
    return bool(found == value)


@pytest.fixture(scope="module")
def everything() -> Release:
    return render({**EVERYTHING, "pods": HATCHES})


@pytest.mark.parametrize(
    # Sorted: every process that collects tests must find the same ones in the same order.
    "name",
    sorted(HATCHES.keys() - {"topologySpreadConstraints", "podSecurityContext", "securityContext"}),
)
def test_a_value_of_pods_reaches_all_pods(everything: Release, name: str) -> None:
    workloads = _workloads(everything)
    assert workloads.keys() == {
        *("gateway", "generation", "reallocator", "bubbles", "policy", "facade", "drafter", "drafts"),
        *("redis", "model"),
    }
    for component, workload in workloads.items():
        template, value = workload["spec"]["template"], HATCHES[name]
        if (name, component) == ("extraContainers", "model"):
            # A Job ends when all of its containers have.
            assert len(template["spec"]["containers"]) == 1
        elif name in ("labels", "annotations"):
            assert value.items() <= workload["metadata"][name].items(), component
        else:
            assert _has(template["spec"], template["metadata"], name, value), component


def test_the_pod_of_helm_test_has_no_sidecar_that_would_never_end(everything: Release) -> None:
    (pod,) = [pod for name, pod in everything.pods() if name == "paceline-test-gateway"]
    assert [each["name"] for each in pod["containers"]] == ["health"]
    assert "initContainers" not in pod
    # It is placed as the gateway is.
    assert pod["nodeSelector"] == HATCHES["nodeSelector"]


def test_a_value_of_a_component_replaces_that_of_pods_for_it_alone() -> None:
    values = {**EVERYTHING, "pods": {"priorityClassName": "usual"}}
    for component in ("gateway", "bubbles", "drafts", "drafter", "facade"):
        own = {**values.get(component, {}), "priorityClassName": "high"}
        workloads = _workloads(render({**values, component: own}))
        for other, workload in workloads.items():
            expected = "high" if other == component else "usual"
            assert workload["spec"]["template"]["spec"]["priorityClassName"] == expected
    pools = [{"name": "a"}, {"name": "b", "priorityClassName": "high", "podSecurityContext": {"fsGroup": 7}}]
    defaults = {"priorityClassName": "low", "podSecurityContext": {"runAsUser": 1000660000}}
    release = render({"generation": {"defaults": defaults, "pools": pools}})
    a, b = (release.named("StatefulSet", f"-generation-{name}")["spec"]["template"]["spec"] for name in "ab")
    assert (a["priorityClassName"], b["priorityClassName"]) == ("low", "high")
    assert a["securityContext"]["runAsUser"] == 1000660000
    # Of a security context a pool replaces single fields of those for all pods.
    assert b["securityContext"]["fsGroup"] == 7
    assert b["securityContext"]["runAsNonRoot"] is True


def test_the_cluster_may_choose_the_user_and_the_group() -> None:
    chosen = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "seccompProfile"))
    for values in ({"pods": {"podSecurityContext": chosen}}, {"gateway": {"podSecurityContext": chosen}}):
        release = render(values)
        pods = list(release.pods()) if "pods" in values else [("", _pod(release, "gateway"))]
        for name, pod in pods:
            assert pod["securityContext"] == {"runAsNonRoot": True}, name
    # One pod of all that are there.
    others = _pod(render({"gateway": {"podSecurityContext": chosen}}), "policy")["securityContext"]
    assert others["runAsUser"] == 10001


def test_fields_of_containers_can_be_taken_out_and_changed(everything: Release) -> None:
    for component, workload in _workloads(everything).items():
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["supplementalGroups"] == [7]
        assert "runAsUser" not in pod["securityContext"]
        inner = container(workload)["securityContext"]
        assert (inner["readOnlyRootFilesystem"], inner["allowPrivilegeEscalation"]) == (False, False), (
            component
        )
    release = render({"pods": {"securityContext": {"capabilities": None}}})
    assert all("capabilities" not in container(each)["securityContext"] for each in release.workloads())


def test_pods_are_spread_by_their_own_labels_unless_told_otherwise(everything: Release) -> None:
    for workload in _workloads(everything).values():
        labels = workload["spec"]["template"]["metadata"]["labels"]
        (spread,) = workload["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    own = {**HATCHES["topologySpreadConstraints"][0], "labelSelector": {"matchLabels": {"a": "b"}}}
    pod = _pod(render({"gateway": {"topologySpreadConstraints": [own]}}), "gateway")
    assert pod["topologySpreadConstraints"] == [own]


def test_labels_by_which_pods_are_selected_cannot_be_replaced() -> None:
    taken = {COMPONENT: "mine", "app.kubernetes.io/name": "mine"}
    release = render({"pods": {"podLabels": taken, "labels": taken}})
    for each in release.workloads():
        selector = each["spec"]["selector"]["matchLabels"]
        assert selector.items() <= each["spec"]["template"]["metadata"]["labels"].items()
        assert each["metadata"]["labels"][COMPONENT] != "mine"


def test_workloads_are_updated_as_the_values_say() -> None:
    release = value_set("front-door")
    reserved = release.named("StatefulSet", "-generation-reserved")
    assert reserved["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert "updateStrategy" not in release.named("StatefulSet", "-generation-spot")["spec"]
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    facade = render({"facade": {"enabled": True, "updateStrategy": rolling}}).named("Deployment", "-facade")
    assert facade["spec"]["strategy"] == rolling


def test_budgets_are_of_the_size_that_each_pool_says() -> None:
    budgets = {
        each["metadata"]["name"]: each["spec"] for each in value_set("front-door").all("PodDisruptionBudget")
    }
    assert budgets["paceline-generation-reserved"]["minAvailable"] == 6
    assert "maxUnavailable" not in budgets["paceline-generation-reserved"]
    assert budgets["paceline-generation-spot"]["maxUnavailable"] == "50%"
    # One that consists of a single pod would never be drained.
    assert budgets["paceline-gateway"]["maxUnavailable"] == 1
    assert "paceline-facade" not in budgets
    alone = value_set("defaults").all("PodDisruptionBudget")
    assert "paceline-gateway" not in {each["metadata"]["name"] for each in alone}
    values = {
        "gateway": {"replicas": 3, "maxUnavailable": 2},
        "facade": {"enabled": True, "replicas": 3, "maxUnavailable": 2},
        "drafts": {"maxUnavailable": "50%"},
    }
    budgets = {each["metadata"]["name"]: each["spec"] for each in render(values).all("PodDisruptionBudget")}
    assert budgets["paceline-facade"]["maxUnavailable"] == budgets["paceline-gateway"]["maxUnavailable"] == 2
    assert budgets["paceline-drafts"]["maxUnavailable"] == "50%"


def _pod(release: Release, component: str) -> dict[str, Any]:
    pod: dict[str, Any] = _workloads(release)[component]["spec"]["template"]["spec"]
    return pod


def test_an_example_has_what_a_quota_of_limits_asks_of_every_container() -> None:
    # With a Job for the model as well, and pods that wait for it.
    download = {
        "weights": {"enabled": True},
        "model": {"path": "/weights/m", "download": {"source": "hf://a/b"}},
    }
    values = {**VALUE_SETS["cpu"], **download}
    values["model"]["download"]["resources"] = {"limits": {"cpu": "1"}}
    containers = [
        (name, each)
        for name, pod in render(values).pods()
        for each in (*pod["containers"], *pod.get("initContainers", []))
    ]
    assert len(containers) > 12
    for name, each in containers:
        assert each["resources"]["limits"].keys() >= {"cpu", "memory"}, (name, each["name"])
