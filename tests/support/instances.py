"""Generation instances as real processes, and a caller that reads what they send.

with InstanceProcess(model, redis_url, folder) as instance:
    async with calling(instance.address) as caller:
        await caller.send(start=[item(1, prompt, seed=7)])
        outcome = (await caller.ended(1))[1]
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from paceline.internal.v1 import generation_pb2 as pb
from paceline.internal.v1 import generation_pb2_grpc as rpc
from paceline.v1 import sample_pb2
from services.generation.engine.environment import RUNNER_VARIABLE
from tests.support.zygote import Forked, forked

CALL = 60.0
"""Deadline of calls and waits, in seconds: far above what anything takes."""
BREAKS_AT = 40
"""Response tokens at which the engine of `tests.support.breaking_instance` fails."""
_START_TIMEOUT = 600.0
_SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max-model-len": 512,
    "max-num-seqs": 32,
    "kv-cache-memory-bytes": 128 << 20,
    "threads-bind": "0",
    # Of engines that are tested at length; it takes a tenth of a second.
    "draft-check": False,
}


class InstanceProcess:
    """`python -m services.generation` on one core; ready when the constructor's context is entered.

    Its output is in `log`.
    """

    def __init__(
        self,
        model: Path,
        redis_url: str,
        folder: Path,
        *,
        module: str = "services.generation",
        **settings: Any,
    ) -> None:
        """`folder` is for the log and the ready file; `settings` are flags, with underscores."""
        self.log = folder / "instance.log"
        self._ready_file = folder / "ready.json"
        self._module = module
        own = {name.replace("_", "-"): value for name, value in settings.items()}
        places = {"model": model, "redis-url": redis_url, "ready-file": self._ready_file}
        self._settings = _SETTINGS | places | own
        self._process: Forked | None = None
        self.address = self.metrics_address = ""

    def launch(self) -> None:
        """Start the process, without waiting for it."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._ready_file.unlink(missing_ok=True)
        flags = [part for name, value in self._settings.items() for part in _flag(name, value)]
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", self._module, *flags]
            own = {"OMP_NUM_THREADS": "1"}
            if v2 := self._settings.get("engine") == "v2":
                own[RUNNER_VARIABLE] = "1"
            self._process = forked(command, os.environ | own, log, v2=v2)

    def wait_ready(self, timeout: float = _START_TIMEOUT) -> None:
        """Block until the process takes calls. RuntimeError with the end of its log when it does not."""
        deadline = time.monotonic() + timeout
        while not self._ready_file.exists():
            if self.running.poll() is not None or time.monotonic() > deadline:
                status = self.running.poll()
                self.kill()
                raise RuntimeError(f"the instance did not start (status {status}):\n{self.log_tail()}")
            time.sleep(0.02)
        ready = json.loads(self._ready_file.read_text())
        self.address = ready["address"]
        self.metrics_address = f"127.0.0.1:{ready['metrics_port']}"

    @property
    def running(self) -> Forked:
        """The process, once launched."""
        if self._process is None:
            raise RuntimeError("the instance was not launched")
        return self._process

    @property
    def alive(self) -> bool:
        """Whether the process was launched and has not ended."""
        return self._process is not None and self._process.poll() is None

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.running.terminate()

    def wait(self, timeout: float = CALL) -> int:
        """Exit status, once the process has ended; it is killed when it does not within `timeout` seconds."""
        try:
            return self.running.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """End the process as a crash would."""
        self.running.kill()
        self.running.wait()

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name and labels, as they stand in the exposition text."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def log_tail(self, lines: int = 30) -> str:
        """Return the end of what the process wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Self:
        self.launch()
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process if it is running, with SIGTERM."""
        if self.alive:
            self.terminate()
            self.wait()


def _flag(name: str, value: Any) -> tuple[str, ...]:
    """Return a setting on the command line; a yes or no has no value of its own."""
    if isinstance(value, bool):
        return (f"--{name}" if value else f"--no-{name}",)
    return f"--{name}", str(value)


def item(handle: int, prompt: Sequence[int], **fields: Any) -> pb.WorkItem:
    """Return a work item; names of sampling parameters go to `sampling`, all others are the item's own.

    It is streamed unless it is said not to be: most tests read along.
    """
    own = {field.name for field in pb.WorkItem.DESCRIPTOR.fields}
    sampling = {name: value for name, value in fields.items() if name not in own}
    rest = {"streamed": True} | {name: value for name, value in fields.items() if name in own}
    params = sample_pb2.SamplingParams(**sampling)
    return pb.WorkItem(handle=handle, prompt_token_ids=prompt, sampling=params, **rest)


