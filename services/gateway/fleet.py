"""The health of the fleet: which instance may be given work, and which is gone.

Pure: time is passed in (monotonic seconds), nothing is called. A member goes

    (registered) -> STALE -> SERVING <-> PAUSED
                     ^  ^       |    -> DRAINING
                     |  |_______|  weights unknown or old
                     |
                   DEAD <- any state: heartbeat gone, stream broken, process replaced

There is no transition DEAD -> SERVING. An instance that was lost may have missed a weight update, been
half-way through one, or be a new process with the weights of its start; its samples are already going on
elsewhere. So it comes back as STALE only (a new process under a new epoch; a process that was frozen
under its old one), and serves once it is known to have the published version: a new epoch by its own
word in a fresh handshake, or by a completed update; an epoch that was lost or failed an update only by a
completed update. The one exception is the version that the fleet started with: no weights are recorded
for it, so there the handshake has to do.

Life is judged by two signs: the registry record, which expires `ttl` after the last heartbeat, and what
comes over the work stream. An instance is lost when its record is gone *and* its stream is silent: a
Redis that cannot be reached, or that came back empty, kills nobody.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.platform.registry import InstanceRecord


class State(enum.StrEnum):
    """As paceline.v1.InstanceState, in lower case."""

    STALE = "stale"
    SERVING = "serving"
    PAUSED = "paused"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class FleetRules:
    """Seconds. `silence`: a stream that brought something more recently proves life. `grace`: after the
    registry could not be read, records get this long to come back. `retry_first` doubles with every loss
    up to `retry_most`; a member that served for `steady` starts again at the first. Dead members are
    shown for `remember`."""

    silence: float = 1.0
    grace: float = 3.0
    retry_first: float = 0.5
    retry_most: float = 30.0
    steady: float = 30.0
    remember: float = 300.0


@dataclass(slots=True)
class Member:
    """One instance under its latest epoch."""

    record: InstanceRecord
    state: State
    version: int
    since: float
    reason: str = ""
    present: bool = True
    # Whether only a completed update makes it serve; and whether that is so because it failed one.
    needs_update: bool = False
    weights_unknown: bool = False
    heard_at: float = float("-inf")
    serving_since: float = float("inf")
    losses: int = 0
    retry_at: float = float("-inf")
    # What the instance says of itself, as far as it bears on new work.
    reported: State = State.SERVING
    load: dict[str, float] = field(default_factory=dict)

    @property
    def instance_id(self) -> str:
        return self.record.instance_id

    @property
    def epoch(self) -> int:
        return self.record.epoch


@dataclass(frozen=True, slots=True)
class Loss:
    """A member that just died (under this epoch)."""

    instance_id: str
    epoch: int
    reason: str


class Fleet:
    """All members, by instance id. `revision` grows with every change that a watcher would see."""

    def __init__(self, rules: FleetRules | None = None) -> None:
        self.rules = rules or FleetRules()
        self.members: dict[str, Member] = {}
        # The version that work is done with; None until the first instance says what it has.
        self.published: int | None = None
        # Whether weights are recorded for the published version.
        self.recorded = False
        self.revision = 0
        self._grace_until = float("-inf")
        self._unreadable = False

    def member(self, instance_id: str, epoch: int) -> Member | None:
        """The member, if this is still its epoch."""
        member = self.members.get(instance_id)
        return member if member is not None and member.epoch == epoch else None

    def unreadable(self) -> None:
        """The registry could not be read."""
        self._unreadable = True

    def observe(self, records: Mapping[str, InstanceRecord], now: float) -> list[Loss]:
        """Takes in what the registry shows; returns who is lost."""
        if self._unreadable:
            self._unreadable, self._grace_until = False, now + self.rules.grace
        losses = []
        for record in records.values():
            losses += self._seen(record, now)
        for member in list(self.members.values()):
            if member.instance_id not in records:
                losses += self._missing(member, now)
        return losses

    def heard(self, instance_id: str, epoch: int, now: float) -> None:
        """Something came over the member's stream."""
        member = self.member(instance_id, epoch)
        if member is not None:
            member.heard_at = now

    def confirm(self, instance_id: str, epoch: int, version: int, now: float, *, updated: bool) -> bool:
        """The member says in a handshake, or has shown by a completed update, that it has `version`.
        True when it may serve now."""
        member = self.member(instance_id, epoch)
        if member is None or member.state is State.DEAD:
            return False
        if self.published is None:
            self.published = version
        self._note_version(member, version)
        member.weights_unknown = member.weights_unknown and not updated
        member.needs_update = (
            member.needs_update and not updated and (self.recorded or member.weights_unknown)
        )
        if version != self.published or member.needs_update:
            self._enter(member, State.STALE, f"has version {version}, published is {self.published}", now)
            return False
        member.serving_since = min(member.serving_since, now)
        self._enter(member, member.reported, "", now)
        return True

    def lost(self, instance_id: str, epoch: int, reason: str, now: float) -> list[Loss]:
        """The member's connection broke."""
        member = self.member(instance_id, epoch)
        return self._die(member, reason, now) if member is not None else []

    def quarantine(self, instance_id: str, epoch: int, reason: str, now: float) -> None:
        """The member failed an update: nobody knows its weights. It serves after a completed update."""
        member = self.member(instance_id, epoch)
        if member is not None and member.state is not State.DEAD:
            member.needs_update = member.weights_unknown = True
            self._enter(member, State.STALE, reason, now)

    def publish(self, version: int, *, recorded: bool, now: float) -> None:
        """From now on work is done with this version; members without it are STALE."""
        self.published, self.recorded = version, recorded
        self.revision += 1
        for member in self.members.values():
            if member.state is not State.DEAD and member.version != version:
                self._enter(member, State.STALE, f"has version {member.version}", now)

    def report(self, instance_id: str, state: State, now: float) -> None:
        """The member was paused, resumed or drained."""
        member = self.members.get(instance_id)
        if member is None:
            return
        member.reported = state
        if member.state in (State.SERVING, State.PAUSED, State.DRAINING):
            self._enter(member, state, "", now)

    def due(self, now: float) -> list[Member]:
        """Members that should be connected to, or be connected to again. The dead among them become
        STALE."""
        found = []
        for member in self.members.values():
            if member.state is State.DEAD and member.present and now >= member.retry_at:
                self._enter(member, State.STALE, "heartbeat is back", now)
            if member.state is not State.DEAD:
                found.append(member)
        return found

    def usable(self) -> list[Member]:
        """Members that have the published version and are not on their way out."""
        return [m for m in self.members.values() if m.state in (State.SERVING, State.PAUSED)]

    def _seen(self, record: InstanceRecord, now: float) -> list[Loss]:
        member = self.members.get(record.instance_id)
        if member is not None and record.epoch < member.epoch:
            return []
        if member is None or record.epoch > member.epoch:
            return self._join(record, member, now)
        if record.state != member.record.state:
            # Only a change counts: a record lags behind what the gateway itself has just asked for.
            self.report(record.instance_id, _reported(record.state), now)
        member.record, member.present = record, True
        member.load = {name: float(value) for name, value in record.load.items()}
        return []

    def _join(self, record: InstanceRecord, old: Member | None, now: float) -> list[Loss]:
        losses = self._die(old, f"replaced by epoch {record.epoch}", now) if old is not None else []
        member = Member(record, State.STALE, record.policy_version, now, reason="registered")
        member.reported = _reported(record.state)
        member.losses = old.losses if old is not None else 0
        self.members[record.instance_id] = member
        self.revision += 1
        return losses

    def _missing(self, member: Member, now: float) -> list[Loss]:
        member.present = False
        if member.state is State.DEAD:
            if now - member.since > self.rules.remember:
                del self.members[member.instance_id]
                self.revision += 1
            return []
        if now < self._grace_until or now - member.heard_at < self.rules.silence:
            return []
        return self._die(member, "heartbeat gone", now)

    def _die(self, member: Member, reason: str, now: float) -> list[Loss]:
        if member.state is State.DEAD:
            return []
        if now - member.serving_since > self.rules.steady:
            member.losses = 0
        wait = min(self.rules.retry_first * 2**member.losses, self.rules.retry_most)
        member.losses, member.retry_at = min(member.losses + 1, 16), now + wait
        member.needs_update, member.serving_since = True, float("inf")
        self._enter(member, State.DEAD, reason, now)
        return [Loss(member.instance_id, member.epoch, reason)]

    def _note_version(self, member: Member, version: int) -> None:
        if member.version != version:
            member.version = version
            self.revision += 1

    def _enter(self, member: Member, state: State, reason: str, now: float) -> None:
        assert not (member.state is State.DEAD and state is not State.STALE), "the dead do not serve"
        if (member.state, member.reason) != (state, reason):
            member.state, member.reason, member.since = state, reason, now
            self.revision += 1


def _reported(state: str) -> State:
    """What a record's state says about new work. STALE and SERVING are for the gateway to judge."""
    return State(state) if state in (State.PAUSED, State.DRAINING) else State.SERVING
