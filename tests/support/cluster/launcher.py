"""How containers of a cluster are started: images, mounts, and the processes that they are forked from."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.cluster.container import Order, Place, system_places
from tests.support.cluster.images import Image, image_of
from tests.support.cluster.names import Names
from tests.support.cluster.network import Network
from tests.support.cluster.spec import Container, Pod
from tests.support.cluster.volumes import Volumes
from tests.support.zygote import Forked, forked

ROOT = Path(__file__).parents[3]
_VALKEY = Image({}, ("python", "-m", "tests.support.cluster.valkey"), "/data")


class Launcher:
    """Starts containers, and commands in them; what a kubelet needs of the cluster."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        trees: Mapping[str, Path],
        volumes: Volumes,
        names: Names,
        changed: Callable[[], None],
    ) -> None:
        """Start none yet.

        Args:
            network: of the cluster.
            folder: for logs and orders, one folder for each pod.
            trees: checkouts of the product by the tag of the images that are built from them.
            volumes: of the pods.
            names: that pods know.
            changed: what kubelets call when a pod has changed.
        """
        self.network = network
        self.folder = folder
        self.changed = changed
        self._trees = trees
        self._volumes = volumes
        self._names = names
        self._numbers = itertools.count()

    def start(
        self,
        pod: Pod,
        container: Container,
        network: str,
        command: tuple[str, ...],
        of: int = 0,
        script: bytes = b"",
    ) -> Forked:
        """Start a container, or `command` in the one whose process 1 is `of`."""
        folder = self.folder / pod.name
        image, tree = self._image(container.image)
        name = "exec" if of else container.name
        root = folder / f"{container.name}.root"
        root.mkdir(parents=True, exist_ok=True)
        pid_file = folder / f"{container.name}.pid"
        if not of:
            pid_file.unlink(missing_ok=True)
        places = [*system_places(tree), Place(str(self._names.of(pod.name)), "/run/cluster", True)]
        places += [self._volumes.place(pod, each) for each in container.mounts]
        order = Order(
            host=pod.name,
            network=network,
            root=str(root),
            pid_file=str(pid_file),
            user=container.user,
            group=container.group,
            volume_group=pod.group,
            folder=image.folder,
            places=tuple(places),
            read_only=container.read_only,
            tree="" if tree == ROOT else str(tree),
            of=of,
        )
        file = order.write(folder / f"{name}-{next(self._numbers)}.json")
        words = command or (container.command + container.arguments) or ()
        # A command of one's own goes past the image's entry, but for the stand-in of Valkey's programs.
        entry = () if (command or container.command) and image is not _VALKEY else image.entry
        module = "tests.support.cluster.container"
        stdin = folder / f"{name}.stdin"
        stdin.write_bytes(script)
        with (folder / f"{name}.log").open("wb" if of else "ab") as log, stdin.open("rb") as given:
            argv = [sys.executable, "-m", module, str(file), *entry, *words]
            # Not what imports have found out where this container is forked, which has another home.
            variables = {"TORCHINDUCTOR_CACHE_DIR": "/cache/paceline/inductor", **image.environment}
            return forked(argv, {**variables, **container.environment}, log, pipe=given.fileno())

    def _image(self, reference: str) -> tuple[Image, Path]:
        name, _, tag = reference.rpartition(":")
        if name == "valkey/valkey":
            return _VALKEY, ROOT
        tree = self._trees[tag]
        return image_of((tree / "deploy/docker/Dockerfile").read_text(), name.removeprefix("paceline-")), tree
