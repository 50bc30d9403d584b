"""Write tensors that the ranks of a trainer hold in parts (FSDP2, DTensor): the ranks write the files together."""

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

from paceline.errors import rank_lost
from paceline.weights import safetensors
from paceline.weights.safetensors import Entry, FileWrite, WrittenFile, entry_of, pairs_of

T = TypeVar("T")

_RANK_TIMEOUT_SECONDS = 600.0


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
