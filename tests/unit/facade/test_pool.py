"""Workers of the facade, as real processes: killed at their deadline, with their caller, and with the facade."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from paceline.errors import DeadlineExceededError
from services.contracts.errors import InvalidArgument, ResourceExhausted, Unavailable
from services.facade.work import pool as module
from services.facade.work.pool import WorkerPool, WorkersFailed, WorkFailed
from tests.support import work

MIB = 1 << 20
SMALL, MEDIUM, LARGE = 10, 100_000, 2_000_000


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[WorkerPool]:
    made = WorkerPool(workers=2, seconds=60.0, memory_bytes=256 * MIB, most_waiting=2)
    yield made
    await made.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.01)


async def hanging(pool: WorkerPool, told: Path, size: int) -> tuple[asyncio.Task[None], int]:
    """Return work that hangs, and its process."""
    task = asyncio.create_task(pool.run(work.hang, told, size=size))
    await until(lambda: told.exists() or task.done())
    return task, number_in(told)


def number_in(told: Path) -> int:
    """Return the process that a file tells, and remove it."""
    found = int(told.read_text())
    told.unlink()
    return found


async def test_a_worker_that_hangs_is_killed_and_holds_up_no_small_work(
    pool: WorkerPool, tmp_path: Path
) -> None:
    task, process = await hanging(pool, tmp_path / "told", MEDIUM)
    # The other process does small work, which passes by what is larger.
    waits = asyncio.create_task(pool.run(work.pid, size=LARGE))
    other = await pool.run(work.pid, size=SMALL)
    assert other != process
    assert not waits.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not psutil.pid_exists(process))
    assert await waits != process
    assert psutil.pid_exists(other)
    pool._seconds = 0.2
    with pytest.raises(DeadlineExceededError, match="work_seconds"):
        await pool.run(work.hang, tmp_path / "told", size=SMALL)
    killed = number_in(tmp_path / "told")
    await until(lambda: not psutil.pid_exists(killed))
    pool._seconds = 60.0
    assert await pool.run(work.pid, size=SMALL) != process


async def test_work_that_fails_fails_alone(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkFailed, match="a defect"):
        await pool.run(work.fail, size=SMALL)
    assert await pool.run(work.take, 64 * MIB, size=SMALL) == 64 * MIB
    with pytest.raises(InvalidArgument, match="work_memory_bytes"):
        await pool.run(work.take, 512 * MIB, size=LARGE)
    for _ in range(3):
        with pytest.raises(Unavailable, match="died"):
            await pool.run(work.die, size=LARGE)
    # It has one socket: no port of the facade, nor the pipe of another worker.
    assert len(await pool.run(work.sockets, size=SMALL)) == 1
    held, _ = await hanging(pool, tmp_path / "told", LARGE)
    waiting = [asyncio.create_task(pool.run(work.pid, size=LARGE)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="the most is 2"):
        await pool.run(work.pid, size=LARGE)
    held.cancel()
    assert len(await asyncio.gather(*waiting)) == 2
    # What forks the workers may die as well.
    assert pool._process is not None
    pool._process.kill()
    await until(lambda: pool._process is None or pool._process.poll() is not None)
    while True:
        try:
            assert await pool.run(work.pid, size=SMALL)
        except Unavailable:
            continue  # A worker that was taken before it died with it.
        break


_FACADE = """
import asyncio, sys
from pathlib import Path
from services.facade.work import pool as module
from services.facade.work.pool import WorkerPool
from tests.support import work

async def main():
    pool = WorkerPool(workers=2)
    print(await pool.run(work.pid, size=1), pool._process.pid, flush=True)
    await pool.run(work.hang, Path(sys.argv[1]), size=1)

asyncio.run(main())
"""


async def test_workers_end_with_the_facade_even_when_it_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "told"
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", _FACADE, str(told)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        await until(told.exists)
        processes = {*map(int, line.split()), number_in(told)}
        assert all(psutil.pid_exists(each) for each in processes)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    await until(lambda: not any(psutil.pid_exists(each) for each in processes))


async def test_a_pool_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "tied", lambda _: ["false"])
    with pytest.raises(WorkersFailed, match="died"):
        await WorkerPool().start()


async def test_a_process_that_dies_before_it_is_told_anything_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.wait()

    monkeypatch.setattr(module, "tied", lambda _: ["false"])
    monkeypatch.setattr(module.subprocess, "Popen", Ended)
    pool = WorkerPool()
    pool.launch()
    with pytest.raises(WorkersFailed, match="died"):
        await pool.start()
