"""Push weights through a shared folder: write a model folder, and have every instance load it.

    weights = WeightFolder(Path("/shared/run-1"), model=Path("/models/qwen3"))
    with client.run("run-1", weights=weights) as run:
        run.push_weights(model.state_dict())

A version is published after all phases of the update have succeeded; after an error the previous version stays.
Ranks that hold parts of the tensors (FSDP, DTensor) write the files together, as `ShardedTensors`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from io import BufferedWriter
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self, TypeVar

from paceline import types as t
from paceline.calls import GatewayCalls
from paceline.errors import rank_lost
from paceline.files import sync
from paceline.shards import OpenShard
from paceline.weights import adapters, delta, expansion, safetensors
from paceline.weights.adapters import Adapter
from paceline.weights.expansion import BaseWeights
from paceline.weights.safetensors import Entry, FileWrite, WrittenFile, entry_of, pairs_of
from paceline.weights.version_push import VersionPush

T = TypeVar("T")

_RANK_TIMEOUT_SECONDS = 600.0
# A larger delta saves less than expanding it costs.
_MOST_DELTA_SHARE = 0.5

log = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class WeightFolder:
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
            for folder in sorted(self.root.glob(kind))[: -self.keep]:
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


class ShardedTensors:
    """Tensors by name, whole or as DTensors, which all ranks of torch.distributed write together.

    For a `WeightFolder` on a file system that all ranks see. All ranks construct it and write it, once.

    The files are byte for byte the files that one process would write, because names and shapes alone decide
    which tensors a file has. Rank r of n writes the files r, r + n, ... A rank has one tensor on the device and
    two on the host, because one is written while the other is gathered.
    """

    def __init__(self, tensors: Mapping[str, Any], *, timeout_seconds: float = _RANK_TIMEOUT_SECONDS) -> None:
        """Agree with all ranks on the tensors to write; every rank calls it.

        Args:
            tensors: the same names, shapes and dtypes on every rank. Tensors with a method `full_tensor` are
                gathered by it; of others, such as buffers, the rank that writes the file takes its own copy.
            timeout_seconds: longest time that a rank waits for the others, at each tensor. If a rank dies in a
                collective of the trainer's own groups, the time limit of these groups applies.

        Raises:
            ValueError: there is no tensor, or one that cannot be written.
            PacelineError: AbortedError with the reason RANK_LOST if a rank is gone or has other tensors.
        """
        import torch.distributed as dist  # only a process with ranks gets here

        self._dist: Any = dist
        self._timeout = timedelta(seconds=timeout_seconds)
        self._tensors = dict(pairs_of(tensors, in_parts=True))
        self._entries = [entry_of(name, tensor) for name, tensor in self._tensors.items()]
        self._begun = False
        with _others_needed():
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        described = hashlib.sha256(repr([(e.name, e.dtype, e.shape) for e in self._entries]).encode())
        seen = self._exchange(described.hexdigest())
        if different := [rank for rank, digest in enumerate(seen) if digest != seen[0]]:
            raise rank_lost(f"rank {different[0]} has tensors of other names, shapes or dtypes than rank 0")
        if not self._entries:
            raise ValueError("there are no tensors to write")

    def join(self) -> None:
        """Write this rank's files of the version that rank 0 pushes; return when all ranks have written theirs.

        Raises:
            OSError: the disk is full, for example.
            PacelineError: AbortedError with the reason RANK_LOST if another rank failed or is gone; then no
                version is written.
        """
        if self._rank == 0:
            raise ValueError("rank 0 pushes; all others join")
        self._begin()
        received: list[Any] = [None]
        with _others_needed():
            self._barrier()
            self._dist.broadcast_object_list(received, src=0, group=self._group)
        if received[0] is None:
            raise rank_lost("rank 0 gave the push up")
        self._write(Path(received[0][0]), received[0][1])

    def give_up(self) -> None:
        """Release the ranks that wait in `join`: nothing will be written. No effect once writing has begun."""
        if not self._begun and self._rank == 0:
            self._announce(None)

    def write(self, folder: Path, shard_bytes: int) -> None:
        """Write the files and the index into a folder without either, on rank 0; all other ranks call `join`.

        Raises:
            OSError: the disk is full, for example.
            PacelineError: AbortedError with the reason RANK_LOST if another rank failed or is gone.
        """
        if self._rank != 0:
            raise ValueError("rank 0 pushes; all others join")
        self._announce((str(folder), shard_bytes))
        files = self._write(folder, shard_bytes)
        safetensors.finish_folder(folder, len(files), safetensors.index_of(files))

    def _announce(self, place: tuple[str, int] | None) -> None:
        """Send the folder and the size of its files to the ranks in `join`; None: nothing will be written."""
        self._begin()
        with _others_needed():
            self._barrier()
            self._dist.broadcast_object_list([place], src=0, group=self._group)

    def _begin(self) -> None:
        if self._begun:
            raise ValueError(
                "these tensors were written already: make another ShardedTensors for each version"
            )
        self._begun = True

    def _write(self, folder: Path, shard_bytes: int) -> list[WrittenFile]:
        """Write this rank's files; return the entries of all ranks' files, in order."""
        files = safetensors.plan(self._entries, shard_bytes)
        written: dict[int, WrittenFile] = {}
        failure: Exception | None = None
        for first in range(0, len(files), self._ranks):
            batch = files[first : first + self._ranks]
            with _FileWriter(folder, first + self._rank) as writer:
                for step in zip_longest(*batch):
                    # A rank that cannot write still gathers, because the others would wait for it.
                    writer.put(self._gather(step))
            if writer.written is not None:
                written[first + self._rank] = writer.written
            failure = failure or writer.failure
        found = self._exchange((None if failure is None else repr(failure), written))
        self._dist.destroy_process_group(self._group)
        _raise_failure(failure, found)
        together = {number: file for _, own in found for number, file in own.items()}
        return [together[number] for number in range(len(files))]

    def _gather(self, step: Sequence[Entry | None]) -> Entry | None:
        """Gather one tensor for each rank; return the tensor for this rank, in memory."""
        mine = None
        with _others_needed():
            self._barrier()
            for rank, entry in enumerate(step):
                if entry is None:
                    continue
                tensor = self._tensors[entry.name]
                if hasattr(tensor, "full_tensor"):
                    tensor = tensor.full_tensor()
                if rank == self._rank:
                    mine = dataclasses.replace(
                        entry, load=partial(_same, entry_of(entry.name, tensor).load())
                    )
                del tensor
        return mine

    def _barrier(self) -> None:
        """Wait for all ranks, so that a missing rank is noticed within the time limit."""
        self._dist.monitored_barrier(self._group, self._timeout)

    def _exchange(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks, by rank."""
        found: list[Any] = [None] * self._ranks
        with _others_needed():
            self._barrier()
            self._dist.all_gather_object(found, mine, group=self._group)
        return found


