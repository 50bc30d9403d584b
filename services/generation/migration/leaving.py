"""Engine-thread half of a move at the donor: everything that touches the engine, between two engine steps.

`departure.py` is the half that runs in the event loop, waits, and calls the receiver. `Ports` is the event loop's
access to the ports of the instance's ranks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.internal.v1 import generation_pb2
from paceline.internal.v1 import migration_pb2 as pb
from paceline.times import seconds_of
from services.generation.config import GenerationConfig
from services.generation.engine.types import Exported, MigrationEngine, Verifier
from services.generation.kv_transfer.block_store import Geometry
from services.generation.kv_transfer.port import KvPort
from services.generation.kv_transfer.reason import NotMoved, Reason
from services.generation.kv_transfer.transfers import KvPart, KvSent
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.samples import RunningSample
from services.generation.loop.work_stream import WorkStream
from services.generation.migration import protocol

# Room of a reservation beyond the present tokens: a constant, one eighth of the tokens (a longer sample takes
# longer to send), and the tokens that the sample generates in this many seconds.
_SLACK_TOKENS = 64
_SLACK_SHARE = 8
_SLACK_SECONDS = 0.25
# Interval at which several ranks are asked whether they have sent their KV.
_POLL_SECONDS = 0.002


def geometry_of(
    kv: Geometry, model: str, vocab_size: int, ranks: int, transport: str = "tcp"
) -> pb.KvGeometry:
    """Build the geometry that donor and receiver must have in common."""
    return pb.KvGeometry(
        model=model, vocab_size=vocab_size, tensor_parallel=ranks, transport=transport, **asdict(kv)
    )


def check_geometry(own: pb.KvGeometry, offered: pb.KvGeometry) -> None:
    """Raise NotMoved if the KV of two instances is incompatible; the message says what differs."""
    differing = [
        f"{field.name} is {getattr(offered, field.name)!r}, here {getattr(own, field.name)!r}"
        for field in pb.KvGeometry.DESCRIPTOR.fields
        if getattr(own, field.name) != getattr(offered, field.name)
    ]
    if differing:
        raise NotMoved(Reason.GEOMETRY, "; ".join(differing))


def capacity_of(tokens: int, most: int, rate: float = 0.0) -> int:
    """Return the tokens to reserve for a sample that has `tokens` and can have `most`, prompt included.

    `rate` is its tokens per second. Room that the move does not need is used later.
    """
    slack = _SLACK_TOKENS + tokens // _SLACK_SHARE + int(_SLACK_SECONDS * rate)
    return min(tokens + slack, most)


class Ports:
    """Ports of all ranks.

    The port of a single rank is in this process and is called directly. The ports of several ranks are in other
    processes, and the engine thread calls them between two steps.
    """

    def __init__(self, loop: EngineLoop, engine: MigrationEngine, local: KvPort | None) -> None:
        """Use `local` as the port of the only rank; None with several ranks."""
        self._loop = loop
        self._engine = engine
        self._local = local

    async def send(
        self, migration_id: str, addresses: Sequence[str], token: bytes, seconds: float, part: KvPart
    ) -> list[KvSent]:
        """Have every rank send its part to its peer; returns the KV that has arrived, by rank.

        NotMoved if a rank fails, TimeoutError after `seconds`.
        """
        if self._local is not None:
            sending = self._local.send(migration_id, addresses, token, seconds, part)
            return [await asyncio.wrap_future(sending)]
        await self._call("send", migration_id, tuple(addresses), token, seconds, part)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = await self._call("sent", migration_id)
            if all(sent is not None for sent in found):
                return found
            await asyncio.sleep(_POLL_SECONDS)
        raise TimeoutError(f"the ranks had not sent their KV after {seconds:.1f} s")

    async def failures(self) -> dict[str, NotMoved]:
        """Return the errors of expected samples whose connection has failed on any rank, by migration id."""
        if self._local is not None:
            return self._local.failures()
        return {name: error for rank in await self._call("failures") for name, error in rank.items()}

    async def end(self, migration_id: str) -> None:
        """Close the connections of a sample that was sent."""
        if self._local is not None:
            self._local.end(migration_id)
        else:
            await self._call("end", migration_id)

    async def _call(self, method: str, *args: object) -> list[Any]:
        return await self._loop.execute(lambda: self._engine.call_ports(method, *args))


@dataclass(frozen=True, slots=True)
class DonorContext:
    """Parts of the donor that a move uses."""

    loop: EngineLoop
    engine: MigrationEngine
    ports: Ports
    geometry: pb.KvGeometry
    config: GenerationConfig
    max_model_len: int


class LeavingSample:
    """Sample that is moved with its KV. All methods are called in the engine thread.

    After `describe`, `exported` is the sample's KV at the time `looked_at` (monotonic seconds); `capacity` is the
    number of tokens for which the receiver reserves room; `rate` is the sample's tokens per second.
    """

    exported: Exported
    capacity: int
    rate: float
    looked_at: float

    def __init__(self, donor: DonorContext, request: pb.MoveRequest, on_left: Callable[[bool], None]) -> None:
        """Prepare a move. `on_left` is called if the sample ends here during it, with True if it finished."""
        self._donor = donor
        self._request = request
        self._on_left = on_left
        self._sample: RunningSample | None = None
        # Number of response tokens that were sent with the reservation.
        self._reserved_tokens = 0

    def describe(self) -> pb.ReserveRequest:
        """Check that the sample may leave, watch it, and describe it to the receiver.

        The caller adds the timeout of the reservation. NotMoved if the sample may not leave.
        """
        donor, loop, key = self._donor, self._donor.loop, self._request.key
        sample = movable_sample(loop, key)
        self.exported, self.looked_at = donor.engine.export(key), time.monotonic()
        loop.watchers[key] = self._on_left
        self._sample, self._reserved_tokens = sample, len(sample.response)
        prompt, longest = len(sample.request.prompt), donor.max_model_len
        most = min(prompt + (sample.request.sampling.max_tokens or longest), longest)
        step = seconds_of(loop.load.step_time)
        self.rate = (1 + sample.acceptance) / step if step > 0 else 0.0
        self.capacity = capacity_of(prompt + self._reserved_tokens, most, self.rate)
        reserve = protocol.reserve_request(sample, self._request.migration_id, loop.policy_version)
        reserve.donor_id, reserve.capacity_tokens = donor.config.instance_id, self.capacity
        reserve.geometry.CopyFrom(donor.geometry)
        return reserve

    def refresh(self) -> None:
        """Update `exported`. NotMoved if the sample was preempted or has outgrown its reservation."""
        self._set_exported(self._donor.engine.export(self._request.key))

    def pause(self) -> None:
        """Keep the sample out of further steps. NotMoved if it has ended, or as `refresh`."""
        sample = self._present()
        self._check_size(len(sample.request.prompt) + len(sample.response))
        self._set_exported(self._donor.engine.pause(self.exported))

    def final_state(self) -> tuple[pb.CommitRequest, int]:
        """Return the data that the receiver needs to run the paused sample, and the length of its response."""
        sample, loop = self._present(), self._donor.loop
        commit = pb.CommitRequest(
            migration_id=self._request.migration_id,
            new_token_ids=sample.response[self._reserved_tokens :],
            counters=sample.finished(None, loop.now),
            drafters=protocol.drafter_states(loop.drafts.carry(self._request.key)),
            acceptance=sample.acceptance,
            tokens_crc=protocol.tokens_crc(sample.response),
        )
        return commit, len(sample.response)

    def hand_over(self) -> None:
        """End the sample here, and send its new place to its stream."""
        sample, loop, request = self._present(), self._donor.loop, self._request
        loop.watchers.pop(request.key, None)
        stream = sample.stream
        loop.release(request.key)
        if isinstance(stream, WorkStream):
            moved = generation_pb2.Moved(
                handle=sample.handle,
                migration_id=request.migration_id,
                instance_id=request.receiver_id,
                address=request.receiver_address,
                response_tokens=len(sample.response),
            )
            stream.move(sample, moved)
        loop.flush()

    def resume(self) -> None:
        """Let the sample decode again here."""
        self._donor.engine.resume(self._request.key)

    def restore(self) -> None:
        """Stop watching the sample and let it decode here, whatever the outcome of the move.

        A sample that belongs to another move is left alone: if it was resumed, it would decode during that move.
        """
        watchers, key = self._donor.loop.watchers, self._request.key
        if watchers.get(key) == self._on_left:
            del watchers[key]
            self.resume()

    def _present(self) -> RunningSample:
        if self._sample is None or self._request.key not in self._donor.loop.samples:
            raise NotMoved(Reason.FINISHED, "the sample ended at its donor")
        return self._sample

    def _set_exported(self, exported: Exported) -> None:
        if exported.preemptions != self.exported.preemptions:
            raise NotMoved(Reason.PREEMPTED, "the donor preempted the sample")
        self._check_size(exported.tokens + 1)
        self.exported, self.looked_at = exported, time.monotonic()

    def _check_size(self, tokens: int) -> None:
        if tokens > self.capacity:
            raise NotMoved(Reason.OUTGROWN, f"the sample has outgrown {self.capacity} tokens")


def movable_sample(loop: EngineLoop, key: str) -> RunningSample:
    """Return the sample of a key. NotMoved if it may not leave, or does not exist."""
    sample = loop.samples.get(key)
    if sample is None or key in loop.samples.background:
        raise NotMoved(Reason.UNKNOWN_SAMPLE, f"there is no sample {key!r}")
    if key in loop.watchers or not isinstance(sample.stream, WorkStream):
        raise NotMoved(Reason.IN_TRANSIT, "the sample is being moved, or not claimed yet")
    if key in loop.drafts.reuse:
        raise NotMoved(Reason.REUSING, "the sample is still reusing a cached rollout")
    if sample.request.verifier is Verifier.LENIENT and sample.started is None:
        raise NotMoved(Reason.NOT_DECODING, "the sample has not begun")
    return sample


def hand_back(loop: EngineLoop, request: pb.MoveRequest, report: pb.Migration) -> None:
    """Move a sample by its prefix: end it here, and have its stream resume it at the receiver.

    Only tokens are moved, by way of the gateway; tokens that it does not have yet are sent with the end. The
    receiver prefills them in one step, which is faster than sending KV for short contexts. NotMoved if the sample
    may not leave, or does not exist.
    """
    sample = movable_sample(loop, request.key)
    stream = sample.stream
    assert isinstance(stream, WorkStream)
    report.response_tokens = len(sample.response)
    finished = sample.finished(None, loop.now)
    finished.resume_on = request.receiver_id
    loop.release(request.key)
    stream.finish(sample, finished)
    loop.flush()
    report.state, report.outcome = pb.MIGRATION_STATE_COMMITTED, pb.MOVE_OUTCOME_MOVED


def listed_sample(
    loop: EngineLoop, engine: MigrationEngine, key: str, max_model_len: int, unsupported: bool
) -> pb.ListedSample:
    """Describe a sample to the reallocator, including whether it may leave."""
    sample = loop.samples[key]
    request, origin = sample.request, sample.origin
    room = max_model_len - len(request.prompt)
    return pb.ListedSample(
        key=key,
        handle=sample.handle,
        prompt_tokens=len(request.prompt),
        response_tokens=len(sample.response),
        max_tokens=min(request.sampling.max_tokens or room, room),
        acceptance=sample.acceptance,
        kv_blocks=engine.blocks_of(key),
        immovable=pb.MOVE_REASON_UNSUPPORTED if unsupported else _immovable(loop, engine, key),
        run_id=origin.run_id,
        prompt_id=request.prompt_id,
        slot=origin.slot,
        step=origin.step,
        migrations=sample.migrations,
    )


def _immovable(loop: EngineLoop, engine: MigrationEngine, key: str) -> pb.MoveReason:
    try:
        movable_sample(loop, key)
        engine.export(key)
    except NotMoved as error:
        reason: pb.MoveReason = error.reason.value
        return reason
    return pb.MOVE_REASON_UNSPECIFIED
