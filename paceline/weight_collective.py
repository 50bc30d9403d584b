"""Push weights by a broadcast of torch.distributed (gloo), from the trainer to a rank on every instance.

with client.run("run-1", weights=WeightCollective()) as run:
    run.push_weights(model.state_dict())
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial

from paceline import safetensors
from paceline import types as t
from paceline.broadcaster import Broadcaster
from paceline.calls import GatewayCalls
from paceline.client_errors import no_rendezvous, rank_lost
from paceline.installation import how_to_install
from paceline.rendezvous import RankGone, Rendezvous, RoundRanks, SlowRanks, local_address
from paceline.send_window import cut
from paceline.shards import OpenShard
from paceline.times import duration
from paceline.v1.weight_pb2 import CollectiveRendezvous
from paceline.version_push import VersionPush
from paceline.weight_bucket import SMALLEST_BUCKET, most_piece_bytes

log = logging.getLogger("paceline")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
# Rounds in a row that the same ranks lose without a byte that all have got.
_MOST_LOST = 3


@dataclass(frozen=True, slots=True)
class WeightCollective:
    """Transport of weights by broadcast, for few instances on a fast network that the trainer shares with them.

    The trainer needs torch, the instances `weight_collective` and `adopted_weights`. The connections have no TLS.
    """

    host: str = ""
    """Address of this machine at which the instances reach it. Empty: that from which it reaches them."""
    port: int = 0
    """Port of the store at which the ranks meet. 0: any. The connections of gloo take any ports besides."""
    bucket_bytes: int = 16 << 20
    """Bytes of one broadcast. The trainer has two of them in memory, and so has each instance."""
    window_bytes: int = 256 << 20
    """Bytes that are kept until all instances have them, for the case that one of them dies."""
    shard_bytes: int = 256 * 10**6
    """Largest file of a version. Each is checked while the next one comes."""
    join_seconds: float = 60.0
    """An instance that is not ready for the first broadcast after so long is left out."""
    stall_seconds: float = 30.0
    """Longest that a rank waits for another one, and thus for the next bucket of this trainer's tensors, too."""

    def __post_init__(self) -> None:
        """Raise ValueError for a value that cannot be meant."""
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
    """Push tensors to the one shard. An error aborts the update, except one for which `keeps_staged` is True.

    Instances that fail or are slower than the limits are left out, and fetch the version from others when it is
    published.

    Raises:
        ValueError: tensors that cannot be written (see `safetensors.write`).
        PacelineError: AbortedError with the reason RANK_LOST if no instance is left, which names those that were;
            FailedPreconditionError with the reason NO_RENDEZVOUS without torch here, if the port is taken, or if
            there are several shards.
    """
    if not push.shards.alone:
        raise no_rendezvous("a WeightCollective goes to one shard only: push to several by a WeightStream")
    rendezvous = await _host(push.shards.members[0].calls, collective)

    def start(member: OpenShard, version: int) -> Awaitable[t.CollectiveStarted]:
        return member.calls.start_collective(
            push.run_id, version, push.target, rendezvous.described, push.push_id
        )

    async def stage(member: OpenShard, started: t.CollectiveStarted) -> None:
        broadcast = _Broadcast(member.calls, push, collective, rendezvous, started)
        checksum = await broadcast.send(tensors)
        await member.calls.update_streamed(started.update_id, checksum, broadcast.left_out)

    try:
        return await push.stage(start, stage, in_flight)
    finally:
        rendezvous.close("the push has ended")


async def _host(client: GatewayCalls, collective: WeightCollective) -> Rendezvous:
    described = CollectiveRendezvous(
        key=secrets.token_hex(8),
        bucket_bytes=collective.bucket_bytes,
        stall=duration(collective.stall_seconds),
        join=duration(collective.join_seconds),
    )
    instances = () if collective.host else await client.instances()
    try:
        host = collective.host or (local_address(instances[0].address) if instances else "127.0.0.1")
        return await client.run_work(partial(Rendezvous.host, host, collective.port, described))
    except ImportError as error:
        text = f"a WeightCollective needs torch with gloo in the trainer: {error}; {how_to_install('collective')}"
        raise no_rendezvous(text) from error
    except OSError as error:
        raise no_rendezvous(str(error)) from error


