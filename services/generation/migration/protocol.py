"""Protocol of a move: the state machines of donor and receiver, and the messages that carry a sample.

The state machines are pure: events and times in, decisions out. The donor owns the sample until the receiver has
confirmed the commit, so any failure before that ends with the sample decoding here and the reservation freed
there. Without a confirmation the donor asks the receiver to cancel, and the answer decides. If the receiver
cannot be reached either, the donor continues: the receiver drops a sample at its deadline, because only the
gateway can claim it and was not notified.

    OPEN ── commit ─▶ COMMITTED ── claim ─▶ CLAIMED
      │                   ├────── claim deadline ─▶ EXPIRED
      └─ cancel, deadline ┴────── disown ─▶ CANCELLED

Only OPEN can become COMMITTED, and only COMMITTED can become CLAIMED, so a sample never has two owners: a late
Commit finds its migration cancelled, a late Claim finds it expired. Ended migrations are remembered for a while,
for callers that did not receive the answer.

A sample continues elsewhere as if nothing had happened. Its noise is a function of seed and position, so no
generator state is carried. Its log-probabilities go to the gateway with the event that it has moved. The receiver
builds its suffix index from its copy of the rollouts.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from services.generation.loop.samples import RunningSample


class Stage(Enum):
    """Stage of a move."""

    RESERVING = auto()
    # Stage 1: whole blocks are sent while the sample decodes on.
    COPYING = auto()
    PAUSING = auto()
    # Stage 2: the remaining KV is sent while the sample is paused.
    SENDING = auto()
    COMMITTING = auto()
    # Commit was not answered.
    DECIDING = auto()
    RELEASING = auto()
    OVER = auto()


class Event(Enum):
    """Event of a move. DONE is the success of its stage."""

    DONE = auto()
    # The receiver refused, and has nothing of the sample.
    REFUSED = auto()
    # The stage failed; the receiver may or may not have the sample.
    FAILED = auto()
    # The sample has ended here: finished, aborted, or its engine is gone.
    LEFT = auto()


class Action(Enum):
    """Action that the donor takes next; several are taken in order."""

    COPY = auto()
    PAUSE = auto()
    SEND = auto()
    COMMIT = auto()
    # Ask the receiver to cancel: DONE if it has the sample, REFUSED if it never will.
    DECIDE = auto()
    # Let the sample decode here again.
    RESUME = auto()
    # End the sample here without a Finished, and tell its stream where it is.
    RELEASE = auto()
    # Tell the receiver to free the reservation, or (DISOWN) to end its sample even if it is committed.
    CANCEL = auto()
    DISOWN = auto()


class Fate(Enum):
    """Fate of the sample."""

    # It is still at the donor, or ended there.
    KEPT = auto()
    MOVED = auto()


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
    """One move, from Reserve on. `reason` and `message` say why the sample was kept."""

    stage: Stage = Stage.RESERVING
    fate: Fate = Fate.KEPT
    reason: Reason | None = None
    message: str = ""
    # The first refusal came before anything was sent.
    refused: bool = field(default=False)

    @property
    def paused(self) -> bool:
        """True while the sample is kept out of engine steps."""
        return self.stage in _PAUSED

    def on(self, event: Event, reason: Reason = Reason.INTERNAL, message: str = "") -> list[Action]:
        """Return the actions after an event; none once the move is over. `reason` says what went wrong."""
        stage = self.stage
        if stage is Stage.OVER:
            return []
        if event is Event.DONE and stage is Stage.RELEASING:
            self.stage, self.fate, self.reason, self.message = Stage.OVER, Fate.MOVED, None, ""
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
        # Resume the sample first, because it is stalled.
        actions = [Action.RESUME] if stage in _PAUSED else []
        if event is Event.FAILED:
            actions.append(Action.DISOWN if stage in _OFFERED else Action.CANCEL)
        return actions

    def _note(self, reason: Reason, message: str) -> None:
        """Keep the first reason, because later ones are its consequences."""
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
    """Migrations to one instance, by id."""

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
        """Add a reservation. ValueError when the id is known."""
        if self.get(migration_id) is not None:
            raise ValueError(f"migration {migration_id} is known")
        incoming = self._live[migration_id] = Incoming(migration_id, sample_id, deadline)
        return incoming

    def commit(self, migration_id: str, deadline: float) -> bool:
        """Commit a sample, to be claimed by the deadline. Returns False when it may not be taken any more."""
        incoming = self._live.get(migration_id)
        if incoming is None or incoming.state is not ReceiverState.OPEN:
            return False
        incoming.state, incoming.deadline = ReceiverState.COMMITTED, deadline
        return True

    def claim(self, migration_id: str) -> Incoming | None:
        """Let the gateway take a sample over. Returns None when there is nothing to claim."""
        incoming = self._live.get(migration_id)
        if incoming is None or incoming.state is not ReceiverState.COMMITTED:
            return None
        self._end(incoming, ReceiverState.CLAIMED)
        return incoming

    def cancel(
        self, migration_id: str, reason: Reason, message: str = "", *, disown: bool = False
    ) -> tuple[Incoming, bool]:
        """End a migration. A committed one stays, unless its donor disowns it.

        Returns the migration, and whether this ended it. An unknown one is remembered as cancelled.
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

    def expire(self, now: float) -> list[tuple[Incoming, ReceiverState]]:
        """End the migrations past their deadline; returns each with the state that it was in."""
        found = [each for each in self._live.values() if each.deadline <= now]
        ended = [(each, each.state) for each in found]
        for each in found:
            each.reason, each.message = Reason.DEADLINE, f"the deadline of {each.state.name} is over"
            self._end(
                each, ReceiverState.CANCELLED if each.state is ReceiverState.OPEN else ReceiverState.EXPIRED
            )
        return ended

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
    """Describe a sample to a receiver; the caller adds donor, geometry, capacity and timeout."""
    rollout = sample.rollout
    return pb.ReserveRequest(
        migration_id=migration_id,
        item=item_of(sample, policy_version),
        rollout=None if rollout is None else convert.to_proto(rollout),
        cached_token_ids=sample.request.cached,
        migrations=sample.migrations,
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
        # A sample that decodes has had its prompt told.
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
    sample.drafts = {source.drafter: source for source in counters.draft_sources}
    # All but the last token came with their KV.
    sample.cached_context = len(sample.request.prompt) + len(sample.request.prefix) - 1


def drafter_states(states: Mapping[str, bytes]) -> pb.DrafterStates:
    """Wrap the state of a sample's drafters, by drafter name."""
    return pb.DrafterStates(
        states=[pb.DrafterState(drafter=name, state=state) for name, state in states.items()]
    )


def carried(message: pb.DrafterStates) -> dict[str, bytes]:
    """Read `drafter_states`."""
    return {each.drafter: each.state for each in message.states}


def tokens_crc(tokens: Sequence[int]) -> int:
    """Return the CRC-32 of a response, as the protocol defines it."""
    return zlib.crc32(np.asarray(tokens, "<u4").tobytes())


def migration(incoming: Incoming, receiver_id: str) -> pb.Migration:
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
    """Return the answer to a commit, given the migration as it is then; None for an unknown one."""
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
    """Return the protocol's value of a reason; UNSPECIFIED for None."""
    value: pb.MoveReason = pb.MOVE_REASON_UNSPECIFIED if reason is None else reason.value
    return value