class _FileWriter:
    """Writer of one file in a thread, while the next tensor is gathered. After a failure it ignores tensors."""

    def __init__(self, folder: Path, number: int) -> None:
        self.written: WrittenFile | None = None
        """Entry of the file; None without tensors, or after a failure."""
        self.failure: Exception | None = None
        self._path = safetensors.unfinished_file(folder, number)
        self._layout = safetensors.ShardLayout(number)
        self._file: BufferedWriter | None = None
        self._thread = ThreadPoolExecutor(1, "weights")
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._wait()
        self._thread.shutdown()
        try:
            if self._file is not None and self.failure is None and error is None:
                self._write([self._layout.header()])
                self._file.flush()
                os.fsync(self._file.fileno())
                self.written = self._layout.written
        except OSError as failure:
            self.failure = failure
        finally:
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()

    def put(self, entry: Entry | None) -> None:
        """Start writing a tensor that is in memory, once the previous one is written. None does nothing more."""
        self._wait()
        if entry is not None and self.failure is None:
            self._pending = self._thread.submit(self._append, entry)

    def _append(self, entry: Entry) -> None:
        if self._file is None:
            self._file = self._path.open("xb")
        # The plan has divided the tensors, so a file needs no limit here.
        self._layout.add(entry, sys.maxsize)
        self._write(self._layout.content(entry))

    def _write(self, contents: Iterable[FileWrite]) -> None:
        assert self._file is not None
        for each in contents:
            if self._file.tell() != each.offset:
                self._file.seek(each.offset)
            self._file.write(each.content)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except (OSError, ValueError) as error:
            self.failure = error


def _raise_failure(failure: Exception | None, found: Sequence[tuple[str | None, object]]) -> None:
    """Raise this rank's own failure, or else report the failure of another rank."""
    if failure is not None:
        raise failure
    for rank, (error, _) in enumerate(found):
        if error is not None:
            raise rank_lost(f"rank {rank} could not write its files: {error}")


def _same(values: T) -> T:
    return values


@contextmanager
def _others_needed() -> Iterator[None]:
    """Turn an error of torch.distributed into AbortedError with the reason RANK_LOST."""
    try:
        yield
    except RuntimeError as error:
        raise rank_lost(f"another rank of the trainer failed or is gone: {error}") from error
