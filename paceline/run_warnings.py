"""Warn of what a trainer seldom means: the same samples twice, another trainer's weights, steps without a hint."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paceline import types as t

log = logging.getLogger("paceline")

_KEPT_STEPS = 8
_UNANNOUNCED = 3
"""Steps in a row that nobody announced, of which a trainer is warned."""


class RunWarnings:
    """Warnings of one training job, each given once."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._asked: dict[tuple[int, int], set[str]] = {}
        """Prompts that were asked for, by step and version; of the newest ones."""
        self._knows_weights = False
        self._last_step: int | None = None
        self._announced = -1
        """Highest step that was announced."""
        self._unannounced = 0

    def announced(self, step: int) -> None:
        """Take note of a hint."""
        self._announced = max(self._announced, step)

    def begins(self, step: int) -> None:
        """Warn where later steps begin that were not announced: nothing of them is generated ahead."""
        later, self._last_step = self._last_step is not None and step > self._last_step, step
        if not later:
            return
        self._unannounced = 0 if step <= self._announced else self._unannounced + 1
        if self._unannounced == _UNANNOUNCED:
            log.warning(
                "run %s: the last %d steps were not announced, so nothing of them was generated ahead. Give all "
                "batches to run.rollouts, or name the next prompts by run.hint, where they are known",
                self._run_id,
                _UNANNOUNCED,
            )

    def pushed(self) -> None:
        """Take note that the job has pushed weights: what is served later is its own."""
        self._knows_weights = True

    def served(self, published: t.Versions) -> None:
        """Warn if a job that has pushed nothing is served what somebody has pushed."""
        if self._knows_weights or not published.policy_checksum:
            return
        self._knows_weights = True
        log.warning(
            "run %s: version %d is served, which was pushed, and not by this run object: its samples are of those "
            "weights. Push yours first, or name policy_version=%d if that is what you want",
            self._run_id,
            published.policy_version,
            published.policy_version,
        )

    def asked(self, step: int, version: int, prompt_ids: Iterable[str]) -> None:
        """Warn of prompts that were asked for before in a step: their samples have the same seeds."""
        before = self._asked.setdefault((step, version), set())
        while len(self._asked) > _KEPT_STEPS:
            del self._asked[next(iter(self._asked))]
        asked = list(prompt_ids)
        again = [each for each in asked if each in before]
        before.update(asked)
        if again:
            log.warning(
                "run %s: in step %d prompt %r%s was asked for before: the samples of its slots are the same again, "
                "since their seeds come of run, step, prompt and slot. For other samples use another prompt_id, or "
                "ask for more samples in one group",
                self._run_id,
                step,
                again[0],
                f" and {len(again) - 1} others" if len(again) > 1 else "",
            )
