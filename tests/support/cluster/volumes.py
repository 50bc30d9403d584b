"""Volumes as folders of this machine."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.support.cluster.container import Place
from tests.support.cluster.spec import Mount, Pod, Volume

_CHOICES = itertools.count()


class Volumes:
    """The folders of all pods' volumes, and of claims, below one folder."""

    def __init__(self, folder: Path, empty: Mapping[str, Path]) -> None:
        """Keep them in `folder`.

        Args:
            folder: where they are made.
            empty: what empty volumes of a name begin with.
        """
        self._folder = folder
        self._begin = empty

    def claim(self, name: str) -> Path:
        """Return the folder of a claim, which outlives pods."""
        path = self._folder / "claims" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def make(self, pod: Pod, secrets: Mapping[str, Mapping[str, bytes]]) -> None:
        """Make the volumes of a pod. KeyError if a secret is not there, for which a real pod would wait."""
        for volume in pod.volumes:
            if volume.kind == "empty":
                path = self._of(pod, volume)
                shutil.copytree(self._begin[volume.name], path) if volume.name in self._begin else path.mkdir(
                    parents=True
                )
                _own(path, pod.group)
            elif volume.kind == "claim":
                _own(self.claim(volume.source), pod.group)
            elif volume.kind == "secret":
                self.write(pod, volume, secrets[volume.source])

    def write(self, pod: Pod, volume: Volume, data: Mapping[str, bytes]) -> None:
        """Write a secret to its volume, all files of it at once, as a kubelet does."""
        place = self._of(pod, volume)
        if volume.items:
            data = {path: data[key] for key, path in volume.items}
        if all((place / name).exists() and (place / name).read_bytes() == data[name] for name in data):
            return
        version = place / f"..{next(_CHOICES)}"
        version.mkdir(parents=True)
        for name, content in data.items():
            file = version / name
            file.write_bytes(content)
            os.chown(file, 0, pod.group)
            file.chmod(volume.mode)
            if not (place / name).is_symlink():
                (place / name).symlink_to(f"..data/{name}")
        link = place / "..next"
        link.symlink_to(version.name)
        before = place / "..data"
        stale = before.resolve() if before.is_symlink() else None
        link.replace(before)
        if stale:
            shutil.rmtree(stale)

    def place(self, pod: Pod, mount: Mount) -> Place:
        """Return where a container sees a volume. ValueError if the pod has no such volume."""
        volume = next((each for each in pod.volumes if each.name == mount.volume), None)
        if volume is None:
            raise ValueError(f"{pod.name}: there is no volume {mount.volume}")
        if volume.kind == "memory":
            size = volume.source.removesuffix("i").lower()
            return Place("", mount.path, mount.read_only, f"mode=2777,gid={pod.group},size={size}")
        return Place(str(self._of(pod, volume)), mount.path, mount.read_only)

    def remove(self, pod: Pod) -> None:
        """Remove what does not outlive a pod."""
        shutil.rmtree(self._folder / "pods" / pod.name, ignore_errors=True)

    def _of(self, pod: Pod, volume: Volume) -> Path:
        if volume.kind == "claim":
            return self.claim(volume.source)
        return self._folder / "pods" / pod.name / volume.name


def _own(folder: Path, group: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, -1, group)
        path.chmod(path.stat().st_mode | (0o2070 if path.is_dir() else 0o060))
