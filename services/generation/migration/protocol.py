"""Protocol of a move: the state machines of donor and receiver, and the messages that describe a sample.

The state machines, `Donor` and `ReceiverLedger`, are pure: events and times in, decisions out.

A sample continues elsewhere as if nothing had happened. Its noise is a function of seed and position, so there is
no generator state to send. Its log-probabilities go to the gateway with the event that it has moved. The receiver
builds its suffix index from its copy of the rollouts.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto

import numpy as np

from paceline.internal.v1 import generation_pb2
from paceline.internal.v1 import migration_pb2 as pb
from paceline.times import seconds_of
from paceline.v1 import sample_pb2
from services.contracts import rollout as convert
from services.contracts.sampling import Sampling
from services.generation.engine.types import Verifier
from services.generation.kv_transfer.reason import Reason
from services.generation.loop.samples import RunningSample, VerifiedTokens


class Stage(Enum):
    """Stage of a move."""

    RESERVING = auto()
    # Stage 1: whole blocks are sent while the sample continues to decode.
    COPYING = auto()
    PAUSING = auto()
    # Stage 2: the remaining KV is sent while the sample is paused.
    SENDING = auto()
    COMMITTING = auto()
    # Commit got no answer.
    DECIDING = auto()
    RELEASING = auto()
    OVER = auto()


class Event(Enum):
    """Event of a move. DONE means that its stage succeeded."""

    DONE = auto()
    # The receiver refused, and holds nothing of the sample.
    REFUSED = auto()
    # The stage failed; the receiver may or may not have the sample.
    FAILED = auto()
    # The sample has ended here: finished, aborted, or its engine is gone.
    LEFT = auto()


class Action(Enum):
    """Action for the donor to take next; several are taken in order."""

    COPY = auto()
    PAUSE = auto()
    SEND = auto()
    COMMIT = auto()
    # Ask the receiver to cancel: DONE if it has taken the sample, REFUSED if it never will.
    DECIDE = auto()
    # Let the sample decode here again.
    RESUME = auto()
    # End the sample here without a Finished, and send its new place to its stream.
    RELEASE = auto()
    # Have the receiver free the reservation, or (DISOWN) end its sample even if it is committed.
    CANCEL = auto()
    DISOWN = auto()


_FORWARD = {
    Stage.RESERVING: (Stage.COPYING, Action.COPY),
    Stage.COPYING: (Stage.PAUSING, Action.PAUSE),
    Stage.PAUSING: (Stage.SENDING, Action.SEND),
    Stage.SENDING: (Stage.COMMITTING, Action.COMMIT),
    Stage.COMMITTING: (Stage.RELEASING, Action.RELEASE),
    Stage.DECIDING: (Stage.RELEASING, Action.RELEASE),
}
_PAUSED = frozenset({Stage.SENDING, Stage.COMMITTING, Stage.DECIDING, Stage.RELEASING})
# The receiver may have run the sample already.
_OFFERED = frozenset({Stage.COMMITTING, Stage.DECIDING, Stage.RELEASING})


@dataclass(slots=True)
class Donor:
    """One move, from Reserve on. `reason` and `message` say why the sample was kept.

    The donor owns the sample until the receiver has confirmed the commit, so any failure before that ends with
    the sample decoding here and the reservation freed there. Without a confirmation the donor asks the receiver
    to cancel, and the answer decides. If the receiver cannot be reached for that either, the donor keeps the
    sample: the receiver drops its copy at the deadline, because only the gateway can claim it and was not
    notified.
    """

    stage: Stage = Stage.RESERVING
    moved: bool = False
    reason: Reason | None = None
    message: str = ""
    # True if the receiver refused before anything was sent.
    refused: bool = False

    @property
    def paused(self) -> bool:
        """True while the sample is kept out of engine steps."""
        return self.stage in _PAUSED

    def on(self, event: Event, reason: Reason = Reason.INTERNAL, message: str = "") -> list[Action]:
        """Return the actions after an event; none once the move is over. `reason` is the cause of a failure."""
        stage = self.stage
        if stage is Stage.OVER:
            return []
        if event is Event.DONE and stage is Stage.RELEASING:
            self.stage, self.moved, self.reason, self.message = Stage.OVER, True, None, ""
            return []
        if event is Event.DONE:
            self.stage, action = _FORWARD[stage]
            return [action]
        self._note(reason, message)
        if event is Event.LEFT:
            self.stage = Stage.OVER
            return [Action.DISOWN if stage in _OFFERED else Action.CANCEL]
        if event is Event.FAILED and stage is Stage.COMMITTING:
            self.stage = Stage.DECIDING
            return [Action.DECIDE]
        self.refused = event is Event.REFUSED and stage is Stage.RESERVING
        self.stage = Stage.OVER
        # The sample is resumed first, because it is stalled.
        actions = [Action.RESUME] if stage in _PAUSED else []
        if event is Event.FAILED:
            actions.append(Action.DISOWN if stage in _OFFERED else Action.CANCEL)
        return actions

    def _note(self, reason: Reason, message: str) -> None:
        """Keep the first reason, because later ones are its consequences; an end of the sample overrides it."""
        if self.reason is None or reason in (Reason.FINISHED, Reason.ABORTED):
            self.reason, self.message = reason, message


REMEMBERED = 4096
"""Number of ended migrations that are remembered."""


class ReceiverState(Enum):
    """State of a migration, as in `pb.MigrationState`."""

    OPEN = pb.MIGRATION_STATE_OPEN
    COMMITTED = pb.MIGRATION_STATE_COMMITTED
    CLAIMED = pb.MIGRATION_STATE_CLAIMED
    CANCELLED = pb.MIGRATION_STATE_CANCELLED
    EXPIRED = pb.MIGRATION_STATE_EXPIRED


@dataclass(slots=True)
class Incoming:
    """Migration of one sample. At `deadline`, OPEN becomes CANCELLED and COMMITTED becomes EXPIRED."""

    migration_id: str
    sample_id: str
    deadline: float
    state: ReceiverState = ReceiverState.OPEN
    reason: Reason | None = None
    message: str = ""

    @property
    def over(self) -> bool:
        """True once the migration has ended."""
        return self.state in (ReceiverState.CLAIMED, ReceiverState.CANCELLED, ReceiverState.EXPIRED)


class ReceiverLedger:
    """Migrations to one instance, by id.

        OPEN ── commit ─▶ COMMITTED ── claim ─▶ CLAIMED
          │                   ├────── claim deadline ─▶ EXPIRED
          └─ cancel, deadline ┴────── disown ─▶ CANCELLED

    Only OPEN can become COMMITTED, and only COMMITTED can become CLAIMED, so a sample never has two owners: a
    late Commit finds its migration cancelled, a late Claim finds it expired. Ended migrations are remembered for
    a while, for callers that did not receive the answer.
    """

    def __init__(self, most_open: int) -> None:
        """Allow `most_open` reservations at a time."""
        self._most_open = most_open
        self._live: dict[str, Incoming] = {}
        self._over: OrderedDict[str, Incoming] = OrderedDict()

    def __iter__(self) -> Iterator[Incoming]:
        """Iterate over the migrations that have not ended."""
        return iter(list(self._live.values()))

    def get(self, migration_id: str) -> Incoming | None:
        """Return a migration; None if it is unknown."""
        return self._live.get(migration_id) or self._over.get(migration_id)

    @property
    def full(self) -> bool:
        """True if no further reservation is allowed."""
        return sum(each.state is ReceiverState.OPEN for each in self._live.values()) >= self._most_open

    def open(self, migration_id: str, sample_id: str, deadline: float) -> Incoming:
        """Add a reservation. ValueError if the id is known."""
        if self.get(migration_id) is not None:
            raise ValueError(f"migration {migration_id} is known")
        incoming = self._live[migration_id] = Incoming(migration_id, sample_id, deadline)
        return incoming

    def commit(self, migration_id: str, deadline: float) -> bool:
        """Commit a sample, to be claimed before the deadline. Returns False if it can no longer be taken."""
        incoming = self._live.get(migration_id)
        if incoming is None or incoming.state is not ReceiverState.OPEN:
            return False
        incoming.state, incoming.deadline = ReceiverState.COMMITTED, deadline
        return True

    def claim(self, migration_id: str) -> Incoming | None:
        """Hand a sample to the gateway. Returns None if there is nothing to claim."""
        incoming = self._live.get(migration_id)
        if incoming is None or incoming.state is not ReceiverState.COMMITTED:
            return None
        self._end(incoming, ReceiverState.CLAIMED)
        return incoming

    def cancel(
        self, migration_id: str, reason: Reason, message: str = "", *, disown: bool = False
    ) -> tuple[Incoming, bool]:
        """End a migration; a committed one only if its donor disowns it.

        Returns the migration, and whether this call ended it. An unknown one is remembered as cancelled.
        """
        incoming = self.get(migration_id)
        if incoming is None:
            incoming = Incoming(migration_id, "", 0.0, ReceiverState.CANCELLED, reason, message)
            self._remember(incoming)
            return incoming, False
        if incoming.over or (incoming.state is ReceiverState.COMMITTED and not disown):
            return incoming, False
        incoming.reason, incoming.message = reason, message
        self._end(incoming, ReceiverState.CANCELLED)
        return incoming, True

    def expire(self, now: float) -> list[Incoming]:
        """End the migrations past their deadline, and return them."""
        found = [each for each in self._live.values() if each.deadline <= now]
        for each in found:
            each.reason, each.message = Reason.DEADLINE, f"the deadline of {each.state.name} is over"
            self._end(
                each, ReceiverState.CANCELLED if each.state is ReceiverState.OPEN else ReceiverState.EXPIRED
            )
        return found

    def _end(self, incoming: Incoming, state: ReceiverState) -> None:
        incoming.state = state
        self._live.pop(incoming.migration_id, None)
        self._remember(incoming)

    def _remember(self, incoming: Incoming) -> None:
        self._over[incoming.migration_id] = incoming
        while len(self._over) > REMEMBERED:
            self._over.popitem(last=False)


_LEVELS = {
    Verifier.COUPLED: sample_pb2.EXACTNESS_LEVEL_EXACT,
    Verifier.REJECTION: sample_pb2.EXACTNESS_LEVEL_REJECTION,
    Verifier.LENIENT: sample_pb2.EXACTNESS_LEVEL_LENIENT,
}


def reserve_request(sample: RunningSample, migration_id: str, policy_version: int) -> pb.ReserveRequest:
    """Describe a sample to a receiver; the caller adds the donor, geometry, capacity and timeout."""
    rollout = sample.rollout
    return pb.ReserveRequest(
        migration_id=migration_id,
        item=item_of(sample, policy_version),
        rollout=None if rollout is None else convert.to_proto(rollout),
        cached_token_ids=sample.request.cached,
        migrations=sample.migrations,
        mixed_kv=sample.mixed_kv,
    )


def item_of(sample: RunningSample, policy_version: int) -> generation_pb2.WorkItem:
    """Return the work item that continues a sample; its prefix is the response so far."""
    request, origin = sample.request, sample.origin
    exactness = sample_pb2.Exactness(level=_LEVELS[request.verifier])
    if request.verifier is Verifier.LENIENT:
        exactness.lenience = request.lenience
    return generation_pb2.WorkItem(
        prompt_token_ids=request.prompt,
        prefix_token_ids=sample.response,
        # The prompt's scores of a decoding sample have been reported already.
        sampling=sampling_params(replace(request.sampling, prompt_logprobs=None)),
        exactness=exactness,
        seed=request.seed,
        policy_version=policy_version,
        reference_token_ids=request.given,
        prompt_id=request.prompt_id,
        run_id=origin.run_id,
        slot=origin.slot,
        step=origin.step,
        trace_parent=sample.trace.traceparent,
        streamed=sample.streamed,
    )


def sampling_params(sampling: Sampling) -> sample_pb2.SamplingParams:
    """Return the message that `services.contracts.sampling.resolve` turns into these parameters."""
    fields = asdict(sampling)
    del fields["unknown_logprobs_mode"]
    processed = fields.pop("processed_logprobs")
    mode = sample_pb2.LOGPROBS_MODE_PROCESSED if processed else sample_pb2.LOGPROBS_MODE_RAW
    return sample_pb2.SamplingParams(logprobs_mode=mode, **fields)


def take_counters(sample: RunningSample, counters: generation_pb2.Finished, now: float) -> None:
    """Continue the counters of an arrived sample; `now` is a time of the loop's clock, in seconds."""
    sample.started = now - seconds_of(counters.generation_time)
    sample.arrived = sample.started - seconds_of(counters.queue_time)
    sample.decode_steps, sample.verify_steps = counters.decode_steps, counters.verify_steps
    sample.prefill_seconds = seconds_of(counters.prefill_time)
    sample.verify_seconds = seconds_of(counters.verify_time)
    sample.plain_seconds = seconds_of(counters.plain_time)
    sample.cached_tokens, sample.reused_prefix = counters.cached_tokens, counters.reused_prefix
    sample.drafts = {
        each.drafter: VerifiedTokens(each.drafted, each.accepted) for each in counters.draft_sources
    }
    # All tokens except the last arrived with their KV.
    sample.cached_context = len(sample.request.prompt) + len(sample.request.prefix) - 1