@dataclass(slots=True)
class Outcome:
    """What an instance has sent of one sample."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # The policy version that sampled each token.
    versions: list[int] = field(default_factory=list)
    # Whether each was sampled with KV of several versions.
    mixed: list[bool] = field(default_factory=list)
    finished: pb.Finished | None = None
    refused: pb.Refused | None = None

    @property
    def over(self) -> bool:
        """Whether the sample ended or was refused."""
        return self.finished is not None or self.refused is not None

    @property
    def reason(self) -> str:
        """Name of the finish reason without its prefix: STOP, LENGTH or ABORTED; "" before the end."""
        if self.finished is None:
            return ""
        return sample_pb2.FinishReason.Name(self.finished.finish_reason).removeprefix("FINISH_REASON_")


class Caller:
    """One Work stream and the outcomes of its samples by handle. Holds the instance to the order of events."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.outcomes: dict[int, Outcome] = {}
        self.responses: list[pb.WorkResponse] = []

    async def send(self, start: Iterable[pb.WorkItem] = (), abort: Iterable[int] = ()) -> None:
        """Write one request."""
        await self._call.write(pb.WorkRequest(start=start, abort=abort))

    async def until(self, holds: Callable[[], Any]) -> None:
        """Read until the condition holds. EOFError when the stream ends before."""
        async with asyncio.timeout(CALL):
            while not holds():
                response = await self._call.read()
                if response is grpc.aio.EOF:
                    raise EOFError("the instance ended the stream")
                self._take(response)

    async def ended(self, *handles: int) -> dict[int, Outcome]:
        """Read until each of these samples ended or was refused; their outcomes."""
        await self.until(lambda: all(self.of(handle).over for handle in handles))
        return {handle: self.of(handle) for handle in handles}

    async def started(self, *handles: int, tokens: int = 1) -> None:
        """Read until each of these samples has some tokens."""
        await self.until(lambda: all(len(self.of(handle).tokens) >= tokens for handle in handles))

    async def rest(self) -> grpc.StatusCode:
        """Read to the end of the stream; its status."""
        try:
            await self.until(lambda: False)
        except (EOFError, grpc.aio.AioRpcError):
            code: grpc.StatusCode = await self._call.code()
            return code
        raise AssertionError("unreachable")

    def of(self, handle: int) -> Outcome:
        """What there is of a sample."""
        return self.outcomes.setdefault(handle, Outcome())

    def leave(self) -> None:
        """Cancel the stream, as a caller that dies would."""
        self._call.cancel()

    def _take(self, response: pb.WorkResponse) -> None:
        self.responses.append(response)
        for delta in response.deltas:
            outcome = self.of(delta.handle)
            assert not outcome.over, f"tokens of {delta.handle} after its end"
            assert len(delta.tokens.token_ids) == len(delta.tokens.logprobs) > 0
            outcome.tokens += delta.tokens.token_ids
            outcome.logprobs += delta.tokens.logprobs
            outcome.versions += [
                run.policy_version for run in delta.tokens.versions for _ in range(run.tokens)
            ]
            outcome.mixed += [run.mixed_kv for run in delta.tokens.versions for _ in range(run.tokens)]
        for finished in response.finished:
            outcome = self.of(finished.handle)
            assert not outcome.over, f"{finished.handle} ended twice"
            outcome.finished = finished
        for refused in response.refused:
            outcome = self.of(refused.handle)
            assert not outcome.over, f"{refused.handle} refused after its end"
            outcome.refused = refused


@asynccontextmanager
async def stub_of(address: str) -> AsyncIterator[Any]:
    """A stub of GenerationService."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield rpc.GenerationServiceStub(channel)


@asynccontextmanager
async def calling(address: str) -> AsyncIterator[Caller]:
    """A Work stream of its own connection; its samples are aborted at the end."""
    async with stub_of(address) as stub:
        call = stub.Work()
        try:
            yield Caller(call)
        finally:
            call.cancel()


async def generate(address: str, items: Sequence[pb.WorkItem]) -> dict[int, Outcome]:
    """Outcomes of items on a stream of their own."""
    async with calling(address) as caller:
        await caller.send(start=items)
        return await caller.ended(*[each.handle for each in items])
