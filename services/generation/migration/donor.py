"""What a donor does next with a sample that it moves. Pure: events in, actions out.

The sample is the donor's until the receiver has confirmed it, so whatever fails before that ends with the sample
decoding on here and with the reservation freed there. When the confirmation does not come, the receiver is asked
to cancel: its answer decides. When it cannot be asked either, the donor goes on: what the receiver may have is
nobody's, because only the gateway can claim it and is not told of it, and it is dropped after a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from services.generation.migration.reason import Reason


class Stage(Enum):
    """Where a move is."""

    RESERVING = auto()
    # Stage 1: whole blocks are sent while the sample decodes on.
    COPYING = auto()
    FREEZING = auto()
    # Stage 2: the rest is sent while it is frozen.
    SENDING = auto()
    COMMITTING = auto()
    # Commit was not answered.
    DECIDING = auto()
    RELEASING = auto()
    OVER = auto()


class Event(Enum):
    """What has happened. DONE is the success of what the stage does."""

    DONE = auto()
    # The receiver said no, and has nothing of the sample.
    REFUSED = auto()
    # It did not work; what the receiver has is not known.
    FAILED = auto()
    # The sample has ended here: finished, aborted, or its engine is gone.
    LEFT = auto()


class Action(Enum):
    """What is to be done, in this order."""

    COPY = auto()
    FREEZE = auto()
    SEND = auto()
    COMMIT = auto()
    # Ask the receiver to cancel, and hear what it says: DONE if it has the sample, REFUSED if it never will.
    DECIDE = auto()
    # Let the sample decode on here.
    THAW = auto()
    # End the sample here without a Finished, and tell its stream where it is.
    RELEASE = auto()
    # Tell the receiver, without waiting for it: to free the reservation; to end its sample, even a committed one.
    CANCEL = auto()
    DISOWN = auto()


class Fate(Enum):
    """What became of the sample."""

    # Still with the donor, or ended there.
    KEPT = auto()
    MOVED = auto()


_FORWARD = {
    Stage.RESERVING: (Stage.COPYING, Action.COPY),
    Stage.COPYING: (Stage.FREEZING, Action.FREEZE),
    Stage.FREEZING: (Stage.SENDING, Action.SEND),
    Stage.SENDING: (Stage.COMMITTING, Action.COMMIT),
    Stage.COMMITTING: (Stage.RELEASING, Action.RELEASE),
    Stage.DECIDING: (Stage.RELEASING, Action.RELEASE),
}
_FROZEN = frozenset({Stage.SENDING, Stage.COMMITTING, Stage.DECIDING, Stage.RELEASING})
# The receiver may have run the sample already.
_OFFERED = frozenset({Stage.COMMITTING, Stage.DECIDING, Stage.RELEASING})


@dataclass(slots=True)
class Donor:
    """One move, from Reserve on. `reason` and `message` say why the sample is kept, once that is so."""

    stage: Stage = Stage.RESERVING
    fate: Fate = Fate.KEPT
    reason: Reason | None = None
    message: str = ""
    # The first refusal came before anything was sent.
    refused: bool = field(default=False)

    @property
    def frozen(self) -> bool:
        """Whether the sample is kept out of the donor's steps."""
        return self.stage in _FROZEN

    def on(self, event: Event, reason: Reason = Reason.INTERNAL, message: str = "") -> list[Action]:
        """What to do after an event; nothing any more once the move is over. `reason` is of what went wrong."""
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
        # The sample first: it has waited.
        actions = [Action.THAW] if stage in _FROZEN else []
        if event is Event.FAILED:
            actions.append(Action.DISOWN if stage in _OFFERED else Action.CANCEL)
        return actions

    def _note(self, reason: Reason, message: str) -> None:
        """Keep the first reason: what follows from it says less."""
        if self.reason is None or reason in (Reason.FINISHED, Reason.ABORTED):
            self.reason, self.message = reason, message