def drafter_states(states: Mapping[str, bytes]) -> pb.DrafterStates:
    """Build the message with the state of a sample's drafters, by drafter name."""
    return pb.DrafterStates(
        states=[pb.DrafterState(drafter=name, state=state) for name, state in states.items()]
    )


def drafter_states_of(message: pb.DrafterStates) -> dict[str, bytes]:
    """Return the state of each drafter in a message, by drafter name."""
    return {each.drafter: each.state for each in message.states}


def tokens_crc(tokens: Sequence[int]) -> int:
    """Return the CRC-32 of a response, as the protocol defines it."""
    return zlib.crc32(np.asarray(tokens, "<u4").tobytes())


def arrival_report(incoming: Incoming, receiver_id: str) -> pb.Migration:
    """Return the report of an arrival."""
    return pb.Migration(
        migration_id=incoming.migration_id,
        state=incoming.state.value,
        reason=reason_value(incoming.reason),
        message=incoming.message,
        key=incoming.sample_id,
        receiver_id=receiver_id,
    )


def commit_answer(incoming: Incoming | None) -> pb.CommitResponse:
    """Return the answer to a commit, given the migration afterwards; None for an unknown one."""
    if incoming is None:
        return pb.CommitResponse(
            state=pb.MIGRATION_STATE_CANCELLED,
            reason=Reason.WITHDRAWN.value,
            message="there is no such reservation",
        )
    return pb.CommitResponse(
        state=incoming.state.value, reason=reason_value(incoming.reason), message=incoming.message
    )


def reason_value(reason: Reason | None) -> pb.MoveReason:
    """Return the protocol's value for a reason; UNSPECIFIED for None."""
    value: pb.MoveReason = pb.MOVE_REASON_UNSPECIFIED if reason is None else reason.value
    return value
