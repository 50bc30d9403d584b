"""Run jobs in worker processes, one at a time in each, with a deadline after which the worker is killed.

Callers take turns at the workers. The pools of `concurrent.futures` and `pebble` break permanently when the kernel
kills a worker that is out of memory, which a hostile request may provoke. Here each worker has its own socket.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from paceline.errors import DeadlineExceededError, Violation
from services.contracts.errors import InvalidArgument, ResourceExhausted, Unavailable
from services.facade.work.process import (
    ANSWER,
    DONE,
    DONE_BYTES,
    FAILED,
    FORK,
    KILL,
    LONGEST_MESSAGE,
    NO_MEMORY,
    PID,
    READY,
    REQUEST,
)
from services.platform.launching import tied

log = structlog.get_logger(__name__)

_ENVIRONMENT = {"RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}
_MEDIUM, _LARGE = 64 * 1024, 1024 * 1024
"""Bytes beyond which a job may take long, and much memory. One worker never gets such jobs, so that small
requests are not delayed. Only one large job runs at a time, so that at least one of three workers is left for
medium ones."""
_MEMORY_BELOW_LARGE = 192 * 1024 * 1024

_Waiting = deque[tuple[int, "asyncio.Future[None]"]]


class FairSemaphore:
    """Bounded number of units. Waiting callers take turns, so that one with many requests keeps no other out."""

    def __init__(self, most: int, share: int | None = None) -> None:
        """Allow `most` units in total, and `share` to a caller except by a single request; None: all of them."""
        self._most = most
        self._share = most if share is None else share
        self._held: Counter[str] = Counter()
        self._total = 0
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()

    @asynccontextmanager
    async def hold(self, caller: str, count: int = 1) -> AsyncIterator[None]:
        """Hold units within the context. A request for more than `most` units waits until no unit is held."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append((count, turn))
        self._give()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._add(caller, -count)
            self._give()

    def _give(self) -> None:
        """Give turns to waiting callers while units are left."""
        skipped = 0
        while skipped < len(self._waiting):
            caller, waiting = next(iter(self._waiting.items()))
            self._waiting.move_to_end(caller)
            while waiting and waiting[0][1].done():
                waiting.popleft()
            if not waiting:
                del self._waiting[caller]
                continue
            count, turn = waiting[0]
            if self._held[caller] and self._held[caller] + count > self._share:
                skipped += 1
                continue
            if self._total and self._total + count > self._most:
                # Keep it first, because smaller requests of others could keep it out forever.
                self._waiting.move_to_end(caller, last=False)
                return
            waiting.popleft()
            skipped = 0
            self._add(caller, count)
            turn.set_result(None)

    def _add(self, caller: str, count: int) -> None:
        self._total += count
        self._held[caller] += count
        if not self._held[caller]:
            del self._held[caller]


class WorkersFailed(Exception):
    """Raised if the workers cannot start; the message has the reason."""


class WorkFailed(Exception):
    """Raised if a job fails by a defect; the message is the worker's traceback."""


class _Died(Exception):
    pass


@dataclass(slots=True, eq=False)
class _Worker:
    pid: int
    pipe: socket.socket
    control: socket.socket
    """Control socket of the process that forked it."""

    async def ask(self, request: bytes, memory: int) -> tuple[bytes, bytearray]:
        """Return the status and the bytes of an answer. _Died if the worker is gone."""
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.pipe, REQUEST.pack(memory, len(request)))
            await loop.sock_sendall(self.pipe, request)
            status, size = ANSWER.unpack(await self._received(ANSWER.size))
            return status, await self._received(size)
        except OSError as error:
            raise _Died from error

    async def _received(self, size: int) -> bytearray:
        loop, found, got = asyncio.get_running_loop(), bytearray(size), 0
        view = memoryview(found)
        while got < size:
            if not (count := await loop.sock_recv_into(self.pipe, view[got:])):
                raise _Died
            got += count
        return found


