"""A namespace of a real API server, and a release of the chart in it, as kubectl and Helm make and change it."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import yaml

from tests.support.kubernetes_server import ApiServer

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm/paceline"
TOOLS = ROOT / ".tools/cluster"
HELMS = {3: TOOLS / "helm-3", 4: TOOLS / "helm-4"}
"""Programs by major version."""
_INFORMATION = re.compile(r"^I\d{4} .*\n", re.MULTILINE)
"""Lines of a client's log that are neither errors nor warnings."""
POOL = "app.kubernetes.io/component=generation"


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace, and one major version of Helm that works in it."""

    server: ApiServer
    name: str
    helm_version: int
    folder: Path
    """Has `config`, and the files that tests write."""
    home: Path
    """Has what kubectl and Helm remember of the server."""

    def run(self, *command: str, given: str = "", fails: bool = False, **environment: str) -> str:
        """Return the output of a command. AssertionError if it fails or warns, or with `fails` if it succeeds.

        What a command that fails has said is returned then.
        """
        own = {
            "HOME": str(self.home),
            "KUBECONFIG": str(self.folder / "config"),
            "PATH": f"{self.folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        ended = subprocess.run(
            command,
            input=given,
            env={**own, **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        errors = _INFORMATION.sub("", ended.stderr)
        said = f"{' '.join(command)}: status {ended.returncode}\n{ended.stdout[-1500:]}\n{errors}"
        if fails:
            assert ended.returncode != 0, said
            return errors
        assert (ended.returncode, errors) == (0, ""), said
        return ended.stdout

    def script(self, text: str, **environment: str) -> str:
        """Return the output of a block of a document's commands, which name the namespace `ml`."""
        return self.run("bash", "-euo", "pipefail", "-c", text.replace(" ml", f" {self.name}"), **environment)

    def helm(self, *words: str, fails: bool = False) -> str:
        """Return the output of Helm."""
        return self.run("helm", *words, "--namespace", self.name, fails=fails)

    def kubectl(self, *words: str, given: str = "") -> str:
        """Return the output of kubectl."""
        return self.run("kubectl", *words, "--namespace", self.name, given=given)

    def install(self, values: Mapping[str, Any]) -> None:
        """`helm install paceline`."""
        self._write(values)
        self.helm("install", "paceline", str(CHART), "--values", "values.yaml")

    def upgrade(self, values: Mapping[str, Any] | None = None, *options: str) -> None:
        """`helm upgrade paceline`, to the values of before if none are given."""
        if values is not None:
            self._write(values)
        self.helm("upgrade", "paceline", str(CHART), "--values", "values.yaml", *options)

    def _write(self, values: Mapping[str, Any]) -> None:
        (self.folder / "values.yaml").write_text(yaml.safe_dump(dict(values)))

    def rollback(self, revision: int | None = None, *options: str, fails: bool = False) -> str:
        """`helm rollback paceline`, to the revision before if none is given."""
        to = [] if revision is None else [str(revision)]
        return self.helm("rollback", "paceline", *to, *options, fails=fails)

    def all(self, plural: str, api: str = "apps/v1") -> list[dict[str, Any]]:
        """Return all objects of a kind."""
        path = f"{'/api' if api == 'v1' else '/apis'}/{api}/namespaces/{self.name}/{plural}"
        found: list[dict[str, Any]] = self.server.call("GET", path).json()["items"]
        return found

    def one(self, plural: str, name: str, api: str = "apps/v1") -> dict[str, Any]:
        """Return an object by its name."""
        (found,) = [each for each in self.all(plural, api) if each["metadata"]["name"] == name]
        return found

    def pools(self) -> dict[str, int]:
        """Return the number of instances of each pool, by the name of its StatefulSet."""
        key, _, component = POOL.partition("=")
        return {
            each["metadata"]["name"]: each["spec"]["replicas"]
            for each in self.all("statefulsets")
            if each["metadata"]["labels"][key] == component
        }

    def scale(self, pool: str, replicas: int) -> None:
        """Write to the scale as the policy controller does, without its name for the field."""
        path = f"/apis/apps/v1/namespaces/{self.name}/statefulsets/{pool}/scale"
        body = {"metadata": {"name": pool, "namespace": self.name}, "spec": {"replicas": replicas}}
        self.server.call("PUT", f"{path}?fieldManager=paceline-policy", body)

    def secrets(self) -> dict[str, dict[str, str]]:
        """Return the contents of the secrets but Helm's own."""
        return {
            each["metadata"]["name"]: {
                key: base64.b64decode(text).decode() for key, text in each["data"].items()
            }
            for each in self.all("secrets", "v1")
            if not each["type"].startswith("helm.sh/")
        }

    def templates(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and template of every kind of pod of the release, that of `helm test` among them."""
        for plural, api in (("deployments", "apps/v1"), ("statefulsets", "apps/v1"), ("jobs", "batch/v1")):
            for each in self.all(plural, api):
                template = each["spec"]["template"]
                for claim in each["spec"].get("volumeClaimTemplates", []):
                    name = claim["metadata"]["name"]
                    volume = {"name": name, "persistentVolumeClaim": {"claimName": f"{name}-0"}}
                    template["spec"]["volumes"].append(volume)
                yield each["metadata"]["name"], template
        for hook in yaml.safe_load_all(self.helm("get", "hooks", "paceline")):
            if hook["kind"] == "Pod":
                yield hook["metadata"]["name"], hook

    def try_pod(self, template: Mapping[str, Any]) -> str:
        """Create a pod of a template without keeping it; return why it is refused, "" if it is not."""
        metadata = {"labels": template["metadata"].get("labels", {}), "generateName": "try-"}
        pod = {"metadata": metadata, "spec": template["spec"]}
        try:
            self.server.call("POST", f"/api/v1/namespaces/{self.name}/pods?dryRun=All", pod)
        except requests.HTTPError as error:
            return str(error.response.json()["message"])
        return ""
