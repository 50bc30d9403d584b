"""Define the steps of a run and their estimated times, and record the finished ones.

The record is a JSON file, replaced as a whole after every step, and a file with a line for each step.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.host import WorkerSetup
from bench.report import keep

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
