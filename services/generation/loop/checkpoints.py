"""Checkpoints of running samples: which of them are due to report their new tokens. Pure.

A sample is a function of its seed and its prefix, so what an unfinished one reports only saves work if its instance
is lost. It therefore reports in checkpoints, after a number of tokens or seconds. A streamed sample, whose caller
reads along, is due with every token.

The first checkpoint of a sample comes after a part of that, another part for each sample. So samples that were
started together do not report together, and one whose instances die again and again before it is due makes
progress on some.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from paceline.internal.v1 import generation_pb2 as pb

# Multiples of the golden ratio, modulo 1, are spread evenly however many there are.
_SPREAD = 0.6180339887498949
# Messages that the checkpoints of a stream are spread over, and the longest time between two of them.
_MESSAGES = 5
_LONGEST_SILENCE = 1.0


class ReportingSample(Protocol):
    """Sample that reports its tokens."""

    handle: int
    streamed: bool
    """Its caller reads along: tokens are reported as they come."""
    quota: int
    """Unreported tokens that make it due."""
    report_at: float
    """Time at which it is due."""

    def take_delta(self) -> pb.Delta | None:
        """Return the tokens since the last call, or None when there are none."""


S = TypeVar("S", bound=ReportingSample)


@dataclass(frozen=True, slots=True)
class CheckpointRules:
    """Unreported tokens, or seconds since the last report, after which a sample is due to report."""

    tokens: int = 512
    seconds: float = 5.0

    @property
    def message_seconds(self) -> float:
        """Least time between two messages that nothing but checkpoints and the load calls for."""
        return min(self.seconds / _MESSAGES, _LONGEST_SILENCE)


class Checkpoints(Generic[S]):
    """Due reports of the samples of one stream; costs nothing for a sample that is not due."""

    def __init__(self, rules: CheckpointRules, samples: Mapping[int, S], offset: float = 0.0) -> None:
        """Watch `samples`, by handle; one that is no longer among them is never due. `offset`: of their parts."""
        self._rules = rules
        self._samples = samples
        self._offset = offset
        self._full: dict[int, S] = {}
        # One entry for each sample: the time at which to look at it again, a number to order by, and the sample.
        self._times: list[tuple[float, int, S]] = []
        self._begun = 0

    def begin(self, sample: S, now: float) -> None:
        """Watch a sample from now on."""
        if sample.streamed:
            sample.quota = 1
            return
        self._begun += 1
        part = (self._offset + self._begun * _SPREAD) % 1.0
        sample.quota = 1 + int(part * (self._rules.tokens - 1))
        sample.report_at = now + part * self._rules.seconds
        heapq.heappush(self._times, (sample.report_at, self._begun, sample))

    def reached(self, sample: S) -> None:
        """Note that a sample has `quota` unreported tokens, or is to report for another reason."""
        self._full[sample.handle] = sample

    def take(self, now: float) -> list[S]:
        """Return the samples that are due, and let their time begin anew."""
        full, self._full = self._full, {}
        due = [sample for sample in full.values() if self._has(sample)]
        for sample in due:
            self._renew(sample, now)
        while self._times and self._times[0][0] <= now:
            _, number, sample = heapq.heappop(self._times)
            if not self._has(sample):
                continue
            if sample.report_at <= now:
                due.append(sample)
                self._renew(sample, now)
            heapq.heappush(self._times, (sample.report_at, number, sample))
        return due

    def _has(self, sample: S) -> bool:
        return self._samples.get(sample.handle) is sample

    def _renew(self, sample: S, now: float) -> None:
        if not sample.streamed:
            sample.quota, sample.report_at = self._rules.tokens, now + self._rules.seconds
