"""Turns of callers at something scarce: places of workers, or bytes of memory."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_Waiting = deque[tuple[int, "asyncio.Future[None]"]]


class CallerTurns:
    """So many units at once. Callers that wait take turns, so that none is kept out by another's many demands."""

    def __init__(self, most: int, share: int | None = None) -> None:
        """No caller holds more than `share`, unless by one demand; None: it may hold all of it."""
        self._most = most
        self._share = most if share is None else share
        self._held: Counter[str] = Counter()
        self._total = 0
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()

    @asynccontextmanager
    async def held(self, caller: str, count: int = 1) -> AsyncIterator[None]:
        """Hold units within the context. A demand above all that there is gets its turn when nothing is held."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append((count, turn))
        self._give()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._hold(caller, -count)
            self._give()

    def _give(self) -> None:
        """Give a turn to each caller, as far as there is something to give."""
        passed = 0
        while passed < len(self._waiting):
            caller, waiting = next(iter(self._waiting.items()))
            self._waiting.move_to_end(caller)
            while waiting and waiting[0][1].done():
                waiting.popleft()
            if not waiting:
                del self._waiting[caller]
                continue
            count, turn = waiting[0]
            if self._held[caller] and self._held[caller] + count > self._share:
                passed += 1
                continue
            if self._total and self._total + count > self._most:
                # It is the next one: others that need less would keep it out for good.
                self._waiting.move_to_end(caller, last=False)
                return
            waiting.popleft()
            passed = 0
            self._hold(caller, count)
            turn.set_result(None)

    def _hold(self, caller: str, count: int) -> None:
        self._total += count
        self._held[caller] += count
        if not self._held[caller]:
            del self._held[caller]
