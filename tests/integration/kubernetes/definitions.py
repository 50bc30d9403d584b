"""Definitions of the kinds that the chart's values ask other projects for, in as few words as the API server takes.

They accept every field. So a test with them shows that the chart names groups, versions and kinds that are served,
and what Helm makes of such objects, but not that their fields are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_KINDS = (
    ("cert-manager.io", "v1", ("Certificate", "Issuer", "ClusterIssuer")),
    ("gateway.networking.k8s.io", "v1", ("GRPCRoute", "HTTPRoute", "TLSRoute")),
    ("keda.sh", "v1alpha1", ("ScaledObject",)),
    ("monitoring.coreos.com", "v1", ("PodMonitor", "PrometheusRule")),
)
_CLUSTER_WIDE = ("ClusterIssuer",)
_APPROVED = {"api-approved.kubernetes.io": "unapproved, for tests only"}
"""Groups of k8s.io are refused without it."""


def definitions() -> Iterator[dict[str, Any]]:
    """Yield a CustomResourceDefinition for each kind."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    for group, version, kinds in _KINDS:
        for kind in kinds:
            plural = f"{kind.lower()}s"
            served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
            yield {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{plural}.{group}", "annotations": _APPROVED},
                "spec": {
                    "group": group,
                    "scope": "Cluster" if kind in _CLUSTER_WIDE else "Namespaced",
                    "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
                    "versions": [served],
                },
            }
