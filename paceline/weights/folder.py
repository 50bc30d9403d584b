"""Push weights through a shared folder: write a model folder, and have every instance load it.

    weights = WeightFolder(Path("/shared/run-1"), model=Path("/models/qwen3"))
    with client.run("run-1", weights=weights) as run:
        run.push_weights(model.state_dict())

A version is published after all phases of the update have succeeded; after an error the previous version stays.
Ranks that hold parts of the tensors (FSDP, DTensor) write the files together, as `ShardedTensors`.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline import types as t
from paceline.calls import GatewayCalls
from paceline.errors import shards_differ
from paceline.files import sync
from paceline.shards import OpenShard
from paceline.weights import adapters, delta, expansion, safetensors
from paceline.weights.adapters import Adapter
from paceline.weights.expansion import BaseWeights
from paceline.weights.sharded import ShardedTensors
from paceline.weights.version_push import VersionPush, WeightTransport

# A larger delta saves less than expanding it costs.
_MOST_DELTA_SHARE = 0.5

log = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class WeightFolder(WeightTransport):
    """Folder with one model folder for each version, which every instance must be able to read.

    Folders appear whole or not at all. The `keep` newest stay: instances that join later load the published
    version, and the previous one is still served while an update is in progress.
    """

    root: Path
    """Folder of the versions."""
    model: Path
    """Model folder in Hugging Face layout. Every version gets a copy of its config and tokenizer."""
    keep: int = 2
    """Number of versions that are kept; >= 1."""
    shard_bytes: int = safetensors.SHARD_BYTES
    """Largest safetensors file of a version."""
    deltas: bool = False
    """Also write the difference to the published version; instances that hold that version read it instead."""

    async def push(
        self, client: GatewayCalls, push: VersionPush, tensors: safetensors.Tensors, in_flight: t.InFlight
    ) -> t.UpdateFinished:
        """Write the tensors as a version, and have the instances read it."""
        write = partial(self.write, tensors=tensors)
        return await push_folder(client, push, write, self.write_delta, in_flight)

    async def push_sharded(
        self, client: GatewayCalls, push: VersionPush, tensors: ShardedTensors, in_flight: t.InFlight
    ) -> t.UpdateFinished:
        """Write the tensors with the other ranks, and have the instances read them."""
        write = partial(self.write, tensors=tensors)
        return await push_folder(client, push, write, self.write_delta, in_flight)

    async def push_adapter(
        self, client: GatewayCalls, push: VersionPush, source: Adapter | Path, in_flight: t.InFlight
    ) -> t.UpdateFinished:
        """Write an adapter on the published version, and have the instances read it."""
        published = push.base
        if published is None:
            raise shards_differ({name: each.policy_version for name, each in push.published.items()})
        base = await client.run_work(lambda: self.base_of(published))
        write = partial(self.write_adapter, source=source, base=base)
        return await push_folder(client, push, write, in_flight=in_flight)

    def write(self, version: int, tensors: safetensors.Tensors | ShardedTensors) -> Path:
        """Write a version and return its absolute path.

        Args:
            version: number of the version. A folder that an unpublished attempt left for it is replaced.
            tensors: numpy arrays or torch tensors, by name or as an iterator of pairs, which is read once, with one
                tensor in memory at a time; or the `ShardedTensors` of several ranks.

        Raises:
            ValueError: tensors that cannot be written (see `safetensors.write`).
            OSError: the disk is full, for example.
            PacelineError: AbortedError with the reason RANK_LOST if another rank failed or is gone.
        """
        folder = self.root.absolute() / f"v{version:08d}"
        with _appearing(folder) as unfinished:
            for path in self.model.iterdir():
                if path.is_file() and ".safetensors" not in path.name:
                    sync(Path(shutil.copy2(path, unfinished / path.name)))
            if isinstance(tensors, ShardedTensors):
                tensors.write(unfinished, self.shard_bytes)
            else:
                safetensors.write(unfinished, tensors, self.shard_bytes)
        return folder

    def write_delta(self, published: t.Versions, folder: Path) -> Path | None:
        """Write the difference between the published version and a folder that `write` returned; return its path.

        None: `deltas` is off, the published version is not here, or the delta is too large to be worth it.
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
            written = delta.write(base, published.policy_version, folder, unfinished)
            if written.bytes > _MOST_DELTA_SHARE * sum(file.stat().st_size for file in folder.iterdir()):
                return None
            _remove(place)
            unfinished.rename(place)
        except (OSError, ValueError) as error:
            log.warning("the version is pushed without a delta: %s", error)
            return None
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return place

    def base_of(self, published: t.Versions) -> BaseWeights:
        """Return the full version on which the next adapter builds (see `adapters.base_of`)."""
        return adapters.base_of(published, self.root.absolute(), self.model)

    def write_adapter(self, version: int, source: Adapter | Path, base: BaseWeights) -> Path:
        """Write a LoRA adapter as a version and return its absolute path.

        Raises:
            ValueError: the source is not an adapter.
            OSError: the disk is full, for example.
        """
        place = self.root.absolute() / f"adapter-{version:08d}"
        with _appearing(place) as unfinished:
            adapters.write(unfinished, source, base)
        return place

    def prune(self) -> None:
        """Remove all but the newest folders of each kind."""
        for kind in ("v[0-9]*", "delta-*", "adapter-*"):
            # By time, because a fleet that has lost its state counts versions from the beginning again.
            written = sorted(
                self.root.glob(kind), key=lambda folder: (folder.stat().st_mtime_ns, folder.name)
            )
            for folder in written[: -self.keep]:
                _remove(folder)


async def push_folder(
    client: GatewayCalls,
    push: VersionPush,
    folder_of: Callable[[int], Path],
    delta_of: Callable[[t.Versions, Path], Path | None] = lambda *_: None,
    in_flight: t.InFlight = t.InFlight.REFUSE,
) -> t.UpdateFinished:
    """Push a version whose files are in `folder_of(version)`.

    An error aborts the update, unless `keeps_staged` is True for it: then `push.finish` can be called again. If all
    shards have the same published version, `delta_of` may return a folder with the difference to it.
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


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder, which is renamed to `folder` when the block ends, and removed if it raises."""
    for left in folder.parent.glob(f".{folder.name}.*"):  # of a trainer that died while it wrote
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
    sync(folder.parent)


def _remove(folder: Path) -> None:
    """Remove a folder. It is hidden first, because a partly removed folder must not look complete."""
    hidden = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    with suppress(FileNotFoundError):
        folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
