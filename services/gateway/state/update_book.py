"""Phases of a weight update, and the published version. Pure.

Times are passed in (unix seconds); the caller stages and applies weights.

    start -> STARTED -> staged -> STAGED -> applying -> APPLYING -> publish
                |          (again)  |                       |
                +------ abort ------+                       +-> fail: nothing is published

From APPLYING on there is no way back: instances may already have the new weights, so a gateway that restarts
finishes the update.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field, fields
from typing import Any, Self

from services.contracts.errors import FailedPrecondition, NotFound


class JsonRecord:
    """Base of dataclasses that are kept in Redis as a JSON object of their fields."""

    __slots__ = ()

    def to_json(self: Any) -> str:
        """Serialise the fields that differ from their defaults: other releases may lack the others."""
        values = ((each, getattr(self, each.name)) for each in fields(self))
        return json.dumps({each.name: value for each, value in values if value != each.default})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse the result of `to_json`, perhaps of a release with fields that this one lacks."""
        known = {each.name for each in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})


class UpdatePhase(enum.StrEnum):
    """Phase of an update."""

    STARTED = "started"
    STAGED = "staged"
    APPLYING = "applying"


class InFlightTreatment(enum.StrEnum):
    """Treatment of samples that are unfinished when weights are applied: the values of paceline.v1.InFlight."""

    REFUSE = "refuse"
    ABORT = "abort"
    CONTINUE = "continue"
    KEEP_KV = "keep_kv"


@dataclass(slots=True)
class WeightUpdate(JsonRecord):
    """Update that is not finished. `touched_at`: time of the last call of its trainer.

    With a `ticket` its weights are pushed to the instances; otherwise they are in a folder. An update that keeps KV
    is one with CONTINUE that `keeps_kv`, so that a gateway of an earlier release can finish it.
    """

    update_id: str
    run_id: str
    version: int
    phase: UpdatePhase
    touched_at: float
    path: str = ""
    checksum: str = ""
    in_flight: InFlightTreatment = InFlightTreatment.REFUSE
    ticket: str = field(default="", repr=False)
    keeps_kv: bool = False

    def __post_init__(self) -> None:
        self.phase = UpdatePhase(self.phase)
        self.in_flight = InFlightTreatment(self.in_flight)

    def is_staged(self, version: int, checksum: str) -> bool:
        """Return True if these staged weights of an instance are the weights that this update has staged."""
        staged = self.phase in (UpdatePhase.STAGED, UpdatePhase.APPLYING)
        return staged and version == self.version and bool(checksum) and checksum == self.checksum


@dataclass(frozen=True, slots=True)
class PublishedVersion(JsonRecord):
    """Version that samples are generated with.

    Its weights are in the folder `path`, or on every instance that has the version if it was `streamed`; otherwise
    it is the version that the fleet started with. Unfinished samples of the versions from `since` on continue under
    it; None: of no earlier version.
    """

    version: int
    path: str = ""
    checksum: str = ""
    update_id: str = ""
    since: int | None = None
    streamed: bool = False

    @property
    def oldest(self) -> int:
        """The oldest version whose unfinished samples continue under this one."""
        return self.version if self.since is None else self.since

    @property
    def recorded(self) -> bool:
        """True if an instance without the version can load it."""
        return self.streamed or bool(self.path)


