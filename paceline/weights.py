"""Sends weights: writes a model folder, then takes it through the four phases of an update.

    weights = WeightFolder(Path("/shared/run-1"), model=Path("/models/qwen3"))
    with client.run("run-1", weights=weights) as run:
        run.push_weights(model.state_dict())

A version is published when every phase has succeeded; an error leaves the one before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import calls, safetensors
from paceline import types as t
from paceline.errors import PacelineError


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """Keeps one folder for each version under `root`, which every instance must be able to read.

    Folders appear whole or not at all. The `keep` newest stay: instances that join later load the
    published one, and the one before it is still served while an update is in progress.
    """

    root: Path
    model: Path
    """Model folder in Hugging Face layout, whose config and tokenizer go with every version."""
    keep: int = 2

    def write(self, version: int, tensors: Mapping[str, Any]) -> Path:
        """Writes a version from named tensors (numpy or torch) and returns its absolute path."""
        folder = self.root.absolute() / f"v{version:08d}"
        unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for path in self.model.iterdir():
            if path.is_file() and ".safetensors" not in path.name:
                shutil.copy2(path, unfinished)
        safetensors.write(unfinished / "model.safetensors", tensors)
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was never published
        unfinished.rename(folder)
        return folder

    def prune(self) -> None:
        """Removes all but the newest folders."""
        for folder in sorted(self.root.glob("v[0-9]*"))[: -self.keep]:
            shutil.rmtree(folder, ignore_errors=True)


def push(
    run_id: str, target: t.WeightTarget, folder_of: Callable[[int], Path]
) -> calls.Steps[t.UpdateFinished]:
    """The next version's update: `folder_of(version)` gives its folder. An error aborts the update."""
    published: t.Versions = yield calls.versions()
    version = _version(published, target) + 1
    folder: Path = yield calls.Local(lambda: folder_of(version))
    checksum: str = yield calls.Local(lambda: safetensors.checksum(folder))
    started: t.UpdateStarted = yield calls.start_update(run_id, version, target)
    try:
        yield calls.update_weights(started.update_id, str(folder), checksum)
        finished: t.UpdateFinished = yield from _finish(started.update_id, version, target)
    except GeneratorExit:
        raise
    except BaseException:
        yield from _abort(started.update_id)
        raise
    return finished


def _finish(update_id: str, version: int, target: t.WeightTarget) -> calls.Steps[t.UpdateFinished]:
    """FinishUpdate; when its answer was lost, whether the version was published decides."""
    try:
        finished: t.UpdateFinished = yield calls.finish_update(update_id)
    except PacelineError:
        published: t.Versions = yield calls.versions()
        if _version(published, target) != version:
            raise
        return t.UpdateFinished(version, published.instances)
    return finished


def _abort(update_id: str) -> calls.Steps[None]:
    """AbortUpdate; the error that led here is the one to report."""
    try:
        yield calls.abort_update(update_id)
    except PacelineError:
        return


def _version(versions: t.Versions, target: t.WeightTarget) -> int:
    return versions.drafter_version if target is t.WeightTarget.DRAFTER else versions.policy_version
