"""Pods that are made out of manifests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster.images import image_of
from tests.support.cluster.spec import Pod, Probe, expanded, pod_of
from tests.unit.helm.release import ROOT

CLOSED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def template(container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    first = {"name": "main", "image": "i:1", "securityContext": CLOSED, **(container or {})}
    security = {"runAsUser": 7, "runAsGroup": 8, "fsGroup": 9}
    return {
        "metadata": {"labels": {"a": "b"}},
        "spec": {"securityContext": security, "containers": [first], **spec},
    }


def made(container: dict[str, Any] | None = None, secrets: Any = None, **spec: Any) -> Pod:
    return pod_of("pod-0", template(container, **spec), secrets or {})


def test_variables_come_from_values_secrets_the_pod_and_those_before() -> None:
    secret = {"secretKeyRef": {"name": "s", "key": "k"}}
    env = [
        {"name": "WORD", "valueFrom": secret},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "BOTH", "value": "$(NAME):$(WORD)@$(LATER)$$(NAME)"},
        {"name": "LATER", "value": "x"},
    ]
    (only,) = made({"env": env, "args": ["--p", "$(WORD)"]}, {"s": {"k": b"pw"}}).containers
    assert only.environment["BOTH"] == "pod-0:pw@$(LATER)$(NAME)"
    assert only.arguments == ("--p", "pw")
    with pytest.raises(KeyError):
        made({"env": env}, {"s": {}})


def test_text_expands_as_in_kubernetes() -> None:
    assert expanded("$(A)-$$(A)-$(B)-$A", {"A": "1"}) == "1-$(A)-$(B)-$A"


def test_security_and_times_are_those_of_the_manifest() -> None:
    pod = made(
        {"securityContext": {**CLOSED, "runAsUser": 5, "readOnlyRootFilesystem": True}}, restartPolicy="Never"
    )
    (only,) = pod.containers
    assert (only.user, only.group, pod.group, only.read_only) == (5, 8, 9, True)
    assert (pod.grace, pod.restarts) == (30, False)
    assert made(terminationGracePeriodSeconds=75).grace == 75


def test_probes_take_paths_and_named_ports() -> None:
    container = {
        "ports": [{"name": "redis", "containerPort": 6379}],
        "readinessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": 5, "failureThreshold": 120},
    }
    (only,) = made(container).containers
    assert only.readiness == Probe(6379, "", 5, 1, 120)
    asked = {"httpGet": {"port": 7481, "path": "/readyz"}, "timeoutSeconds": 3}
    assert made({"readinessProbe": asked}).containers[0].readiness == Probe(7481, "/readyz", 10, 3, 3)


def test_volumes_and_claims_of_a_stateful_set() -> None:
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "tls", "secret": {"secretName": "t", "defaultMode": 0o440}},
        {"name": "weights", "persistentVolumeClaim": {"claimName": "w"}},
    ]
    pod = pod_of("db-2", template(volumes=volumes), {}, claims=["data"])
    assert [(each.name, each.kind, each.source) for each in pod.volumes] == [
        *(("shm", "memory", "1Gi"), ("tls", "secret", "t"), ("weights", "claim", "w")),
        ("data", "claim", "data-db-2"),
    ]
    assert pod.volumes[1].mode == 0o440


@pytest.mark.parametrize(
    "part",
    [
        {"lifecycle": {"preStop": {"exec": {"command": ["x"]}}}},
        {"readinessProbe": {"grpc": {"port": 1}}},
        {"readinessProbe": {"exec": {"command": ["ask", "it"]}}},
        {"securityContext": {**CLOSED, "allowPrivilegeEscalation": True}},
        {"securityContext": {"allowPrivilegeEscalation": False}},
        {"volumeMounts": [{"name": "v", "mountPath": "/v", "subPath": "folder"}]},
        {"env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]},
    ],
)
def test_what_is_not_played_is_said(part: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not played"):
        made(part)


def test_fields_of_a_pod_that_are_not_played_are_said() -> None:
    with pytest.raises(ValueError, match="hostNetwork"):
        made(hostNetwork=True)
    with pytest.raises(ValueError, match="not played"):
        made(volumes=[{"name": "n", "nfs": {"server": "s"}}])


def test_images_are_those_of_the_dockerfile() -> None:
    text = (ROOT / "deploy/docker/Dockerfile").read_text()
    control, cuda = image_of(text, "control"), image_of(text, "generation-cuda")
    assert control.entry == cuda.entry == ("python", "-m")
    assert control.folder == "/cache"
    assert control.environment["PACELINE_READY_FILE"] == "/tmp/ready.json"
    assert control.environment["NUMBA_CACHE_DIR"] == "/cache/numba"
    assert control.environment["PATH"].startswith("/opt/paceline/bin:")
    assert cuda.environment.items() > control.environment.items()
    assert cuda.environment["TRITON_CACHE_DIR"] == "/cache/triton"
    with pytest.raises(KeyError):
        image_of(text, "absent")
