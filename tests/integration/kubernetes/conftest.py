"""A Kubernetes API server of our own, and kubectl and Helm as their users have them.

All of it is skipped without KUBEBUILDER_ASSETS (tests/support/kubernetes_server.py) or without the programs that
`scripts/cluster-tools` gets.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.kubernetes.definitions import definitions
from tests.integration.kubernetes.release import HELMS, TOOLS, Space
from tests.support.kubernetes_server import ApiServer, api_server

SpaceMaker = Callable[[int], Space]

_NUMBERS = itertools.count(1)
_RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
_PRIORITIES = ("training", "spot")
"""Classes that helm/paceline/ci/front-door-values.yaml names."""


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server with the kinds of all projects that the chart knows.

    TEST_KUBERNETES_CRDS names a folder with these projects' own definitions, to use them in place of ours.
    """
    if "KUBEBUILDER_ASSETS" not in os.environ:
        pytest.skip("no Kubernetes API server: KUBEBUILDER_ASSETS is not set")
    if not all(path.exists() for path in (*HELMS.values(), TOOLS / "kubectl")):
        pytest.skip("no kubectl and no Helm in .tools/cluster: scripts/cluster-tools gets them")
    with api_server(tmp_path_factory.mktemp("cluster"), controllers=True) as running:
        found = list(definitions())
        if folder := os.environ.get("TEST_KUBERNETES_CRDS"):
            found = [yaml.safe_load(path.read_text()) for path in sorted(Path(folder).glob("*.yaml"))]
        for each in found:
            running.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", each)
        for name in _PRIORITIES:
            body = {"metadata": {"name": name}, "value": 1000}
            running.call("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", body)
        yield running


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder of all clients, which ask the server only once for what it has."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="package")
def make_space(server: ApiServer, home: Path, tmp_path_factory: pytest.TempPathFactory) -> SpaceMaker:
    """Make a namespace that enforces Pod Security's `restricted`, for a major version of Helm."""

    def make(helm_version: int) -> Space:
        name = f"space-{next(_NUMBERS)}"
        folder = tmp_path_factory.mktemp(name)
        server.write_config(folder / "config")
        (folder / "config").chmod(0o600)
        (folder / "helm").symlink_to(HELMS[helm_version])
        (folder / "kubectl").symlink_to(TOOLS / "kubectl")
        server.call("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": _RESTRICTED}})
        return Space(server, name, helm_version, folder, home)

    return make


@pytest.fixture(params=HELMS, ids=lambda version: f"helm{version}")
def space(request: pytest.FixtureRequest, make_space: SpaceMaker) -> Space:
    """A namespace, once for each major version of Helm."""
    return make_space(request.param)
