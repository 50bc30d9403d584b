"""Broadcast the bytes of a version from the trainer in rounds, each with the ranks that the one before left."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain
from typing import Any

from paceline.rendezvous import RankGone, Rendezvous, RoundRanks, round_lives
from paceline.send_window import SendWindow
from paceline.v1.weight_stream_pb2 import WeightPiece
from paceline.weight_bucket import BucketWriter


class Broadcaster:
    """One pass over the pieces of a version. `send` is called in one thread at a time, until it returns."""

    def __init__(self, rendezvous: Rendezvous, pieces: Iterator[WeightPiece], window_bytes: int) -> None:
        """Keep up to `window_bytes` that not all ranks have acknowledged."""
        self._rendezvous = rendezvous
        self._pieces = pieces
        self._window_bytes = window_bytes
        self._window = SendWindow()
        self._index = hashlib.sha256()
        self._stopped = False

    @property
    def checksum(self) -> str:
        """Checksum of what was sent (see `safetensors.checksum`), once all of it was."""
        return f"index-sha256:{self._index.hexdigest()}"

    @property
    def kept_from(self) -> int:
        """Position before which all ranks have the bytes; they are kept no more."""
        return self._window.begin

    def stop(self) -> None:
        """End `send`, which raises at the next bucket; may be called in any thread."""
        self._stopped = True

    def send(self, ranks: RoundRanks, position: int) -> None:
        """Send to the ranks of a round, which have the bytes before a position, until they have all.

        Raises:
            RankGone: the round is lost; call it again with the ranks that are left.
            ValueError: tensors that cannot be written (see `safetensors.write`).
        """
        current = _Round(self._rendezvous, ranks, self._window, self._window_bytes)
        try:
            current.send(self._coming(position))
        except BaseException as error:
            self._rendezvous.lose_round(ranks.number, f"the trainer: {error}")
            raise
        finally:
            current.close()

    def _coming(self, position: int) -> Iterator[WeightPiece]:
        return chain(self._window.since(position), self._new())

    def _new(self) -> Iterator[WeightPiece]:
        for piece in self._pieces:
            if self._stopped:
                raise RankGone("the push was given up")
            if piece.index:
                self._index.update(piece.data)
            self._window.add(piece)
            yield piece


class _Round:
    """A round on the trainer. One bucket is filled while the one before is on its way."""

    def __init__(
        self, rendezvous: Rendezvous, ranks: RoundRanks, window: SendWindow, window_bytes: int
    ) -> None:
        import torch
        from torch.distributed import BroadcastOptions

        self._rendezvous, self._ranks = rendezvous, ranks
        self._window, self._window_bytes = window, window_bytes
        size = rendezvous.described.bucket_bytes
        self._tensors = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        self._limit = timedelta(seconds=rendezvous.stall_seconds)
        self._options = BroadcastOptions()
        self._options.rootRank, self._options.timeout = 0, self._limit
        self._work: Any = None
        self._buckets = 0
        self._asked: deque[tuple[int, int]] = deque()
        """Numbers of the acknowledgements that are asked for, and the positions behind the buckets."""
        self._asked_upto = 0
        self._group: Any = rendezvous.open_round(ranks)

    def close(self) -> None:
        """End the connections, so that the ranks which wait for this one learn of it.

        They end with the last reference to the group or to its work: a traceback must have none.
        """
        self._work = self._group = None

    def send(self, pieces: Iterator[WeightPiece]) -> None:
        """Send all pieces, the last of which is the last of the version."""
        bucket = self._bucket()
        end = 0
        for piece in pieces:
            if not bucket.add(piece):
                self._post(bucket, end, last=False)
                bucket = self._bucket()
                bucket.add(piece)
            end = piece.position + len(piece.data)
        self._post(bucket, end, last=True)
        self._wait()
        self._confirm(0)

    def _bucket(self) -> BucketWriter:
        return BucketWriter(memoryview(self._tensors[self._buckets % 2].numpy()))

    def _post(self, bucket: BucketWriter, end: int, *, last: bool) -> None:
        number = 0
        if last or end - self._asked_upto > self._window_bytes // 2:
            number = self._buckets + 1
            self._asked.append((number, end))
            self._asked_upto = end
        bucket.finish(number)
        self._wait()
        self._rendezvous.check(self._ranks)
        with round_lives():
            self._work = self._group.broadcast([self._tensors[self._buckets % 2]], self._options)
        self._buckets += 1
        self._confirm(self._window_bytes)

    def _wait(self) -> None:
        if self._work is not None:
            with round_lives():
                self._work.wait(self._limit)
            self._work = None

    def _confirm(self, most: int) -> None:
        """Wait until no more than `most` bytes are kept."""
        while self._window.bytes > most and self._asked:
            if self._asked[0][0] == self._buckets:
                self._wait()
            number, position = self._asked.popleft()
            self._rendezvous.await_acknowledged(self._ranks, number, position)
            self._window.confirm(position)
