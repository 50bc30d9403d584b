"""Ledger of the coordinator: runs and their hints, instances and their leases.

Pure: times are passed in (unix seconds), nothing is sent. The states of a task are

    free -> leased(instance) -> finished
      ^________|   given back, instance silent or replaced, or the instance does not know of the lease

so a task has at most one valid lease. A report about a lease that is no longer valid is used only where it still
adds information.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from paceline.internal.v1 import bubble_pb2 as pb
from services.bubbles.config import BubblesConfig
from services.bubbles.pool import PooledTask, StepPool


class SharingMembers:
    """Counts instances that polled in the last `seconds` or are registered, in O(1)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Time of the last poll of each, the longest silent first.
        self._heard: dict[str, float] = {}
        self._alive: Set[str] = frozenset()
        # Number of registered instances that are not in `_heard`.
        self._others = 0

    def note_poll(self, instance_id: str, now: float) -> None:
        """Record a poll."""
        known = self._heard.pop(instance_id, None) is not None
        self._others -= not known and instance_id in self._alive
        self._heard[instance_id] = now

    def forget(self, instance_id: str) -> None:
        """Stop counting an instance, unless it is registered."""
        if self._heard.pop(instance_id, None) is not None:
            self._others += instance_id in self._alive

    def set_alive(self, alive: Set[str]) -> None:
        """Set the registered instances."""
        self._alive = frozenset(alive)
        self._others = len(self._alive - self._heard.keys())

    def count(self, now: float) -> int:
        """Return the number of instances, at least 1."""
        while self._heard:
            name, heard = next(iter(self._heard.items()))
            if now - heard <= self._seconds:
                break
            self.forget(name)
        return max(1, len(self._heard) + self._others)


FORGET = 600.0
"""Seconds after which a silent run or instance is forgotten."""


@dataclass(slots=True, eq=False)
class PregenerationRun:
    """A run with its hinted steps.

    `status` is the gateway's latest report, of time `heard_at`; `ended_at`: when the last sample of its step ended,
    0 if unknown.
    """

    run_id: str
    heard_at: float
    status: pb.SetRunRequest | None = None
    ended_at: float = 0.0
    pools: dict[int, StepPool] = field(default_factory=dict)

    @property
    def leased(self) -> int:
        """Number of tasks that instances have."""
        return sum(pool.leased for pool in self.pools.values() if pool.wanted)

    def coming(self, most: int) -> list[StepPool]:
        """Return the pools of the next `most` hinted steps, nearest first."""
        steps = sorted(step for step, pool in self.pools.items() if pool.wanted)
        return [self.pools[step] for step in steps[:most]]


@dataclass(slots=True, eq=False)
class TaskLease:
    """A task of a run's step, given to an instance."""

    number: int
    run_id: str
    step: int
    task: PooledTask
    revoked: bool = False

    @property
    def is_valid(self) -> bool:
        """True while the lease is the task's valid one; False after the instance was silent for too long."""
        return self.task.lease == self.number


@dataclass(slots=True, eq=False)
class PollingInstance:
    """An instance under its latest epoch. `answered`: halt and sleep of its last answer."""

    instance_id: str
    epoch: int
    seen_at: float
    leases: dict[int, TaskLease] = field(default_factory=dict)
    answered: tuple[bool, bool] = (False, False)


def is_running(progress: pb.PregenerationProgress) -> bool:
    """Return True for a task that is still being generated."""
    return not (progress.finished or progress.returned)


