"""What the chart refuses in a cluster that cannot serve it, with the value to change."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import helm_python as helm
import pytest

from tests.support.cluster.charts import texts
from tests.unit.helm.release import CHART, VALUE_SETS, render

REAL = "apiregistration.k8s.io/v1"
"""An API that every cluster has, and Helm does not assume where it knows none."""
CERTIFICATES = "cert-manager.io/v1/Certificate"
PUSHED = {"image": {"registry": "registry.example.com"}}
ROUTE = {"enabled": True, "kind": "TLSRoute", "parentRefs": [{"name": "front"}]}


def installed(values: dict[str, Any], apis: Sequence[str]) -> dict[str, str]:
    return texts(CHART, copy.deepcopy(values), name="paceline", namespace="ml", apis=[REAL, *apis])


@pytest.mark.parametrize(
    ("values", "api", "said"),
    [
        ({}, CERTIFICATES, "install cert-manager, or set tls.mode to secrets"),
        (
            {"monitoring": {"podMonitors": {"enabled": True}}},
            "monitoring.coreos.com/v1/PodMonitor",
            "set monitoring.podMonitors.enabled to false",
        ),
        (
            {"monitoring": {"rules": {"enabled": True}}},
            "monitoring.coreos.com/v1/PrometheusRule",
            "set monitoring.rules.enabled to false",
        ),
        (
            {"autoscale": {"enabled": True, "by": "keda"}},
            "keda.sh/v1alpha1/ScaledObject",
            "install KEDA, or set autoscale.by",
        ),
        (
            {"gateway": {"route": ROUTE}},
            "gateway.networking.k8s.io/v1/TLSRoute",
            "set gateway.route.apiVersion to one",
        ),
    ],
)
def test_an_api_that_the_values_need_is_asked_for(values: dict[str, Any], api: str, said: str) -> None:
    others = [] if api == CERTIFICATES else [CERTIFICATES]
    with pytest.raises(helm.HelmError, match=said) as caught:
        installed({**PUSHED, **values}, others)
    assert f"needs {api}, which this cluster does not serve" in str(caught.value)
    assert str(caught.value).count("does not serve") == 1
    assert installed({**PUSHED, **values}, [*others, api])


def test_images_without_a_registry_are_refused_unless_the_nodes_have_them() -> None:
    plain = {"tls": {"mode": "none"}}
    with pytest.raises(helm.HelmError, match=r"image\.registry names no registry for paceline-control:"):
        installed(plain, [])
    assert installed({**plain, "image": {"pullPolicy": "Never"}}, [])
    of_its_own = {
        name: {"repository": f"registry.example.com/{name.lower()}"} for name in ("control", "generationCuda")
    }
    assert installed({**plain, "image": of_its_own}, [])


def test_without_a_cluster_only_images_are_refused() -> None:
    for name, values in VALUE_SETS.items():
        registry = {"image": {**values.get("image", {}), **PUSHED["image"]}}
        assert render({**values, **registry, "checkCluster": True}).manifests, name
    with pytest.raises(helm.HelmError, match=r"image\.registry names no registry"):
        render({"checkCluster": True})


def test_nothing_is_refused_if_one_says_so() -> None:
    assert render({}).manifests
    assert installed({"checkCluster": False}, [])
