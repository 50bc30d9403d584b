"""Push weights by a broadcast of torch.distributed (gloo), from the trainer to one rank on every instance.

The broadcast runs in rounds. When a rank fails, the next round has the remaining ranks, and continues at the lowest
position that one of them has reached.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

from paceline import types as t
from paceline.calls import GatewayCalls
from paceline.errors import no_rendezvous, rank_lost
from paceline.installation import how_to_install
from paceline.shards import OpenShard
from paceline.times import duration
from paceline.v1.weight_pb2 import CollectiveRendezvous
from paceline.v1.weight_stream_pb2 import WeightPiece
from paceline.weights import safetensors
from paceline.weights.pieces import SendWindow, cut
from paceline.weights.rendezvous import (
    SMALLEST_BUCKET,
    BucketWriter,
    RankGone,
    RoundRanks,
    SlowRanks,
    TrainerRendezvous,
    local_address,
    most_piece_bytes,
    round_lives,
)
from paceline.weights.version_push import VersionPush

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
# Rounds that the same ranks may lose in a row while no byte reaches all of them.
_MOST_LOST = 3

log = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class WeightCollective:
    """Transport of weights by broadcast, for few instances on a fast network that the trainer shares with them.

    The trainer needs torch, the instances `weight_collective` and `adopted_weights`. The connections have no TLS.
    """

    host: str = ""
    """Address of this machine at which the instances reach it. Empty: the address from which it reaches them."""
    port: int = 0
    """Port of the store at which the ranks meet. 0: any. The connections of gloo use any other ports."""
    bucket_bytes: int = 16 << 20
    """Bytes of one broadcast. The trainer and each instance have two of them in memory."""
    window_bytes: int = 256 << 20
    """Bytes that are kept until all instances have them, in case one of them dies."""
    shard_bytes: int = 256 * 10**6
    """Largest file of a version. Each file is checked while the next one arrives."""
    join_seconds: float = 60.0
    """Seconds after which an instance that is not ready for the first round is left out."""
    stall_seconds: float = 30.0
    """Longest wait of a rank for another one, and thus also for the next bucket of this trainer's tensors."""

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of its range."""
        if self.bucket_bytes < SMALLEST_BUCKET or self.bucket_bytes > 1 << 30:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}; must be {SMALLEST_BUCKET} to {1 << 30}")
        for name, value in (("join_seconds", self.join_seconds), ("stall_seconds", self.stall_seconds)):
            if not 0.1 <= value <= 3600:
                raise ValueError(f"{name} is {value:g}; must be 0.1 to 3600")


async def push_collective(
    push: VersionPush,
    collective: WeightCollective,
    tensors: safetensors.Tensors,
    in_flight: t.InFlight = t.InFlight.REFUSE,
) -> t.UpdateFinished:
    """Push tensors to the only shard. An error aborts the update, unless `keeps_staged` is True for it.

    Instances that fail or exceed the limits are left out; they fetch the version from others once it is published.

    Raises:
        ValueError: tensors that cannot be written (see `safetensors.write`).
        PacelineError: AbortedError with the reason RANK_LOST if no instance is left; it names the instances that
            were left out. FailedPreconditionError with the reason NO_RENDEZVOUS without torch here, if the port is
            taken, or if there are several shards.
    """
    if not push.shards.alone:
        raise no_rendezvous("a WeightCollective goes to one shard only: push to several by a WeightStream")
    rendezvous = await _host(push.shards.members[0].calls, collective)

    def start(member: OpenShard, version: int) -> Awaitable[t.CollectiveStarted]:
        return member.calls.start_collective(
            push.run_id, version, push.target, rendezvous.described, push.push_id
        )

    async def stage(member: OpenShard, started: t.CollectiveStarted) -> None:
        broadcast = _Broadcast(member.calls, push, collective, rendezvous, started, tensors)
        checksum = await broadcast.send()
        await member.calls.update_streamed(started.update_id, checksum, broadcast.left_out)

    try:
        return await push.stage(start, stage, in_flight)
    finally:
        rendezvous.close("the push has ended")


async def _host(client: GatewayCalls, collective: WeightCollective) -> TrainerRendezvous:
    described = CollectiveRendezvous(
        key=secrets.token_hex(8),
        bucket_bytes=collective.bucket_bytes,
        stall=duration(collective.stall_seconds),
        join=duration(collective.join_seconds),
    )
    instances = () if collective.host else await client.instances()
    try:
        host = collective.host or (local_address(instances[0].address) if instances else "127.0.0.1")
        return await client.run_work(partial(TrainerRendezvous.host, host, collective.port, described))
    except ImportError as error:
        text = f"a WeightCollective needs torch with gloo in the trainer: {error}; {how_to_install('collective')}"
        raise no_rendezvous(text) from error
    except OSError as error:
        raise no_rendezvous(str(error)) from error


class _Broadcast:
    """Broadcast of the pieces of one version, in as many rounds as it takes."""

    def __init__(
        self,
        client: GatewayCalls,
        push: VersionPush,
        collective: WeightCollective,
        rendezvous: TrainerRendezvous,
        started: t.CollectiveStarted,
        tensors: safetensors.Tensors,
    ) -> None:
        self._client = client
        self._push = push
        self._collective = collective
        self._rendezvous = rendezvous
        self._started = started
        self._pieces = cut(
            safetensors.lay_out(tensors, collective.shard_bytes), most_piece_bytes(collective.bucket_bytes)
        )
        self._window = SendWindow()
        self._index = hashlib.sha256()
        self._stopped = False
        self.left_out: dict[str, str] = {}
        """Instances that take no part any more, with the reasons."""

    async def send(self) -> str:
        """Send all bytes, and return their checksum (see `safetensors.checksum`)."""
        number = lost = 0
        before: object = None
        try:
            while ready := await self._ready(number):
                ranks = RoundRanks(number, tuple(ready))
                try:
                    await self._client.run_work(partial(self._send_round, ranks, min(ready.values())))
                    break
                except RankGone as gone:
                    log.warning("round %d of the weight broadcast was lost: %s", number, gone)
                    if isinstance(gone, SlowRanks):
                        self._leave_out(
                            gone.instance_ids, f"slower than {self._collective.stall_seconds:g} s"
                        )
                    state = (ranks.instance_ids, self._window.begin)
                    lost, before = (lost + 1 if state == before else 1), state
                    if lost == _MOST_LOST:
                        raise self._failure(str(gone)) from gone
                    number += 1
            # If no instance is ready for another round, the remaining ones had all bytes when the last was lost.
            return f"index-sha256:{self._index.hexdigest()}"
        except BaseException:
            # Ends `_send_round`, which may still run in its thread, at the next piece.
            self._stopped = True
            raise

    async def _ready(self, number: int) -> dict[str, int]:
        """Return the instances that are ready for a round, with the positions behind the bytes that they have.

        It waits, within a limit, for all that take part and do not have all bytes, and then leaves out the missing
        ones. The result is empty if all instances have all bytes.
        """
        began, pause = time.monotonic(), _FIRST_PAUSE
        limit = self._collective.join_seconds if not number else 2 * self._collective.stall_seconds
        while True:
            # Returns the instances that live and have not failed, or raises the error with which all have failed.
            self._started = await self._client.start_collective(
                *(self._push.run_id, self._started.version, self._push.target),
                *(self._rendezvous.described, self._push.push_id),
            )
            wanted = [each for each in self._started.instance_ids if each not in self.left_out]
            try:
                ready, complete, gone = await self._client.run_work(partial(self._look, number, wanted))
            except RankGone as error:
                raise rank_lost(str(error)) from error
            for each, reason in gone.items():
                self._leave_out([each], reason)
            # Bytes before the window are not kept, so an instance that lost them cannot catch up.
            self._leave_out(
                [each for each in ready if ready[each] < self._window.begin],
                "it restarted and lacks earlier bytes",
            )
            known = {*self.left_out, *ready, *complete}
            missing = [each for each in wanted if each not in known]
            over = time.monotonic() - began > limit
            if over:
                self._leave_out(missing, f"not ready for round {number} after {limit:g} s")
            if over or not missing:
                taken = {each: position for each, position in ready.items() if each not in self.left_out}
                if not taken and not complete:
                    raise self._failure("no instance is left")
                return taken
            if not await self._client.sleep(pause):
                raise rank_lost("the client was closed")
            pause = min(_LONGEST_PAUSE, 2 * pause)

    def _look(self, number: int, wanted: list[str]) -> tuple[dict[str, int], set[str], dict[str, str]]:
        here = self._rendezvous
        return here.present(number, wanted), here.complete(wanted), here.gone(wanted)

    def _leave_out(self, instance_ids: Iterable[str], reason: str) -> None:
        for each in instance_ids:
            if self.left_out.setdefault(each, reason) is reason:
                log.warning("instance %s is left out of the weight broadcast: %s", each, reason)

    def _failure(self, reason: str) -> Exception:
        others = "".join(f"; {each}: {why}" for each, why in sorted(self.left_out.items()))
        return rank_lost(f"the weights could not be broadcast: {reason}{others}")

    def _send_round(self, ranks: RoundRanks, position: int) -> None:
        """Send all remaining pieces to the ranks of a round, which have the bytes before a position.

        Runs in one thread at a time.

        Raises:
            RankGone: the round is lost; the remaining ranks need another one.
            ValueError: tensors that cannot be written (see `safetensors.write`).
        """
        current = _Round(self._rendezvous, ranks, self._window, self._collective.window_bytes)
        try:
            current.send(chain(self._window.since(position), self._new_pieces()))
        except BaseException as error:
            self._rendezvous.lose_round(ranks.number, f"the trainer: {error}")
            raise
        finally:
            current.close()

    def _new_pieces(self) -> Iterator[WeightPiece]:
        for piece in self._pieces:
            if self._stopped:
                raise RankGone("the push was given up")
            if piece.index:
                self._index.update(piece.data)
            self._window.add(piece)
            yield piece


class _Round:
    """A round on the trainer. It fills one bucket while the previous one is being sent."""

    def __init__(
        self, rendezvous: TrainerRendezvous, ranks: RoundRanks, window: SendWindow, window_bytes: int
    ) -> None:
        """Keep at most `window_bytes` in `window` that not all ranks have acknowledged."""
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
        self._requested: deque[tuple[int, int]] = deque()
        """Numbers of the requested acknowledgements, with the positions behind their buckets."""
        self._requested_end = 0
        """Position behind the last bucket for which an acknowledgement was requested."""
        self._group: Any = rendezvous.open_round(ranks)

    def close(self) -> None:
        """Drop the connections, so that ranks which wait for this one notice.

        They end with the last reference to the group or to its work, so no traceback may hold one.
        """
        self._work = self._group = None

    def send(self, pieces: Iterator[WeightPiece]) -> None:
        """Send the pieces, which end with the last piece of the version."""
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
        if last or end - self._requested_end > self._window_bytes // 2:
            number = self._buckets + 1
            self._requested.append((number, end))
            self._requested_end = end
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
        """Wait until at most `most` bytes are kept."""
        while self._window.bytes > most and self._requested:
            if self._requested[0][0] == self._buckets:
                self._wait()
            number, position = self._requested.popleft()
            self._rendezvous.await_acknowledged(self._ranks, number, position)
            self._window.confirm(position)
