"""Run the steps in calls that resume an interrupted run, and the processes that carry them out, one at a time.

The record is a JSON file, replaced as a whole after every step, and a file with a line for each step. A process
that fails at an order, or is late, is ended: an engine does not continue after an error, and a device's context may
be corrupted. The next order gets a new process.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from bench.report import keep
from bench.worker import PipedWorker


class OrderFailed(RuntimeError):
    """The process raised an error or ended; the message is the end of its traceback."""


class OrderLate(RuntimeError):
    """The order was not carried out in time."""


class StartFailed(OrderFailed):
    """The process raised an error or ended before it took orders."""


class StartLate(OrderLate):
    """The process was not ready for orders in time."""


class WorkerSetup(Protocol):
    """Frozen, picklable description of a process. Orders with equal setups can share one process."""

    @property
    def start_seconds(self) -> float:
        """Estimated seconds until the process takes orders."""
        ...

    def orders(self) -> Any:
        """Build the setup in the process; return the object whose methods are the orders."""
        ...


class Worker(Protocol):
    """A process behind a pipe, which sends True once it is built."""

    pipe: Connection[Any, Any]

    def kill(self) -> None:
        """End the process at once."""


class SpawnedWorker(PipedWorker):
    """A fresh Python process, so that vLLM and Triton are imported after the environment that they read is set."""

    def __init__(self, setup: WorkerSetup) -> None:
        super().__init__(build_orders, setup)


Start = Callable[[Any], Worker]


class WorkerHost:
    """Keep the process of the last order for the next order with the same setup. A context manager."""

    def __init__(self, start: Start = SpawnedWorker) -> None:
        self._start = start
        self._setup: WorkerSetup | None = None
        self._worker: Worker | None = None

    def __enter__(self) -> WorkerHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has(self, setup: WorkerSetup) -> bool:
        """Return True if a process with this setup is running."""
        return self._worker is not None and self._setup == setup

    def ask(
        self, setup: WorkerSetup, order: str, arguments: dict[str, Any], seconds: float
    ) -> dict[str, Any]:
        """Carry out an order, in a new process if none with this setup is running.

        Raises:
            OrderFailed: the process raised an error or ended; StartFailed: it did so before it took the order.
            OrderLate: the order and the start of its process took longer than `seconds`; StartLate: the start did.
        """
        deadline = time.monotonic() + seconds
        try:
            if not self.has(setup):
                self.close()
                self._worker, self._setup = self._start(setup), setup
                try:
                    self._answer(deadline)
                except OrderFailed as error:
                    raise StartFailed(str(error)) from error
                except OrderLate as error:
                    raise StartLate(str(error)) from error
            assert self._worker is not None
            self._worker.pipe.send((order, arguments))
            found: dict[str, Any] = self._answer(deadline)
        except BaseException:
            self.close()
            raise
        return found

    def close(self) -> None:
        """End the process, if there is one."""
        if self._worker is not None:
            self._worker.pipe.close()
            self._worker.kill()
        self._worker = self._setup = None

    def _answer(self, deadline: float) -> Any:
        assert self._worker is not None
        try:
            if not self._worker.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise OrderLate("the order took too long and was ended")
            answer = self._worker.pipe.recv()
        except (EOFError, OSError) as error:
            raise OrderFailed("the process has ended; its output is above") from error
        if isinstance(answer, str):
            raise OrderFailed(answer)
        return answer


def build_orders(setup: WorkerSetup) -> Callable[[tuple[str, dict[str, Any]]], Any]:
    """Return the function from the name of an order and its arguments to its result."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    orders = setup.orders()
    return lambda order: getattr(orders, order[0])(**order[1])


LINES = "results.jsonl"
"""Name of the file with a line for each step, in the order in which the steps ended."""


class OtherRun(ValueError):
    """The file belongs to another device, other software or other sources."""


