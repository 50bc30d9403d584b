"""Connections that NetworkPolicies let into pods and out of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any

from tests.support.cluster.dns import Peer

_DIRECTIONS = {"Ingress": ("ingress", "from"), "Egress": ("egress", "to")}
"""Types of policies: where they have their rules, and rules their peers."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Ports from first to last, and addresses at the other end: who may connect, or to whom; None: all."""

    first: int
    last: int
    peers: tuple[str, ...] | None

    def admits(self, peer: str, port: int) -> bool:
        """Say if a connection from or to an address, to a port, may be made."""
        return self.first <= port <= self.last and (self.peers is None or peer in self.peers)


Openings = dict[str, tuple[Opening, ...]]
"""What may be done of each pod that a policy selects, by its address. Nothing is shut of the others."""


def openings(policies: Iterable[Mapping[str, Any]], pods: Sequence[Peer]) -> Openings:
    """Return the connections that pods accept. ValueError for what is not played."""
    return _openings(policies, pods, "Ingress")


def exits(policies: Iterable[Mapping[str, Any]], pods: Sequence[Peer]) -> Openings:
    """Return the connections that pods may make. ValueError for what is not played."""
    return _openings(policies, pods, "Egress")


def _openings(policies: Iterable[Mapping[str, Any]], pods: Sequence[Peer], direction: str) -> Openings:
    found: Openings = {}
    for policy in policies:
        spec = policy["spec"]
        if unknown := set(spec["policyTypes"]) - _DIRECTIONS.keys():
            raise ValueError(f"policy types that are not played: {sorted(unknown)}")
        if direction not in spec["policyTypes"]:
            continue
        rules, to = _DIRECTIONS[direction]
        namespace = policy["metadata"]["namespace"]
        opened = [each for rule in spec.get(rules) or [] for each in _opened(rule, to, namespace, pods)]
        for pod in pods:
            if _selects(spec["podSelector"], pod.labels):
                found[pod.address] = (*found.get(pod.address, ()), *opened)
    return found


def _opened(rule: Mapping[str, Any], to: str, namespace: str, pods: Sequence[Peer]) -> list[Opening]:
    # Without peers, or with an empty list of them, a rule is for everybody.
    peers = rule.get(to)
    addresses = (pod.address for pod in pods if any(_is(peer, namespace, pod) for peer in peers or ()))
    those = tuple(addresses) if peers else None
    # Names are resolved by files; nothing else of UDP is played.
    ports = [each for each in rule["ports"] if each["protocol"] == "TCP"]
    return [Opening(each["port"], each.get("endPort", each["port"]), those) for each in ports]


def _is(peer: Mapping[str, Any], namespace: str, pod: Peer) -> bool:
    if unknown := peer.keys() - {"podSelector", "namespaceSelector", "ipBlock"}:
        raise ValueError(f"peers of a policy that are not played: {sorted(unknown)}")
    if "ipBlock" in peer:
        block, address = peer["ipBlock"], ip_address(pod.address)
        return address in ip_network(block["cidr"]) and not any(
            address in ip_network(each) for each in block.get("except", ())
        )
    # All pods are of the release's namespace.
    own = {"kubernetes.io/metadata.name": namespace}
    return _selects(peer.get("namespaceSelector", {}), own) and _selects(
        peer.get("podSelector", {}), pod.labels
    )


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    if unknown := selector.keys() - {"matchLabels"}:
        raise ValueError(f"a selector that is not played: {sorted(unknown)}")
    return bool(selector.get("matchLabels", {}).items() <= labels.items())
