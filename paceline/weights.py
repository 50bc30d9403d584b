"""Push weights: write a model folder and take it through the four phases of an update.

    weights = WeightFolder(Path("/shared/run-1"), model=Path("/models/qwen3"))
    with client.run("run-1", weights=weights) as run:
        run.push_weights(model.state_dict())

A version is published when every phase has succeeded; an error leaves the one before.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline import adapters, delta, expansion, safetensors
from paceline import types as t
from paceline.adapters import Adapter
from paceline.calls import GatewayCalls
from paceline.expansion import BaseWeights
from paceline.sharded_tensors import ShardedTensors
from paceline.shards import OpenShard
from paceline.version_push import VersionPush

log = logging.getLogger("paceline")
# A larger delta saves less than expanding it costs.
_MOST_DELTA_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """Folder with one model folder for each version, which every instance must be able to read.

    Folders appear whole or not at all. The `keep` newest stay: instances that join later load the
    published one, and the one before it is still served while an update is in progress.
    """

    root: Path
    model: Path
    """Model folder in Hugging Face layout, whose config and tokenizer go with every version."""
    keep: int = 2
    shard_bytes: int = safetensors.SHARD_BYTES
    """Largest safetensors file of a version."""
    deltas: bool = False
    """Also write what changed since the published version, which instances that hold that one read instead."""

    def write(self, version: int, tensors: safetensors.Tensors | ShardedTensors) -> Path:
        """Write a version and return its absolute path.

        Args:
            version: a folder that has it already, of an attempt that was never published, is replaced.
            tensors: numpy arrays or torch tensors, by name or as an iterator of pairs, which is read once, with one
                tensor in memory at a time; or those of several ranks.

        Raises:
            ValueError: tensors that cannot be written (see `safetensors.write`).
            OSError: the disk is full, for example.
            PacelineError: AbortedError with the reason RANK_LOST if another rank failed or is gone.
        """
        folder = self.root.absolute() / f"v{version:08d}"
        with _appearing(folder) as unfinished:
            for path in self.model.iterdir():
                if path.is_file() and ".safetensors" not in path.name:
                    safetensors.sync(Path(shutil.copy2(path, unfinished / path.name)))
            if isinstance(tensors, ShardedTensors):
                tensors.write(unfinished, self.shard_bytes)
            else:
                safetensors.write(unfinished, tensors, self.shard_bytes)
        return folder

    def write_delta(self, published: t.Versions, folder: Path) -> Path | None:
        """Write what changed from the published version to a version that `write` returned; return its path.

        None: deltas are not asked for, the published version is not here, or a delta would not be worth it.
        """
        base = self.root.absolute() / f"v{published.policy_version:08d}"
        if not self.deltas or not base.is_dir() or base == folder:
            return None
        place = folder.with_name(f"delta-{folder.name[1:]}")
        unfinished = place.with_name(f".{place.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            if safetensors.index_checksum(base) != published.policy_checksum:
                return None
            written = delta.encode(base, published.policy_version, folder, unfinished)
            if written.bytes > _MOST_DELTA_SHARE * sum(file.stat().st_size for file in folder.iterdir()):
                return None
            _remove(place)
            unfinished.rename(place)
        except (OSError, ValueError) as error:
            log.warning("version goes without a delta: %s", error)
            return None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return place

    def base_of(self, published: t.Versions) -> BaseWeights:
        """Return the full version that the next adapter builds on (see `adapters.base_of`)."""
        return adapters.base_of(published, self.root.absolute(), self.model)

    def write_adapter(self, version: int, source: Adapter | Path, base: BaseWeights) -> Path:
        """Write a LoRA adapter as a version and return its absolute path.

        Raises:
            ValueError: the source is no adapter.
            OSError: the disk is full, for example.
        """
        place = self.root.absolute() / f"adapter-{version:08d}"
        with _appearing(place) as unfinished:
            adapters.write(unfinished, source, base)
        return place

    def prune(self) -> None:
        """Remove all but the newest folders of each kind."""
        for kind in ("v[0-9]*", "delta-*", "adapter-*"):
            for folder in sorted(self.root.glob(kind))[: -self.keep]:
                _remove(folder)


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder, which takes this place when the block ends and is removed when it raises."""
    for left in folder.parent.glob(f".{folder.name}.*"):  # by a trainer that died in the middle
        shutil.rmtree(left, ignore_errors=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        _remove(folder)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    safetensors.sync(folder.parent)


def _remove(folder: Path) -> None:
    """Remove a folder, out of sight first: one that is half removed must not look whole."""
    hidden = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    with suppress(FileNotFoundError):
        folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


async def push_folder(
    client: GatewayCalls,
    push: VersionPush,
    folder_of: Callable[[int], Path],
    delta_of: Callable[[t.Versions, Path], Path | None] = lambda *_: None,
    in_flight: t.InFlight = t.InFlight.REFUSE,
) -> t.UpdateFinished:
    """Push a version whose files are in `folder_of(version)`. An error aborts the update.

    Not so an error for which `keeps_staged` is True: `push.finish` can go on then. `delta_of` returns the folder
    with what changed since the published version, if there is one, and the shards have the same.
    """
    folder = await client.run_work(lambda: folder_of(push.version))
    checksum = await client.run_work(lambda: expansion.checksum(folder))
    base = push.base
    changes = None if base is None else await client.run_work(lambda: delta_of(base, folder))

    def start(member: OpenShard, version: int) -> Awaitable[t.UpdateStarted]:
        return member.calls.start_update(push.run_id, version, push.target, push.push_id)

    async def stage(member: OpenShard, started: t.UpdateStarted) -> None:
        await member.calls.update_weights(started.update_id, folder, checksum, changes)

    return await push.stage(start, stage, in_flight)
