"""Track which KV of a moving sample has been sent, and send the rest. Runs in the event loop of the donor."""

from __future__ import annotations

import time

from paceline.internal.v1 import migration_pb2 as pb
from services.generation.kv_transfer.outgoing import KvPart, KvSent
from services.generation.migration.leaving import LeavingSample
from services.generation.migration.ports import Ports

# Fewer new whole blocks than these are not worth another round of copying: they go while the sample is paused.
_WORTH_BLOCKS = 2


class Shipment:
    """KV of one sample on its way to a receiver that has reserved room for it."""

    def __init__(
        self,
        migration_id: str,
        sample: LeavingSample,
        ports: Ports,
        block_size: int,
        reserved: pb.Reservation,
    ) -> None:
        self._migration_id = migration_id
        self._sample = sample
        self._ports = ports
        self._size = block_size
        self._reserved = reserved
        # Blocks that have been sent or need not be.
        self._sent_blocks = reserved.shared_blocks

    @property
    def may_have_grown(self) -> bool:
        """True if enough new whole blocks should be there by now to send them while the sample decodes."""
        sample = self._sample
        tokens = sample.exported.tokens + sample.rate * (time.monotonic() - sample.looked_at)
        return int(tokens) // self._size - self._sent_blocks >= _WORTH_BLOCKS

    async def send_whole(self, seconds: float) -> list[KvSent]:
        """Send the whole blocks, which no step writes to any more; without any, only connect."""
        return await self._send(
            max(self._sample.exported.tokens // self._size, self._sent_blocks), b"", seconds
        )

    async def send_rest(self, drafters: bytes, seconds: float) -> list[KvSent]:
        """Send the state of the drafters and all remaining KV of the paused sample."""
        return await self._send(len(self._sample.exported.blocks), drafters, seconds)

    async def _send(self, end: int, drafters: bytes, seconds: float) -> list[KvSent]:
        size, begin, exported = self._size, self._sent_blocks, self._sample.exported
        tokens = min(end * size, exported.tokens) - begin * size
        part = KvPart(begin * size, max(tokens, 0), exported.blocks[begin:end], drafters)
        reserved = self._reserved
        sent = await self._ports.send(
            self._migration_id, reserved.data_addresses, reserved.token, seconds, part
        )
        self._sent_blocks = end
        return sent
