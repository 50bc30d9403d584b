"""The cluster: objects, their controllers, and pods on nodes."""

from __future__ import annotations

import base64
import copy
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.cluster import controllers
from tests.support.cluster.certificates import issued
from tests.support.cluster.dns import Peer
from tests.support.cluster.kubelet import Kubelet
from tests.support.cluster.launcher import Launcher
from tests.support.cluster.names import Names
from tests.support.cluster.network import Network
from tests.support.cluster.spec import Pod, pod_of
from tests.support.cluster.volumes import Volumes
from tests.support.zygote import Forked

# Of operators and of a control plane that this cluster does not have.
_IGNORED = frozenset(
    {
        *("ConfigMap", "Ingress", "Issuer", "PersistentVolumeClaim", "PodDisruptionBudget"),
        *("PodMonitor", "PrometheusRule", "Role", "RoleBinding", "ServiceAccount"),
    }
)
_KNOWN = frozenset(
    {"Certificate", "Deployment", "Job", "NetworkPolicy", "Pod", "Secret", "Service", "StatefulSet"}
)
Key = tuple[str, str]
"""Kind and name of an object."""


class Cluster:
    """Nodes that run what is applied. Use as a context manager, in the main thread."""

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[str],
        trees: Mapping[str, Path],
        *,
        reserved: Collection[str] = (),
        empty: Mapping[str, Path],
    ) -> None:
        """Make it, with nothing in it.

        Args:
            folder: for volumes and logs.
            nodes: their names.
            trees: checkouts of the product by the tag of the images that are built from them.
            reserved: those that pods have to select.
            empty: what empty volumes of a name begin with.
        """
        self.folder = folder
        self.volumes = Volumes(folder / "volumes", empty)
        self.secrets: dict[str, dict[str, bytes]] = {}
        self.objects: dict[Key, dict[str, Any]] = {}
        self.pods: dict[str, tuple[Key, Kubelet]] = {}
        self.ended: list[Kubelet] = []
        self._nodes = dict.fromkeys(nodes, True)
        self._reserved = reserved
        self._names = Names(folder / "names")
        self._numbers = itertools.count()
        self._change = threading.Condition()
        self._closed = False
        self._controllers = threading.Thread(target=self._control, name="controllers", daemon=True)
        self.network = Network()
        self._launcher = Launcher(self.network, folder, trees, self.volumes, self._names, self._changed)

    def __enter__(self) -> Cluster:
        """Begin to control."""
        self._controllers.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes without grace."""
        with self._change:
            self._closed = True
            self._change.notify_all()
            kubelets = [each for _, each in self.pods.values()]
        for each in kubelets:
            each.lose()
            each.end()
        for each in kubelets:
            each.gone.wait(60)
        self._controllers.join()
        self.network.close()

    def apply(self, manifests: Iterable[Mapping[str, Any]]) -> None:
        """Make and change objects. ValueError for a kind that is not played."""
        with self._change:
            for each in manifests:
                kind, name = each["kind"], each["metadata"]["name"]
                if kind not in _KNOWN | _IGNORED:
                    raise ValueError(f"a kind that is not played: {kind} {name}")
                if kind == "Secret":
                    self.secrets[name] = {key: base64.b64decode(text) for key, text in each["data"].items()}
                self.objects[kind, name] = dict(each)
            for (kind, name), each in self.objects.items():
                if kind == "Certificate" and each["spec"]["secretName"] not in self.secrets:
                    self._issue(name)
            self._refresh_volumes()
            self._change.notify_all()

    def prune(self, kept: Iterable[Mapping[str, Any]]) -> None:
        """Remove objects of a release that its new manifests have no more, but those that Helm is told to keep."""
        names = {(each["kind"], each["metadata"]["name"]) for each in kept}
        with self._change:
            for key, each in list(self.objects.items()):
                of_release = "helm.sh/chart" in each["metadata"].get("labels", {})
                policy = each["metadata"].get("annotations", {}).get("helm.sh/resource-policy")
                if key not in names and of_release and policy != "keep":
                    del self.objects[key]
            self._change.notify_all()

    def scale(self, name: str, replicas: int) -> None:
        """Set the number of pods of a StatefulSet."""
        self._edit("StatefulSet", name, lambda spec: {**spec, "replicas": replicas})

    def restart(self, name: str) -> None:
        """Have the pods of a StatefulSet made anew, as `kubectl rollout restart` does: its template is changed."""

        def restarted(spec: dict[str, Any]) -> dict[str, Any]:
            spec = copy.deepcopy(spec)
            spec["template"]["metadata"]["annotations"] = {"restartedAt": str(time.time())}
            return spec

        self._edit("StatefulSet", name, restarted)

    def renew(self, name: str) -> None:
        """Have the secret of a Certificate made anew, as cert-manager does when it is deleted."""
        with self._change:
            self._issue(name)
            self._refresh_volumes()

    def lose(self, node: str) -> None:
        """Take a node's power away: nothing more comes from it, and the scheduler leaves it alone."""
        with self._change:
            self._nodes[node] = False
            for each in self.on(node):
                each.lose()
            self._change.notify_all()

    def take_out_of_service(self, node: str) -> None:
        """Say that a lost node's pods have ended, as the taint out-of-service does."""
        for each in self.on(node):
            each.end()

    def execute(self, pod: str, *command: str, script: str = "") -> Forked:
        """Run a command in a pod; its output goes to `log(pod, "exec")`."""
        return self.pod(pod).execute(command, script.encode())

    def pod(self, name: str) -> Kubelet:
        """Return a pod. KeyError: there is none."""
        return self.pods[name][1]

    def of(self, kind: str, name: str) -> list[Kubelet]:
        """Return the pods of a workload."""
        return [each for key, each in list(self.pods.values()) if key == (kind, name)]

    def on(self, node: str) -> list[Kubelet]:
        """Return the pods on a node."""
        return [each for _, each in list(self.pods.values()) if each.node == node]

    def log(self, pod: str, container: str) -> str:
        """Return what a container has said."""
        return (self.folder / pod / f"{container}.log").read_text(errors="replace")

    def rolled_out(self, kind: str, name: str) -> bool:
        """Say if a workload has its pods, all of them of the last template, and ready."""
        spec = self.objects[kind, name]["spec"]
        revision = controllers.revision_of(spec["template"])
        current = [each.ready and each.revision == revision for each in self.of(kind, name)]
        return len(current) == spec["replicas"] and all(current)

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until something is so. AssertionError with the state of all pods if it is not, in time."""
        deadline = time.monotonic() + seconds
        with self._change:
            while not condition():
                assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.described()}"
                self._change.wait(0.1)

    def described(self) -> str:
        """Return a table of pods, and the end of what those have said that are not ready."""
        lines = []
        for name, (_, each) in self.pods.items():
            lines.append(f"{name} on {each.node}: {each.phase}, ready {each.ready}, restarts {each.restarts}")
            if not each.ready:
                logs = sorted((self.folder / name).glob("*.log"))
                lines += [f"  {log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs]
        return "\n".join(lines)

    def _changed(self) -> None:
        with self._change:
            self._change.notify_all()

    def _edit(self, kind: str, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        with self._change:
            found = self.objects[kind, name]
            self.objects[kind, name] = {**found, "spec": change(found["spec"])}
            self._change.notify_all()

    def _issue(self, name: str) -> None:
        certificate = self.objects["Certificate", name]
        issuer = self.objects["Issuer", certificate["spec"]["issuerRef"]["name"]]["spec"]
        authority = issuer.get("ca", {}).get("secretName")
        if authority and authority not in self.secrets:
            certificates = {each["spec"].get("secretName"): key for key, each in self.objects.items()}
            self._issue(certificates[authority][1])
        self.secrets[certificate["spec"]["secretName"]] = issued(
            certificate, self.secrets[authority] if authority else None
        )

    def _refresh_volumes(self) -> None:
        for _, kubelet in self.pods.values():
            for volume in kubelet.pod.volumes:
                if volume.kind == "secret" and not kubelet.gone.is_set():
                    self.volumes.write(kubelet.pod, volume, self.secrets[volume.source])

    def _control(self) -> None:
        while True:
            with self._change:
                if self._closed:
                    return
                self._reconcile()
                self._publish()
                self._change.wait(0.2)

    def _reconcile(self) -> None:
        for name, (key, kubelet) in list(self.pods.items()):
            if kubelet.gone.is_set() and not (
                key[0] in ("Job", "Pod") and kubelet.phase in ("Succeeded", "Failed")
            ):
                del self.pods[name]
                self.ended.append(kubelet)
                self.volumes.remove(kubelet.pod)
            elif key not in self.objects or (kubelet.lost and key[0] == "Deployment"):
                kubelet.end()
        for key, each in list(self.objects.items()):
            self._step(key, each)

    def _step(self, key: Key, manifest: Mapping[str, Any]) -> None:
        kind, name = key
        if kind == "Pod" and name not in self.pods:
            self._make(key, name, manifest, "")
        if kind not in ("Deployment", "StatefulSet", "Job"):
            return
        spec = manifest["spec"]
        revision = controllers.revision_of(spec["template"])
        seen = [
            controllers.Seen(each.pod.name, each.revision, each.ready, each.ending.is_set())
            for each in self.of(*key)
        ]
        if kind == "Job":
            step = controllers.Step(count=0 if seen else 1)
        elif kind == "Deployment":
            step = controllers.deployment(spec, seen)
        else:
            step = controllers.stateful_set(name, spec, seen)
        for each in step.delete:
            self.pod(each).end()
        made = [*step.create, *[f"{name}-{revision}-{next(self._numbers)}" for _ in range(step.count)]]
        for each in made:
            self._make(key, each, spec["template"], revision)

    def _make(self, key: Key, name: str, template: Mapping[str, Any], revision: str) -> None:
        spec = self.objects[key]["spec"]
        claims = [each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", [])]
        pod = pod_of(name, template, self.secrets, service=spec.get("serviceName", ""), claims=claims)
        if node := self._node(pod):
            self.volumes.make(pod, self.secrets)
            self.pods[name] = key, Kubelet(pod, node, revision, self._launcher)

    def _node(self, pod: Pod) -> str:
        """Return the node with the fewest pods of the same labels, and then the fewest pods; "" if none is fit."""
        wanted = pod.selector.get("kubernetes.io/hostname")
        alive = [each for each in self._nodes if self._nodes[each]]
        nodes = [each for each in alive if (each == wanted if wanted else each not in self._reserved)]

        def load(node: str) -> tuple[int, int]:
            pods = self.on(node)
            return sum(each.pod.labels == pod.labels for each in pods), len(pods)

        return min(nodes, key=load, default="")

    def _publish(self) -> None:
        pods = [each for _, each in self.pods.values() if not (each.lost or each.gone.is_set())]
        peers = [
            Peer(each.pod.name, each.address, each.pod.labels, each.pod.ports, each.ready, each.pod.service)
            for each in pods
        ]
        self._names.publish(list(self.objects.values()), peers, self.network)
        for each in pods:
            each.published.set()
