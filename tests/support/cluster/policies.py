"""Connections that NetworkPolicies let into pods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.cluster.dns import Peer


@dataclass(frozen=True, slots=True)
class Opening:
    """Ports of a pod, from the first to the last, and the addresses that may connect to them; None: all may."""

    first: int
    last: int
    sources: tuple[str, ...] | None

    def admits(self, source: str, port: int) -> bool:
        """Say if an address may connect to a port."""
        return self.first <= port <= self.last and (self.sources is None or source in self.sources)


def openings(policies: Iterable[Mapping[str, Any]], pods: Sequence[Peer]) -> dict[str, tuple[Opening, ...]]:
    """Return what is open of each pod that a policy selects, by its address. Nothing is shut of the others.

    ValueError for what is not played.
    """
    found: dict[str, tuple[Opening, ...]] = {}
    for policy in policies:
        spec = policy["spec"]
        if spec["policyTypes"] != ["Ingress"]:
            raise ValueError(f"policy types that are not played: {spec['policyTypes']}")
        namespace = policy["metadata"]["namespace"]
        opened = [each for rule in spec.get("ingress") or [] for each in _openings(rule, namespace, pods)]
        for pod in pods:
            if _selects(spec["podSelector"], pod.labels):
                found[pod.address] = (*found.get(pod.address, ()), *opened)
    return found


def _openings(rule: Mapping[str, Any], namespace: str, pods: Sequence[Peer]) -> list[Opening]:
    # Without peers, or with an empty list of them, a rule is for everybody.
    peers = rule.get("from")
    addresses = (pod.address for pod in pods if any(_is(peer, namespace, pod) for peer in peers or ()))
    sources = tuple(addresses) if peers else None
    return [Opening(each["port"], each.get("endPort", each["port"]), sources) for each in rule["ports"]]


def _is(peer: Mapping[str, Any], namespace: str, pod: Peer) -> bool:
    if unknown := peer.keys() - {"podSelector", "namespaceSelector"}:
        raise ValueError(f"peers of a policy that are not played: {sorted(unknown)}")
    # All pods are of the release's namespace.
    own = {"kubernetes.io/metadata.name": namespace}
    return _selects(peer.get("namespaceSelector", {}), own) and _selects(
        peer.get("podSelector", {}), pod.labels
    )


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    if unknown := selector.keys() - {"matchLabels"}:
        raise ValueError(f"a selector that is not played: {sorted(unknown)}")
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
