"""Ways from outside of the cluster to the gateway and the facade."""

from __future__ import annotations

from typing import Any

import helm_python as helm
import pytest

from tests.unit.helm.release import render, value_set

HOST = "rollouts.example.com"
ROUTE = {"enabled": True, "parentRefs": [{"name": "front"}], "hostnames": [HOST]}


def test_a_route_hands_tls_on_to_the_service_of_the_gateway_whose_certificate_has_its_name() -> None:
    release = value_set("front-door")
    (route,) = release.all("TLSRoute")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert route["spec"]["parentRefs"] == [{"name": "front", "namespace": "gateways", "sectionName": "tls"}]
    ((backend,),) = [rule["backendRefs"] for rule in route["spec"]["rules"]]
    service = release.named("Service", "-gateway")
    assert backend == {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
    assert set(route["spec"]["hostnames"]) <= set(
        release.named("Certificate", "-gateway")["spec"]["dnsNames"]
    )


def test_a_grpc_route_is_the_default_and_an_http_route_that_of_the_facade() -> None:
    release = render({"gateway": {"route": ROUTE}, "facade": {"enabled": True, "route": ROUTE}})
    (grpc,), (http,) = release.all("GRPCRoute"), release.all("HTTPRoute")
    assert {each["apiVersion"] for each in (grpc, http)} == {"gateway.networking.k8s.io/v1"}
    assert http["spec"]["rules"] == [{"backendRefs": [{"name": "paceline-facade", "port": 7480}]}]
    other = render({"gateway": {"route": {**ROUTE, "kind": "TLSRoute", "apiVersion": "v1alpha2"}}})
    assert other.all("TLSRoute")[0]["apiVersion"] == "gateway.networking.k8s.io/v1alpha2"


def test_an_ingress_leads_to_the_port_of_the_service() -> None:
    (ingress,) = value_set("front-door").all("Ingress")
    assert ingress["spec"]["ingressClassName"] == "nginx"
    (rule,) = ingress["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert (rule["host"], backend) == (
        "rollouts-http.example.com",
        {"name": "paceline-facade", "port": {"number": 7480}},
    )
    values = {"gateway": {"service": {"port": 443}, "ingress": {"enabled": True, "hosts": [HOST]}}}
    (ingress,) = render(values).all("Ingress")
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": "paceline-gateway", "port": {"number": 443}}


def test_there_is_no_way_in_unless_asked_for() -> None:
    for kind in ("Ingress", "GRPCRoute", "HTTPRoute", "TLSRoute"):
        assert not value_set("gpu").all(kind)
    # Nor to a facade that is not there.
    assert not render({"facade": {"route": ROUTE}}).all("HTTPRoute")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gateway": {"ingress": {"enabled": True}}}, r"gateway\.ingress\.hosts is needed"),
        ({"gateway": {"route": {"enabled": True}}}, r"gateway\.route\.parentRefs is needed"),
        ({"tls": {"mode": "none"}, "gateway": {"route": {**ROUTE, "kind": "TLSRoute"}}}, "passes TLS on"),
    ],
)
def test_a_way_that_leads_nowhere_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        render(values)
