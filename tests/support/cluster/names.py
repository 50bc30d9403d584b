"""Names that pods can call, where Services lead and what policies let through, as the network is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.cluster.dns import Peer, hosts, routes
from tests.support.cluster.network import Network
from tests.support.cluster.policies import Openings, exits, openings


class Names:
    """An /etc/hosts for each pod, in a folder of its name, and the addresses of Services."""

    def __init__(self, folder: Path) -> None:
        """Keep the files in `folder`."""
        self._folder = folder
        self._addresses: dict[str, str] = {}
        self._opened: tuple[Openings, Openings] = {}, {}

    def of(self, pod: str) -> Path:
        """Return the folder with a pod's file."""
        folder = self._folder / pod
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def publish(self, objects: Sequence[Mapping[str, Any]], pods: Sequence[Peer], network: Network) -> None:
        """Tell pods and network what there is: Services and NetworkPolicies of all objects, and pods."""
        services = [each for each in objects if each["kind"] == "Service"]
        policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
        opened = openings(policies, pods), exits(policies, pods)
        if opened != self._opened:
            network.restrict(*opened)
            self._opened = opened
        for each in services:
            if each["spec"].get("clusterIP") != "None":
                self._addresses.setdefault(each["metadata"]["name"], f"10.96.0.{len(self._addresses) + 1}")
        network.publish(routes(services, self._addresses, pods))
        known = hosts(services, self._addresses, pods)
        for pod in pods:
            self._write(pod.name, f"{known}{pod.address} {pod.name}\n")

    def _write(self, pod: str, text: str) -> None:
        file = self.of(pod) / "hosts"
        if not file.exists() or file.read_text() != text:
            # Readers find all of it or what was there before.
            part = file.with_name("part")
            part.write_text(text)
            part.replace(file)