class WorkerPool:
    """Worker processes of an event loop. They start with the first job, or with `start`."""

    def __init__(
        self,
        model: Path | None = None,
        workers: int | None = None,
        seconds: float = 30.0,
        memory_bytes: int = 768 * 1024 * 1024,
        most_waiting: int = 16384,
    ) -> None:
        """Use `workers` processes; None: one a core, from 3 to 4."""
        count = workers or max(3, min(4, len(os.sched_getaffinity(0))))
        self._model = model
        self._memory_bytes = memory_bytes
        self._seconds = seconds
        self._most_waiting = most_waiting
        self._waiting = 0
        self._free = FairSemaphore(count)
        self._free_for_medium = FairSemaphore(count - 1)
        self._free_for_large = FairSemaphore(1)
        self._idle: list[_Worker] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False
        self._lock = asyncio.Lock()

    def launch(self) -> None:
        """Start the process that loads the tokenizer, which takes seconds, and do not wait for it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Tied to the thread that starts it, so not started through the loop's own helper.
            self._process = subprocess.Popen(
                tied([sys.executable, "-m", "services.facade.work.process", str(theirs.fileno())]),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
        self._control, self._ready = ours, False
        ours.setblocking(False)
        # If the process has died already, the reader of its answer finds out.
        with suppress(OSError):
            ours.send(pickle.dumps(self._model))

    async def start(self) -> None:
        """Start the workers, unless they are running. WorkersFailed if they cannot start."""
        async with self._lock:
            await self._started()

    async def stop(self) -> None:
        """Kill all processes; running jobs fail."""
        for worker in self._idle:
            worker.pipe.close()
        self._idle.clear()
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def run(self, work: Callable[..., Any], *arguments: Any, size: int, caller: str = "") -> Any:
        """Return the result of `work(tokenizer, *arguments)`, a job on about `size` bytes.

        Callers take turns. The worker is killed when the deadline passes or this is cancelled.

        ResourceExhausted: too many jobs wait. DeadlineExceededError: the job took too long. InvalidArgument: it
        needs too much memory. Unavailable: its worker died. WorkFailed: it raised.
        """
        memory = self._memory_bytes if size > _LARGE else min(self._memory_bytes, _MEMORY_BELOW_LARGE)
        async with self._turn(size, caller):
            request = pickle.dumps((work, arguments), pickle.HIGHEST_PROTOCOL)
            status, answer = await self._ask(request, memory)
        if status == DONE:
            return pickle.loads(answer)
        if status == DONE_BYTES:
            return answer
        if status == NO_MEMORY:
            raise self._too_much()
        raise WorkFailed(answer.decode())

    @asynccontextmanager
    async def _turn(self, size: int, caller: str) -> AsyncIterator[None]:
        if self._waiting >= self._most_waiting:
            found = f"{self._waiting} requests wait to be read or written; the most is {self._most_waiting}"
            raise ResourceExhausted("waiting_work", found, 1.0)
        async with AsyncExitStack() as held:
            self._waiting += 1
            try:
                if size > _LARGE:
                    await held.enter_async_context(self._free_for_large.hold(caller))
                if size > _MEDIUM:
                    await held.enter_async_context(self._free_for_medium.hold(caller))
                await held.enter_async_context(self._free.hold(caller))
            finally:
                self._waiting -= 1
            yield

    async def _ask(self, request: bytes, memory: int) -> tuple[bytes, bytearray]:
        worker = await self._taken()
        kept = False
        try:
            async with asyncio.timeout(self._seconds):
                answer = await worker.ask(request, memory)
            kept = True
            return answer
        except TimeoutError:
            log.warning("work_took_too_long", seconds=self._seconds, bytes=len(request))
            found = f"reading or writing it took longer than {self._seconds:g} s, the facade's work_seconds"
            raise DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, found) from None
        except _Died:
            log.warning("worker_died", bytes=len(request))
            raise Unavailable("the worker of the request died, perhaps for want of memory") from None
        finally:
            if kept:
                self._idle.append(worker)
            else:
                self._kill(worker)

    async def _taken(self) -> _Worker:
        """Return an idle worker that is not known to be dead, or a new one."""
        while self._idle:
            worker = self._idle.pop()
            if not _closed(worker.pipe):
                return worker
            self._kill(worker)
        forking = asyncio.create_task(self._new())
        try:
            # Shielded, because the caller may leave; another one can use the worker.
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(self._keep)
            raise

    async def _new(self) -> _Worker:
        async with self._lock:
            try:
                return await self._forked(await self._started())
            except (OSError, WorkersFailed) as error:
                log.error("worker_not_started", error=str(error))
                await self.stop()
                raise Unavailable(f"no worker can be started: {error}") from error

    def _keep(self, forking: asyncio.Task[_Worker]) -> None:
        if not forking.cancelled() and forking.exception() is None:
            self._idle.append(forking.result())

    async def _started(self) -> socket.socket:
        if self._control is None or (self._ready and _closed(self._control)):
            await self.stop()
            self.launch()
        assert self._control is not None, "it was launched"
        if not self._ready:
            try:
                answer = await asyncio.get_running_loop().sock_recv(self._control, LONGEST_MESSAGE)
            except OSError:
                answer = b""
            if answer != READY:
                await self.stop()
                raise WorkersFailed(answer.removeprefix(FAILED).decode() or "the process of the workers died")
            self._ready = True
        return self._control

    async def _forked(self, control: socket.socket) -> _Worker:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                socket.send_fds(control, [FORK], [theirs.fileno()])
            answer = await asyncio.get_running_loop().sock_recv(control, PID.size)
            if not answer:
                raise WorkersFailed("the process of the workers died")
        except BaseException:
            ours.close()
            raise
        return _Worker(PID.unpack(answer)[0], ours, control)

    def _kill(self, worker: _Worker) -> None:
        worker.pipe.close()
        try:
            if self._control is worker.control:
                worker.control.send(KILL + PID.pack(worker.pid))
        except OSError:
            log.warning("worker_not_killed", pid=worker.pid, exc_info=True)

    def _too_much(self) -> InvalidArgument:
        most = self._memory_bytes
        return InvalidArgument(
            [Violation("", f"the request needs more than {most} bytes, work_memory_bytes")]
        )


def _closed(pipe: socket.socket) -> bool:
    """Return True if the other end is gone; while it lives, it sends nothing unasked."""
    try:
        pipe.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
