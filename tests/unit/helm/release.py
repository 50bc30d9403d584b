"""Renderings of the chart, and ways to find manifests in them."""

from __future__ import annotations

import base64
import copy
import functools
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm/paceline"
VALUE_SETS = {
    "defaults": {},
    **{
        file.name.removesuffix("-values.yaml"): yaml.safe_load(file.read_text())
        for file in sorted((CHART / "ci").glob("*-values.yaml"))
    },
}
"""Values of the sets in helm/paceline/ci, and none, by name."""
NAMESPACE = "ml"
ELSEWHERE = "rediss://:secret@redis.example.com:6380/0"
"""Address of a Redis that is given in a secret."""
POD_IP = "10.0.0.7"
COMPONENT, POOL = "app.kubernetes.io/component", "paceline.io/pool"

# Parsing is most of the work, and every test reads much of the same YAML.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@functools.cache
def chart() -> helm.Chart:
    """Return the chart, loaded once."""
    return helm.Chart.load(str(CHART))


@dataclass(frozen=True, slots=True)
class Release:
    """Manifests and notes of one rendering."""

    manifests: tuple[dict[str, Any], ...]
    notes: str

    def all(self, kind: str) -> list[dict[str, Any]]:
        """Return all manifests of a kind."""
        return [each for each in self.manifests if each["kind"] == kind]

    def named(self, kind: str, name: str) -> dict[str, Any]:
        """Return the manifest of a kind with a name, which begins with the release's."""
        (found,) = [each for each in self.all(kind) if each["metadata"]["name"] == f"paceline{name}"]
        return found

    def names(self, kind: str) -> set[str]:
        """Return the names of the manifests of a kind."""
        return {each["metadata"]["name"] for each in self.all(kind)}

    def workloads(self) -> list[dict[str, Any]]:
        """Return all workloads, which make pods."""
        return [*self.all("Deployment"), *self.all("StatefulSet")]

    def pods(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return name and spec of every kind of pod, including those of Jobs and of `helm test`."""
        for each in self.workloads():
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]
        for each in self.all("Job"):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]
        for each in self.all("Pod"):
            yield each["metadata"]["name"], each["spec"]

    def services(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return component and workload of each of our services."""
        for each in self.workloads():
            component = each["metadata"]["labels"][COMPONENT]
            if component != "redis":
                yield component, each


def render(
    values: Mapping[str, Any] | None = None, name: str = "paceline", *, upgrade: bool = False
) -> Release:
    """Render the chart as `helm install` or `helm upgrade` does, without a cluster."""
    # The library keeps the values that it is given, and the chart adds to them.
    given = copy.deepcopy({"checkCluster": False, **(values or {})})
    texts = chart().render(given, name=name, namespace=NAMESPACE, is_install=not upgrade, is_upgrade=upgrade)
    notes = next(text for path, text in texts.items() if path.endswith("NOTES.txt"))
    documents = [
        document
        for path, text in sorted(texts.items())
        if not path.endswith("NOTES.txt")
        for document in yaml.load_all(text, _LOADER)
        if document is not None
    ]
    return Release(tuple(documents), notes)


@functools.cache
def value_set(name: str) -> Release:
    """Return the rendering of one of VALUE_SETS."""
    return render(VALUE_SETS[name])


def container(workload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the service's container of a workload's pods, which is the first; sidecars follow."""
    first: dict[str, Any] = workload["spec"]["template"]["spec"]["containers"][0]
    return first


def environment(holder: Mapping[str, Any], pod: str = "paceline-x-0") -> dict[str, str]:
    """Return the environment of a container. Secrets hold "secret", the address ELSEWHERE, and a pod has POD_IP."""
    found: dict[str, str] = {}
    for each in holder.get("env", []):
        if "value" in each:
            text = each["value"]
            for name, value in found.items():
                text = text.replace(f"$({name})", value)
            found[each["name"]] = text
        elif "fieldRef" in each["valueFrom"]:
            fields = {"metadata.name": pod, "status.podIP": POD_IP}
            found[each["name"]] = fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            found[each["name"]] = ELSEWHERE if each["name"] == "PACELINE_REDIS_URL" else "secret"
    return found


def secret_text(secret: Mapping[str, Any], key: str) -> str:
    """Return the value of a key of a secret."""
    return base64.b64decode(secret["data"][key]).decode()


def generated(release: Release) -> list[dict[str, Any]]:
    """Return the secrets that the chart makes up, which are hooks and of no release manifest."""
    return [
        each for each in release.all("Secret") if "helm.sh/hook" in each["metadata"].get("annotations", {})
    ]


def write_users(release: Release, folder: Path) -> str:
    """Have the first container of Redis's pod write its file of users, users.acl, to `folder`; return its text."""
    (first, *_) = release.named("StatefulSet", "-redis")["spec"]["template"]["spec"]["initContainers"]
    secret = release.named("Secret", "-redis")
    passwords = folder / "passwords"
    passwords.mkdir()
    for key in secret["data"]:
        (passwords / key).write_text(secret_text(secret, key))
    script = first["command"][-1]
    for inside, here in (("/etc/paceline/passwords", passwords), ("/etc/paceline/redis", folder)):
        assert inside in [each["mountPath"] for each in first["volumeMounts"]]
        script = script.replace(inside, str(here))
    subprocess.run(
        [*first["command"][:-1], script], env={"PATH": os.environ["PATH"], **environment(first)}, check=True
    )
    return (folder / "users.acl").read_text()
