"""Elect one of several processes as the leader: it has a term while it holds a lease in Redis."""

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

from services.contracts.errors import ServiceError, Unavailable
from services.platform.config import LeaderConfig
from services.platform.redis.connection import OUTAGES, Refused, connect, reason_of, show_outage
from services.platform.tasks import end, is_cancelled

log = structlog.get_logger(__name__)

# Longest time that a stopping process waits for Redis to release its lease.
_RELEASE_SECONDS = 2.0

# KEYS: lease, the highest term given out, the holder's address. ARGV: own term (0 for none), highest term known,
# milliseconds, own address (empty for none).
# Takes a free lease under a new term, or renews an own one, even an expired one if no later term was given out.
# Terms ascend even if Redis has lost the counter, because they are at least the unix time.
# Returns 1 and the term if the lease is held now; else 0, the term of its current or later holder, and the address
# of the current holder.
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

# KEYS: lease, the holder's address. ARGV: own term, milliseconds. Extends the lease, even in a full Redis.
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
    """Term and address of a process that leads; the address is empty if it publishes none."""

    term: int
    address: str


class Term(Protocol):
    """Work of the leader, from its election to the loss of the lease."""

    async def run(self) -> None:
        """Work until cancelled or fenced, which Unavailable may report."""


T = TypeVar("T", bound=Term)
R = TypeVar("R")


async def _ignore(_change: object) -> None:
    pass


async def _nothing() -> None:
    pass


def in_short(error: Exception) -> str:
    """Return what an error means for whoever cannot lead: without addresses, since callers and probes see it."""
    if isinstance(error, OUTAGES):
        return f"Redis cannot be used: {reason_of(error)}"
    if isinstance(error, ServiceError):
        return str(error)
    return (
        f"what the leader needs in Redis cannot be read: {type(error).__name__}, see the log of this process"
    )


