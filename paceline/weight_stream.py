"""Push weights without a shared disk: to one instance, from where they go on to all others.

with client.run("run-1") as run:
    run.push_weights(model.state_dict())
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import grpc

from paceline import safetensors
from paceline import types as t
from paceline.calls import GatewayCalls
from paceline.channel import Tls
from paceline.errors import PacelineError, from_rpc, source_read_once, stream_stalled
from paceline.send_window import SourceBehind, cut
from paceline.weight_sender import SendStalled, WeightSender
from paceline.weights import aborting, finish, next_version

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
    run_id: str,
    target: t.WeightTarget,
    stream: WeightStream,
    tensors: safetensors.Tensors,
    in_flight: t.InFlight = t.InFlight.REFUSE,
) -> t.UpdateFinished:
    """Push tensors as the next version. An error aborts the update, except one for which `keeps_staged` is True.

    Raises:
        ValueError: tensors that cannot be written (see `safetensors.write`).
        PacelineError: AbortedError with the reason SOURCE_READ_ONCE if bytes of an iterator are needed again.
    """
    version = next_version(await client.versions(), target)
    started = await client.start_stream(run_id, version, target)
    async with aborting(client, started.update_id):
        checksum = await _send(client, run_id, target, stream, tensors, started)
        await client.update_streamed(started.update_id, checksum)
        return await finish(client, started.update_id, version, target, in_flight)


async def _send(
    client: GatewayCalls,
    run_id: str,
    target: t.WeightTarget,
    stream: WeightStream,
    tensors: safetensors.Tensors,
    started: t.StreamStarted,
) -> str:
    """Send all bytes, to one instance after the other if need be; return their checksum."""

    def begin() -> WeightSender:
        pieces = cut(safetensors.lay_out(tensors, stream.shard_bytes), stream.piece_bytes)
        return WeightSender(pieces, stream.window_bytes, stream.stall_seconds)

    sender, reached, progress_at, pause = begin(), 0, time.monotonic(), _FIRST_PAUSE
    while True:
        try:
            await client.run_work(partial(_attempt, client, stream, sender, started))
            return sender.checksum
        except SourceBehind as behind:
            if not isinstance(tensors, Mapping):
                raise source_read_once(str(behind)) from behind
            sender = begin()
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
        started = await client.start_stream(run_id, started.version, target)


def _attempt(
    client: GatewayCalls, stream: WeightStream, sender: WeightSender, started: t.StreamStarted
) -> None:
    channel = client.dial(started.address, stream.tls)
    try:
        sender.send(channel, started.ticket)
    finally:
        channel.close()
