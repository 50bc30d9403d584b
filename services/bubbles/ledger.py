"""What the coordinator knows: runs and their hints, instances and their leases.

Pure: times are passed in (unix seconds), nothing is sent. An item goes

    free -> leased(instance) -> finished
      ^________|   given back, instance silent or replaced, or the instance does not know of the lease

so it has at most one lease that counts. What an instance says of a lease that does not count any more is taken in
as far as it is worth knowing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from paceline.internal.v1 import bubble_pb2 as pb
from services.bubbles.pool import Item, StepPool
from services.bubbles.records import Instance, Lease, Phase, Poll, Progress, Rules, Run, Standing

FORGET = 600.0
"""Seconds after which a silent run or instance is forgotten."""


class Ledger:
    """`revision` grows with every change that can change an answer; `tally` counts what became of leases, for
    whoever empties it. Leases are numbered upwards from `first_lease`. `alive`: the samples of a step that each
    living instance has, whether or not it polls."""

    def __init__(self, rules: Rules, first_lease: int = 1) -> None:
        self.rules = rules
        self.runs: dict[str, Run] = {}
        self.instances: dict[str, Instance] = {}
        self.alive: dict[str, int] = {}
        self.revision = 0
        self.tally: Counter[str] = Counter()
        self._next_lease = first_lease

    # What the gateway says ------------------------------------------------------------------------------

    def set_run(self, run_id: str, standing: Standing, hint_ids: Iterable[str], now: float) -> list[str]:
        """The run stands so, and these hints are of use; returns those of them that are not here."""
        run = self.runs.setdefault(run_id, Run(run_id, now))
        before, run.standing, run.heard_at = run.standing, standing, now
        self.revision += before != standing
        if standing.phase is Phase.ROLLOUT:
            run.ended_at = 0.0
        elif before is not None and before.phase is Phase.ROLLOUT:
            run.ended_at = now
        useful = list(hint_ids)
        self._drop_passed(run, standing.step, set(useful))
        have = {pool.hint.hint_id for pool in run.pools.values() if pool.wanted}
        return [hint_id for hint_id in useful if hint_id not in have]

    def close_run(self, run_id: str) -> None:
        """The run is over."""
        if self.runs.pop(run_id, None) is not None:
            self.revision += 1

    def put_hint(self, hint: pb.PutHintRequest, now: float) -> int:
        """Names the samples of a coming step; returns how many are to be pre-generated. Replaces an earlier
        hint for the step; a sample that is the same in both stays as far as it is."""
        run = self.runs.setdefault(hint.run_id, Run(hint.run_id, now))
        if run.standing is not None and hint.step <= run.standing.step:
            return 0
        old = run.pools.get(hint.step)
        if old is None or not old.wanted or old.hint.hint_id != hint.hint_id:
            pool = StepPool(hint, coupled=self.rules.coupled, per_prompt=self.rules.per_prompt)
            if old is not None:
                pool.adopt(old)
            run.pools[hint.step] = pool
            self.revision += 1
        return len(run.pools[hint.step].items)

    def coverage(self, run_id: str, step: int) -> list[Item]:
        """The items of a step that there is something of; also of the step that is being rolled out."""
        run = self.runs.get(run_id)
        pool = run.pools.get(step) if run is not None else None
        return [] if pool is None else [item for item in pool.items.values() if item.covered or item.finished]

    # What instances say ---------------------------------------------------------------------------------

    def report(self, poll: Poll, now: float) -> Instance | None:
        """Takes in what an instance says of its leases; one that it does not name it does not have. None for a
        process that has been replaced."""
        instance = self.instances.get(poll.instance_id)
        if instance is not None and poll.epoch < instance.epoch:
            return None
        if instance is None or poll.epoch > instance.epoch:
            if instance is not None:
                self._void(instance, "replaced")
            instance = self.instances[poll.instance_id] = Instance(poll.instance_id, poll.epoch, now)
            self.revision += 1
        instance.seen_at = now
        told = {each.lease: each for each in poll.progress}
        for lease in list(instance.leases.values()):
            progress = told.get(lease.number)
            if progress is None:
                self._unknown(instance, lease)
            else:
                self._advance(instance, lease, progress)
        return instance

    def living(self, samples: Mapping[str, int]) -> None:
        """Sets `alive`. One that was alive and is no more loses its leases at once."""
        for name in self.alive.keys() - samples.keys():
            if name in self.instances:
                self._void(self.instances[name], "expired")
        if samples != self.alive:
            self.alive = dict(samples)
            self.revision += 1

    def expire(self, now: float) -> None:
        """Takes the leases from instances that are silent, and forgets whom nobody has heard of for long."""
        for instance in list(self.instances.values()):
            silent = now - instance.seen_at
            if silent > self.rules.lease_seconds:
                self._void(instance, "expired")
            if silent > FORGET:
                del self.instances[instance.instance_id]
        for run in list(self.runs.values()):
            if now - run.heard_at > FORGET:
                self.close_run(run.run_id)

    def members(self, now: float) -> int:
        """Instances that there are to share the items, one at least."""
        heard = {
            each.instance_id
            for each in self.instances.values()
            if now - each.seen_at <= self.rules.lease_seconds
        }
        return max(1, len(heard | self.alive.keys()))

    # Leases ---------------------------------------------------------------------------------------------

    def lease(self, run: Run, pool: StepPool, item: Item, instance: Instance) -> Lease:
        """Gives an item, just taken from the pool, to an instance."""
        lease = Lease(self._next_lease, run.run_id, pool.hint.step, item)
        self._next_lease += 1
        item.lease, item.running = lease.number, 0
        instance.leases[lease.number] = lease
        self.tally["leased"] += 1
        return lease

    def revoke(self, lease: Lease) -> None:
        """The instance is being told to end the lease. It counts until the instance has done so."""
        if not lease.revoked:
            lease.revoked = True
            self.tally["revoked"] += 1

    def pool_of(self, lease: Lease) -> StepPool | None:
        """The pool that the lease's item is in; None when no hint names it any more."""
        run = self.runs.get(lease.run_id)
        pool = run.pools.get(lease.step) if run is not None else None
        return pool if pool is not None and pool.items.get(lease.item.key) is lease.item else None

    def _advance(self, instance: Instance, lease: Lease, progress: Progress) -> None:
        item = lease.item
        self.tally["tokens"] += max(0, progress.tokens - item.covered)
        if progress.runs:
            if lease.counts:
                item.running = progress.tokens
            return
        del instance.leases[lease.number]
        item.tokens, item.last = max(item.tokens, progress.tokens), instance.instance_id
        self.tally["finished" if progress.finished else "returned"] += 1
        pool = self.pool_of(lease)
        if progress.finished and pool is not None:
            pool.finish(item)
        if lease.counts:
            self._free(lease)
        self.revision += 1

    def _unknown(self, instance: Instance, lease: Lease) -> None:
        """The instance has ended the lease as it was told to, or has never heard of it."""
        del instance.leases[lease.number]
        if lease.revoked:
            lease.item.tokens = lease.item.covered
        if lease.counts:
            self._free(lease)
            self.revision += 1
            self.tally["unknown"] += not lease.revoked

    def _void(self, instance: Instance, cause: str) -> None:
        """The leases of an instance do not count any more; it may still tell of them."""
        for lease in instance.leases.values():
            if lease.counts:
                self._free(lease)
                self.revision += 1
                self.tally[cause] += 1

    def _free(self, lease: Lease) -> None:
        item, pool = lease.item, self.pool_of(lease)
        item.lease = item.running = 0
        if pool is not None:
            pool.put_back(item)

    def _drop_passed(self, run: Run, step: int, useful: set[str]) -> None:
        for at, pool in list(run.pools.items()):
            if at == step:
                # What there is of it is still asked for.
                self.revision += pool.wanted
                pool.wanted = False
            elif at < step or pool.hint.hint_id not in useful:
                del run.pools[at]
                self.revision += 1
