"""Decide which instance pre-generates which tasks, and when instances stop.

Pure: times are passed in (unix seconds), nothing is sent. Polls without work are held back, in groups that get an
answer together (`HeldPolls`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.internal.v1 import bubble_pb2 as pb
from services.bubbles.ledger import BubbleLedger, PollingInstance, PregenerationRun, TaskLease, is_running
from services.bubbles.pool import StepPool


@dataclass(frozen=True, slots=True)
class PollKind:
    """Properties of a poll that decide, with the ledger, whether an instance that runs nothing gets an answer.

    `takes`: it has room, and no samples of a step or few enough. `answered`: halt and sleep of its last answer.
    """

    policy_version: int
    takes: bool
    answered: tuple[bool, bool]


class HeldPolls:
    """Instances whose polls are held back, by kind, in order of arrival."""

    def __init__(self) -> None:
        self._kinds: dict[str, PollKind] = {}
        self._groups: dict[PollKind, dict[str, None]] = {}

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._kinds

    def hold(self, instance_id: str, kind: PollKind) -> None:
        """Hold the poll of an instance as the last of its kind, also if it is held under another kind."""
        self.leave(instance_id)
        self._kinds[instance_id] = kind
        self._groups.setdefault(kind, {})[instance_id] = None

    def leave(self, instance_id: str) -> None:
        """Release an instance's poll, if it is held."""
        kind = self._kinds.pop(instance_id, None)
        if kind is not None:
            group = self._groups[kind]
            del group[instance_id]
            if not group:
                del self._groups[kind]

    def first(self, has_answer: Callable[[PollKind], bool]) -> list[str]:
        """Return the first poll of each kind that has an answer; the next one follows once it was answered."""
        return [next(iter(group)) for kind, group in self._groups.items() if has_answer(kind)]


RUN_SILENCE = 10.0
"""Seconds without a report of the gateway after which no more tasks of a run are given out."""


@dataclass(frozen=True, slots=True)
class WorkAnswer:
    """Answer to a poll. `quiet`: it has nothing new for the instance."""

    leases: tuple[TaskLease, ...] = ()
    revoked: tuple[int, ...] = ()
    halt: bool = False
    sleep: bool = False
    halted_at: float = 0.0
    quiet: bool = True


