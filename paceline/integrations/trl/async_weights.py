"""Weights of TRL's AsyncGRPOTrainer on their way to the fleet."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paceline import types as t

if TYPE_CHECKING:
    from paceline.blocking_run import Run


class PacelineWeightTransfer:
    """The `weight_transfer` of an AsyncGRPOTrainer: each synchronisation is a push of the run.

    Samples go on under the old weights while the new ones are sent, and from their next token under the new ones:
    so `pause` and `resume` have nothing to do. Of a PEFT model the trainer sends weights with the adapter merged.
    """

    def __init__(self, run: Run, *, in_flight: t.InFlight = t.InFlight.CONTINUE) -> None:
        """Push by a run, which the caller closes after training.

        `in_flight` is what becomes of unfinished samples of any run. A worker always has some, so that REFUSE
        would refuse every push but the first.
        """
        self._run = run
        self._in_flight = in_flight
        self._pushed: list[int] = []
        """Policy version of each push."""

    @property
    def pushes(self) -> int:
        """Number of pushes so far."""
        return len(self._pushed)

    def push_of(self, policy_version: int) -> int:
        """Return the number of the push, from 1, that brought a policy version; 0: it was there before.

        One that is newer than all pushes is that of the push which is just ending.
        """
        newer = bool(self._pushed) and policy_version > self._pushed[-1]
        return bisect_right(self._pushed, policy_version) + newer

    def init_weight_transfer(self) -> None:
        """Do nothing: the push that follows connects."""

    def pause(self) -> None:
        """Do nothing."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Push the tensors as the next version. When this returns, the fleet serves them.

        They are read to their end also when that fails, so that other processes, which gather them too, do not
        wait indefinitely. PacelineError: the push was refused; the fleet serves what it served.
        """
        try:
            finished = self._run.push_weights(iterator, in_flight=self._in_flight)
        finally:
            for _ in iterator:
                pass
        self._pushed.append(finished.policy_version)

    def resume(self) -> None:
        """Do nothing."""

    def destroy(self) -> None:
        """Do nothing: the run is the caller's."""
