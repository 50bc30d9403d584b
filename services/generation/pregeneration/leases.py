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


def affordable(seconds: Callable[[int], float], running: int, forks: int, slowdown: float) -> int:
    """Return how many forks may join the samples of an instance; below 0, how many should leave.

    With all of its forks a step takes at most 1 + `slowdown` times as long as without them. Where no task is left
    that they could slow down there may be any number of them.

    Args:
        seconds: predicted time of a step by its number of samples; 0 where that is not known.
        running: tasks that are being generated.
        forks: forks that are.
        slowdown: as a share.
    """
    if not running:
        return _MOST_FORKS
    most = (1 + slowdown) * seconds(running)
    if not most:
        return -forks
    fits, beyond = 0, _MOST_FORKS
    while fits + 1 < beyond:
        tried = (fits + beyond) // 2
        fits, beyond = (tried, beyond) if seconds(running + tried) <= most else (fits, tried)
    return fits - forks


# A beginning goes to the store again when it has grown by this many tokens and by this share: what is sent in all
# stays in proportion to the length, and a lost instance costs about that share.
_GROWTH_TOKENS = 32
_GROWTH_SHARE = 0.125


class NearTie(NamedTuple):
    """A position at which the runner-up nearly was the token of the sample."""

    margin: float
    """By which its score was less, in nats, noise included."""
    position: int
    token: int


@dataclass(slots=True, eq=False)
class DraftLease:
    """A task and the tokens generated for it so far, under policy `version`.

    `number` names the lease in reports; 0 when the coordinator that gave it is gone. `stored` tokens were handed to
    the draft store. It is `finished` if the sample ended by itself, and `returned` if it was given back, because
    real work came or it was refused.
    """

    number: int
    handle: int
    task: pb.PregenerationTask
    version: int
    # 1 + the position at which a fork takes the runner-up, 0 for a task. A fork has no number or log-probabilities.
    fork: int = 0
    # uint32 and float32, of the same length: made into a rollout by copying.
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
        """Identity of the sample, whichever coordinator gave the task."""
        task = self.task
        return task.run_id, task.prompt_id, task.slot, task.seed

    @property
    def running(self) -> bool:
        """True while the sample is being generated."""
        return not (self.finished or self.returned)

    def note_ties(self, runners_up: Sequence[int], margins: Sequence[float], fork_margin: float) -> None:
        """Record the near-ties among the coming tokens."""
        coming = enumerate(zip(margins, runners_up, strict=True), len(self.tokens))
        for position, (margin, token) in coming:
            if margin < fork_margin:
                insort(self.ties, NearTie(margin, position, token))

    def nearest_open(self, most: int) -> list[NearTie]:
        """Return the ties that belong to the `most` nearest and are not forked."""
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
        """Begin with the store's tokens of the same seed and policy."""
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

    `epoch` names the coordinator process that gave them, 0 before the first; `news` grows with every end of a task
    that is to be reported.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.news = 0
        self._leases: dict[int, DraftLease] = {}
        self._handles = count(1)
        # Leases whose near-ties may be forked still, those that are finished and told included.
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
        """Take over tasks; returns the leases to start, at most `room`, and gives back the rest.

        A task that is being generated already, for a coordinator that is gone, gets its new number instead.
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
        """Add tokens of a task since the last call; tokens with a margin below `fork_margin` are near-ties.

        `runners_up` and `margins` have an entry for each token, or none.
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

        At most `room` are added. A task has at most `most`; then a nearer tie takes the place of its farthest one.
        A tie in the last token that a response may have leads nowhere.
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
                # It may have its place later.
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
        """Return the handles of at most `count` running forks; forks of the farthest ties come first."""
        running = {handle for handle, lease in self._leases.items() if lease.fork and lease.running}
        ties = sorted(
            ((tie, handle) for lease in self._forkable.values() for tie, handle in lease.forked), reverse=True
        )
        return [handle for _, handle in ties if handle in running][:count]

    def end_forking(self) -> None:
        """Fork none of the tasks so far any more: other work came, or other weights."""
        self._forkable.clear()

    def end(self, handle: int, *, finished: bool) -> DraftLease | None:
        """End a task, finished or not, and return its lease; None when it is not running any more."""
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
        """Forget tasks that are not wanted any more; returns the handles of those to end, with their forks."""
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
        """Drop the numbers of another coordinator process; running tasks go on."""
        self.epoch = epoch
        self._leases = {h: lease for h, lease in self._leases.items() if lease.running}
        for lease in self._leases.values():
            lease.number = 0

    def progress(self) -> list[pb.PregenerationProgress]:
        """Return the progress of all leases of the coordinator."""
        return [lease.progress() for lease in self._leases.values() if lease.number]

    def told(self, progress: Iterable[pb.PregenerationProgress]) -> None:
        """Forget the ended tasks of a report that the coordinator has got."""
        ended = {each.lease for each in progress if each.finished or each.returned}
        self._leases = {h: lease for h, lease in self._leases.items() if lease.number not in ended}

    def growing(self) -> list[DraftLease]:
        """Return the running tasks whose new tokens should go to the store."""
        return [lease for lease in self._leases.values() if lease.running and lease.worth_storing]
