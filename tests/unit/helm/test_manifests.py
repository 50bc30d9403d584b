"""Manifests of every set of values are valid for Kubernetes and refer to each other correctly."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes_validate
import pytest

from tests.unit.helm.release import CHART, VALUE_SETS, Release, container, environment, render, value_set

VERSIONS = ("1.27", "1.36")
# Of operators, whose kinds Kubernetes has no schema of.
FOREIGN = ("cert-manager.io/", "monitoring.coreos.com/", "keda.sh/", "gateway.networking.k8s.io/")
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
WORD = re.compile(r"[A-Z][A-Za-z]+|[a-z]+/v\d\w*|v\d\w*")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")


@pytest.fixture(params=VALUE_SETS, scope="module")
def release(request: pytest.FixtureRequest) -> Release:
    return value_set(request.param)


def test_the_value_sets_are_those_that_are_promised() -> None:
    assert set(VALUE_SETS) >= {"defaults", "gpu", "spot-pool", "external-redis", "mtls", "autoscale", "cpu"}
    assert all(value_set(name).manifests for name in VALUE_SETS)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(version: str) -> None:
    # Many sets of values give manifests with the same fields.
    distinct = {
        json.dumps(_fields(manifest), sort_keys=True): manifest
        for name in VALUE_SETS
        for manifest in value_set(name).manifests
        if not manifest["apiVersion"].startswith(FOREIGN)
    }
    for manifest in distinct.values():
        kubernetes_validate.validate(manifest, version, strict=True)


def _fields(part: Any) -> Any:
    """What of a manifest a schema can tell apart: names of fields, types, and words such as ClusterIP."""
    if isinstance(part, dict):
        return {name: _fields(each) for name, each in part.items()}
    if isinstance(part, list):
        found = {json.dumps(_fields(each), sort_keys=True) for each in part}
        return sorted(found)
    if isinstance(part, str):
        return part if WORD.fullmatch(part) else "text"
    return type(part).__name__


def test_a_misspelled_field_would_be_noticed() -> None:
    deployment = value_set("defaults").named("Deployment", "-gateway")
    wrong = {**deployment, "spec": {**deployment["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.33", strict=True)


def test_names_and_labels_are_valid_and_no_two_are_the_same(release: Release) -> None:
    for manifest in release.manifests:
        metadata = manifest["metadata"]
        assert DNS_LABEL.fullmatch(metadata["name"]), metadata["name"]
        assert metadata["namespace"] == "ml"
        assert all(LABEL_VALUE.fullmatch(value) for value in metadata["labels"].values()), metadata
    counts = Counter((each["kind"], each["metadata"]["name"]) for each in release.manifests)
    assert not [each for each, count in counts.items() if count > 1]


def test_names_leave_room_for_what_kubernetes_appends() -> None:
    values = {"generation": {"pools": [{"name": "a-pool-of-16-lon"}]}}
    long = render(values, name="a-release-with-a-name-of-46-characters-in-all")
    for each in long.all("StatefulSet"):
        # An ordinal for the pod's name, and ten characters of hash for the revision's label.
        assert len(each["metadata"]["name"]) <= 52


def test_selectors_match_the_labels_of_their_own_pods_and_of_no_others(release: Release) -> None:
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in release.workloads()
    }
    for each in release.workloads():
        selector = each["spec"]["selector"]["matchLabels"]
        assert [name for name, labels in pods.items() if _selects(selector, labels)] == [
            each["metadata"]["name"]
        ]
    for each in [*release.all("Service"), *release.all("PodDisruptionBudget"), *release.all("PodMonitor")]:
        selector = each["spec"]["selector"]
        found = [
            name for name, labels in pods.items() if _selects(selector.get("matchLabels", selector), labels)
        ]
        assert found, each["metadata"]["name"]
        assert all(name.startswith(each["metadata"]["name"]) for name in found)


def test_statefulsets_have_a_headless_service_that_gives_each_pod_an_address(release: Release) -> None:
    services = {each["metadata"]["name"]: each for each in release.all("Service")}
    for each in release.all("StatefulSet"):
        service = services[each["spec"]["serviceName"]]
        assert _selects(service["spec"]["selector"], each["spec"]["template"]["metadata"]["labels"])
        if each["metadata"]["labels"]["app.kubernetes.io/component"] != "redis":
            assert service["spec"]["clusterIP"] == "None"
            # Peers dial an instance as soon as it is registered.
            assert service["spec"]["publishNotReadyAddresses"] is True
            host = environment(container(each), "pod-0")["PACELINE_ADVERTISE_HOST"]
            assert host == f"pod-0.{service['metadata']['name']}.ml.svc.cluster.local"


def test_ports_of_services_and_monitors_are_ports_of_the_pods(release: Release) -> None:
    for each in [*release.all("Service"), *release.all("PodMonitor")]:
        selector = each["spec"]["selector"]
        for workload in release.workloads():
            if _selects(
                selector.get("matchLabels", selector), workload["spec"]["template"]["metadata"]["labels"]
            ):
                containers = workload["spec"]["template"]["spec"]["containers"]
                ports = {port["name"] for holder in containers for port in holder.get("ports", [])}
                wanted = each["spec"].get("ports", each["spec"].get("podMetricsEndpoints"))
                assert {port.get("targetPort", port.get("port")) for port in wanted} <= ports


def test_what_is_mounted_is_there(release: Release) -> None:
    made = {kind: release.names(kind) for kind in ("Secret", "PersistentVolumeClaim", "ServiceAccount")}
    certificates = {each["spec"]["secretName"] for each in release.all("Certificate")}
    claims = {each["spec"]["serviceName"]: each for each in release.all("StatefulSet")}
    for name, pod in release.pods():
        assert pod["serviceAccountName"] in made["ServiceAccount"]
        volumes = {each["name"] for each in pod["volumes"]} if "volumes" in pod else set()
        if name in claims:
            templates = claims[name]["spec"].get("volumeClaimTemplates", [])
            volumes |= {each["metadata"]["name"] for each in templates}
        mounted = [
            {mount["name"] for mount in each.get("volumeMounts", [])}
            for each in (*pod["containers"], *pod.get("initContainers", []))
        ]
        assert set().union(*mounted) == volumes
        for secret in _secrets(pod):
            # The other secrets are those that the values name.
            assert secret in made["Secret"] | certificates or secret.startswith("platform-"), name


def test_nothing_that_somebody_else_has_to_make_is_needed_by_default() -> None:
    secrets = {each for _, pod in value_set("defaults").pods() for each in _secrets(pod)}
    assert secrets
    assert not [each for each in secrets if each.startswith("platform-")]


def test_quantities_are_quantities_and_requests_do_not_exceed_limits(release: Release) -> None:
    for name, pod in release.pods():
        for each in (*pod["containers"], *pod.get("initContainers", [])):
            requests, limits = each["resources"]["requests"], each["resources"]["limits"]
            assert {"cpu", "memory"} <= requests.keys(), name
            assert "memory" in limits, name
            for amount in [*requests.values(), *limits.values()]:
                assert QUANTITY.fullmatch(str(amount)), name
            assert _bytes(requests["memory"]) <= _bytes(limits["memory"]), name
        for volume in pod.get("volumes", []):
            if "emptyDir" in volume:
                assert QUANTITY.fullmatch(volume["emptyDir"]["sizeLimit"]), name


def test_no_template_is_left_out_of_every_value_set() -> None:
    rendered = {
        (each["kind"], each["metadata"]["labels"]["app.kubernetes.io/component"])
        for name in VALUE_SETS
        for each in value_set(name).manifests
    }
    kinds = {kind for kind, _ in rendered}
    assert {"PodMonitor", "PrometheusRule", "ConfigMap", "Role", "Certificate", "NetworkPolicy"} <= kinds
    assert list((CHART / "templates").glob("*.yaml"))


def _selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(name) == value for name, value in selector.items())


def _secrets(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name == "secretName":
                yield each
            elif name == "secretKeyRef":
                yield each["name"]
            else:
                yield from _secrets(each)
    elif isinstance(value, list):
        for each in value:
            yield from _secrets(each)


def _bytes(amount: Any) -> float:
    units = {
        "m": 1e-3,
        "k": 1e3,
        "M": 1e6,
        "G": 1e9,
        "Ki": 2.0**10,
        "Mi": 2.0**20,
        "Gi": 2.0**30,
        "Ti": 2.0**40,
    }
    number = re.match(r"[\d.]+", str(amount))
    assert number is not None
    return float(number[0]) * units.get(str(amount)[number.end() :], 1.0)
