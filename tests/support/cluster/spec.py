"""Pods out of rendered manifests: what a kubelet reads of them, with secrets and the pod's name put in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Secrets = Mapping[str, Mapping[str, bytes]]
"""Contents of secrets by name and key."""

POD_IP = "(address of the pod)"
"""What stands in a variable for the address of its pod, which is known when that is on a node."""
# What this cluster has no use for, or a real kubelet shows better. Everything else that is not read below is an
# error, so that nothing of a manifest is left out unnoticed.
_IGNORED = frozenset(
    {
        *("affinity", "automountServiceAccountToken", "enableServiceLinks", "imagePullPolicy"),
        *("imagePullSecrets", "livenessProbe", "priorityClassName", "resources", "schedulerName"),
        *("serviceAccountName", "startupProbe", "tolerations", "topologySpreadConstraints"),
    }
)
_POD = frozenset(
    {
        *("containers", "initContainers", "nodeSelector", "restartPolicy", "securityContext"),
        *("terminationGracePeriodSeconds", "volumes"),
    }
)
_CONTAINER = frozenset(
    {
        *("args", "command", "env", "image", "name", "ports", "readinessProbe", "securityContext"),
        "volumeMounts",
    }
)


@dataclass(frozen=True, slots=True)
class Probe:
    """A question of the kubelet: a GET of a path, or a connection to the port if there is none."""

    port: int
    path: str
    period: float
    timeout: float
    failures: int


@dataclass(frozen=True, slots=True)
class Mount:
    """A place at which a container sees a volume."""

    volume: str
    path: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume of a pod: empty, memory (both of `source` as their size), secret or claim."""

    name: str
    kind: str
    source: str
    mode: int = 0o644
    items: tuple[tuple[str, str], ...] = ()
    """Keys of a secret and their files. Empty: all of them, by their names."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container. The command is empty where it is the image's."""

    name: str
    image: str
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    mounts: tuple[Mount, ...]
    user: int
    group: int
    read_only: bool
    ports: Mapping[str, int]
    readiness: Probe | None


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod. `group` owns its volumes; `grace` is in seconds; `service` gives it a name of its own."""

    name: str
    labels: Mapping[str, str]
    selector: Mapping[str, str]
    group: int
    grace: float
    restarts: bool
    initial: tuple[Container, ...]
    containers: tuple[Container, ...]
    volumes: tuple[Volume, ...]
    service: str = ""

    @property
    def ports(self) -> dict[str, int]:
        """Ports of all containers by name."""
        return {name: port for each in self.containers for name, port in each.ports.items()}


def pod_of(
    name: str, template: Mapping[str, Any], secrets: Secrets, *, service: str = "", claims: Iterable[str] = ()
) -> Pod:
    """Return the pod that a template makes.

    Args:
        name: its name.
        template: metadata and spec, of a workload or of a Pod.
        secrets: for variables that come from some. Their lack is a KeyError, as it keeps a real pod from starting.
        service: the headless Service of a StatefulSet, which gives the pod a name of its own.
        claims: names of a StatefulSet's claim templates.

    ValueError for what this cluster cannot play.
    """
    spec = template["spec"]
    if unknown := spec.keys() - _POD - _IGNORED:
        raise ValueError(f"{name}: fields of a pod that are not played: {sorted(unknown)}")
    security = spec.get("securityContext", {})

    def containers(kind: str) -> tuple[Container, ...]:
        return tuple(_container(name, each, security, secrets) for each in spec.get(kind, []))

    volumes = [_volume(each) for each in spec.get("volumes", [])]
    volumes += [Volume(each, "claim", f"{each}-{name}") for each in claims]
    return Pod(
        name=name,
        labels=template["metadata"].get("labels", {}),
        selector=spec.get("nodeSelector", {}),
        group=security.get("fsGroup", 0),
        grace=spec.get("terminationGracePeriodSeconds", 30),
        restarts=spec.get("restartPolicy", "Always") == "Always",
        initial=containers("initContainers"),
        containers=containers("containers"),
        volumes=tuple(volumes),
        service=service,
    )


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return the text with $(NAME) replaced by variables, as Kubernetes does: unknown ones stay, $$ is $."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([\w.-]+)\)", value, text)


def _container(
    pod: str, container: Mapping[str, Any], pod_security: Mapping[str, Any], secrets: Secrets
) -> Container:
    if unknown := container.keys() - _CONTAINER - _IGNORED:
        raise ValueError(f"{pod}: fields of a container that are not played: {sorted(unknown)}")
    if any("subPath" in each for each in container.get("volumeMounts", [])):
        raise ValueError(f"{pod}: a folder of a volume is not played")
    security = {**pod_security, **container.get("securityContext", {})}
    if security.get("allowPrivilegeEscalation", True) or security.get("capabilities") != {"drop": ["ALL"]}:
        raise ValueError(f"{pod}: a container with privileges is not played")
    environment = _environment(pod, container.get("env", []), secrets)
    ports = {each["name"]: each["containerPort"] for each in container.get("ports", [])}
    return Container(
        name=container["name"],
        image=container["image"],
        command=_words(container.get("command", ()), environment),
        arguments=_words(container.get("args", ()), environment),
        environment=environment,
        mounts=tuple(
            Mount(each["name"], each["mountPath"], each.get("readOnly", False))
            for each in container.get("volumeMounts", [])
        ),
        user=security["runAsUser"],
        group=security["runAsGroup"],
        read_only=security.get("readOnlyRootFilesystem", False),
        ports=ports,
        readiness=_probe(container.get("readinessProbe"), ports),
    )


def _words(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(expanded(each, environment) for each in words)


def _environment(pod: str, entries: Iterable[Mapping[str, Any]], secrets: Secrets) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in entries:
        if "value" in entry:
            found[entry["name"]] = expanded(entry["value"], found)
        elif "secretKeyRef" in entry.get("valueFrom", {}):
            reference = entry["valueFrom"]["secretKeyRef"]
            found[entry["name"]] = secrets[reference["name"]][reference["key"]].decode()
        elif entry.get("valueFrom") == {"fieldRef": {"fieldPath": "metadata.name"}}:
            found[entry["name"]] = pod
        elif entry.get("valueFrom") == {"fieldRef": {"fieldPath": "status.podIP"}}:
            found[entry["name"]] = POD_IP
        else:
            raise ValueError(f"{pod}: a variable that is not played: {entry}")
    return found


def _probe(probe: Mapping[str, Any] | None, ports: Mapping[str, int]) -> Probe | None:
    if probe is None:
        return None
    times = probe.get("periodSeconds", 10), probe.get("timeoutSeconds", 1), probe.get("failureThreshold", 3)
    for kind in ("tcpSocket", "httpGet"):
        if kind in probe:
            port = probe[kind]["port"]
            return Probe(ports.get(port, port), probe[kind].get("path", ""), *times)
    raise ValueError(f"a probe that is not played: {probe}")


def _volume(volume: Mapping[str, Any]) -> Volume:
    name = volume["name"]
    match {key: value for key, value in volume.items() if key != "name"}:
        case {"emptyDir": empty}:
            return Volume(name, "memory" if empty.get("medium") == "Memory" else "empty", empty["sizeLimit"])
        case {"secret": secret}:
            items = tuple((each["key"], each["path"]) for each in secret.get("items", ()))
            return Volume(name, "secret", secret["secretName"], secret.get("defaultMode", 0o644), items)
        case {"persistentVolumeClaim": claim}:
            return Volume(name, "claim", claim["claimName"])
        case other:
            raise ValueError(f"a volume that is not played: {other}")
