"""A batch that is being worked on: its state, and what the process keeps beside it."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

from services.gateway.batch import Batch
from services.gateway.links import WorkLink
from services.platform.pulse import Pulse
from services.platform.tracing import NO_SPAN, Span

# A sample of a batch that is being worked on, by batch key and sample index.
Ref = tuple[tuple[str, str], int]


@dataclass(slots=True, eq=False)
class Running:
    """One batch. `order` ranks its samples after those of earlier batches. A private batch belongs to a
    Generate call: it is not journaled and goes with the call."""

    batch: Batch
    order: int
    fingerprint: str = ""
    private: bool = False
    # Samples that the journal has as finished: those that may be delivered.
    events: int = 0
    changed: Pulse = field(default_factory=Pulse)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    # Sample index -> where it is.
    places: dict[int, tuple[WorkLink, int]] = field(default_factory=dict)
    members: dict[int, list[int]] = field(init=False)
    # Why the batch can never be delivered, if so.
    broken: str = ""
    # Nobody works on it any more.
    dropped: bool = False
    # From here to the last delivery.
    trace: Span = NO_SPAN

    def __post_init__(self) -> None:
        # Group number -> indexes of its samples.
        members: dict[int, list[int]] = defaultdict(list)
        for sample in self.batch.samples:
            members[sample.group].append(sample.index)
        self.members = dict(members)

    def expected_tokens(self, index: int) -> int:
        """The trainer's guess of the response length; 0 for none."""
        return self.batch.groups[self.batch.samples[index].group].expected_tokens

    def stop_timers(self) -> None:
        """Cancels the deadline and whatever else was to happen later."""
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
