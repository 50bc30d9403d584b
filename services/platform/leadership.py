"""Terms of leadership, one after the other: of several processes the one that has the lease acts."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Generic, NoReturn, Protocol, TypeVar

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.platform.errors import Unavailable
from services.platform.lease import Lease
from services.platform.tasks import end

log = structlog.get_logger(__name__)

_OPEN_PAUSE = 0.5


class Term(Protocol):
    """All that must not be done by two processes at once."""

    async def run(self) -> None:
        """Works until cancelled, or until another process has taken over: Unavailable, or none, says so."""


T = TypeVar("T", bound=Term)


class Leadership(Generic[T]):
    """Leads whenever the lease is to be had. `run` until it is cancelled.

    `open` makes the term with a token, which is to fence what it writes; while that raises what Redis raises, or
    Unavailable, it is tried again. `changed` is told that a term begins (True), and that it is over (False): before
    its work is ended, so that nothing more is promised in its name.
    """

    def __init__(
        self,
        who: str,
        redis: Redis,
        key: str,
        seconds: float,
        open: Callable[[str], Awaitable[T]],
        changed: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`who` is what users call the process; `key` and `seconds` are the lease's."""
        self.term: T | None = None
        self._who = who
        self._redis = redis
        self._key = key
        self._seconds = seconds
        self._open = open
        self._changed = changed

    def leading(self) -> T:
        """What this process leads with; Unavailable while another one leads."""
        if self.term is None:
            raise Unavailable(f"this {self._who} stands by for another one", retry_after=1.0)
        return self.term

    async def run(self) -> NoReturn:
        """Leads and stands by until cancelled. Raises what the work raises."""
        while True:
            # A new token each term, so that nothing left over from an earlier one can write.
            lease = Lease(self._redis, self._key, uuid.uuid4().hex, self._seconds)
            try:
                await lease.acquire()
                await self._lead(lease)
            finally:
                await lease.release()

    async def _lead(self, lease: Lease) -> None:
        holding = asyncio.create_task(lease.hold(), name="lease")
        working = asyncio.create_task(self._work(lease.token), name="term")
        try:
            await asyncio.wait((holding, working), return_when=asyncio.FIRST_COMPLETED)
            if holding.done():
                log.warning("lease_lost", to=holding.result())
            else:
                working.result()
        except Unavailable as error:
            log.warning("fenced", reason=str(error))
        finally:
            try:
                await self._step_down()
            finally:
                await end((working, holding))

    async def _work(self, token: str) -> None:
        self.term = await self._opened(token)
        await self._changed(True)
        log.info("leading", token=token)
        await self.term.run()

    async def _opened(self, token: str) -> T:
        while True:
            try:
                return await self._open(token)
            except (RedisError, Unavailable) as error:
                log.warning("term_not_opened", error=str(error))
                await asyncio.sleep(_OPEN_PAUSE)

    async def _step_down(self) -> None:
        if self.term is not None:
            self.term = None
            await self._changed(False)
