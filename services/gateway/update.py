"""The four phases of a weight update, and the version that is published.

Pure: times are passed in (unix seconds); whoever calls does the staging and applying.

    start -> STARTED -> staged -> STAGED -> applying -> APPLYING -> publish
                |          (again)  |                       |
                +------ abort ------+                       +-> fail: nothing is published

From APPLYING on there is no way back: instances may already have the new weights, so a gateway that
starts again goes forward.
"""

import enum
import json
from dataclasses import asdict, dataclass

from services.platform.errors import FailedPrecondition, NotFound


class UpdatePhase(enum.StrEnum):
    """How far an update is."""

    STARTED = "started"
    STAGED = "staged"
    APPLYING = "applying"


@dataclass(slots=True)
class Update:
    """An update that is not finished. `touched_at`: when the trainer last did something about it."""

    update_id: str
    run_id: str
    version: int
    phase: UpdatePhase
    touched_at: float
    path: str = ""
    checksum: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Update":
        fields = json.loads(text)
        return cls(**{**fields, "phase": UpdatePhase(fields["phase"])})


@dataclass(frozen=True, slots=True)
class Published:
    """The version that work is done with. Without a path it is the one that the fleet started with."""

    version: int
    path: str = ""
    checksum: str = ""
    update_id: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Published":
        return cls(**json.loads(text))


class UpdateBook:
    """The published version and the one update that may be in progress. Every refusal is a
    FailedPrecondition whose metadata says what is and what was asked for."""

    def __init__(self, timeout: float, published: Published | None = None) -> None:
        self.timeout = timeout
        self.published = published
        self.active: Update | None = None

    @property
    def version(self) -> int | None:
        """The published version; None while no instance has ever said what it has."""
        return self.published.version if self.published else None

    def is_applying(self) -> bool:
        """Whether instances are changing weights now."""
        return self.active is not None and self.active.phase is UpdatePhase.APPLYING

    def expired(self, now: float) -> Update | None:
        """The update in progress, if its trainer has let it lie for longer than the timeout."""
        update = self.active
        if update is None or update.phase is UpdatePhase.APPLYING:
            return None
        return update if now - update.touched_at > self.timeout else None

    def start(self, update_id: str, run_id: str, version: int, now: float) -> Update:
        """Claims the update. An expired one must have been aborted before."""
        if self.active is not None:
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
        self.active = Update(update_id, run_id, version, UpdatePhase.STARTED, now)
        return self.active

    def open_for(self, update_id: str, *phases: UpdatePhase) -> Update:
        """The update of this id, which must be in one of these phases."""
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

    def staged(self, update_id: str, path: str, checksum: str, now: float) -> Update:
        """Every instance that answers has checked and staged the weights."""
        update = self.open_for(update_id, UpdatePhase.STARTED, UpdatePhase.STAGED)
        update.phase, update.path, update.checksum, update.touched_at = (
            UpdatePhase.STAGED,
            path,
            checksum,
            now,
        )
        return update

    def applying(self, update_id: str, unfinished: int, now: float) -> Update:
        """Goes past the point of no return; refused while samples of the old version are not done."""
        update = self.open_for(update_id, UpdatePhase.STAGED)
        if unfinished:
            raise FailedPrecondition(
                "SAMPLES_UNFINISHED",
                f"{unfinished} samples of version {self.version} are running or queued: "
                "wait for them or cancel them first",
                unfinished=str(unfinished),
                current=str(self.version),
            )
        update.phase, update.touched_at = UpdatePhase.APPLYING, now
        return update

    def publish(self) -> Published:
        """The update has succeeded: its version is the published one."""
        update = self.active
        assert update is not None, "nothing to publish"
        assert update.phase is UpdatePhase.APPLYING, f"cannot publish from {update.phase}"
        self.published = Published(update.version, update.path, update.checksum, update.update_id)
        self.active = None
        return self.published

    def drop(self) -> None:
        """Forgets the update in progress."""
        self.active = None