class BubbleLedger:
    """Records of the coordinator, changed by reports of gateway and instances.

    `revision` grows with every change that can change an answer; `tally` counts events of leases until it is
    emptied. `alive`: number of step samples of each registered instance, polling or not; `recounted`: instances
    whose number has changed, if the config makes it matter, until it is emptied.
    """

    def __init__(self, config: BubblesConfig, first_lease: int = 1) -> None:
        """Leases are numbered upwards from `first_lease`."""
        self.config = config
        self.runs: dict[str, PregenerationRun] = {}
        self.instances: dict[str, PollingInstance] = {}
        self.alive: dict[str, int] = {}
        self.recounted: set[str] = set()
        self.revision = 0
        self.tally: Counter[str] = Counter()
        self._next_lease = first_lease
        self._members = SharingMembers(config.lease_seconds)

    # Reports of the gateway ------------------------------------------------------------------------------

    def set_run(self, request: pb.SetRunRequest, now: float) -> list[str]:
        """Record the status of a run and its useful hints; return the hints among them that are missing here."""
        useful = list(request.hint_ids)
        status = pb.SetRunRequest()
        status.CopyFrom(request)
        status.ClearField("hint_ids")
        run = self.runs.setdefault(status.run_id, PregenerationRun(status.run_id, now))
        before, run.status, run.heard_at = run.status, status, now
        self.revision += before != status
        if status.phase == pb.RUN_PHASE_ROLLOUT:
            run.ended_at = 0.0
        elif before is not None and before.phase == pb.RUN_PHASE_ROLLOUT:
            run.ended_at = now
        self._drop_passed(run, status.step, set(useful))
        have = {pool.hint.hint_id for pool in run.pools.values() if pool.wanted}
        return [hint_id for hint_id in useful if hint_id not in have]

    def close_run(self, run_id: str) -> None:
        """Forget a run that is over."""
        if self.runs.pop(run_id, None) is not None:
            self.revision += 1

    def put_hint(self, hint: pb.PutHintRequest, now: float) -> int:
        """Record the samples of a coming step; return the number of samples to pre-generate.

        Replaces an earlier hint for the step; a sample that is the same in both keeps its tokens.
        """
        run = self.runs.setdefault(hint.run_id, PregenerationRun(hint.run_id, now))
        if run.status is not None and hint.step <= run.status.step:
            return 0
        old = run.pools.get(hint.step)
        if old is None or not old.wanted or old.hint.hint_id != hint.hint_id:
            pool = StepPool(hint, coupled=self.config.coupled, per_prompt=self.config.per_prompt)
            if old is not None:
                pool.adopt(old)
            run.pools[hint.step] = pool
            self.revision += 1
        return len(run.pools[hint.step].tasks)

    def coverage(self, run_id: str, step: int) -> list[PooledTask]:
        """Return the tasks of a step that have tokens, including the step that is being rolled out."""
        run = self.runs.get(run_id)
        pool = run.pools.get(step) if run is not None else None
        return [] if pool is None else [task for task in pool.tasks.values() if task.covered or task.finished]

    # Reports of instances --------------------------------------------------------------------------------

    def report(self, poll: pb.PollWorkRequest, now: float) -> PollingInstance | None:
        """Record the progress of an instance's leases; it does not have a lease that it does not name.

        The caller leaves out leases of another coordinator process. Returns None for a process that was replaced.
        """
        instance = self.instances.get(poll.instance_id)
        if instance is not None and poll.epoch < instance.epoch:
            return None
        if instance is None or poll.epoch > instance.epoch:
            if instance is not None:
                self._void(instance, "replaced")
            instance = self.instances[poll.instance_id] = PollingInstance(poll.instance_id, poll.epoch, now)
            self.revision += 1
        self.note_poll(instance, now)
        reported = {each.lease: each for each in poll.progress}
        for lease in list(instance.leases.values()):
            progress = reported.get(lease.number)
            if progress is None:
                self._unknown(instance, lease)
            else:
                self._advance(instance, lease, progress)
        return instance

    def note_poll(self, instance: PollingInstance, now: float) -> None:
        """Record that an instance polls, which keeps its leases."""
        instance.seen_at = now
        self._members.note_poll(instance.instance_id, now)

    def set_alive(self, samples: Mapping[str, int]) -> None:
        """Set `alive`. An instance that is no longer registered loses its leases at once."""
        for name in self.alive.keys() - samples.keys():
            if name in self.instances:
                self._void(self.instances[name], "expired")
        if samples.keys() != self.alive.keys():
            self._members.set_alive(samples.keys())
            self.revision += 1
        if self.config.max_step_samples is not None:
            changed = {name for name, _ in samples.items() ^ self.alive.items()}
            self.recounted |= changed
            self.revision += bool(changed)
        self.alive = dict(samples)

    def expire(self, now: float) -> None:
        """Take the leases from silent instances; forget runs and instances after `FORGET` seconds of silence."""
        for instance in list(self.instances.values()):
            silent = now - instance.seen_at
            if silent > self.config.lease_seconds:
                self._void(instance, "expired")
            if silent > FORGET:
                del self.instances[instance.instance_id]
                self._members.forget(instance.instance_id)
        for run in list(self.runs.values()):
            if now - run.heard_at > FORGET:
                self.close_run(run.run_id)

    def members(self, now: float) -> int:
        """Return the number of instances that share the tasks, at least 1."""
        return self._members.count(now)

    # Leases ---------------------------------------------------------------------------------------------

    def lease(
        self, run: PregenerationRun, pool: StepPool, task: PooledTask, instance: PollingInstance
    ) -> TaskLease:
        """Give a task, just taken from the pool, to an instance."""
        lease = TaskLease(self._next_lease, run.run_id, pool.hint.step, task)
        self._next_lease += 1
        task.lease, task.running = lease.number, 0
        instance.leases[lease.number] = lease
        self.tally["leased"] += 1
        return lease

    def revoke(self, lease: TaskLease) -> None:
        """Mark a lease that its instance is asked to end. It stays valid until the instance confirms."""
        if not lease.revoked:
            lease.revoked = True
            self.tally["revoked"] += 1

    def pool_of(self, lease: TaskLease) -> StepPool | None:
        """Return the pool of the lease's task; None if no hint names the task any more."""
        run = self.runs.get(lease.run_id)
        pool = run.pools.get(lease.step) if run is not None else None
        return pool if pool is not None and pool.tasks.get(lease.task.key) is lease.task else None

    def _advance(
        self, instance: PollingInstance, lease: TaskLease, progress: pb.PregenerationProgress
    ) -> None:
        task = lease.task
        self.tally["tokens"] += max(0, progress.tokens - task.covered)
        if is_running(progress):
            if lease.is_valid:
                task.running = progress.tokens
            return
        del instance.leases[lease.number]
        task.tokens = max(task.tokens, progress.tokens)
        self.tally["finished" if progress.finished else "returned"] += 1
        pool = self.pool_of(lease)
        if pool is not None:
            pool.keep(task, instance.instance_id)
            if progress.finished:
                pool.finish(task)
        if lease.is_valid:
            self._free(lease)
        self.revision += 1

    def _unknown(self, instance: PollingInstance, lease: TaskLease) -> None:
        """Drop a lease that the instance has ended on request or does not know."""
        del instance.leases[lease.number]
        if lease.revoked:
            lease.task.tokens = lease.task.covered
        if lease.is_valid:
            self._free(lease)
            self.revision += 1
            self.tally["unknown"] += not lease.revoked

    def _void(self, instance: PollingInstance, cause: str) -> None:
        """Invalidate the leases of an instance, which may still report their progress."""
        for lease in instance.leases.values():
            if lease.is_valid:
                self._free(lease)
                self.revision += 1
                self.tally[cause] += 1

    def _free(self, lease: TaskLease) -> None:
        task, pool = lease.task, self.pool_of(lease)
        task.lease = task.running = 0
        if pool is not None:
            pool.put_back(task)

    def _drop_passed(self, run: PregenerationRun, step: int, useful: set[str]) -> None:
        for at, pool in list(run.pools.items()):
            if at == step:
                # The gateway may still request its coverage.
                self.revision += pool.wanted
                pool.wanted = False
            elif at < step or pool.hint.hint_id not in useful:
                del run.pools[at]
                self.revision += 1
