"""The items that an instance has of the coordinator, and what is to be told about them. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

import numpy as np

from paceline.internal.v1 import bubble_pb2 as pb
from services.drafts.rollout import Kind, Rollout

# A beginning goes to the store again when it has grown by this many tokens and by this share: what is sent in all
# stays in proportion to the length, and a lost instance costs about that share.
_GROWTH_TOKENS = 32
_GROWTH_SHARE = 0.125


class State(Enum):
    """How far an item is."""

    RUNNING = "running"
    # Ended by itself.
    FINISHED = "finished"
    # Given back: real work came, or it was refused.
    RETURNED = "returned"


@dataclass(slots=True, eq=False)
class Lease:
    """An item and the tokens generated for it so far, under policy `version`.

    `number` is its name in reports; 0 when the coordinator that gave it is gone. `stored` of its tokens were
    handed to the draft store.
    """

    number: int
    handle: int
    item: pb.PregenerationItem
    version: int
    # uint32 and float32, of the same length: made into a rollout by copying.
    tokens: array[int] = field(default_factory=lambda: array("I"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    state: State = State.RUNNING
    stored: int = 0

    @property
    def names(self) -> tuple[str, str, int, int]:
        """What is generated, whoever asked for it."""
        item = self.item
        return item.run_id, item.prompt_id, item.slot, item.seed

    @property
    def finished(self) -> bool:
        """Whether it ended by itself."""
        return self.state is State.FINISHED

    @property
    def worth_storing(self) -> bool:
        """Whether the store should have the tokens that are new."""
        new = len(self.tokens) - self.stored
        if self.state is State.RUNNING:
            return new >= max(_GROWTH_TOKENS, self.stored * _GROWTH_SHARE)
        return new > 0 or (self.finished and bool(self.tokens))

    def resume(self, known: Rollout) -> None:
        """Begin with tokens that the store has already, of the same seed and policy."""
        longest = self.item.sampling.max_tokens or len(known.tokens)
        self.tokens.frombytes(known.tokens[:longest].astype(np.uint32).tobytes())
        self.logprobs.frombytes(known.logprobs[:longest].astype(np.float32).tobytes())
        self.stored = len(self.tokens)

    def store(self) -> Rollout:
        """The tokens so far, as a draft that goes to the store."""
        item = self.item
        self.stored = len(self.tokens)
        return Rollout(
            run_id=item.run_id,
            prompt_id=item.prompt_id,
            slot=item.slot,
            version=self.version,
            kind=Kind.PREGENERATED,
            step=item.step,
            seed=item.seed,
            tokens=np.array(self.tokens, np.uint32),
            logprobs=np.array(self.logprobs, np.float32),
            finished=self.finished,
        )

    def progress(self) -> pb.PregenerationProgress:
        """The report of it."""
        return pb.PregenerationProgress(
            lease=self.number,
            tokens=len(self.tokens),
            finished=self.finished,
            returned=self.state is State.RETURNED,
        )


class Leases:
    """All items of the instance. `epoch` names the coordinator process that gave them, 0 before the first.

    `news` grows with every end that the coordinator has to be told of.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.news = 0
        self._leases: dict[int, Lease] = {}
        self._handles = count(1)

    @property
    def running(self) -> int:
        """Items that are being generated."""
        return sum(lease.state is State.RUNNING for lease in self._leases.values())

    def take(self, items: Iterable[pb.PregenerationItem], version: int, room: int) -> list[Lease]:
        """Take over items; returns the leases to start, at most `room`, and gives back the rest.

        An item that is being generated already, for a coordinator that is gone, gets its new number instead.
        """
        orphans = {lease.names: lease for lease in self._leases.values() if not lease.number}
        known = {lease.number for lease in self._leases.values()}
        fresh: list[Lease] = []
        for item in items:
            if item.lease in known:
                continue
            lease = Lease(item.lease, next(self._handles), item, version)
            orphan = orphans.pop(lease.names, None)
            if orphan is not None and orphan.version == version:
                orphan.number = item.lease
                continue
            self._leases[lease.handle] = lease
            if len(fresh) < room:
                fresh.append(lease)
            else:
                self.end(lease.handle, finished=False)
        return fresh

    def grow(self, handle: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Tokens of an item since the last call."""
        lease = self._leases.get(handle)
        if lease is not None:
            lease.tokens.extend(tokens)
            lease.logprobs.extend(logprobs)

    def end(self, handle: int, *, finished: bool) -> Lease | None:
        """An item ended, by itself or not. None when nothing is known of it any more."""
        lease = self._leases.get(handle)
        if lease is None or lease.state is not State.RUNNING:
            return None
        lease.state = State.FINISHED if finished else State.RETURNED
        if lease.number:
            self.news += 1
        else:
            del self._leases[handle]
        return lease

    def revoke(self, numbers: Iterable[int]) -> list[int]:
        """The handles to end, of items that are not wanted any more; nothing more is told of them."""
        unwanted = set(numbers) - {0}
        gone = [lease for lease in self._leases.values() if lease.number in unwanted]
        for lease in gone:
            lease.number = 0
            if lease.state is not State.RUNNING:
                del self._leases[lease.handle]
        return [lease.handle for lease in gone if lease.state is State.RUNNING]

    def void(self, epoch: int) -> None:
        """Another coordinator process: nobody knows the old numbers any more. Running items go on."""
        self.epoch = epoch
        self._leases = {h: lease for h, lease in self._leases.items() if lease.state is State.RUNNING}
        for lease in self._leases.values():
            lease.number = 0

    def progress(self) -> list[pb.PregenerationProgress]:
        """All that the coordinator has to know of its leases."""
        return [lease.progress() for lease in self._leases.values() if lease.number]

    def told(self, progress: Iterable[pb.PregenerationProgress]) -> None:
        """The coordinator has got this report: what has ended in it is forgotten."""
        ended = {each.lease for each in progress if each.finished or each.returned}
        self._leases = {h: lease for h, lease in self._leases.items() if lease.number not in ended}

    def growing(self) -> list[Lease]:
        """Running items whose new tokens the store should have."""
        return [
            lease for lease in self._leases.values() if lease.state is State.RUNNING and lease.worth_storing
        ]
