"""Leadership of one of several processes: terms, one after another, while it holds a lease in Redis."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.contracts.errors import Unavailable
from services.platform.config import LeaderConfig
from services.platform.redis.connection import OUTAGES, Refused, connect, show_outage
from services.platform.tasks import end, is_cancelled

log = structlog.get_logger(__name__)

_OPEN_PAUSE = 0.5
# Longest time that a process which ends waits for Redis to release its lease.
_RELEASE_SECONDS = 2.0

# KEYS: lease, the highest term given out, the holder's address. ARGV: own term (0 for none), highest term known,
# milliseconds, own address (empty for none).
# Takes a free lease under a new term, or renews an own one, also one that has expired if no later term was
# given out. Terms ascend even where Redis has lost the counter, because they are at least the unix time.
# Returns 1 if the lease is held now and its term; else 0, the term of who has it or had it later, and the address
# of who has it.
_TAKE = """
local holder = redis.call('GET', KEYS[1])
local given = tonumber(redis.call('GET', KEYS[2]) or '0')
local mine = tonumber(ARGV[1])
if holder and (mine == 0 or tonumber(holder) ~= mine) then
  return {0, tonumber(holder) or 0, redis.call('GET', KEYS[3]) or ''}
end
if mine == 0 then
  mine = math.max(given, tonumber(ARGV[2]), tonumber(redis.call('TIME')[1]) - 1) + 1
elseif given > mine then
  return {0, given, ''}
end
local term = string.format('%d', mine)
if given ~= mine then redis.call('SET', KEYS[2], term) end
redis.call('SET', KEYS[1], term, 'PX', ARGV[3])
if ARGV[4] ~= '' then redis.call('SET', KEYS[3], ARGV[4], 'PX', ARGV[3]) end
return {1, mine, ''}
"""

# KEYS: lease, the holder's address. ARGV: own term, milliseconds. What a full Redis still takes.
_KEEP = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

# KEYS: lease, the holder's address. ARGV: own term.
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1], KEYS[2]) end
return 0
"""


@dataclass(frozen=True, slots=True)
class Leader:
    """A process that leads, by its term, and its address; empty where it gives none."""

    term: int
    address: str


class Lease:
    """A lease that one process holds at a time, for `seconds` after its last renewal.

    Who takes it gets a `term`, higher than all before, also than those that Redis has forgotten. In an outage of
    Redis no other process can take the lease, so its holder continues. Writes that two holders must not both make
    have to be fenced: checked against the lease when they are made.
    """

    def __init__(
        self,
        redis: Redis,
        key: str,
        seconds: float,
        alive: Callable[[], bool] = lambda: True,
        address: Callable[[], str] = lambda: "",
    ) -> None:
        """`key` has a hash tag, so that the counter of terms lies in the same slot of a cluster.

        The lease is renewed only while its holder is `alive`. Others see the `address` of the holder.
        """
        self.term = 0
        self.leader: Leader | None = None
        """Another process that has the lease, as far as is known."""
        self.outage: str = ""
        """Why Redis did not take the lease or its renewal last time; empty if it did."""
        self._redis: Any = redis
        self._key = key
        self._seconds = seconds
        self._alive = alive
        self._address = address
        self._highest = 0
        self._lock = asyncio.Lock()
        self._address_key = f"{key}:address"

    async def acquire(self) -> int:
        """Wait until the lease is held and return the new term."""
        self.term = told = 0
        while not is_cancelled():
            own, term = await self._take() or (False, told)
            if own:
                return term
            if term != told:
                log.info("standing_by", leader=term)
                told = term
            await asyncio.sleep(self._seconds / 10)
        raise asyncio.CancelledError

    async def hold(self) -> int:
        """Renew the lease until another process has it or had it; return that one's term."""
        while not is_cancelled():
            # After an outage the holder comes before those who stand by.
            await asyncio.sleep(self._seconds / (20 if self.outage else 4))
            if not self._alive():
                log.error("lease_let_go", term=self.term)
                continue
            taken = await self._take()
            if taken is not None and not taken[0]:
                return taken[1]
        raise asyncio.CancelledError

    async def release(self) -> None:
        """Release the lease, so that a standby takes over at once. In an outage of Redis it expires by itself."""
        try:
            async with asyncio.timeout(_RELEASE_SECONDS), self._lock:
                await self._redis.eval(_RELEASE, 2, self._key, self._address_key, str(self.term))
        except (RedisError, TimeoutError) as error:
            log.warning("lease_not_released", error=str(error))

    async def _take(self) -> tuple[bool, int] | None:
        """Return whether the lease is held and the term of its holder; None in an outage of Redis."""
        # To its end even if the caller is cancelled: a lease that was taken must be known, to be released.
        return await asyncio.shield(asyncio.ensure_future(self._taken()))

    async def _taken(self) -> tuple[bool, int] | None:
        milliseconds = int(self._seconds * 1000)
        keys = (self._key, f"{self._key}:term", self._address_key)
        given = (self.term, self._highest, milliseconds, self._address())
        async with self._lock:
            try:
                own, term, address = await self._redis.eval(_TAKE, len(keys), *keys, *given)
            except OUTAGES as error:
                if not self.outage:
                    log.warning("lease_unreachable", error=str(error))
                self.outage = str(error) or type(error).__name__
                show_outage(error)
                if isinstance(error, Refused) and self.term:
                    with suppress(*OUTAGES):
                        mine = (self._key, self._address_key)
                        await self._redis.eval(_KEEP, len(mine), *mine, str(self.term), milliseconds)
                return None
            self.outage = ""
            self.leader = None if own else Leader(term, address.decode())
            show_outage(None)
            self._highest = max(self._highest, term)
            if own:
                self.term = term
        return bool(own), term


