"""Rank of an instance in weight broadcasts: the program of a separate process.

It reads orders from its standard input and writes reports to its standard output, as lines of JSON. It ends when
its input ends, whatever it is doing. It is a process because one that hangs in a broadcast can be killed, and
because receiving the bytes then takes no time from the thread of the engine.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import torch
from torch.distributed import BroadcastOptions

from paceline.v1.weight_pb2 import CollectiveRendezvous
from paceline.weights.rendezvous import (
    InstanceRendezvous,
    NotOfRound,
    RankGone,
    RoundRanks,
    TrainerGone,
    head_of,
    pieces_of,
    round_lives,
)
from paceline.weights.safetensors import unfinished_file
from services.contracts.errors import DataLoss, ServiceError, Unavailable, to_status
from services.generation.weights.files import FileContent, open_weight_file, read_content
from services.generation.weights.stream.stored_stream import StoredStream

Report = Callable[[dict[str, Any]], None]


class BroadcastReceiver:
    """Receives one broadcast, in as many rounds as the trainer uses for it."""

    def __init__(
        self, described: CollectiveRendezvous, instance_id: str, folder: Path, most_bytes: int, report: Report
    ) -> None:
        """Receive files of at most `most_bytes` into an empty folder, and report progress to `report`."""
        self._described = described
        self._instance_id = instance_id
        self._stored = StoredStream(folder, most_bytes)
        self._report = report
        self._contents = CompleteFiles(self._stored)
        self._buffers = [torch.zeros(described.bucket_bytes, dtype=torch.uint8) for _ in range(2)]

    def receive(self) -> dict[str, Any]:
        """Receive all, and return the report of it.

        Raises:
            Unavailable: the trainer is gone, has given up, or has left this instance out.
            ServiceError: the disk is full, for example, or the bytes are corrupt.
        """
        number = 0
        try:
            rendezvous = InstanceRendezvous.join(self._described, self._instance_id)
        except RankGone as error:
            raise Unavailable(str(error)) from error
        try:
            while not self._stored.whole:
                number = self._round(rendezvous, number)
        except (TrainerGone, NotOfRound) as error:
            raise Unavailable(f"the weights were not received: {error}") from error
        except ServiceError as error:
            rendezvous.leave(number, error.message)
            raise
        rendezvous.finish()
        return {"checksum": self._stored.checksum, "contents": self._contents.finish()}

    def _round(self, rendezvous: InstanceRendezvous, number: int) -> int:
        """Take part in a round; return the number of the next one."""
        group = None
        try:
            self._report({"position": self._stored.log.end})
            ranks, group = rendezvous.enter_round(number, self._stored.log.end)
            self._take(rendezvous, ranks, group)
        except TrainerGone:
            raise
        except RankGone as gone:
            rendezvous.lose_round(number, f"{self._instance_id}: {gone}")
        finally:
            # The group's connections end with its last reference, which ranks that wait for this one notice.
            del group
        return number + 1

    def _take(self, rendezvous: InstanceRendezvous, ranks: RoundRanks, group: Any) -> None:
        """Receive buckets until the last one; each is written while the next one arrives."""
        limit = timedelta(seconds=rendezvous.stall_seconds)
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, limit
        with round_lives():
            work = group.broadcast([self._buffers[0]], options)
        count = 0
        while True:
            bucket = memoryview(self._buffers[count % 2].numpy())
            with round_lives():
                work.wait(limit)
            acknowledgement, last = head_of(bucket)
            count += 1
            if not last:
                with round_lives():
                    work = group.broadcast([self._buffers[count % 2]], options)
            self._write(bucket)
            if acknowledgement:
                end = self._stored.log.end
                rendezvous.acknowledge(ranks, acknowledgement, end)
            self._report({"position": self._stored.log.end})
            if last:
                return

    def _write(self, bucket: memoryview) -> None:
        try:
            for piece in pieces_of(bucket):
                self._stored.put(piece)
        except ValueError as error:
            raise DataLoss(f"what was broadcast is corrupt: {error}") from error
        self._contents.read()


class CompleteFiles:
    """Reads each file in a thread once it is complete, while the next one arrives."""

    def __init__(self, stored: StoredStream) -> None:
        self._stored = stored
        self._thread = ThreadPoolExecutor(1, "weights")
        self._begun = 0
        self._found: list[tuple[tuple[int, ...], FileContent]] = []

    def read(self) -> None:
        """Begin with the files that are complete now."""
        while not self._stored.whole and self._begun < self._stored.complete_files:
            self._thread.submit(self._read, self._begun)
            self._begun += 1

    def finish(self) -> list[Any]:
        """Return stamp, SHA-256 and largest values of each file that was read."""
        self._thread.shutdown()
        return [[stamp, content.sha256, dict(content.largest)] for stamp, content in self._found]

    def _read(self, number: int) -> None:
        try:
            file = open_weight_file(unfinished_file(self._stored.folder, number), "")
            self._found.append((file.stamp, read_content(file)))
        except (ServiceError, OSError):
            pass  # Renamed meanwhile, or unreadable: staging reads the file and reports its fault.


def obey(order: dict[str, Any], report: Report) -> dict[str, Any]:
    """Carry out an order; return the report of its outcome."""
    described = CollectiveRendezvous.FromString(base64.b64decode(order["rendezvous"]))
    try:
        folder, most = Path(order["folder"]), int(order["most_bytes"])
        receiver = BroadcastReceiver(described, order["instance_id"], folder, most, report)
        return {"whole": receiver.receive()}
    except ServiceError as error:
        status = base64.b64encode(to_status(error).SerializeToString()).decode()
        return {"error": {"code": error.code.name, "message": error.message, "status": status}}
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        text = f"the rank of the broadcast failed: {error!r}"
        return {"error": {"code": grpc.StatusCode.INTERNAL.name, "message": text, "status": ""}}


def main() -> None:
    """Carry out orders until the input ends."""
    # gloo writes to the standard output.
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(line)
        # End at once, whatever is in progress.
        os._exit(0)

    def report(content: dict[str, Any]) -> None:
        output.write(json.dumps(content) + "\n")

    threading.Thread(target=read, name="orders", daemon=True).start()
    while True:
        report(obey(json.loads(orders.get()), report))


if __name__ == "__main__":
    main()
