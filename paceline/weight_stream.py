"""Push weights without a shared disk: to one instance, from where they go on to all others.

with client.run("run-1") as run:
    run.push_weights(model.state_dict())
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from paceline import safetensors
from paceline import types as t
from paceline.calls import GatewayCalls
from paceline.channel import Tls
from paceline.client_errors import source_read_once, stream_stalled
from paceline.errors import PacelineError, from_rpc
from paceline.piece_tee import PieceTee
from paceline.send_window import SourceBehind, cut
from paceline.shards import OpenShard
from paceline.shards.stop_signal import on_stop
from paceline.v1.weight_stream_pb2 import WeightPiece
from paceline.version_push import VersionPush
from paceline.weight_sender import SendStalled, WeightSender

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0
# Refusals that another attempt will not change.
_FINAL = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)


@dataclass(frozen=True, slots=True)
class WeightStream:
    """Transport of weights over connections alone: nothing is written by the trainer, and no disk is shared.

    It is that of a run for which no other is named. The instances need `adopted_weights`, and the trainer must
    reach them. It sends every byte once, whatever the number of instances. A folder that is pushed by its path is
    read by the instances, as without a stream.
    """

    piece_bytes: int = 1 << 20
    """Bytes that are sent at a time."""
    window_bytes: int = 64 << 20
    """Bytes that are kept until a second instance has them, for the case that the first one dies."""
    shard_bytes: int = 256 * 10**6
    """Largest file of a version. Each is checked while the next one comes."""
    stall_seconds: float = 10.0
    """An instance that says nothing for so long is taken for lost."""
    give_up_seconds: float = 60.0
    """Time for which sending is tried without any progress."""
    tls: Tls | None = None
    """TLS to the instances, where it differs from that to the gateway."""


async def push_stream(
    client: GatewayCalls,
    push: VersionPush,
    stream: WeightStream,
    tensors: safetensors.Tensors,
    in_flight: t.InFlight = t.InFlight.REFUSE,
) -> t.UpdateFinished:
    """Push tensors, which are read once for all shards, in step with the slowest.

    An error aborts the update, except one for which `keeps_staged` is True.

    Raises:
        ValueError: tensors that cannot be written (see `safetensors.write`).
        PacelineError: AbortedError with the reason SOURCE_READ_ONCE if bytes of an iterator are needed again.
    """
    members = push.shards.members

    def pieces() -> Iterator[WeightPiece]:
        return cut(safetensors.lay_out(tensors, stream.shard_bytes), stream.piece_bytes)

    def start(member: OpenShard, version: int) -> Awaitable[t.StreamStarted]:
        return member.calls.start_stream(push.run_id, version, push.target, push.push_id)

    async def stage(member: OpenShard, started: t.StreamStarted, first: Iterator[WeightPiece]) -> None:
        again = pieces if isinstance(tensors, Mapping) else None
        checksum = await _send(member.calls, push, stream, started, first, again)
        await member.calls.update_streamed(started.update_id, checksum)

    if len(members) == 1:
        return await push.stage(start, lambda member, started: stage(member, started, pieces()), in_flight)

    tee = PieceTee(len(members), stream.window_bytes // 4)

    async def stage_beside(member: OpenShard, started: t.StreamStarted) -> None:
        try:
            await stage(member, started, tee.pieces(members.index(member)))
        except BaseException:
            # The others must not wait for what is not sent any more.
            tee.stop()
            raise

    def feed() -> Coroutine[Any, Any, None]:
        return client.run_work(lambda: tee.feed(pieces()))

    return await push.stage(start, stage_beside, in_flight, feed)


async def _send(
    client: GatewayCalls,
    push: VersionPush,
    stream: WeightStream,
    started: t.StreamStarted,
    first: Iterator[WeightPiece],
    again: Callable[[], Iterator[WeightPiece]] | None,
) -> str:
    """Send all bytes, to one instance after the other if need be; return their checksum.

    `first` are the pieces, and `again` begins another pass over them, if that is possible.
    """

    def begin(pieces: Iterator[WeightPiece]) -> WeightSender:
        return WeightSender(pieces, stream.window_bytes, stream.stall_seconds)

    sender, reached, progress_at, pause = begin(first), 0, time.monotonic(), _FIRST_PAUSE
    while True:
        try:
            await client.run_work(partial(_attempt, client, stream, sender, started))
            return sender.checksum
        except SourceBehind as behind:
            if again is None:
                raise source_read_once(str(behind)) from behind
            sender = begin(again())
            error: PacelineError = source_read_once(str(behind))
        except grpc.RpcError as failed:
            error = from_rpc(failed)
            if error.code in _FINAL:
                raise error from failed
        except SendStalled as stalled:
            error = stream_stalled(str(stalled))
        except BaseException:
            sender.stop()
            raise
        if sender.reached > reached:
            reached, progress_at, pause = sender.reached, time.monotonic(), _FIRST_PAUSE
        if time.monotonic() - progress_at > stream.give_up_seconds or not await client.sleep(pause):
            raise error
        pause = min(_LONGEST_PAUSE, 2 * pause)
        started = await client.start_stream(push.run_id, started.version, push.target, push.push_id)


def _attempt(
    client: GatewayCalls, stream: WeightStream, sender: WeightSender, started: t.StreamStarted
) -> None:
    channel = client.dial(started.address, stream.tls)
    try:
        with on_stop(sender.stop):
            sender.send(channel, started.ticket)
    finally:
        channel.close()
