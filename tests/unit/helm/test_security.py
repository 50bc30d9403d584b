"""Permissions of pods, networks and the Kubernetes API."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import grimp
import pytest

from tests.unit.helm.release import (
    CHART,
    COMPONENT,
    ROOT,
    VALUE_SETS,
    Release,
    container,
    environment,
    render,
    value_set,
)


@pytest.fixture(params=VALUE_SETS, scope="module")
def release(request: pytest.FixtureRequest) -> Release:
    return value_set(request.param)


def test_every_pod_meets_the_restricted_standard_and_has_a_read_only_root(release: Release) -> None:
    for name, pod in release.pods():
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert not [each for each in pod.get("volumes", []) if "hostPath" in each]
        for each in (*pod["containers"], *pod.get("initContainers", [])):
            inner = each["securityContext"]
            assert inner["allowPrivilegeEscalation"] is False
            assert inner["readOnlyRootFilesystem"] is True
            assert inner["capabilities"] == {"drop": ["ALL"]}
            assert "hostPort" not in str(each.get("ports"))


def test_a_mesh_is_not_told_to_read_what_is_encrypted() -> None:
    for values, expected in (({}, {"tls"}), ({"tls": {"mode": "none"}}, {"grpc", "redis"})):
        services = render(values).all("Service")
        found = {port.get("appProtocol") for each in services for port in each["spec"]["ports"]}
        assert found == expected


def test_what_is_written_has_a_volume_where_the_root_is_read_only(release: Release) -> None:
    for component, workload in release.services():
        mounts = {
            each["mountPath"]: each.get("readOnly", False) for each in container(workload)["volumeMounts"]
        }
        # HOME, NUMBA_CACHE_DIR and the ready file of the images lie there.
        assert mounts["/cache"] is False
        assert mounts["/tmp"] is False
        assert all(mounts[path] for path in mounts if path.startswith("/etc/paceline"))
        if component == "generation" and "/weights" in mounts:
            assert mounts["/weights"] is True


def test_variables_of_other_services_do_not_reach_a_pod(release: Release) -> None:
    # PACELINE_GATEWAY_PORT and its like, or VLLM_PORT of a service called vllm.
    assert all(pod["enableServiceLinks"] is False for _, pod in release.pods())


def test_nobody_may_use_the_kubernetes_api_by_default() -> None:
    release = value_set("defaults")
    assert not release.all("Role")
    assert not release.all("RoleBinding")
    assert not any(pod["automountServiceAccountToken"] for _, pod in release.pods())
    assert not any(each["automountServiceAccountToken"] for each in release.all("ServiceAccount"))


def test_with_scaling_the_policy_controller_alone_may_scale_what_it_is_to_scale() -> None:
    release = value_set("autoscale")
    trusted = {name for name, pod in release.pods() if pod["automountServiceAccountToken"]}
    assert trusted == {"paceline-policy"}
    (binding,) = release.all("RoleBinding")
    assert [each["name"] for each in binding["subjects"]] == ["paceline-policy"]
    pod = release.named("Deployment", "-policy")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "paceline-policy"
    (role,) = release.all("Role")
    granted = {
        (resource, verb, name)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", ["*"])
    }
    assert granted == {
        ("statefulsets/scale", "get", "paceline-generation-burst"),
        ("statefulsets/scale", "update", "paceline-generation-burst"),
        ("pods", "get", "*"),
        ("leases", "create", "*"),
        ("leases", "get", "paceline-scaling"),
        ("leases", "update", "paceline-scaling"),
    }


def test_a_role_never_names_no_statefulset_when_it_means_none() -> None:
    values = {"autoscale": {"enabled": True}, "generation": {"defaults": {"scaled": False}}}
    (role,) = render(values).all("Role")
    assert "statefulsets/scale" not in [each for rule in role["rules"] for each in rule["resources"]]


@pytest.mark.parametrize(
    "values",
    [
        {"rbac": {"create": False}, "autoscale": {"enabled": True}},
        {"autoscale": {"enabled": True, "by": "keda"}},
    ],
)
def test_no_role_is_made_where_somebody_else_sees_to_it(values: dict[str, Any]) -> None:
    assert not render(values).all("Role")


def test_without_network_policies_there_are_none() -> None:
    assert not render({"networkPolicy": {"enabled": False}}).all("NetworkPolicy")


def test_every_pod_is_behind_a_network_policy(release: Release) -> None:
    templates = [each["spec"]["template"] for each in (*release.workloads(), *release.all("Job"))]
    for each in [*templates, *release.all("Pod")]:
        labels = each["metadata"]["labels"]
        matching = [
            policy
            for policy in release.all("NetworkPolicy")
            if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        ]
        assert len(matching) == 1
        assert matching[0]["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_from_outside_the_namespace_only_what_trainers_call_is_reached_and_only_at_its_ports(
    release: Release,
) -> None:
    open_to_trainers = {"gateway": [7400], "generation": [7500], "facade": [7480]}
    metrics = {"redis": [9121]}
    for policy in release.all("NetworkPolicy"):
        component = policy["metadata"]["labels"][COMPONENT]
        for rule in policy["spec"].get("ingress", ()):
            # An empty list would mean everybody.
            assert rule.get("from", ["trainers"])
            outside = "from" not in rule or any(
                {"ipBlock", "namespaceSelector"} & each.keys() for each in rule["from"]
            )
            if outside:
                ports = [each["port"] for each in rule["ports"]]
                assert ports in (metrics.get(component, [9400]), open_to_trainers.get(component)), component
                if ports == [9400]:
                    assert rule["from"] == [
                        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
                    ]


def test_each_service_is_reached_by_those_that_call_it() -> None:
    # All services, and a gateway that not everybody reaches.
    named = {"trainers": [{"namespaceSelector": {"matchLabels": {"team": "rl"}}}]}
    release = render({**VALUE_SETS["gpu"], "networkPolicy": named})
    found = _callers(release)
    stores = {"gateway", "generation", "reallocator", "bubbles", "drafts", "policy", "drafter"}
    assert found.pop("redis") == stores
    assert found == _callers_in_code({component for component, _ in release.services()})
    assert "drafter" not in _callers(value_set("defaults"))["redis"]


def test_instances_reach_each_other_at_both_ports() -> None:
    # Where trainers are named, too: weights go on over gRPC, and moves are agreed on, beside the port for KV.
    for release in (value_set("mtls"), render({"generation": {"defaults": {"adoptedSize": ""}}})):
        rules = release.named("NetworkPolicy", "-generation")["spec"]["ingress"]
        reached = {
            rule["ports"][0]["port"]
            for rule in rules
            for each in rule.get("from", ())
            if each.get("podSelector", {}).get("matchLabels", {}).get(COMPONENT) == "generation"
        }
        assert reached == {7500, 7510}


def test_trainers_reach_instances_only_where_weights_can_be_pushed_to_them() -> None:
    def trainers(values: Mapping[str, Any]) -> Any:
        policy = render(values).named("NetworkPolicy", "-generation")
        services, *rules = [each for each in policy["spec"]["ingress"] if each["ports"][0]["port"] == 7500]
        assert all(each.keys() == {"podSelector"} for each in services["from"])
        return [each.get("from", "everybody") for each in rules]

    named = {"trainers": [{"namespaceSelector": {"matchLabels": {"team": "rl"}}}]}
    assert trainers({}) == ["everybody"]
    assert trainers({"networkPolicy": named}) == [named["trainers"]]
    for values in ({}, {"networkPolicy": named}):
        assert trainers({**values, "generation": {"defaults": {"adoptedSize": ""}}}) == []


def test_an_instance_has_a_certificate_for_the_address_that_it_announces() -> None:
    release = value_set("defaults")
    told = environment(
        container(release.named("StatefulSet", "-generation-default")), "paceline-generation-0"
    )
    pod, _, service = told["PACELINE_ADVERTISE_HOST"].partition(".")
    names = release.named("Certificate", "-generation")["spec"]["dnsNames"]
    assert (pod, f"*.{service}" in names) == ("paceline-generation-0", True)


def test_the_learner_reaches_instances_and_the_store_and_the_gateway_alone_reaches_it() -> None:
    callers = _callers(value_set("gpu"))
    assert "drafter" in callers["generation"]
    assert "drafter" in callers["redis"]
    assert callers["drafter"] == {"gateway"}


def test_kv_moves_between_instances_over_one_port_for_each_gpu_and_nobody_else_reaches_these() -> None:
    release = value_set("gpu")
    (rule,) = [
        each
        for policy in release.all("NetworkPolicy")
        for each in policy["spec"].get("ingress", ())
        if "endPort" in each["ports"][0]
    ]
    assert [each["podSelector"]["matchLabels"][COMPONENT] for each in rule["from"]] == ["generation"]
    ports = range(rule["ports"][0]["port"], rule["ports"][0]["endPort"] + 1)
    schema = json.loads((CHART / "values.schema.json").read_text())
    most = schema["properties"]["generation"]["properties"]["defaults"]["properties"]["gpus"]["maximum"]
    assert len(ports) == most
    told = environment(container(release.named("StatefulSet", "-generation-h200")))
    assert int(told["PACELINE_MIGRATION_PORT"]) == ports[0]
    assert not {int(told["PACELINE_PORT"]), int(told["PACELINE_METRICS_PORT"])} & set(ports)


def test_trainers_can_be_named_without_shutting_the_services_out() -> None:
    policy = value_set("mtls").named("NetworkPolicy", "-gateway")
    rule = next(each for each in policy["spec"]["ingress"] if each["ports"][0]["port"] == 7400)
    assert rule["from"][:2] == [
        {"ipBlock": {"cidr": "10.0.0.0/8"}},
        {"namespaceSelector": {"matchLabels": {"team": "rl"}}},
    ]
    inside = [each["podSelector"]["matchLabels"][COMPONENT] for each in rule["from"][2:]]
    assert inside == ["gateway", "policy", "test", "facade"]
    rule = value_set("mtls").named("NetworkPolicy", "-facade")["spec"]["ingress"][0]
    assert rule["ports"] == [{"protocol": "TCP", "port": 7480}]
    assert len(rule["from"]) == 2


def test_the_gateway_is_no_load_balancer_unless_asked_for() -> None:
    assert value_set("defaults").named("Service", "-gateway")["spec"]["type"] == "ClusterIP"
    outside = [
        each for each in value_set("mtls").all("Service") if each["spec"].get("type") == "LoadBalancer"
    ]
    assert [each["metadata"]["name"] for each in outside] == ["paceline-gateway"]
    assert outside[0]["spec"]["loadBalancerSourceRanges"] == ["10.0.0.0/8"]


def test_without_certificates_of_our_own_none_are_made() -> None:
    for name in ("cpu", "mtls"):
        assert not value_set(name).all("Certificate")
        assert not value_set(name).all("Issuer")


def test_a_given_issuer_is_used_instead_of_an_authority_of_our_own() -> None:
    issuer = {"name": "corporate", "kind": "ClusterIssuer"}
    release = render({"tls": {"certManager": {"issuerRef": issuer}}})
    assert not release.all("Issuer")
    assert not [each for each in release.all("Certificate") if each["spec"].get("isCA")]
    assert all(
        each["spec"]["issuerRef"] == {**issuer, "group": "cert-manager.io"}
        for each in release.all("Certificate")
    )


def test_whoever_only_calls_has_no_certificate_to_serve_with() -> None:
    usages = {
        each["metadata"]["name"]: set(each["spec"].get("usages", []))
        for each in value_set("defaults").all("Certificate")
    }
    for name in ("paceline-trainer", "paceline-metrics"):
        assert "server auth" not in usages[name]
        assert "client auth" in usages[name]
    assert {"server auth", "client auth"} <= usages["paceline-generation"]


def test_given_secrets_are_mounted_where_they_are_for() -> None:
    release = value_set("mtls")
    mounted = {component: _secret(workload, "tls") for component, workload in release.services()}
    assert mounted.pop("gateway") == "platform-front-door-tls"
    assert set(mounted.values()) == {"platform-internal-tls"}
    assert not release.all("Secret")


def test_secrets_are_mounted_as_folders_so_that_a_rotation_is_seen(release: Release) -> None:
    for _, pod in release.pods():
        secrets = {volume["name"] for volume in pod.get("volumes", ()) if "secret" in volume}
        for each in pod["containers"]:
            mounts = [mount for mount in each.get("volumeMounts", []) if mount["name"] in secrets]
            assert not [mount for mount in mounts if "subPath" in mount]


def _secret(workload: Mapping[str, Any], volume: str) -> str:
    volumes = workload["spec"]["template"]["spec"]["volumes"]
    return next(str(each["secret"]["secretName"]) for each in volumes if each["name"] == volume)


def _callers(release: Release) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for policy in release.all("NetworkPolicy"):
        component = policy["metadata"]["labels"][COMPONENT]
        for rule in policy["spec"].get("ingress", ()):
            for each in rule.get("from", []):
                if "podSelector" in each:
                    found.setdefault(component, set()).add(each["podSelector"]["matchLabels"][COMPONENT])
    return found


def _callers_in_code(components: set[str]) -> dict[str, set[str]]:
    """Return the callers of each component: those that import a module with a stub of one of its gRPC services."""
    graph = grimp.build_graph("services", cache_dir=None)
    modules, texts = {}, {}
    for component in components:
        package = f"services.{component}"
        own = graph.find_descendants(package)
        modules[component] = own | graph.find_upstream_modules(package, as_package=True)
        texts[component] = _text(own)
    servers = {
        service: component
        for component, text in texts.items()
        for service in re.findall(r"add_(\w+)Servicer_to_server\(", text)
    }
    # Without a stub, the gateway forwards calls to its leader, and the facade calls it through the SDK.
    found = {"gateway": {"gateway", "facade", "test"}}
    for component, read in modules.items():
        for service in re.findall(r"(\w+Service)Stub\b", _text(read)):
            found.setdefault(servers[service], set()).add(component)
    # The store itself imports what its client shares with it.
    found["drafts"].remove("drafts")
    return found


def _text(modules: set[str]) -> str:
    files = [ROOT / f"{module.replace('.', '/')}.py" for module in sorted(modules)]
    return "\n".join(file.read_text() for file in files if file.is_file())
