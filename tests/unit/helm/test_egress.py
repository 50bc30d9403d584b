"""Connections that pods may make: those that others accept, and what they need from elsewhere."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import helm_python as helm
import pytest

from tests.unit.helm.release import COMPONENT, VALUE_SETS, Release, render, value_set

METADATA = (
    *("169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200", "168.63.129.16"),
    *("fd00:ec2::254", "fd20:ce::254", "fe80::a9fe:a9fe"),
)


def rules(release: Release, component: str) -> list[dict[str, Any]]:
    """Return the rules of a component's pods."""
    found: list[dict[str, Any]] = release.named("NetworkPolicy", f"-{component}")["spec"]["egress"]
    return found


def outside(release: Release, component: str) -> list[tuple[int, int]]:
    """Return the ports, from first to last, at which pods reach addresses outside the release."""
    return [
        (port["port"], port.get("endPort", port["port"]))
        for rule in rules(release, component)
        if any("ipBlock" in each for each in rule["to"])
        for port in rule["ports"]
    ]


def pairs(release: Release, direction: str, peers: str) -> set[tuple[str, str, int, int]]:
    """Return caller, called component, and ports of all rules that name components of the release."""
    found = set()
    for policy in release.all("NetworkPolicy"):
        own = policy["metadata"]["labels"][COMPONENT]
        for rule in policy["spec"].get(direction, ()):
            for each in rule.get(peers, ()):
                other = each.get("podSelector", {}).get("matchLabels", {}).get(COMPONENT)
                if other is not None:
                    caller, called = (other, own) if direction == "ingress" else (own, other)
                    found |= {
                        (caller, called, port["port"], port.get("endPort", port["port"]))
                        for port in rule["ports"]
                    }
    return found


@pytest.mark.parametrize("name", VALUE_SETS)
def test_a_pod_may_make_the_connections_that_others_accept_from_it_and_no_other(name: str) -> None:
    release = value_set(name)
    accepted, made = pairs(release, "ingress", "from"), pairs(release, "egress", "to")
    components = {each["metadata"]["labels"][COMPONENT] for each in release.all("NetworkPolicy")}
    assert len(made) >= 12
    assert accepted <= made
    # The gateway accepts them from everybody where no trainers are named.
    others = {each[:3] for each in made - accepted}
    assert others <= {(each, "gateway", 7400) for each in ("gateway", "policy", "test", "facade")}
    assert all(each[0] in components for each in made)


def test_redis_and_the_facade_reach_nothing_else() -> None:
    assert rules(value_set("defaults"), "redis") == []
    assert {each[1] for each in pairs(value_set("mtls"), "egress", "to") if each[0] == "facade"} == {
        "gateway"
    }


@pytest.mark.parametrize("name", VALUE_SETS)
def test_names_are_resolved_and_by_default_nothing_outside_is_reached(name: str) -> None:
    release = value_set(name)
    # Redis, or a collector of traces.
    expected = {"external-redis", "managed-redis", "sentinel", "gpu"}
    for policy in release.all("NetworkPolicy"):
        component = policy["metadata"]["labels"][COMPONENT]
        if component != "redis":
            assert {each["port"] for each in policy["spec"]["egress"][0]["ports"]} == {53}
        if name not in expected and component not in ("model", "policy"):
            assert outside(release, component) == []


def test_no_rule_leads_to_the_metadata_of_a_cloud() -> None:
    many = {
        "tracing": {"endpoint": "otel.monitoring:4317"},
        "model": {"download": {"source": "hf://org/model"}},
    }
    blocks = [
        each["ipBlock"]
        for release in (*map(value_set, VALUE_SETS), render(many))
        for policy in release.all("NetworkPolicy")
        for rule in policy["spec"]["egress"]
        for each in rule["to"]
        if "ipBlock" in each
    ]
    assert blocks
    for block in blocks:
        for address in map(ip_address, METADATA):
            inside = address in ip_network(block["cidr"])
            assert not inside or any(address in ip_network(each) for each in block["except"])


@pytest.mark.parametrize(
    ("source", "port"),
    [
        ("https://files.example.com:8443/model", 8443),
        ("http://files/model", 80),
        ("file:///source/model", None),
    ],
)
def test_the_pod_that_downloads_the_model_reaches_its_source_alone(source: str, port: int | None) -> None:
    expected = [] if port is None else [(port, port)]
    download = {"model": {"download": {"source": source}}}
    job = render(download)
    assert outside(job, "model") == expected
    assert outside(job, "generation") == []


def test_instances_that_download_the_model_themselves_reach_its_source() -> None:
    model = {"download": {"source": "s3://bucket/folder"}, "path": "/model"}
    own = render({"weights": {"enabled": False}, "model": model})
    assert outside(own, "generation") == [(443, 443)]
    assert outside(own, "gateway") == []
    assert "paceline-model" not in own.names("NetworkPolicy")


@pytest.mark.parametrize(
    ("external", "expected"),
    [
        ({"url": "rediss://redis.example.com:6380/0?ssl_ca_certs=/x:1"}, (6380, 6380)),
        ({"hosts": ["redis.example.com"]}, (6379, 6379)),
        # Where it is not known at which port the data are.
        ({"existingSecret": "address"}, (1, 65535)),
        ({"hosts": ["a:26379"], "kind": "sentinel", "primaryName": "name"}, (1, 65535)),
    ],
)
def test_a_redis_elsewhere_is_reached_at_its_port(
    external: dict[str, Any], expected: tuple[int, int]
) -> None:
    release = render(
        {"redis": {"embedded": {"enabled": False}, "external": external}, "facade": {"enabled": True}}
    )
    for component in ("gateway", "generation", "drafts", "policy", "bubbles", "reallocator"):
        assert outside(release, component) == [expected]
    assert outside(release, "facade") == outside(release, "test") == []


def test_collector_and_kubernetes_are_reached_by_those_that_use_them() -> None:
    scaled = {"tracing": {"endpoint": "https://otel.example.com:4318/"}, "autoscale": {"enabled": True}}
    release = render(scaled)
    assert outside(release, "gateway") == [(4318, 4318)]
    assert outside(release, "policy") == [(4318, 4318), (443, 443), (6443, 6443)]
    assert outside(render({"autoscale": {"enabled": True, "by": "hpa"}}), "policy") == []


def test_rules_can_be_added_by_component_and_all_of_them_left_out() -> None:
    added = {"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}], "ports": [{"protocol": "TCP", "port": 9000}]}
    release = render({"networkPolicy": {"egress": {"extra": {"generation": [added]}}}})
    assert rules(release, "generation")[-1] == added
    assert added not in rules(release, "gateway")
    with pytest.raises(helm.HelmError, match="generaton"):
        render({"networkPolicy": {"egress": {"extra": {"generaton": [added]}}}})
    without = render({"networkPolicy": {"egress": {"enabled": False}}})
    for policy in without.all("NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        assert "egress" not in policy["spec"]
