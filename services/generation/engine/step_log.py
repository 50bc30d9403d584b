"""Log the shapes of an engine's steps, from which their times on another device can be predicted.

The log records what vLLM schedules, so it has the same form for an engine with vLLM's own runner and drafts.
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
    """Tokens that it computes: prompt tokens, draft tokens, and the latest token of each decoding sample."""
    drafted: int
    """Draft tokens among them."""
    context: int
    """Tokens of all its samples together that have KV after it, without draft tokens."""

    @classmethod
    def of_line(cls, line: str) -> Self:
        """Parse a line of a log. ValueError or TypeError if it is not one."""
        return cls(*json.loads(line))


class StepLog:
    """Writes a line for each step of a vLLM scheduler: a JSON array of the fields of `LoggedStep`.

    If a line cannot be written, the log ends there and the engine continues.
    """

    def __init__(self, scheduler: Any, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Watch the scheduler from now on; `path` is overwritten. OSError if it cannot be opened."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Line-buffered, so that readers see a line as soon as its step begins.
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
        # vLLM already counts scheduled tokens as computed.
        computed = sum([self._requests[each].num_computed_tokens for each in scheduled])
        rows = output.total_num_scheduled_tokens
        return LoggedStep(self._clock(), len(scheduled), rows, drafted, computed - drafted)

    def _close(self) -> None:
        try:
            self._file.close()
        except OSError:
            # The unwritten line is lost, but the descriptor is closed.
            return
