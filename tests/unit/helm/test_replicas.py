"""Numbers of instances: the chart's own, until somebody else has set one, for both majors of Helm."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.support.cluster.charts import notes, rendered
from tests.unit.helm.release import CHART, render

NAME = "paceline-generation-h100"
RELEASE: dict[str, Any] = {"name": "paceline", "namespace": "ml"}
HELM_3, HELM_4 = "v3.17.2", "v4.2.3"
# Entries of managedFields, as an API server of Kubernetes 1.36 writes them.
SERVER_SIDE, CLIENT_SIDE = "Apply", "Update"


def _entry(manager: str, operation: str, *fields: str, subresource: str = "") -> dict[str, Any]:
    entry = {
        "manager": manager,
        "operation": operation,
        "fieldsV1": {"f:spec": {f"f:{f}": {} for f in fields}},
    }
    return {**entry, "subresource": subresource} if subresource else entry


def _of_helm(operation: str, *, owns: bool, manager: str = "helm") -> dict[str, Any]:
    return _entry(manager, operation, "template", *(["replicas"] if owns else []))


def _of_scaler(manager: str) -> dict[str, Any]:
    return _entry(manager, "Update", "replicas", subresource="scale")


# The controller of StatefulSets writes another field of that name.
STATUS = {
    **_entry("kube-controller-manager", "Update"),
    "fieldsV1": {"f:status": {"f:replicas": {}}},
    "subresource": "status",
}


def _there(replicas: int, *owners: dict[str, Any], left: bool = False) -> list[dict[str, Any]]:
    metadata: dict[str, Any] = {"name": NAME, "managedFields": [*owners, STATUS]}
    if left:
        metadata["annotations"] = {"paceline.io/replicas": "set by others"}
    return [{"kind": "StatefulSet", "metadata": metadata, "spec": {"replicas": replicas}}]


def _values(replicas: int, *, scaled: bool = False) -> dict[str, Any]:
    pool = {"name": "h100", "replicas": replicas, "maxReplicas": 16}
    return {"generation": {"pools": [pool]}, "autoscale": {"enabled": scaled}}


def _upgraded(values: dict[str, Any], there: list[dict[str, Any]], version: str) -> int | None:
    found = rendered(CHART, copy.deepcopy(values), there=there, upgrade=True, version=version, **RELEASE)
    (pool,) = [each for each in found if each["metadata"]["name"] == NAME and each["kind"] == "StatefulSet"]
    replicas: int | None = pool["spec"].get("replicas")
    return replicas


@pytest.mark.parametrize("upgrade", [False, True])
def test_a_pool_begins_with_its_number_and_a_scaled_one_with_that_of_kubernetes(upgrade: bool) -> None:
    # An upgrade that adds a pool, and a rendering without a cluster.
    assert (
        render(_values(4), upgrade=upgrade).named("StatefulSet", "-generation-h100")["spec"]["replicas"] == 4
    )
    scaled = render(_values(4, scaled=True), upgrade=upgrade).named("StatefulSet", "-generation-h100")
    assert "replicas" not in scaled["spec"]


@pytest.mark.parametrize(
    ("version", "operation", "manager"),
    [(HELM_4, SERVER_SIDE, "helm"), (HELM_3, CLIENT_SIDE, "helm"), (HELM_4, SERVER_SIDE, "flux-helm")],
)
def test_the_number_of_the_values_stands_while_nobody_has_scaled(
    version: str, operation: str, manager: str
) -> None:
    there = _there(4, _of_helm(operation, owns=True, manager=manager))
    assert _upgraded(_values(8), there, version) == 8


@pytest.mark.parametrize("manager", ["kubectl", "paceline-policy", "OpenAPI-Generator"])
def test_a_number_that_was_scaled_stays_and_is_in_no_conflict(manager: str) -> None:
    # By hand, or by a policy service whose autoscaling is now off.
    server_side = _there(6, _of_helm(SERVER_SIDE, owns=False), _of_scaler(manager))
    assert _upgraded(_values(4), server_side, HELM_4) is None
    # A field that leaves the manifest is set to one by a three-way merge.
    client_side = _there(6, _of_helm(CLIENT_SIDE, owns=False), _of_scaler(manager))
    for version in (HELM_3, HELM_4):
        assert _upgraded(_values(4), client_side, version) == 6
    # Helm 3 merges three ways, whatever has applied before.
    assert _upgraded(_values(4), server_side, HELM_3) == 6


def test_a_number_that_was_edited_stays() -> None:
    there = _there(6, _of_helm(SERVER_SIDE, owns=False), _entry("kubectl-edit", "Update", "replicas"))
    assert _upgraded(_values(4), there, HELM_4) is None


def test_a_scaler_finds_the_number_that_it_left() -> None:
    values = _values(4, scaled=True)
    # Installed with the scaler; then after it has scaled.
    assert _upgraded(values, _there(1, _of_helm(SERVER_SIDE, owns=False)), HELM_4) is None
    scaled = _there(6, _of_helm(SERVER_SIDE, owns=False), _of_scaler("paceline-policy"))
    assert _upgraded(values, scaled, HELM_4) is None
    assert _upgraded(values, _there(6, _of_helm(CLIENT_SIDE, owns=False)), HELM_3) == 6


def test_a_scaler_that_is_switched_on_begins_with_what_is_there() -> None:
    # Helm alone has written the number: a field that it gives up is set to one.
    there = _there(6, _of_helm(SERVER_SIDE, owns=True))
    assert _upgraded(_values(4, scaled=True), there, HELM_4) == 6
    # The same number by the scaler and by Helm, which looked it up.
    both = _there(6, _of_helm(SERVER_SIDE, owns=True), _of_scaler("paceline-policy"))
    assert _upgraded(_values(4, scaled=True), both, HELM_4) is None


def test_a_number_without_a_writer_is_a_scalers() -> None:
    # Kubernetes notes no writer of a scale whose number Helm has never applied.
    there = _there(6, _of_helm(SERVER_SIDE, owns=False))
    assert _upgraded(_values(4), there, HELM_4) is None
    assert _upgraded(_values(4), there, HELM_3) == 6
    said = notes(CHART, _values(4), there=there, upgrade=True, **RELEASE)
    assert "stays at 6 instances, which a scaler has set" in said


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("version", "operation"), [(HELM_4, SERVER_SIDE), (HELM_3, CLIENT_SIDE)])
def test_a_number_that_was_in_no_manifest_is_in_none_later(
    scaled: bool, version: str, operation: str
) -> None:
    # So that no revision of the release has one, to which a rollback would set it.
    for owners in ([], [_of_scaler("paceline-policy")]):
        there = _there(6, _of_helm(operation, owns=operation == CLIENT_SIDE), *owners, left=True)
        assert _upgraded(_values(4, scaled=scaled), there, version) is None


def test_a_manifest_without_a_number_says_so() -> None:
    for scaled in (True, False):
        pool = render(_values(4, scaled=scaled)).named("StatefulSet", "-generation-h100")
        assert ("paceline.io/replicas" in pool["metadata"].get("annotations", {})) is scaled


def test_a_number_of_the_values_that_does_not_apply_is_told() -> None:
    def said(replicas: int, *, scaled: bool = False) -> str:
        there = _there(6, _of_helm(SERVER_SIDE, owns=False), _of_scaler("kubectl"))
        return notes(CHART, _values(replicas, scaled=scaled), there=there, upgrade=True, **RELEASE)

    assert "Pool h100 stays at 6 instances, which kubectl has set" in said(8)
    assert f"kubectl scale statefulset {NAME} --namespace ml --replicas=8" in said(8)
    assert "stays at" not in said(6)
    assert "stays at" not in said(8, scaled=True)
