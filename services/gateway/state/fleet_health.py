"""Health of the fleet: the instances that may get samples, and the dead ones. Pure.

Time is passed in (monotonic seconds). The states of a member are

    (registered) -> STALE -> SERVING <-> PAUSED
                     ^  ^       |    -> DRAINING
                     |  |_______|  weights unknown or old
                     |
                   DEAD <- any state: heartbeat gone, stream broken, process replaced

There is no transition DEAD -> SERVING. An instance that was lost may have missed a weight update, may have been
half-way through one, or may be a new process with the weights of its start; its samples are already being resumed
elsewhere. So it returns as STALE (a new process under a new epoch, a suspended process under its old one), and
serves once it is known to have the published version: a new epoch by its own report in a new handshake, or by a
completed update; an epoch that was lost or failed an update only by a completed update. The one exception is the
version that the fleet started with: no weights are recorded for it, so the handshake must suffice.

An instance shows that it is alive by its registry record, which expires `ttl` after the last heartbeat, and by the
messages on its work stream. It is lost when its record is gone *and* its stream is silent. An outage of Redis, or
an empty Redis after one, removes no record (`services.platform.redis.registry`), so no instance is lost by it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.platform.redis.registry import InstanceRecord
from services.platform.tasks import ExponentialBackoff


class MemberState(enum.StrEnum):
    """State of an instance: the values of paceline.v1.InstanceState, in lower case."""

    STALE = "stale"
    SERVING = "serving"
    PAUSED = "paused"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class FleetRules:
    """Time limits of health, in seconds.

    `silence`: a message within this time proves that the instance is alive; while samples run, an instance sends a
    message every second, or every two seconds to a gateway with many instances. The delay of a new connection
    begins with `retry_first` and doubles with every loss up to `retry_most`; after `steady` seconds of service it
    begins anew. Dead members are shown for `remember`.
    """

    silence: float = 3.0
    retry_first: float = 0.5
    retry_most: float = 30.0
    steady: float = 30.0
    remember: float = 300.0


@dataclass(slots=True)
class FleetMember:
    """Instance under its latest epoch."""

    record: InstanceRecord
    state: MemberState
    version: int
    since: float
    backoff: ExponentialBackoff
    reason: str = ""
    present: bool = True
    # True if it serves only after a completed update; and True if that is because it failed an update.
    needs_update: bool = False
    weights_unknown: bool = False
    message_at: float = float("-inf")
    # True if it ended its stream itself; and True if its record is gone since then, so that it is no loss.
    said_goodbye: bool = False
    left: bool = False
    serving_since: float = float("inf")
    retry_at: float = float("-inf")
    # State that the instance reports, reduced to what matters for new work.
    reported: MemberState = MemberState.SERVING
    load: dict[str, float] = field(default_factory=dict)

    @property
    def instance_id(self) -> str:
        return self.record.instance_id

    @property
    def epoch(self) -> int:
        return self.record.epoch


@dataclass(frozen=True, slots=True)
class InstanceLoss:
    """Loss of a member under this epoch."""

    instance_id: str
    epoch: int
    reason: str


class FleetHealth:
    """Health of all members, by instance id. `revision` grows with every change that a watcher would see."""

    def __init__(self, rules: FleetRules | None = None) -> None:
        self.rules = rules or FleetRules()
        self.members: dict[str, FleetMember] = {}
        # The published version; None until the first instance reports its version.
        self.published: int | None = None
        # True if weights are recorded for the published version.
        self.recorded = False
        self.revision = 0

    def member(self, instance_id: str, epoch: int) -> FleetMember | None:
        """Return the member, if this is still its epoch."""
        member = self.members.get(instance_id)
        return member if member is not None and member.epoch == epoch else None

    def observe(self, records: Mapping[str, InstanceRecord], now: float) -> list[InstanceLoss]:
        """Update members from the records of the registry; return those that are lost."""
        losses = []
        for record in records.values():
            losses += self._seen(record, now)
        for member in list(self.members.values()):
            if member.instance_id not in records:
                losses += self._missing(member, now)
        return losses

    def note_message(self, instance_id: str, epoch: int, now: float) -> None:
        """Record that a message arrived on the member's stream."""
        member = self.member(instance_id, epoch)
        if member is not None:
            member.message_at = now

    def confirm(self, instance_id: str, epoch: int, version: int, now: float, *, updated: bool) -> bool:
        """Record that a member has `version`, by a handshake or (`updated`) by a completed update.

        Returns True if it serves now.
        """
        member = self.member(instance_id, epoch)
        if member is None or member.state is MemberState.DEAD:
            return False
        if self.published is None:
            self.published = version
        self._note_version(member, version)
        member.weights_unknown = member.weights_unknown and not updated
        member.needs_update = (
            member.needs_update and not updated and (self.recorded or member.weights_unknown)
        )
        if version != self.published or member.needs_update:
            self._enter(
                member, MemberState.STALE, f"has version {version}, published is {self.published}", now
            )
            return False
        member.serving_since = min(member.serving_since, now)
        self._enter(member, member.reported, "", now)
        return True

    def lost(
        self, instance_id: str, epoch: int, reason: str, now: float, *, goodbye: bool = False
    ) -> list[InstanceLoss]:
        """Record that the member's connection broke; return the loss, if the member was not dead.

        With `goodbye` the member ended it: if its record is removed as well, it has left the fleet.
        """
        member = self.member(instance_id, epoch)
        if member is None:
            return []
        member.said_goodbye = goodbye
        return self._die(member, reason, now)

    def quarantine(self, instance_id: str, epoch: int, reason: str, now: float) -> None:
        """Take a member with unknown weights out of service until an update on it completes."""
        member = self.member(instance_id, epoch)
        if member is not None and member.state is not MemberState.DEAD:
            member.needs_update = member.weights_unknown = True
            self._enter(member, MemberState.STALE, reason, now)

    def publish(self, version: int, *, recorded: bool, now: float) -> None:
        """Make this the published version; members without it become STALE."""
        self.published, self.recorded = version, recorded
        self.revision += 1
        for member in self.members.values():
            if member.state is not MemberState.DEAD and member.version != version:
                self._enter(member, MemberState.STALE, f"has version {member.version}", now)

    def report(self, instance_id: str, state: MemberState, now: float) -> None:
        """Record that the member was paused, resumed or drained."""
        member = self.members.get(instance_id)
        if member is None:
            return
        member.reported = state
        if member.state in (MemberState.SERVING, MemberState.PAUSED, MemberState.DRAINING):
            self._enter(member, state, "", now)

    def due(self, now: float) -> list[FleetMember]:
        """Return the members that should have a connection. Dead ones whose retry is due become STALE."""
        found = []
        for member in self.members.values():
            if member.state is MemberState.DEAD and member.present and now >= member.retry_at:
                member.said_goodbye = member.left = False
                self._enter(member, MemberState.STALE, "heartbeat is back", now)
            if member.state is not MemberState.DEAD:
                found.append(member)
        return found

    def usable(self) -> list[FleetMember]:
        """Return the members that have the published version and do not drain."""
        return [m for m in self.members.values() if m.state in (MemberState.SERVING, MemberState.PAUSED)]

    def _seen(self, record: InstanceRecord, now: float) -> list[InstanceLoss]:
        member = self.members.get(record.instance_id)
        if member is not None and record.epoch < member.epoch:
            return []
        if member is None or record.epoch > member.epoch:
            return self._join(record, member, now)
        if record.state != member.record.state:
            # Only a change counts: a record may lag behind a request that the gateway has just made.
            self.report(record.instance_id, _reported(record.state), now)
        member.record, member.present = record, True
        member.load = {name: float(value) for name, value in record.load.items()}
        return []

    def _join(self, record: InstanceRecord, old: FleetMember | None, now: float) -> list[InstanceLoss]:
        losses = self._die(old, f"replaced by epoch {record.epoch}", now) if old is not None else []
        backoff = (
            ExponentialBackoff(self.rules.retry_first, self.rules.retry_most) if old is None else old.backoff
        )
        member = FleetMember(
            record, MemberState.STALE, record.policy_version, now, backoff, reason="registered"
        )
        member.reported = _reported(record.state)
        self.members[record.instance_id] = member
        self.revision += 1
        return losses

    def _missing(self, member: FleetMember, now: float) -> list[InstanceLoss]:
        member.present = False
        if member.state is MemberState.DEAD:
            if member.said_goodbye and not member.left:
                member.left, member.reason = True, "left the fleet"
                self.revision += 1
            if now - member.since > self.rules.remember:
                del self.members[member.instance_id]
                self.revision += 1
            return []
        if now - member.message_at < self.rules.silence:
            return []
        return self._die(member, "heartbeat gone", now)

    def _die(self, member: FleetMember, reason: str, now: float) -> list[InstanceLoss]:
        if member.state is MemberState.DEAD:
            return []
        if now - member.serving_since > self.rules.steady:
            member.backoff.succeeded()
        member.retry_at = now + member.backoff.failed()
        member.needs_update, member.serving_since = True, float("inf")
        self._enter(member, MemberState.DEAD, reason, now)
        return [InstanceLoss(member.instance_id, member.epoch, reason)]

    def _note_version(self, member: FleetMember, version: int) -> None:
        if member.version != version:
            member.version = version
            self.revision += 1

    def _enter(self, member: FleetMember, state: MemberState, reason: str, now: float) -> None:
        assert not (member.state is MemberState.DEAD and state is not MemberState.STALE), (
            "the dead do not serve"
        )
        if (member.state, member.reason) != (state, reason):
            member.state, member.reason, member.since = state, reason, now
            self.revision += 1


def _reported(state: str) -> MemberState:
    """Return PAUSED or DRAINING if the record says so, else SERVING: the gateway itself decides about STALE."""
    return MemberState(state) if state in (MemberState.PAUSED, MemberState.DRAINING) else MemberState.SERVING
