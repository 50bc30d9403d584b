"""What of a moving sample's KV has gone over, and what is still to go. As the donor keeps it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from paceline.internal.v1 import migration_pb2 as pb
from services.generation.migration.engine import Exported
from services.generation.migration.outgoing import Part, Sent
from services.generation.migration.place import Place
from services.generation.migration.reason import NotMoved, Reason

# Fewer new whole blocks than these are not worth another look between two steps: they go when it is frozen.
_WORTH_BLOCKS = 2


@dataclass(slots=True)
class Shipment:
    """The KV of one sample.

    `exported` is what there was of it when it was last looked at, at `looked_at` (monotonic seconds),
    `capacity` the tokens that the receiver has room for, `rate` the tokens a second that the sample gets.
    """

    place: Place
    migration_id: str
    exported: Exported
    capacity: int
    rate: float
    looked_at: float = field(default_factory=time.monotonic)
    # Blocks that have been sent or need not be.
    sent_blocks: int = 0
    _reserved: pb.Reservation = field(default_factory=pb.Reservation)

    def reserved(self, reserved: pb.Reservation) -> None:
        """The receiver has made room: where to, and what of it is there already."""
        self._reserved = reserved
        self.sent_blocks = reserved.shared_blocks

    def look(self) -> None:
        """In the engine thread: see what there is now. NotMoved when the sample was preempted or has outgrown its
        reservation."""
        self.saw(self.place.engine.export(self.exported.sample_id))

    def saw(self, exported: Exported) -> None:
        """As `look`, of what was exported otherwise."""
        if exported.preemptions != self.exported.preemptions:
            raise NotMoved(Reason.PREEMPTED, "the donor preempted the sample")
        self.check_size(exported.tokens + 1)
        self.exported, self.looked_at = exported, time.monotonic()

    def check_size(self, tokens: int) -> None:
        """NotMoved when so many are more than the receiver has room for."""
        if tokens > self.capacity:
            raise NotMoved(Reason.OUTGROWN, f"the sample has outgrown {self.capacity} tokens")

    @property
    def may_have_grown(self) -> bool:
        """Whether by now there should be enough new whole blocks to send them while the sample decodes on."""
        tokens = self.exported.tokens + self.rate * (time.monotonic() - self.looked_at)
        return int(tokens) // self._size - self.sent_blocks >= _WORTH_BLOCKS

    async def send_whole(self, seconds: float) -> list[Sent]:
        """Send the whole blocks: no step writes to them any more. At least opens the connections."""
        return await self._send(max(self.exported.tokens // self._size, self.sent_blocks), b"", seconds)

    async def send_rest(self, drafters: bytes, seconds: float) -> list[Sent]:
        """Send what the drafters know, and all that is left; the sample is frozen."""
        return await self._send(len(self.exported.blocks), drafters, seconds)

    @property
    def _size(self) -> int:
        return self.place.geometry.block_size

    async def _send(self, end: int, drafters: bytes, seconds: float) -> list[Sent]:
        size, begin, exported = self._size, self.sent_blocks, self.exported
        tokens = min(end * size, exported.tokens) - begin * size
        part = Part(begin * size, max(tokens, 0), exported.blocks[begin:end], drafters)
        reserved = self._reserved
        sent = await self.place.ports.send(
            self.migration_id, reserved.data_addresses, reserved.token, seconds, part
        )
        self.sent_blocks = end
        return sent