class Leadership(Generic[T]):
    """A process that leads or is a standby; `run` until cancelled.

    A separate thread renews the lease, so that a long turn of the event loop does not lose it; it stops once the
    loop has been blocked for `stall_seconds`. A process that cannot open its term gives the lease back, so that
    another one can lead. A standby checks again and again whether it could lead.
    """

    def __init__(
        self,
        who: str,
        config: LeaderConfig,
        key: str,
        open: Callable[[int], Awaitable[T]],
        changed: Callable[[bool], Awaitable[None]],
        unfit: Callable[[str], Awaitable[None]] = _ignore,
        followed: Callable[[Leader | None], Awaitable[None]] = _ignore,
        address: Callable[[], str] = lambda: "",
        check: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        """Prepare to lead.

        Args:
            who: name of the process in errors.
            config: settings of the lease and of Redis.
            key: Redis key of the lease.
            open: makes a term from its number, which fences its writes. After an error of Redis or Unavailable the
                lease is given back, and this process tries again after others could take it.
            changed: receives True when a term begins, and False when it is over, before its work is ended, so that
                nothing more is promised in its name.
            unfit: receives why this process could not lead now, or cannot renew its lease; empty when it can again.
            followed: receives the leader when another process leads or that changes, and None when this process
                has the lease.
            address: returns the address at which others reach this process.
            check: reads what `open` reads first, and raises its errors. A standby calls it before it follows a
                leader, and then every `lease_seconds`.
        """
        self.term: T | None = None
        self._who = who
        self._config = config
        self._redis = connect(config)
        self._lease = Lease(self._redis, key, config.lease_seconds, self._alive, address)
        self._open = open
        self._changed = changed
        self._tell_unfit = unfit
        self._followed = followed
        self._check = check
        self._unfit = ""
        # The last term could not be opened, for a reason that `check` may not see.
        self._unopened = False
        self._checked = False
        # The last report: why this process is unfit, and who leads.
        self._reported: tuple[str, Leader | None] = ("", None)
        self._reporting = asyncio.Lock()
        self._turned_at = time.monotonic()

    @property
    def unfit(self) -> str:
        """Why this process could not lead now, or cannot renew its lease; empty if nothing is known against it."""
        return self._lease.outage or self._unfit

    def leading(self) -> T:
        """Return the current term; Unavailable while another process leads."""
        if self.term is None:
            stands = "is about to lead" if self._lease.term else "stands by for another one"
            does = f"cannot lead: {self.unfit}" if self.unfit else stands
            raise Unavailable(f"this {self._who} {does}", retry_after=1.0)
        return self.term

    async def run(self) -> NoReturn:
        """Lead whenever the lease is free, until cancelled. Raises the errors of the work."""
        thread = _LoopThread("lease")
        watching = [
            asyncio.create_task(self._turn(), name="lease-turn"),
            asyncio.create_task(self._examine(), name="lease-check"),
        ]
        try:
            while True:
                try:
                    await self._lead(await thread.run(self._lease.acquire()), thread)
                finally:
                    await thread.run(self._lease.release())
                if self._unopened:
                    # Standbys ask for the lease several times meanwhile.
                    await asyncio.sleep(self._config.lease_seconds / 2)
        finally:
            try:
                await end(watching)
                await thread.run(self._redis.aclose())
            finally:
                thread.close()

    async def _lead(self, term: int, thread: _LoopThread) -> None:
        holding = asyncio.create_task(thread.run(self._lease.hold()), name="lease")
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
        """Show the thread that the event loop runs, and report what has changed."""
        while True:
            self._turned_at = time.monotonic()
            await self._report()
            await asyncio.sleep(self._config.lease_seconds / 8)

    async def _report(self) -> None:
        """Report why this process is unfit to lead, and who else leads, if either has changed."""
        async with self._reporting:
            unfit, leader = self._reported
            if unfit != self.unfit:
                unfit = self.unfit
                await self._tell_unfit(unfit)
            now = self._lease.leader
            if leader != now and (self._checked or now is None):
                leader = now
                await self._followed(leader)
            self._reported = unfit, leader

    async def _examine(self) -> None:
        """Check while another process leads whether a term could be opened here."""
        before: Leader | None = None
        due = 0.0
        while not is_cancelled():
            leader = self._lease.leader
            if leader is None:
                before, due = None, 0.0
            elif time.monotonic() >= due:
                found = await self._problem()
                if self._lease.leader == leader:
                    # A term that could not be opened is forgotten once another process has led for a while.
                    if found or not self._unopened or before == leader:
                        self._unfit, self._unopened = found, False
                    before, due, self._checked = leader, time.monotonic() + self._config.lease_seconds, True
                    await self._report()
            await asyncio.sleep(self._config.lease_seconds / 8)

    async def _problem(self) -> str:
        """Return why a term could not be opened now; empty if nothing is known."""
        try:
            await self._check()
        except Exception as error:
            if not self._unfit:
                log.warning("unfit_to_lead", error=str(error), kind=type(error).__name__)
            return in_short(error)
        return ""

    def _alive(self) -> bool:
        return time.monotonic() - self._turned_at < self._config.stall_seconds

    async def _work(self, term: int) -> None:
        try:
            self.term = await self._open(term)
        except (RedisError, Unavailable) as error:
            log.warning("term_not_opened", term=term, error=str(error))
            self._unfit, self._unopened = in_short(error), True
            await self._report()
            return
        self._unfit, self._unopened = "", False
        await self._report()
        await self._changed(True)
        log.info("leading", term=term)
        await self.term.run()

    async def _step_down(self) -> None:
        if self.term is not None:
            self.term = None
            await self._changed(False)


class Lease:
    """A lease that one process holds at a time, for `seconds` after its last renewal.

    Its holder gets a `term` higher than all earlier ones, including those that Redis has lost. In an outage of
    Redis no other process can take the lease, so the holder continues. Writes that two holders must not both make
    must be fenced: checked against the lease when they are made.
    """

    def __init__(
        self,
        redis: Redis,
        key: str,
        seconds: float,
        alive: Callable[[], bool] = lambda: True,
        address: Callable[[], str] = lambda: "",
    ) -> None:
        """`key` has a hash tag, so that the counter of terms is in the same slot of a cluster.

        The lease is renewed only while `alive` returns True. Other processes see the `address` of the holder.
        """
        self.term = 0
        self.leader: Leader | None = None
        """Another process that holds the lease, as of the last attempt."""
        self.outage: str = ""
        """Error of the last attempt to take or renew the lease; empty if Redis answered."""
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
        self.term = reported = 0
        while not is_cancelled():
            own, term = await self._take() or (False, reported)
            if own:
                return term
            if term != reported:
                log.info("standing_by", leader=term)
                reported = term
            await asyncio.sleep(self._seconds / 10)
        raise asyncio.CancelledError

    async def hold(self) -> int:
        """Renew the lease until another process has taken it; return the term of that process."""
        while not is_cancelled():
            # After an outage the holder must be faster than the standbys.
            await asyncio.sleep(self._seconds / (20 if self.outage else 4))
            if not self._alive():
                log.error("lease_let_go", term=self.term)
                continue
            taken = await self._take()
            if taken is not None and not taken[0]:
                return taken[1]
        raise asyncio.CancelledError

    async def release(self) -> None:
        """Release the lease, so that a standby takes over at once; in an outage of Redis it expires by itself."""
        try:
            async with asyncio.timeout(_RELEASE_SECONDS), self._lock:
                await self._redis.eval(_RELEASE, 2, self._key, self._address_key, str(self.term))
        except (RedisError, TimeoutError) as error:
            log.warning("lease_not_released", error=str(error))

    async def _take(self) -> tuple[bool, int] | None:
        """Return whether this process holds the lease, and the term of the holder; None in an outage of Redis."""
        # Shielded from cancellation: a lease that was taken must be known, to be released.
        return await asyncio.shield(asyncio.ensure_future(self._take_now()))

    async def _take_now(self) -> tuple[bool, int] | None:
        milliseconds = int(self._seconds * 1000)
        keys = (self._key, f"{self._key}:term", self._address_key)
        arguments = (self.term, self._highest, milliseconds, self._address())
        async with self._lock:
            try:
                own, term, address = await self._redis.eval(_TAKE, len(keys), *keys, *arguments)
            except OUTAGES as error:
                if not self.outage:
                    log.warning("lease_unreachable", error=str(error))
                self.outage = in_short(error)
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


class _LoopThread:
    """An event loop in a separate thread, which runs while the caller's loop is blocked."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run work in the thread; a cancellation is passed to it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
