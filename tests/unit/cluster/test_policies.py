"""Connections that NetworkPolicies let into pods and out of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster.dns import Peer
from tests.support.cluster.policies import Opening, exits, openings
from tests.unit.helm.release import COMPONENT, value_set

BOTH = {"app.kubernetes.io/name": "paceline", "app.kubernetes.io/instance": "paceline"}


def pod(name: str, address: str, **labels: str) -> Peer:
    return Peer(name, address, labels, {}, True)


SERVER, CALLER = pod("server", "10.0.0.1", app="server"), pod("caller", "10.0.0.2", app="caller")


def policy(*rules: dict[str, Any], **spec: Any) -> dict[str, Any]:
    selector = {"matchLabels": {"app": "server"}}
    wanted = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": list(rules), **spec}
    return {"metadata": {"namespace": "ml"}, "spec": wanted}


def rule(*peers: dict[str, Any], **port: int) -> dict[str, Any]:
    return {"ports": [{"protocol": "TCP", "port": 80, **port}], **({"from": list(peers)} if peers else {})}


def of(**labels: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": labels}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ()),
        ([rule()], (Opening(80, 80, None),)),
        ([rule(of(app="caller"))], (Opening(80, 80, ("10.0.0.2",)),)),
        ([rule(of(app="nobody"))], (Opening(80, 80, ()),)),
        ([rule(of(app="caller"), endPort=90)], (Opening(80, 90, ("10.0.0.2",)),)),
        ([rule({"namespaceSelector": {"matchLabels": {"team": "rl"}}})], (Opening(80, 80, ()),)),
        (
            [rule({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ml"}}})],
            (Opening(80, 80, ("10.0.0.1", "10.0.0.2")),),
        ),
    ],
    ids=["nothing", "everybody", "some", "none", "ports", "elsewhere", "here"],
)
def test_a_selected_pod_is_open_for_what_its_policy_says(
    given: list[dict[str, Any]], expected: tuple[Opening, ...]
) -> None:
    assert openings([policy(*given)], [SERVER, CALLER]) == {"10.0.0.1": expected}


def test_what_several_policies_open_adds_up() -> None:
    found = openings([policy(rule(of(app="caller"))), policy(rule(port=81))], [SERVER, CALLER])
    assert found == {"10.0.0.1": (Opening(80, 80, ("10.0.0.2",)), Opening(81, 81, None))}
    assert [any(each.admits("10.0.0.3", port) for each in found["10.0.0.1"]) for port in (80, 81)] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        policy(policyTypes=["Ingress", "Elsewhere"]),
        policy(rule({"nodeSelector": {}})),
        policy(rule({"podSelector": {"matchExpressions": []}})),
    ],
)
def test_what_is_not_played_is_said(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not played"):
        openings([wrong], [SERVER, CALLER])


def test_policies_of_the_chart_are_played() -> None:
    release = value_set("defaults")
    components = [each["metadata"]["labels"][COMPONENT] for each in release.all("NetworkPolicy")]
    pods = [
        pod(name, f"10.0.0.{number}", **{**BOTH, COMPONENT: name}) for number, name in enumerate(components)
    ]
    found = openings(release.all("NetworkPolicy"), pods)
    assert found.keys() == {each.address for each in pods}
    redis, drafts = (pods[components.index(name)].address for name in ("redis", "drafts"))
    assert any(each.admits(drafts, 6379) for each in found[redis])
    assert not any(each.admits(redis, 7410) for each in found[drafts])
    left = exits(release.all("NetworkPolicy"), pods)
    assert left.keys() == found.keys()
    assert any(each.admits(redis, 6379) for each in left[drafts])
    assert left[redis] == ()


def test_a_selected_pod_leaves_for_what_its_policy_says() -> None:
    out = policy(
        policyTypes=["Egress"],
        egress=[
            {"ports": [{"protocol": "UDP", "port": 53}], "to": [of(app="caller")]},
            {"ports": [{"protocol": "TCP", "port": 80}], "to": [of(app="caller")]},
            {
                "ports": [{"protocol": "TCP", "port": 443}],
                "to": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.2/32"]}}],
            },
        ],
    )
    assert exits([out], [SERVER, CALLER]) == {
        "10.0.0.1": (Opening(80, 80, ("10.0.0.2",)), Opening(443, 443, ("10.0.0.1",)))
    }
    assert openings([out], [SERVER, CALLER]) == {}
    assert exits([policy(rule())], [SERVER, CALLER]) == {}
