"""A release of the chart in a cluster of processes: mutual TLS, tokens, three nodes, two instances."""

from __future__ import annotations

import copy
import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.cluster.charts import rendered
from tests.support.cluster.cluster import Cluster
from tests.support.cluster.kubelet import Kubelet
from tests.support.cluster.launcher import ROOT
from tests.support.cluster.numba_cache import copied
from tests.support.zygote import Forked

TOKEN = "pl_chart"
NODES = ("a", "b", "c")
POOL = "paceline-generation-cpu"
WORKLOADS = (
    ("StatefulSet", "paceline-redis"),
    ("StatefulSet", POOL),
    ("StatefulSet", "paceline-drafts"),
    *(("Deployment", f"paceline-{name}") for name in ("bubbles", "gateway", "policy", "reallocator")),
)
"""Workloads all of whose pods are ready when the release is."""
LONGEST = 400
"""Tokens of most samples of a step."""
MODEL = ROOT / "examples/tinymath/model/model.safetensors"
_UP_SECONDS = 300
"""An old processor under load takes more than a minute to start an engine."""
_PUSH = (ROOT / "tests/e2e/chart_push.py").read_text()
_PROGRAM = (ROOT / "tests/e2e/chart_step.py").read_text()
_LEADING = re.compile(r'"term": (\d+), "event": "leading"')
_BOTH_SERVE = """
import os, time
from pathlib import Path
from paceline import Client, InstanceState, Tls

tls = Tls(ca_file=Path("/tls/ca.crt"), cert_file=Path("/tls/tls.crt"), key_file=Path("/tls/tls.key"))
address = "paceline-gateway.ml.svc.cluster.local:7400"
with Client(address, token=os.environ["PACELINE_TOKEN"], tls=tls) as client:
    while [each.state for each in client.instances()].count(InstanceState.SERVING) < 2:
        time.sleep(0.1)
"""
_TRAINER = """
apiVersion: v1
kind: Pod
metadata: {name: trainer, namespace: ml, labels: {app: trainer}}
spec:
  nodeSelector: {kubernetes.io/hostname: a}
  securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001}
  containers:
    - name: trainer
      image: paceline-control:now
      command: [sleep, infinity]
      env:
        - {name: PACELINE_TOKEN, valueFrom: {secretKeyRef: {name: trainer, key: token}}}
      securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
      volumeMounts:
        - {name: tls, mountPath: /tls, readOnly: true}
  volumes:
    - {name: tls, secret: {secretName: paceline-trainer-tls}}
"""


def values(tag: str = "now") -> dict[str, Any]:
    """Return those of deploy/kind with mutual TLS, a standby of the gateway, and Redis on the trainer's node."""
    found = yaml.safe_load((ROOT / "deploy/kind/values.yaml").read_text())
    found["image"] = {"tag": tag}
    found["tls"] = {"mode": "certManager"}
    found["networkPolicy"] = {"trainers": [{"podSelector": {"matchLabels": {"app": "trainer"}}}]}
    found["gateway"]["replicas"] = 2
    found["redis"]["embedded"]["nodeSelector"] = {"kubernetes.io/hostname": NODES[0]}
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    found["tokens"] = {"grants": [{"name": "trainer", "sha256": digest, "scopes": ["rollouts", "weights"]}]}
    return found


def _events(manifest: Mapping[str, Any]) -> list[str]:
    """Return the hook events of a manifest, none for an object of the release."""
    text = manifest["metadata"].get("annotations", {}).get("helm.sh/hook", "")
    return [each for each in text.split(",") if each]


