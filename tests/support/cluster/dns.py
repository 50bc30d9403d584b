"""Names of Services and pods, and whom Services lead to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Peer:
    """A pod that can be reached, in the eyes of Services."""

    name: str
    address: str
    labels: Mapping[str, str]
    ports: Mapping[str, int]
    ready: bool
    service: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """A port of a Service and the addresses it leads to, as host and port."""

    address: str
    port: int
    to: tuple[tuple[str, int], ...]


def hosts(services: Iterable[Mapping[str, Any]], addresses: Mapping[str, str], pods: Sequence[Peer]) -> str:
    """Return an /etc/hosts that names what is dialled. `addresses` are those of Services by name.

    A headless Service has names for its pods only: a resolver takes lines with a name in common for one host.
    """
    lines = ["127.0.0.1 localhost"]
    for service in services:
        name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
        short = f"{name}.{namespace}"
        names = f"{name} {short} {short}.svc {short}.svc.cluster.local"
        if service["spec"].get("clusterIP") != "None":
            lines.append(f"{addresses[name]} {names}")
            continue
        for pod in _behind(service, pods):
            if pod.service == name:
                lines.append(f"{pod.address} {pod.name}.{short}.svc.cluster.local")
    return "\n".join(lines) + "\n"


def routes(
    services: Iterable[Mapping[str, Any]], addresses: Mapping[str, str], pods: Sequence[Peer]
) -> list[Route]:
    """Return where connections to Services with addresses of their own go."""
    found = []
    for service in services:
        address = addresses.get(service["metadata"]["name"])
        for port in service["spec"]["ports"] if address else ():
            target = port.get("targetPort", port["port"])
            to = [(pod.address, pod.ports.get(target, target)) for pod in _behind(service, pods)]
            found.append(Route(address or "", port["port"], tuple(to)))
    return found


def _behind(service: Mapping[str, Any], pods: Sequence[Peer]) -> list[Peer]:
    selector = service["spec"]["selector"].items()
    unready = service["spec"].get("publishNotReadyAddresses", False)
    return [each for each in pods if selector <= each.labels.items() and (each.ready or unready)]
