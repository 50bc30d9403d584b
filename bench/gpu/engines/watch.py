"""Marks around each step of a model runner: how long the device worked, and how long it idled in between.

On CUDA the marks are events in the stream that the model runs on; without a device they are the host's clock.
"""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from statistics import median
from typing import Any

import torch


class HostMark:
    """Moment on the host, with the interface of a CUDA event."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        """Take the time."""
        self._at = time.perf_counter()

    def elapsed_time(self, later: HostMark) -> float:
        """Return the milliseconds until a later mark."""
        return 1000 * (later._at - self._at)


class StepWatch:
    """Watch over one worker's runner. `begin`, then steps, then `figures`."""

    def __init__(self, worker: Any) -> None:
        """Put the marks into the runner of a worker of this process."""
        self._runner = worker.model_runner
        self._cuda = self._runner.device.type == "cuda"
        self._begun: list[Any] = []
        self._ended: list[Any] = []
        self._graphs: Counter[str] = Counter()
        self._on = False
        execute, sample = self._runner.execute_model, self._runner.sample_tokens

        def executed(*args: Any, **kwargs: Any) -> Any:
            self._mark(self._begun)
            return execute(*args, **kwargs)

        def sampled(*args: Any, **kwargs: Any) -> Any:
            made = sample(*args, **kwargs)
            self._mark(self._ended)
            return made

        self._runner.execute_model, self._runner.sample_tokens = executed, sampled
        self._watch_graphs()

    def begin(self) -> None:
        """Forget the marks so far; those of steps from now on count."""
        self._begun.clear()
        self._ended.clear()
        self._graphs.clear()
        self._on = True

    def figures(self) -> dict[str, Any]:
        """Stop; return the medians of busy and idle milliseconds a step, and the steps by their kind of graph."""
        self._on = False
        if self._cuda:
            torch.cuda.synchronize()
        pairs = list(zip(self._begun, self._ended, strict=False))
        busy = [begin.elapsed_time(end) for begin, end in pairs]
        idle = [end.elapsed_time(begin) for (_, end), (begin, _) in pairwise(pairs)]
        return {
            "busy_ms": median(busy) if busy else None,
            "idle_ms": median(idle) if idle else None,
            "graphs": dict(self._graphs),
        }

    def _mark(self, marks: list[Any]) -> None:
        if self._on:
            marks.append(torch.cuda.Event(enable_timing=True) if self._cuda else HostMark())
            marks[-1].record()

    def _watch_graphs(self) -> None:
        """Count what vLLM's choice of a graph comes to: V1 returns the mode, V2 a description of the batch."""
        for name in ("cudagraph_dispatcher", "cudagraph_manager"):
            owner = getattr(self._runner, name, None)
            if owner is not None:
                owner.dispatch = self._counted(owner.dispatch)

    def _counted(self, dispatch: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            chosen = dispatch(*args, **kwargs)
            if self._on:
                mode = chosen[0] if isinstance(chosen, tuple) else chosen.cg_mode
                self._graphs[mode.name] += 1
            return chosen

        return counted


def watched(core: Any) -> StepWatch:
    """Return the watch of an engine core with one worker in this process."""
    watches: list[StepWatch] = core.collective_rpc(StepWatch)
    return watches[0]