class _Broadcast:
    """One broadcast, in as many rounds as it takes."""

    def __init__(
        self,
        client: GatewayCalls,
        push: VersionPush,
        collective: WeightCollective,
        rendezvous: Rendezvous,
        started: t.CollectiveStarted,
    ) -> None:
        self._client = client
        self._push = push
        self._collective = collective
        self._rendezvous = rendezvous
        self._started = started
        self.left_out: dict[str, str] = {}
        """Instances that take part no more, and why."""

    async def send(self, tensors: safetensors.Tensors) -> str:
        """Send all bytes, and return their checksum."""
        pieces = cut(
            safetensors.lay_out(tensors, self._collective.shard_bytes),
            most_piece_bytes(self._collective.bucket_bytes),
        )
        sender = Broadcaster(self._rendezvous, pieces, self._collective.window_bytes)
        number = lost = 0
        before: object = None
        try:
            while ready := await self._ready(number, sender.kept_from):
                ranks = RoundRanks(number, tuple(ready))
                try:
                    await self._client.run_work(partial(sender.send, ranks, min(ready.values())))
                    return sender.checksum
                except RankGone as gone:
                    log.warning("round %d of the weight broadcast was lost: %s", number, gone)
                    if isinstance(gone, SlowRanks):
                        self._leave_out(
                            gone.instance_ids, f"slower than {self._collective.stall_seconds:g} s"
                        )
                    state = (ranks.instance_ids, sender.kept_from)
                    lost, before = (lost + 1 if state == before else 1), state
                    if lost == _MOST_LOST:
                        raise self._lost(str(gone)) from gone
                    number += 1
            # Whoever is left had all when the last round was lost.
            return sender.checksum
        except BaseException:
            sender.stop()
            raise

    async def _ready(self, number: int, kept_from: int) -> dict[str, int]:
        """Return the instances that are ready for a round, and the positions behind what they have.

        All that take part and do not have all are waited for, within a limit; the others are left out from then on.
        None is ready if all have all.
        """
        began, pause = time.monotonic(), _FIRST_PAUSE
        limit = self._collective.join_seconds if not number else 2 * self._collective.stall_seconds
        while True:
            # Names those that live and have not failed, or raises the error with which all have.
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
            self._leave_out([each for each in ready if ready[each] < kept_from], "it began anew")
            known = {*self.left_out, *ready, *complete}
            waited_for = [each for each in wanted if each not in known]
            over = time.monotonic() - began > limit
            if over:
                self._leave_out(waited_for, f"not ready for round {number} after {limit:g} s")
            if over or not waited_for:
                taken = {each: position for each, position in ready.items() if each not in self.left_out}
                if not taken and not complete:
                    raise self._lost("no instance is left")
                return taken
            if not await self._client.sleep(pause):
                raise rank_lost("the client was closed")
            pause = min(_LONGEST_PAUSE, 2 * pause)

    def _look(self, number: int, wanted: list[str]) -> tuple[dict[str, int], set[str], dict[str, str]]:
        here = self._rendezvous
        return here.present(number, wanted), here.complete(wanted), here.gone(wanted)

    def _leave_out(self, instance_ids: list[str] | tuple[str, ...], reason: str) -> None:
        for each in instance_ids:
            if self.left_out.setdefault(each, reason) is reason:
                log.warning("instance %s is left out of the weight broadcast: %s", each, reason)

    def _lost(self, reason: str) -> Exception:
        others = "".join(f"; {each}: {why}" for each, why in sorted(self.left_out.items()))
        return rank_lost(f"the weights could not be broadcast: {reason}{others}")