@dataclass(slots=True)
class State:
    """State of a run: its environment, and for each step its result, or the reason why it failed or was left out.

    `running` is the step in progress, with the time when it began (seconds since the epoch).
    """

    path: Path
    about: dict[str, Any]
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    running: tuple[str, float] | None = None

    @classmethod
    def load(cls, path: Path) -> State | None:
        """Return the state in the file; None if there is no file."""
        if not path.exists():
            return None
        data = json.loads(path.read_text())
        running = data.pop("running")
        return cls(path, **data, running=None if running is None else (running[0], running[1]))

    @classmethod
    def resume(cls, path: Path, about: dict[str, Any]) -> State:
        """Return the state in the file, or a new one. OtherRun if it belongs to another run."""
        state = cls.load(path)
        if state is None:
            return cls(path, about)
        for name, value in about.items():
            if state.about.get(name) != value:
                raise OtherRun(
                    f"{path} is of another {name} ({state.about.get(name)!r}, not {value!r}): "
                    "give --fresh to begin anew, or another --out"
                )
        return state

    def save(self) -> None:
        """Replace the file."""
        data = asdict(self)
        del data["path"]
        keep(self.path, data, indent=1)

    def begin(self, step: str) -> None:
        """Record that a step runs."""
        self.running = (step, time.time())
        self.save()

    def drop(self) -> None:
        """Remove the record of the running step, which is to be repeated."""
        self.running = None
        self.save()

    def finish(self, step: str, result: dict[str, Any] | None, error: str | None) -> float:
        """Record the end of a step; return its seconds.

        Entries of `failed` in a result, reasons by name, are recorded as separate failures.
        """
        began = self.running[1] if self.running else time.time()
        seconds = time.time() - began
        self.running = None
        if error is None:
            self.done[step] = {"seconds": seconds, "result": result}
            self.failed |= (result or {}).get("failed", {})
        else:
            self.failed[step] = error
        self.save()
        line = {"step": step, "seconds": round(seconds, 3)}
        line |= {"result": result} if error is None else {"error": error}
        with (self.path.parent / LINES).open("a") as lines:
            lines.write(json.dumps(line, default=str) + "\n")
        return seconds

    def over(self, step: str) -> bool:
        """Return whether a step has been run, successfully or not."""
        return step in self.done or step in self.failed

    def result(self, step: str) -> dict[str, Any] | None:
        """Return the result of a step; None if it has none."""
        found: dict[str, Any] | None = self.done[step]["result"] if step in self.done else None
        return found


def sources(folders: Iterable[Path]) -> str:
    """Return a digest of all Python sources in some folders."""
    digest = hashlib.blake2b(digest_size=8)
    for root in folders:
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


Arguments = dict[str, Any]
ENVIRONMENT = "environment"
KERNELS = "kernels: "
"""Prefix of the names of the kernel steps."""
CEILINGS, SWEEP, TUNED_CHECKS = f"{KERNELS}ceilings", f"{KERNELS}sweep: ", f"{KERNELS}exact, tuned: "


@dataclass(frozen=True, slots=True)
class GpuStep:
    """A step: the process that does it, the order, and its approximate seconds.

    `arguments` are the order's arguments. `more` adds arguments from the results of earlier steps, and raises
    LookupError if one of these failed.
    """

    name: str
    setup: WorkerSetup
    order: str
    seconds: float
    arguments: Arguments = field(default_factory=dict)
    more: Callable[[State], Arguments] = field(default=lambda _: {})
    brief: bool = False


def estimated(step: GpuStep, *, starts: bool) -> float:
    """Return the estimated seconds of a step, including the start of its process if it `starts`."""
    return step.seconds + (step.setup.start_seconds if starts else 0)


def left(state: State, steps: Sequence[GpuStep]) -> float:
    """Return the estimated seconds of the remaining steps, corrected by the times of the finished ones."""
    seconds = _by_name(steps)
    took = sum(state.done[name]["seconds"] for name in seconds if name in state.done)
    planned = sum(own for name, own in seconds.items() if name in state.done)
    rate = took / planned if planned else 1.0
    return rate * sum(own for name, own in seconds.items() if not state.over(name))


def total(steps: Sequence[GpuStep]) -> float:
    """Return the estimated seconds of a whole run, starts included."""
    return sum(_by_name(steps).values())


def _by_name(steps: Sequence[GpuStep]) -> dict[str, float]:
    befores = [None, *(step.setup for step in steps)]
    return {
        step.name: estimated(step, starts=step.setup != before)
        for step, before in zip(steps, befores, strict=False)
    }


def tokens_name(setup: Any, way: str) -> str:
    """Return the name of the step in which an engine generates tokens: plainly, with drafts or with trees."""
    return f"tokens: {setup.kind}, {setup.dtype}, {way}"


