"""Events of a work stream on their way from the engine thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from paceline.internal.v1 import generation_pb2 as pb

MOST_BYTES = 1 << 20
"""Size to which responses are merged: far below the size limit of messages, and quickly read by the gateway."""

OutboxEvent = pb.WorkResponse | Exception | None


class ResponseOutbox:
    """Responses that the caller of a stream has not taken yet. None or an exception ends the stream.

    While a response waits for a slow caller, those that follow are merged into it: one delta a sample and policy
    version, one load. So what waits is bounded by the tokens of the samples that the caller has started, however
    long it takes. Filled by any thread, emptied by the event loop.
    """

    def __init__(self, events: asyncio.AbstractEventLoop) -> None:
        self._events = events
        self._news = asyncio.Event()
        self._lock = threading.Lock()
        self._waiting: deque[OutboxEvent] = deque()
        # Of the last response that waits: its size, and once something was merged into it, its deltas by handle.
        self._bytes = 0
        self._deltas: dict[int, pb.Delta] = {}

    def put(self, event: OutboxEvent) -> None:
        """Append an event; from any thread. The caller must not use a response after this."""
        with self._lock:
            is_first = not self._waiting
            last = self._waiting[-1] if self._waiting else None
            size = event.ByteSize() if isinstance(event, pb.WorkResponse) else MOST_BYTES + 1
            if last is None or self._bytes + size > MOST_BYTES:
                self._waiting.append(event)
                self._bytes, self._deltas = size, {}
            elif isinstance(event, pb.WorkResponse) and isinstance(last, pb.WorkResponse):
                self._merge(last, event)
                self._bytes += size
        if is_first:
            self._events.call_soon_threadsafe(self._news.set)

    async def get(self) -> OutboxEvent:
        """Take out the next event, once there is one. For one caller at a time."""
        while True:
            self._news.clear()
            if not self.empty():
                return self.get_nowait()
            await self._news.wait()

    def get_nowait(self) -> OutboxEvent:
        """Take out the next event; IndexError if there is none."""
        with self._lock:
            return self._waiting.popleft()

    def empty(self) -> bool:
        """Return True if no event waits."""
        return not self._waiting

    def _merge(self, last: pb.WorkResponse, event: pb.WorkResponse) -> None:
        if not self._deltas:
            self._deltas = {delta.handle: delta for delta in last.deltas}
        for delta in event.deltas:
            known = self._deltas.get(delta.handle)
            # Tokens of another version stay apart, after those before them.
            if known is None or known.policy_version != delta.policy_version:
                self._deltas[delta.handle] = last.deltas.add()
                self._deltas[delta.handle].CopyFrom(delta)
            else:
                # Appends to its lists.
                known.MergeFrom(delta)
        last.finished.extend(event.finished)
        last.refused.extend(event.refused)
        last.moved.extend(event.moved)
        last.load.CopyFrom(event.load)
        last.policy_version = event.policy_version
