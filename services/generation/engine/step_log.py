"""Log of the shapes of an engine's steps: from it their time on another device can be predicted.

What vLLM schedules is logged, so the log of an engine with vLLM's own runner and drafts is of the same kind.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import structlog

_log = structlog.get_logger(__name__)


class LoggedStep(NamedTuple):
    """Shape of a step that ran."""

    at: float
    """Time at which it was scheduled, in seconds since the epoch."""
    samples: int
    rows: int
    """Tokens that it computes: of prompts, draft tokens, and the newest one of each sample that decodes."""
    drafted: int
    """Draft tokens among them."""
    context: int
    """Tokens whose KV there is after it, without draft tokens, of all its samples together."""

    @classmethod
    def of_line(cls, line: str) -> Self:
        """Return the step of a line of a log. ValueError or TypeError for any other line."""
        return cls(*json.loads(line))


class StepLog:
    """Writes a line for each step that a scheduler of vLLM makes, a JSON array of the fields of `LoggedStep`.

    A log that cannot be written any further ends there, and the engine goes on.
    """

    def __init__(self, scheduler: Any, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Watch the scheduler from now on; `path` is written anew. OSError if it cannot be."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # A line is there for readers as soon as its step begins.
        self._file = path.open("w", buffering=1)
        self._requests, self._clock = scheduler.requests, clock
        self._schedule = scheduler.schedule
        scheduler.schedule = self._watched

    def _watched(self, *given: Any, **named: Any) -> Any:
        output = self._schedule(*given, **named)
        if output.num_scheduled_tokens and not self._file.closed:
            try:
                self._file.write(f"{json.dumps(self._shape(output))}\n")
            except OSError as error:
                _log.warning("step_log_ended", path=self._file.name, fault=repr(error))
                self._close()
        return output

    def _shape(self, output: Any) -> LoggedStep:
        scheduled = output.num_scheduled_tokens
        drafted = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        # vLLM counts what it has scheduled as computed already.
        computed = sum([self._requests[each].num_computed_tokens for each in scheduled])
        rows = output.total_num_scheduled_tokens
        return LoggedStep(self._clock(), len(scheduled), rows, drafted, computed - drafted)

    def _close(self) -> None:
        try:
            self._file.close()
        except OSError:
            # What could not be written is lost; the descriptor is closed all the same.
            return