DONE, FAILED, REFUSED, MORE = 0, 1, 2, 3
"""Exit statuses: all steps are done; all are done and some failed; nothing was run; out of time, call again."""
SLOWEST = 3.0
"""A step is ended after this many times its estimate plus a minute: one that starts an engine after 225 s."""
GRACE_SECONDS = 20
"""Seconds after the end of the call's time at which an unfinished step is ended; the next call repeats it."""
_ROOT = Path(__file__).parents[2]
SOURCES = tuple(_ROOT / part for part in ("kernels", "services/generation", "bench/gpu"))
"""Sources whose changes start a new run."""
Report = Callable[[State], None]


def run(
    steps: Sequence[GpuStep], host: WorkerHost, path: Path, until: float, model: str, report: Report
) -> int:
    """Run the remaining steps.

    Args:
        steps: the steps; the first one is the environment.
        host: runs the processes that carry out the steps.
        path: file of the state.
        until: end of the call, in seconds of the monotonic clock.
        model: name of the model, by which runs are distinguished.
        report: called after every step.

    Returns:
        The exit status.

    Raises:
        OtherRun: the state belongs to another run.
        OrderFailed, OrderLate: the environment step failed.
    """
    first = steps[0]
    began = time.monotonic()
    about = host.ask(first.setup, first.order, first.arguments, _limit(first, starts=True))
    known = {name: about[name] for name in ("device", "torch", "triton", "vllm")}
    state = State.resume(path, {**known, "model": model, "sources": sources(SOURCES)})
    if not state.over(first.name):
        state.begin(first.name)
        state.finish(first.name, about, None)
    _say(f"{about['device']}; environment, {time.monotonic() - began:.1f} s")
    ran = False
    for number, step in enumerate(steps, 1):
        if state.over(step.name):
            continue
        begin, starts = time.monotonic(), not host.has(step.setup)
        # Run at least one step, or a run whose steps are longer than its calls would never end.
        if ran and begin + estimated(step, starts=starts) > until:
            # A later step may be shorter.
            continue
        _say(f"[{number}/{len(steps)}] {step.name} ...")
        limit = _limit(step, starts=starts)
        if not _run(step, steps, host, state, min(limit, until + GRACE_SECONDS - begin), limit):
            return _more(state, steps, f"the time is over in {step.name!r}, which is done again")
        ran = True
        report(state)
        _say(f"    about {left(state, steps):.0f} s left")
    if any(not state.over(step.name) for step in steps):
        return _more(state, steps, "the time is over")
    report(state)
    _say(f"done; failed: {', '.join(state.failed) or 'nothing'}")
    return FAILED if state.failed else DONE


def _limit(step: GpuStep, *, starts: bool) -> float:
    return 60 + SLOWEST * estimated(step, starts=starts)


def _run(
    step: GpuStep, steps: Sequence[GpuStep], host: WorkerHost, state: State, seconds: float, limit: float
) -> bool:
    """Run a step and record it; return False if the end of the call interrupted it."""
    state.begin(step.name)
    result, error, started = None, None, True
    try:
        result = host.ask(step.setup, step.order, {**step.arguments, **step.more(state)}, seconds)
    except LookupError as missing:
        error = f"{missing} failed, or was left out, whose result it needs"
    except OrderFailed as failed:
        error, started = str(failed), not isinstance(failed, StartFailed)
    except OrderLate as late:
        if seconds < limit:
            state.drop()
            return False
        error, started = str(late), not isinstance(late, StartLate)
    if not started:
        # Another start would fail as well, and take as long.
        others = [each for each in steps if each.setup == step.setup and not state.over(each.name)]
        why = f"its process did not start, as for {step.name!r}"
        state.failed |= {each.name: why for each in others if each is not step}
    took = state.finish(step.name, result, error)
    _say(f"    {'ok' if error is None else 'FAILED: ' + last_line(error)}, {took:.1f} s")
    return True


def last_line(error: str) -> str:
    """Return the last line of a traceback, which has the error."""
    return error.strip().rpartition("\n")[2]


def _more(state: State, steps: Sequence[GpuStep], why: str) -> int:
    _say(f"{why}; about {left(state, steps):.0f} s left: call again")
    return MORE


def _say(line: str) -> None:
    print(line, flush=True)