class Term(Protocol):
    """Work that only the leader does, from failover to the loss of the lease."""

    async def run(self) -> None:
        """Work until cancelled or fenced, which Unavailable may report."""


T = TypeVar("T", bound=Term)
R = TypeVar("R")


async def _ignore(told: object) -> None:
    pass


class _OwnLoop:
    """An event loop in a thread of its own, which turns while that of the caller is blocked."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Do work in the thread; a cancellation reaches it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Leadership(Generic[T]):
    """Leader or standby. `run` until cancelled.

    `open` makes a term with its number, which fences what it writes; it is tried again after an error of Redis
    or Unavailable. `changed` receives True when a term begins, and False when it is over, before its work is ended,
    so that nothing more is promised in its name. `store` receives False when Redis does not take the lease because
    of an outage, and True when it does again. `followed` receives the leader for which this process stands by,
    whenever that changes, and None when this process has the lease; `address` returns where others reach it.

    The lease is kept by a thread, however long a turn of the event loop is; but not for a loop that has been
    blocked for `stall_seconds`.
    """

    def __init__(
        self,
        who: str,
        config: LeaderConfig,
        key: str,
        open: Callable[[int], Awaitable[T]],
        changed: Callable[[bool], Awaitable[None]],
        store: Callable[[bool], Awaitable[None]] = _ignore,
        followed: Callable[[Leader | None], Awaitable[None]] = _ignore,
        address: Callable[[], str] = lambda: "",
    ) -> None:
        """`who` names the process in errors; `key` is that of the lease."""
        self.term: T | None = None
        self._who = who
        self._config = config
        self._redis = connect(config)
        self._lease = Lease(self._redis, key, config.lease_seconds, self._alive, address)
        self._open = open
        self._changed = changed
        self._store = store
        self._followed = followed
        self._turned_at = time.monotonic()

    def leading(self) -> T:
        """Return the current term; Unavailable while another process leads."""
        if self.term is None:
            raise Unavailable(f"this {self._who} stands by for another one", retry_after=1.0)
        return self.term

    async def run(self) -> NoReturn:
        """Lead and stand by in turns until cancelled. Raises the errors of the work."""
        own, turning = _OwnLoop("lease"), asyncio.create_task(self._turn(), name="lease-turn")
        try:
            while True:
                try:
                    await self._lead(await own.run(self._lease.acquire()), own)
                finally:
                    await own.run(self._lease.release())
        finally:
            try:
                await end([turning])
                await own.run(self._redis.aclose())
            finally:
                own.close()

    async def _lead(self, term: int, own: _OwnLoop) -> None:
        holding = asyncio.create_task(own.run(self._lease.hold()), name="lease")
        working = asyncio.create_task(self._work(term), name="term")
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

    async def _turn(self) -> None:
        """Show that the event loop turns, and tell of outages and of other leaders."""
        usable, leader = True, None
        while True:
            self._turned_at = time.monotonic()
            if usable != (not self._lease.outage):
                usable = not usable
                await self._store(usable)
            if leader != self._lease.leader:
                leader = self._lease.leader
                await self._followed(leader)
            await asyncio.sleep(self._config.lease_seconds / 8)

    def _alive(self) -> bool:
        return time.monotonic() - self._turned_at < self._config.stall_seconds

    async def _work(self, term: int) -> None:
        self.term = await self._opened(term)
        await self._changed(True)
        log.info("leading", term=term)
        await self.term.run()

    async def _opened(self, term: int) -> T:
        while True:
            try:
                return await self._open(term)
            except (RedisError, Unavailable) as error:
                log.warning("term_not_opened", error=str(error))
                await asyncio.sleep(_OPEN_PAUSE)

    async def _step_down(self) -> None:
        if self.term is not None:
            self.term = None
            await self._changed(False)