@dataclass(eq=False)
class UpdateBook:
    """Published version, and the one update that may be in progress.

    Every refusal is a FailedPrecondition whose metadata names the present and the requested state.
    """

    timeout: float
    published: PublishedVersion | None = None
    active: WeightUpdate | None = None
    # Id of the push that started it; "" if unknown, as after a change of the gateway.
    _push_id: str = field(init=False, default="")

    @property
    def version(self) -> int | None:
        """The published version; None while no instance has reported one."""
        return self.published.version if self.published else None

    def begin_with(self, version: int) -> None:
        """Publish the version that the fleet starts with, if none is published yet."""
        if self.published is None:
            self.published = PublishedVersion(version)

    def is_applying(self) -> bool:
        """Return True while instances are replacing their weights."""
        return self.active is not None and self.active.phase is UpdatePhase.APPLYING

    def version_for(self, version: int, max_staleness: int | None = None) -> int | None:
        """Return the version under which unfinished samples of a version continue; None: they cannot.

        Samples of a batch with `max_staleness` always can, unless they are too old themselves.
        """
        published = self.published
        if published is None or version > published.version:
            return version
        if max_staleness is not None:
            return published.version
        return published.version if version >= published.oldest else None

    def expired(self, now: float) -> WeightUpdate | None:
        """Return the update in progress, if its trainer has been silent for longer than the timeout."""
        update = self.active
        if update is None or update.phase is UpdatePhase.APPLYING:
            return None
        return update if now - update.touched_at > self.timeout else None

    def start(
        self, update_id: str, run_id: str, version: int, now: float, ticket: str = "", push_id: str = ""
    ) -> WeightUpdate:
        """Start an update. The same update in progress is returned: its trainer may have been restarted.

        An expired update must have been dropped before. A pushed update has a `ticket`; one in progress keeps its
        own.
        """
        if self.active is not None:
            active = self.active
            same = (active.run_id, active.version, bool(active.ticket)) == (run_id, version, bool(ticket))
            if same and not self.is_applying():
                if not ticket:
                    # A pushed update is touched once instances are found that can take it.
                    active.touched_at = now
                return active
            raise FailedPrecondition(
                "UPDATE_IN_PROGRESS",
                f"update {self.active.update_id} to version {self.active.version} is in progress",
                update_id=self.active.update_id,
                version=str(self.active.version),
                phase=self.active.phase.value,
            )
        if self.version is not None and version <= self.version:
            raise FailedPrecondition(
                "VERSION_NOT_NEWER",
                f"version {version} is not above the current version {self.version}",
                current=str(self.version),
                requested=str(version),
            )
        self.active = WeightUpdate(update_id, run_id, version, UpdatePhase.STARTED, now, ticket=ticket)
        self._push_id = push_id
        return self.active

    def is_of_another_push(self, run_id: str, push_id: str) -> bool:
        """Return True if an update was started by another push of this run, and is not being applied."""
        update = self.active
        if update is None or update.run_id != run_id or self.is_applying():
            return False
        return bool(push_id and self._push_id) and push_id != self._push_id

    def open_for(self, update_id: str, *phases: UpdatePhase) -> WeightUpdate:
        """Return the update of this id, which must be in one of these phases."""
        update = self.active
        if update is None or update.update_id != update_id:
            raise NotFound("update", update_id)
        if update.phase not in phases:
            raise FailedPrecondition(
                "WRONG_PHASE",
                f"update {update_id} is {update.phase.value}; allowed: {', '.join(p.value for p in phases)}",
                update_id=update_id,
                phase=update.phase.value,
            )
        return update

    def staged(self, update_id: str, path: str, checksum: str, now: float) -> WeightUpdate:
        """Record that the weights are staged on every instance that answers."""
        update = self.open_for(update_id, UpdatePhase.STARTED, UpdatePhase.STAGED)
        update.phase, update.touched_at = UpdatePhase.STAGED, now
        update.path, update.checksum = path, checksum
        return update

    def applying(
        self,
        update_id: str,
        unfinished: int,
        now: float,
        in_flight: InFlightTreatment = InFlightTreatment.REFUSE,
    ) -> WeightUpdate:
        """Enter APPLYING; with REFUSE this fails while samples of the old version are unfinished."""
        update = self.open_for(update_id, UpdatePhase.STAGED)
        update.touched_at = now
        if unfinished and in_flight is InFlightTreatment.REFUSE:
            raise FailedPrecondition(
                "SAMPLES_UNFINISHED",
                f"{unfinished} samples of version {self.version} are running or queued. The weights stay staged: "
                "finish the update when they have ended, or with in_flight ABORT, CONTINUE or KEEP_KV",
                unfinished=str(unfinished),
                current=str(self.version),
                update_id=update_id,
                version=str(update.version),
            )
        update.keeps_kv = in_flight is InFlightTreatment.KEEP_KV
        update.phase = UpdatePhase.APPLYING
        update.in_flight = InFlightTreatment.CONTINUE if update.keeps_kv else in_flight
        return update

    def publish(self) -> PublishedVersion:
        """Publish the version of the update that is being applied."""
        update = self.active
        assert update is not None, "nothing to publish"
        assert update.phase is UpdatePhase.APPLYING, f"cannot publish from {update.phase}"
        since = None
        if update.in_flight is InFlightTreatment.CONTINUE:
            # When a former gateway's update is finished, the version that the fleet started with is unknown.
            since = self.published.oldest if self.published else 0
        self.published = PublishedVersion(
            update.version, update.path, update.checksum, update.update_id, since, bool(update.ticket)
        )
        self.active = None
        return self.published

    def drop(self) -> None:
        """Drop the update in progress."""
        self.active = None
