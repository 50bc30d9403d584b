"""Who pre-generates what, and who stops: the decisions of the coordinator.

Pure: times are passed in (unix seconds), nothing is sent.

Samples of a step come first. Nothing is given out while a sample waits for an instance, nor to an instance
that has samples of a step (unless `intra_threshold` allows it). An instance is given no more than its share of the
items that are open, so that those that become idle later find theirs. It begins with a later step only when
nothing of the nearer one is left for it and it runs nothing of that any more: a larger batch would slow the
nearer step's drafts down. Several runs share the room by the leases that they have.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from services.bubbles.ledger import Ledger
from services.bubbles.pool import StepPool
from services.bubbles.records import Answer, Instance, Lease, Phase, Poll, Run

RUN_SILENCE = 10.0
"""Seconds without a word from the gateway after which nothing more of a run is given out."""


class Plan:
    """Answers polls from what is in the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._rules = ledger.rules

    def answer(self, poll: Poll, now: float) -> Answer:
        """What an instance is to do, once the ledger has its report. May be asked again for the same poll when
        something has changed."""
        instance = self.ledger.instances.get(poll.instance_id)
        running = [each.lease for each in poll.progress if each.runs]
        if instance is None or instance.epoch != poll.epoch:
            return Answer(revoked=tuple(running), quiet=not running)
        instance.seen_at = now
        halt, sleep, halted_at = self._halt()
        revoked = [number for number in running if self._revokes(instance, number)]
        leases = [] if halt else self._hand_out(instance, poll, now)
        quiet = not leases and not revoked and (halt, sleep) == instance.told
        instance.told = (halt, sleep)
        return Answer(tuple(leases), tuple(revoked), halt, sleep, halted_at, quiet)

    def _halt(self) -> tuple[bool, bool, float]:
        """Whether everybody stops, whether they sleep, and when the step ended that they stop for (0: unknown).

        Everybody stops while weights are applied; and, unless updates are used, at the barrier: when a run
        learns and none has samples of a step.
        """
        runs = [(run, run.standing) for run in self.ledger.runs.values() if run.standing is not None]
        if any(standing.phase is Phase.APPLYING for _, standing in runs):
            return True, False, 0.0
        learning = [run.ended_at for run, standing in runs if standing.phase is Phase.UPDATE]
        if self._uses_updates or not learning or self._anyone_rolls():
            return False, False, 0.0
        return True, self._rules.during_update == "sleep", max(learning)

    def _revokes(self, instance: Instance, number: int) -> bool:
        """Whether the instance is to end this lease, which it works on."""
        lease = instance.leases.get(number)
        if lease is None:
            return True
        if self._is_wanted(lease):
            return False
        self.ledger.revoke(lease)
        return True

    def _is_wanted(self, lease: Lease) -> bool:
        pool = self.ledger.pool_of(lease)
        if pool is None or not pool.wanted or lease.item.finished or not lease.counts:
            return False
        standing = self.ledger.runs[lease.run_id].standing
        return standing is None or standing.phase is not Phase.UPDATE or self._uses_updates

    @property
    def _uses_updates(self) -> bool:
        return self._rules.during_update == "pregenerate"

    # Giving out -----------------------------------------------------------------------------------------

    def _hand_out(self, instance: Instance, poll: Poll, now: float) -> list[Lease]:
        if poll.room <= 0 or not self._in_bubble(poll) or self._anyone_waits(now):
            return []
        members = self.ledger.members(now)
        offers: list[tuple[Run, StepPool, int]] = []
        for _, run in sorted(self.ledger.runs.items()):
            if self._may_start(run, poll.policy_version, now):
                offers += self._offer(run, instance, members)
        counts = share_out([(run.leased, most) for run, _, most in offers], poll.room)
        leases: list[Lease] = []
        for (run, pool, _), count in zip(offers, counts, strict=True):
            prompts = {each.item.group.prompt_id for each in instance.leases.values()}
            for item in pool.take(count, instance.instance_id, prompts):
                leases.append(self.ledger.lease(run, pool, item, instance))
        return leases

    def _in_bubble(self, poll: Poll) -> bool:
        """Whether the instance has nothing better to do. Its own count of samples can be a second old; it only
        falls in the tail of a step, so it errs on the safe side."""
        if not poll.serving:
            return True
        threshold, samples = self._rules.intra_threshold, self.ledger.alive.get(poll.instance_id)
        return threshold is not None and samples is not None and samples <= threshold

    def _anyone_rolls(self) -> bool:
        """Whether there are samples of a step: if not, what is idle is idle for the trainer, not in a bubble."""
        return any(run.standing is not None and run.standing.unfinished for run in self.ledger.runs.values())

    def _anyone_waits(self, now: float) -> bool:
        """Whether a sample waits for an instance; a gateway that is gone says nothing of that."""
        return any(
            run.standing is not None and run.standing.waiting and now - run.heard_at <= RUN_SILENCE
            for run in self.ledger.runs.values()
        )

    def _may_start(self, run: Run, version: int, now: float) -> bool:
        standing = run.standing
        if standing is None or standing.policy_version != version or now - run.heard_at > RUN_SILENCE:
            return False
        if self._uses_updates:
            return standing.phase is not Phase.APPLYING
        return standing.phase is Phase.ROLLOUT and self._anyone_rolls()

    def _offer(self, run: Run, instance: Instance, members: int) -> list[tuple[Run, StepPool, int]]:
        """The pool of the run that the instance may take from, and how much at most; empty for none."""
        for pool in run.coming(self._rules.max_ahead):
            held = sum(
                lease.counts and self.ledger.pool_of(lease) is pool for lease in instance.leases.values()
            )
            if pool.free:
                share = -(-pool.open // members) - held
                return [(run, pool, min(share, pool.free))] if share > 0 else []
            if held:
                return []
        return []


def share_out(claims: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Shares `room` among claims of (already held, most): one at a time to whoever has least."""
    counts = [0] * len(claims)
    heap = [(held, at) for at, (held, most) in enumerate(claims) if most > 0]
    heapq.heapify(heap)
    while room > 0 and heap:
        held, at = heapq.heappop(heap)
        counts[at] += 1
        room -= 1
        if counts[at] < claims[at][1]:
            heapq.heappush(heap, (held + 1, at))
    return counts
