"""Draft leases of an instance: its pre-generation tasks, their progress, and the forks that fit. Pure.

A lease names a sample of a coming step. `affordable` computes how many forks of such samples the engine steps
have room for.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np

from paceline.internal.v1 import bubble_pb2 as pb
from services.contracts.rollout import RolloutKind, StoredRollout

_MOST_FORKS = 4096
# Share of the KV cache above which no sample is forked.
_MOST_KV_USAGE = 0.8
# A beginning is sent to the store again when it has grown by at least this many tokens and this share: so the total
# sent stays in proportion to the length, and a lost instance costs about that share.
_GROWTH_TOKENS = 32
_GROWTH_SHARE = 0.125


def affordable(
    seconds: Callable[[int], float], running: int, forks: int, slowdown: float, kv_usage: float = 0.0
) -> int:
    """Return how many forks may join the samples of an instance; if negative, how many should end.

    With all of its forks a step takes at most 1 + `slowdown` times as long as without them. If no task is left that
    they could slow down, the number of forks is not limited. None may join where the KV cache is nearly full,
    because forks must not preempt the samples they belong to.

    Args:
        seconds: returns the predicted time of a step with this number of samples; 0 if it is not known.
        running: number of tasks that are being generated.
        forks: number of forks that are being generated.
        slowdown: as a share.
        kv_usage: share of the KV cache that is in use.
    """
    joining = 0 if kv_usage > _MOST_KV_USAGE else _MOST_FORKS
    if not running:
        return joining
    most = (1 + slowdown) * seconds(running)
    if not most:
        return -forks
    fits, beyond = 0, _MOST_FORKS
    while fits + 1 < beyond:
        tried = (fits + beyond) // 2
        fits, beyond = (tried, beyond) if seconds(running + tried) <= most else (fits, tried)
    return min(fits - forks, joining)


class NearTie(NamedTuple):
    """Position at which the runner-up nearly was the token of the sample."""

    margin: float
    """Difference of the scores, in nats, noise included."""
    position: int
    token: int


@dataclass(slots=True, eq=False)
class DraftLease:
    """Task and the tokens generated for it so far, under policy `version`.

    `number` names the lease in reports; it is 0 once the coordinator that gave it is gone. `stored` tokens were
    sent to the draft store. The lease is `finished` if the sample ended by itself, and `returned` if it was given
    back, because real work arrived or the task was refused.
    """

    number: int
    handle: int
    task: pb.PregenerationTask
    version: int
    # 1 + the position at which a fork takes the runner-up, 0 for a task. A fork has no number or log-probabilities.
    fork: int = 0
    # uint32 and float32, of the same length, so that they become a rollout by copying.
    tokens: array[int] = field(default_factory=lambda: array("I"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    finished: bool = False
    returned: bool = False
    stored: int = 0
    # Near-ties that are not forked, and those that are, with the handles of the forks, by rising margin.
    ties: list[NearTie] = field(default_factory=list)
    forked: list[tuple[NearTie, int]] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, str, int, int]:
        """Identity of the sample, independent of the coordinator that gave the task."""
        task = self.task
        return task.run_id, task.prompt_id, task.slot, task.seed

    @property
    def running(self) -> bool:
        """True while the sample is being generated."""
        return not (self.finished or self.returned)

    def note_ties(self, runners_up: Sequence[int], margins: Sequence[float], fork_margin: float) -> None:
        """Record the near-ties among the tokens that are added next."""
        coming = enumerate(zip(margins, runners_up, strict=True), len(self.tokens))
        for position, (margin, token) in coming:
            if margin < fork_margin:
                insort(self.ties, NearTie(margin, position, token))

    def nearest_open(self, most: int) -> list[NearTie]:
        """Return the ties among the `most` nearest that are not forked."""
        nearest = sorted([*self.ties[:most], *(tie for tie, _ in self.forked)])[:most]
        taken = {tie for tie, _ in self.forked}
        return [tie for tie in nearest if tie not in taken]

    @property
    def worth_storing(self) -> bool:
        """True if the new tokens should go to the store."""
        new = len(self.tokens) - self.stored
        if self.running:
            return new >= max(_GROWTH_TOKENS, self.stored * _GROWTH_SHARE)
        return new > 0 or (self.finished and bool(self.tokens))

    def resume(self, known: StoredRollout) -> None:
        """Begin with tokens that were generated before, with the same seed and policy."""
        longest = self.task.sampling.max_tokens or len(known.tokens)
        self.tokens.frombytes(known.tokens[:longest].astype(np.uint32).tobytes())
        self.logprobs.frombytes(known.logprobs[:longest].astype(np.float32).tobytes())
        self.stored = len(self.tokens)

    def store(self) -> StoredRollout:
        """Return the tokens so far as a rollout for the store, and count them as stored."""
        task = self.task
        self.stored = len(self.tokens)
        return StoredRollout(
            run_id=task.run_id,
            prompt_id=task.prompt_id,
            slot=task.slot,
            version=self.version,
            kind=RolloutKind.PREGENERATED,
            step=task.step,
            seed=task.seed,
            tokens=np.array(self.tokens, np.uint32),
            logprobs=np.array(self.logprobs, np.float32),
            finished=self.finished,
            fork=self.fork,
        )

    def progress(self) -> pb.PregenerationProgress:
        """Return the progress for the coordinator."""
        return pb.PregenerationProgress(
            lease=self.number, tokens=len(self.tokens), finished=self.finished, returned=self.returned
        )


class DraftLeases:
    """All leases of an instance.

    `epoch` names the coordinator process that gave them, 0 before the first; `news` counts the ends of tasks that
    are to be reported.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.news = 0
        self._leases: dict[int, DraftLease] = {}
        self._handles = count(1)
        # Leases whose near-ties may still be forked, including finished ones that were reported.
        self._forkable: dict[int, DraftLease] = {}

    @property
    def running(self) -> int:
        """Number of tasks that are being generated, without forks."""
        return sum(lease.running and not lease.fork for lease in self._leases.values())

    @property
    def forks(self) -> int:
        """Number of forks that are being generated."""
        return sum(lease.running and lease.fork > 0 for lease in self._leases.values())

    def take(self, tasks: Iterable[pb.PregenerationTask], version: int, room: int) -> list[DraftLease]:
        """Take tasks; return the leases to start, at most `room`, and give back the rest.

        A task that is being generated already, for a coordinator that is gone, only gets its new number.
        """
        orphans = {
            lease.names: lease for lease in self._leases.values() if not lease.number and not lease.fork
        }
        known = {lease.number for lease in self._leases.values()}
        fresh: list[DraftLease] = []
        for task in tasks:
            if task.lease in known:
                continue
            lease = DraftLease(task.lease, next(self._handles), task, version)
            orphan = orphans.pop(lease.names, None)
            if orphan is not None and orphan.version == version:
                orphan.number = task.lease
                continue
            self._leases[lease.handle] = lease
            if len(fresh) < room:
                fresh.append(lease)
            else:
                self.end(lease.handle, finished=False)
        return fresh

    def grow(
        self,
        handle: int,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        runners_up: Sequence[int] = (),
        margins: Sequence[float] = (),
        fork_margin: float = 0.0,
    ) -> None:
        """Add new tokens of a task; tokens with a margin below `fork_margin` are near-ties.

        `runners_up` and `margins` have one entry for each token, or are empty.
        """
        lease = self._leases.get(handle)
        if lease is None:
            return
        if not lease.fork:
            lease.logprobs.extend(logprobs)
            if len(margins) == len(tokens):
                lease.note_ties(runners_up, margins, fork_margin)
            if lease.ties:
                self._forkable[handle] = lease
        lease.tokens.extend(tokens)

    def fork(self, most: int, room: int) -> tuple[list[DraftLease], list[int]]:
        """Return forks to start, of the nearest ties first, and the handles of forks to end for them.

        At most `room` are added. A task has at most `most` forks; beyond it, a nearer tie replaces its farthest
        one. A tie in the last token that a response may have is not forked.
        """
        started: list[DraftLease] = []
        ended: list[int] = []
        ties = sorted(
            (tie, lease.handle) for lease in self._forkable.values() for tie in lease.nearest_open(most)
        )
        for tie, handle in ties:
            lease = self._forkable[handle]
            lease.ties.remove(tie)
            if lease.task.sampling.max_tokens and tie.position + 1 >= lease.task.sampling.max_tokens:
                continue
            if len(lease.forked) < most and len(started) - len(ended) >= room:
                # It may be forked later.
                insort(lease.ties, tie)
                continue
            if len(lease.forked) >= most:
                _, farthest = lease.forked.pop()
                if (known := self._leases.get(farthest)) is not None and known.running:
                    ended.append(farthest)
            fork = DraftLease(0, next(self._handles), lease.task, lease.version, tie.position + 1)
            fork.tokens.extend(lease.tokens[: tie.position])
            fork.tokens.append(tie.token)
            fork.stored = len(fork.tokens)
            insort(lease.forked, (tie, fork.handle))
            self._leases[fork.handle] = fork
            started.append(fork)
        return started, ended

    def farthest(self, count: int) -> list[int]:
        """Return the handles of at most `count` running forks, forks of the farthest ties first."""
        running = {handle for handle, lease in self._leases.items() if lease.fork and lease.running}
        ties = sorted(
            ((tie, handle) for lease in self._forkable.values() for tie, handle in lease.forked), reverse=True
        )
        return [handle for _, handle in ties if handle in running][:count]

    def end_forking(self) -> None:
        """Fork none of the present tasks any more, because real work or other weights arrived."""
        self._forkable.clear()

    def end(self, handle: int, *, finished: bool) -> DraftLease | None:
        """End a task, finished or not, and return its lease; None if it is not running any more."""
        lease = self._leases.get(handle)
        if lease is None or not lease.running:
            return None
        lease.finished, lease.returned = finished, not finished
        if lease.number:
            self.news += 1
        else:
            del self._leases[handle]
        return lease

    def revoke(self, numbers: Iterable[int]) -> list[int]:
        """Forget tasks that are not wanted any more; return the handles of the samples to end, forks included."""
        unwanted = set(numbers) - {0}
        gone = [lease for lease in self._leases.values() if lease.number in unwanted]
        for lease in gone:
            lease.number = 0
            self._forkable.pop(lease.handle, None)
            if not lease.running:
                del self._leases[lease.handle]
        forks = [
            self._leases[handle] for lease in gone for _, handle in lease.forked if handle in self._leases
        ]
        return [lease.handle for lease in (*gone, *forks) if lease.running]

    def void(self, epoch: int) -> None:
        """Drop the numbers of another coordinator process; running tasks continue."""
        self.epoch = epoch
        self._leases = {h: lease for h, lease in self._leases.items() if lease.running}
        for lease in self._leases.values():
            lease.number = 0

    def progress(self) -> list[pb.PregenerationProgress]:
        """Return the progress of all leases of the coordinator."""
        return [lease.progress() for lease in self._leases.values() if lease.number]

    def reported(self, progress: Iterable[pb.PregenerationProgress]) -> None:
        """Forget the ended tasks of a report that the coordinator has received."""
        ended = {each.lease for each in progress if each.finished or each.returned}
        self._leases = {h: lease for h, lease in self._leases.items() if lease.number not in ended}

    def growing(self) -> list[DraftLease]:
        """Return the running tasks whose new tokens should go to the store."""
        return [lease for lease in self._leases.values() if lease.running and lease.worth_storing]