class PregenerationPlan:
    """Answers polls from the state of the ledger.

    Samples of a step come first. Nothing is given out while a sample waits for an instance, nor to an instance that
    has samples of a step (unless the config allows it). An instance gets at most its share of the open tasks, so
    that tasks remain for instances that become idle later. It begins with a later step only when no task of the
    nearer one is left for it and it runs none any more: a larger batch would slow the nearer step's drafts down.
    Several runs share the room by the leases that they have.
    """

    def __init__(self, ledger: BubbleLedger) -> None:
        self.ledger = ledger
        self._config = ledger.config

    def answer(self, poll: pb.PollWorkRequest, now: float) -> WorkAnswer:
        """Return the answer to a poll whose report the ledger already has.

        May be called again for the same poll after a change.
        """
        instance = self.ledger.instances.get(poll.instance_id)
        running = [each.lease for each in poll.progress if is_running(each)]
        if instance is None or instance.epoch != poll.epoch:
            return WorkAnswer(revoked=tuple(running), quiet=not running)
        self.ledger.note_poll(instance, now)
        halt, sleep, halted_at = self._halt()
        revoked = [number for number in running if self._revokes(instance, number)]
        leases = [] if halt else self._hand_out(instance, poll, now)
        quiet = not leases and not revoked and (halt, sleep) == instance.answered
        instance.answered = (halt, sleep)
        return WorkAnswer(tuple(leases), tuple(revoked), halt, sleep, halted_at, quiet)

    def kind(self, poll: pb.PollWorkRequest) -> PollKind | None:
        """Return the kind of a poll that reports no running task; None if it will never have an answer."""
        instance = self.ledger.instances.get(poll.instance_id)
        if instance is None or instance.epoch != poll.epoch:
            return None
        return PollKind(poll.policy_version, poll.room > 0 and self._in_bubble(poll), instance.answered)

    def has_answer(self, kind: PollKind, now: float) -> bool:
        """Return True if `answer` would not be quiet for a poll of this kind. O(runs)."""
        halt, sleep, _ = self._halt()
        if halt or (halt, sleep) != kind.answered or not kind.takes:
            return (halt, sleep) != kind.answered
        return not self._anyone_waits(now) and any(
            self._may_start(run, kind.policy_version, now) and self._has_free(run)
            for run in self.ledger.runs.values()
        )

    def _has_free(self, run: PregenerationRun) -> bool:
        return any(pool.free for pool in run.coming(self._config.max_ahead))

    def _halt(self) -> tuple[bool, bool, float]:
        """Return halt, sleep and the time when the step ended (0 if unknown), for all instances.

        All instances stop while weights are applied; unless updates are used, they also stop at the barrier, when a
        run learns and no run has samples of a step.
        """
        runs = [(run, run.status) for run in self.ledger.runs.values() if run.status is not None]
        if any(status.phase == pb.RUN_PHASE_APPLYING for _, status in runs):
            return True, False, 0.0
        learning = [run.ended_at for run, status in runs if status.phase == pb.RUN_PHASE_UPDATE]
        if self._uses_updates or not learning or self._anyone_rolls():
            return False, False, 0.0
        return True, self._config.during_update == "sleep", max(learning)

    def _revokes(self, instance: PollingInstance, number: int) -> bool:
        """Return True if the instance must end this lease, which it works on."""
        lease = instance.leases.get(number)
        if lease is None:
            return True
        if self._is_wanted(lease):
            return False
        self.ledger.revoke(lease)
        return True

    def _is_wanted(self, lease: TaskLease) -> bool:
        pool = self.ledger.pool_of(lease)
        if pool is None or not pool.wanted or lease.task.finished or not lease.is_valid:
            return False
        status = self.ledger.runs[lease.run_id].status
        return status is None or status.phase != pb.RUN_PHASE_UPDATE or self._uses_updates

    @property
    def _uses_updates(self) -> bool:
        return self._config.during_update == "pregenerate"

    # Giving out -----------------------------------------------------------------------------------------

    def _hand_out(self, instance: PollingInstance, poll: pb.PollWorkRequest, now: float) -> list[TaskLease]:
        if poll.room <= 0 or not self._in_bubble(poll) or self._anyone_waits(now):
            return []
        members = self.ledger.members(now)
        claims: list[tuple[PregenerationRun, StepPool, int]] = []
        for _, run in sorted(self.ledger.runs.items()):
            if self._may_start(run, poll.policy_version, now):
                claims += self._claim(run, instance, members)
        counts = share_out([(run.leased, most) for run, _, most in claims], poll.room)
        leases: list[TaskLease] = []
        for (run, pool, _), count in zip(claims, counts, strict=True):
            prompts = {each.task.group.prompt_id for each in instance.leases.values()}
            for task in pool.take(count, instance.instance_id, prompts):
                leases.append(self.ledger.lease(run, pool, task, instance))
        return leases

    def _in_bubble(self, poll: pb.PollWorkRequest) -> bool:
        """Return True if the instance is idle, or has few enough samples of a step.

        The registry's count of samples can be a second old. It only falls in the tail of a step, so an old count
        errs on the safe side.
        """
        if not poll.serving:
            return True
        threshold, samples = self._config.max_step_samples, self.ledger.alive.get(poll.instance_id)
        return threshold is not None and samples is not None and samples <= threshold

    def _anyone_rolls(self) -> bool:
        """Return True if a run has samples of a step; if not, instances wait for the trainer."""
        return any(run.status is not None and run.status.unfinished for run in self.ledger.runs.values())

    def _anyone_waits(self, now: float) -> bool:
        """Return True if a sample waits for an instance, by a recent report of a gateway."""
        return any(
            run.status is not None and run.status.waiting and now - run.heard_at <= RUN_SILENCE
            for run in self.ledger.runs.values()
        )

    def _may_start(self, run: PregenerationRun, version: int, now: float) -> bool:
        status = run.status
        if status is None or status.policy_version != version or now - run.heard_at > RUN_SILENCE:
            return False
        if self._uses_updates:
            return status.phase != pb.RUN_PHASE_APPLYING
        return status.phase == pb.RUN_PHASE_ROLLOUT and self._anyone_rolls()

    def _claim(
        self, run: PregenerationRun, instance: PollingInstance, members: int
    ) -> list[tuple[PregenerationRun, StepPool, int]]:
        """Return the run's pool from which the instance may take tasks, with their number; empty if none."""
        for pool in run.coming(self._config.max_ahead):
            held = sum(
                lease.is_valid and self.ledger.pool_of(lease) is pool for lease in instance.leases.values()
            )
            if pool.free:
                share = -(-pool.open // members) - held
                return [(run, pool, min(share, pool.free))] if share > 0 else []
            if held:
                break
        return []


def share_out(claims: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Share `room` among claims (held, most): one task at a time goes to the claim that has the fewest."""
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