class ChartRelease:
    """The release `paceline` in the namespace `ml`."""

    def __init__(self, folder: Path, trees: Mapping[str, Path] | None = None) -> None:
        """`trees` are checkouts by the tag of their images; this one is "now"."""
        self.cluster = Cluster(
            folder,
            NODES,
            {"now": ROOT, **(trees or {})},
            reserved=NODES[:1],
            empty={"cache": copied(folder / "cache")},
        )
        models = self.cluster.volumes.claim("models")
        shutil.copytree(ROOT / "examples/tinymath/model", models / "tinymath")
        models.chmod(0o755)

    def install(self, given: Mapping[str, Any], chart: Path = ROOT / "helm/paceline") -> None:
        """`helm install`, or `helm upgrade` if it is there, and a pod for a trainer."""
        cluster = self.cluster
        upgrade = bool(cluster.objects)
        manifests = rendered(
            chart,
            copy.deepcopy(dict(given)),
            name="paceline",
            namespace="ml",
            there=[each for (kind, _), each in cluster.objects.items() if kind in ("Secret", "StatefulSet")],
            upgrade=upgrade,
        )
        made = [each for each in manifests if not _events(each)]
        cluster.apply(
            each for each in manifests if f"pre-{'upgrade' if upgrade else 'install'}" in _events(each)
        )
        if not upgrade:
            cluster.secrets["trainer"] = {"token": TOKEN.encode()}
            made.append(yaml.safe_load(_TRAINER))
        cluster.apply(made)
        cluster.prune(made)
        self.hooks = [each for each in manifests if "test" in _events(each)]

    def wait_up(self) -> None:
        """Wait until everything is as the manifests want it, and the gateway has two instances."""
        self.cluster.wait(self.up, _UP_SECONDS, "the release is up")
        asked = self.cluster.execute("trainer", "python", "-", script=_BOTH_SERVE)
        assert asked.wait(60) == 0, self.cluster.log("trainer", "exec")

    def push(self) -> list[str]:
        """Push other weights from the trainer's pod; return the version, and the instances that have applied it."""
        status = self.cluster.execute("trainer", "python", "-", str(MODEL), script=_PUSH).wait(60)
        said = self.cluster.log("trainer", "exec")
        assert status == 0, said
        return said.splitlines()[-1].split()

    def adopted(self) -> dict[str, list[str]]:
        """Return the versions of the weights that are on the volume of each instance for what is pushed."""
        found = {}
        for each in self.cluster.of("StatefulSet", POOL):
            (mount,) = [mount for mount in each.pod.containers[0].mounts if mount.path == "/adopted"]
            folder = Path(self.cluster.volumes.place(each.pod, mount).source)
            found[each.pod.name] = sorted(path.name.partition("-")[0] for path in folder.glob("v*-*"))
        return found

    def leader(self) -> Kubelet:
        """Return the gateway that leads: the one with the highest term, by what they log."""
        terms = {}
        for each in self.cluster.of("Deployment", "paceline-gateway"):
            said = _LEADING.findall(self.cluster.log(each.pod.name, "gateway"))
            terms[max(map(int, said), default=0)] = each
        return terms[max(terms)]

    def up(self) -> bool:
        """Say if everything is as the manifests want it."""
        cluster = self.cluster
        return (
            all(cluster.rolled_out(*each) for each in WORKLOADS) and cluster.pod("trainer").phase == "Running"
        )


class Step:
    """A step in the trainer's pod."""

    def __init__(self, release: ChartRelease, run: str, longest: int = LONGEST, seed: int = 7) -> None:
        """Begin it, as the run of that name; most of its samples have `longest` tokens.

        With a seed that no step had before there are no drafts that are right, and it takes its time.
        """
        self._release = release
        command = ("python", "-", run, str(longest), str(seed))
        self._process: Forked = release.cluster.execute("trainer", *command, script=_PROGRAM)

    def said(self) -> str:
        """Return its output."""
        return self._release.cluster.log("trainer", "exec")

    def begun(self) -> Step:
        """Return when the first sample is there."""
        self._release.cluster.wait(lambda: self.arrived > 0 or self.ended, 60, "the step begins")
        assert not self.ended, self.said()
        return self

    @property
    def arrived(self) -> int:
        """Samples that have arrived."""
        return self.said().count("arrived")

    @property
    def ended(self) -> bool:
        """True once its process has ended."""
        return self._process.poll() is not None

    def result(self) -> tuple[str, list[str]]:
        """Return the checksum of all tokens, and who generated them."""
        assert self._process.wait(120) == 0, self.said() + self._release.cluster.described()
        checksum, *instances = self.said().splitlines()[-1].split()
        return checksum, instances
