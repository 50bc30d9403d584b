"""State machine of a move at its donor. Pure: events in, actions out.

The donor owns the sample until the receiver has confirmed the commit, so any failure before that ends with the
sample decoding here and the reservation freed there. Without a confirmation the receiver is asked to cancel, and
its answer decides. If it cannot be reached either, the donor continues: a sample that the receiver may have is
dropped at its deadline, because only the gateway can claim it and was not told of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from services.generation.kv_transfer.reason import Reason


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
