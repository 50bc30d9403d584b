"""Tensors that several ranks of a trainer hold in parts (FSDP, DTensor): each rank writes its share of the files.

    # On every rank, with the same names in the same order.
    tensors = ShardedTensors(model.state_dict())
    if torch.distributed.get_rank() == 0:
        run.push_weights(tensors)
    else:
        tensors.join()

The files are those that one process would write of the whole tensors, byte for byte: which tensors a file has
follows from names and shapes alone. Rank r of n writes the files r, r + n, ... Tensors are gathered one after the
other, one for each file that is being written. A rank has one on the device, and two on the host: one is written
while the other comes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from io import BufferedWriter
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self, TypeVar

from paceline import safetensors
from paceline.client_errors import rank_lost
from paceline.safetensors import FileWrite, WrittenFile
from paceline.tensor_bytes import Entry, entry_of, pairs_of

T = TypeVar("T")

_MOST_SECONDS = 600.0


class ShardedTensors:
    """Tensors by name, whole or as DTensors, which all ranks of torch.distributed write together.

    For a `WeightFolder` on a file system that all ranks see. All ranks construct it and write it, once.
    """

    def __init__(self, tensors: Mapping[str, Any], *, timeout_seconds: float = _MOST_SECONDS) -> None:
        """Agree with all ranks on what will be written; every rank calls it.

        Args:
            tensors: the same names, shapes and dtypes on every rank. Those with a method `full_tensor` are gathered
                by it; of all others, such as buffers, rank 0 or another one writes its own.
            timeout_seconds: longest time that a rank waits for the others, at each tensor. A collective of the
                trainer's own groups, in which a rank dies, ends with the time limit of these groups.

        Raises:
            ValueError: there is no tensor, or one that cannot be written.
            PacelineError: AbortedError with the reason RANK_LOST if a rank is gone, or has other tensors.
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
        """Write this rank's files of the version that rank 0 pushes; returns when all ranks have written theirs.

        Raises:
            OSError: the disk is full, for example.
            PacelineError: AbortedError with the reason RANK_LOST if another rank failed or is gone. No version is
                left then.
        """
        if self._rank == 0:
            raise ValueError("rank 0 pushes; all others join")
        self._begin()
        told: list[Any] = [None]
        with _others_needed():
            self._barrier()
            self._dist.broadcast_object_list(told, src=0, group=self._group)
        if told[0] is None:
            raise rank_lost("rank 0 gave the push up")
        self._write(Path(told[0][0]), told[0][1])

    def give_up(self) -> None:
        """Let the others, which wait in `join`, know that nothing will be written; nothing once that has begun."""
        if not self._begun and self._rank == 0:
            self._tell(None)

    def write(self, folder: Path, shard_bytes: int) -> None:
        """Write the files and the index into a folder that has none, on rank 0, with all others in `join`.

        Raises:
            OSError: the disk is full, for example.
            PacelineError: AbortedError with the reason RANK_LOST if another rank failed or is gone.
        """
        if self._rank != 0:
            raise ValueError("rank 0 pushes; all others join")
        self._tell((str(folder), shard_bytes))
        files = self._write(folder, shard_bytes)
        safetensors.finish_folder(folder, len(files), safetensors.index_of(files))

    def _tell(self, told: tuple[str, int] | None) -> None:
        self._begin()
        with _others_needed():
            self._barrier()
            self._dist.broadcast_object_list([told], src=0, group=self._group)

    def _begin(self) -> None:
        if self._begun:
            raise ValueError(
                "these tensors were written already: make another ShardedTensors for each version"
            )
        self._begun = True

    def _write(self, folder: Path, shard_bytes: int) -> list[WrittenFile]:
        """Write this rank's files; return all of them, in their order."""
        files = safetensors.plan(self._entries, shard_bytes)
        written: dict[int, WrittenFile] = {}
        failure: Exception | None = None
        for first in range(0, len(files), self._ranks):
            batch = files[first : first + self._ranks]
            with _FileWriter(folder, first + self._rank) as writer:
                for step in zip_longest(*batch):
                    # A rank that cannot write gathers all the same: the others would wait for it.
                    writer.put(self._gather(step))
            if writer.written is not None:
                written[first + self._rank] = writer.written
            failure = failure or writer.failure
        found = self._exchange((None if failure is None else repr(failure), written))
        self._dist.destroy_process_group(self._group)
        self._check(failure, found)
        together = {number: file for _, own in found for number, file in own.items()}
        return [together[number] for number in range(len(files))]

    def _check(self, failure: Exception | None, found: Sequence[tuple[str | None, object]]) -> None:
        """Raise this rank's failure, or the one of another."""
        if failure is not None:
            raise failure
        for rank, (error, _) in enumerate(found):
            if error is not None:
                raise rank_lost(f"rank {rank} could not write its files: {error}")

    def _gather(self, step: Sequence[Entry | None]) -> Entry | None:
        """Gather a tensor for each rank; return that of this rank, in memory."""
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
        """Wait for all ranks, so that a rank that is gone is noticed within the time limit."""
        self._dist.monitored_barrier(self._group, self._timeout)

    def _exchange(self, mine: Any) -> list[Any]:
        """Return what every rank has given."""
        found: list[Any] = [None] * self._ranks
        with _others_needed():
            self._barrier()
            self._dist.all_gather_object(found, mine, group=self._group)
        return found


class _FileWriter:
    """One file, written by a thread while the next tensor is gathered. After a failure it takes no more."""

    def __init__(self, folder: Path, number: int) -> None:
        self.written: WrittenFile | None = None
        """None if there were no tensors, or it failed."""
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
        """Write a tensor that is in memory, once the one before is written; None: nothing."""
        self._wait()
        if entry is not None and self.failure is None:
            self._pending = self._thread.submit(self._append, entry)

    def _append(self, entry: Entry) -> None:
        if self._file is None:
            self._file = self._path.open("xb")
        # The plan is what bounds a file.
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


def _same(values: T) -> T:
    return values


@contextmanager
def _others_needed() -> Iterator[None]:
    """Turn an error of torch.distributed into one that says that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise rank_lost(f"another rank of the trainer failed or is gone: {error}") from error
