"""Read the weights of an update, however they are given, and keep them where instances may.

A folder is linked or copied. A delta is expanded against its base to a full version, which passes the checks of
`staging` as any other does. What is kept here and found to be corrupt is made anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from paceline import delta, expansion
from paceline.errors import Violation
from paceline.expansion import Expansion, ExpansionKind
from services.contracts.errors import DataLoss, FailedPrecondition, InvalidArgument
from services.contracts.weight_folder import check_weight_folder
from services.generation.engine.types import TensorSpec
from services.generation.weights.adoption import AdoptedWeights
from services.generation.weights.staging import StagedWeights, checksum_of, stage

_log = structlog.get_logger(__name__)
# Beside the engine's and those of other instances.
_THREADS = max(1, min(8, (os.cpu_count() or 1) // 4))


@dataclass(frozen=True, slots=True)
class GivenWeights:
    """Weights as an update names them; `checksum` is "" where the sender computed none."""

    folder: Path | None
    checksum: str = ""
    delta: Path | None = None
    """What changed since some version, for instances that hold that one."""


class WeightReader:
    """Reader of the weights of updates. Its calls take long; they come one at a time."""

    def __init__(
        self, manifest: Mapping[str, TensorSpec], root: Path | None, adopted: AdoptedWeights | None
    ) -> None:
        """Read weights for one engine.

        Args:
            manifest: tensors of the model that is served.
            root: folder that weights must be in; None: any.
            adopted: where they are kept; without it they are read where they are, and nothing is expanded.
        """
        self._manifest = manifest
        self._root = root
        self._adopted = adopted

    def read(self, version: int, given: GivenWeights) -> StagedWeights:
        """Stage the weights of a version.

        Raises:
            InvalidArgument: folder missing or not allowed, or weights that cannot be served.
            FailedPrecondition: the weights cannot be kept, or build on weights that are not here.
            DataLoss: they are corrupt.
        """
        for folder in filter(None, (given.folder, given.delta)):
            check_weight_folder(str(folder), self._root, follow_links=True)
        if self._adopted is None:
            if given.folder is None:
                raise _base_not_held("adopted_weights is not set: this instance keeps no version", [])
            return stage(given.folder, version, self._manifest, given.checksum)
        if given.folder is not None and not given.checksum:
            given = replace(given, checksum=checksum_of(given.folder))
        failure: DataLoss | None = None
        for way in self._ways(self._adopted, version, given):
            try:
                return self._stage(self._adopted, way(), version, given)
            except DataLoss as error:
                _log.warning("weights_corrupt", version=version, error=error.message)
                failure = error
        assert failure is not None, "there is a way, or an error that says why there is none"
        raise failure

    def _stage(
        self, adopted: AdoptedWeights, place: Path, version: int, given: GivenWeights
    ) -> StagedWeights:
        """Stage a folder; one that is kept here and corrupt is given up."""
        inode = place.stat().st_ino if place.is_dir() else 0
        try:
            return stage(place, version, self._manifest, given.checksum)
        except DataLoss:
            if place != given.folder:
                adopted.give_up(place, inode)
            raise

    def _ways(
        self, adopted: AdoptedWeights, version: int, given: GivenWeights
    ) -> Iterator[Callable[[], Path]]:
        """Yield functions that return a folder with the weights; each is tried if those before gave corrupt ones.

        A version that is here is used; what can be linked takes no time; then comes what moves the fewest bytes.
        """
        held, folder, change = adopted.held(version, given.checksum), given.folder, given.delta
        if held is not None:
            yield lambda: held
        if change is not None and not (folder is not None and adopted.links(folder)):
            told = _delta_of(change, needed=folder is None)
            base = told and adopted.held(told.base.version, told.base.checksum)
            if base:
                yield lambda: self._expand(adopted, base, version, given.checksum, change)
            elif folder is None:
                raise _base_not_held(
                    f"{change} builds on weights that are not here", adopted.versions(), told
                )
        if folder is not None:
            yield lambda: adopted.adopt(folder, version, given.checksum)

    def _expand(self, adopted: AdoptedWeights, base: Path, version: int, checksum: str, change: Path) -> Path:
        def fill(unfinished: Path) -> None:
            try:
                delta.expand(base, change, unfinished, _THREADS)
            except (ValueError, FileNotFoundError) as error:
                raise DataLoss(f"{change} cannot be expanded: {error}") from error

        return adopted.make(version, checksum, fill)


def _delta_of(change: Path, *, needed: bool) -> Expansion | None:
    """Return what a delta says of itself; None if it says nothing, unless it is needed."""
    try:
        told = expansion.read(change)
        if told is not None and told.kind is ExpansionKind.DELTA:
            return told
        text = f"{change} is no folder with a delta that this instance can read"
    except (OSError, ValueError) as error:
        text = str(error)
    if needed:
        raise InvalidArgument([Violation("disk.delta", text)])
    _log.warning("delta_not_read", error=text)
    return None


def _base_not_held(text: str, held: Sequence[str], told: Expansion | None = None) -> FailedPrecondition:
    wanted = f"{told.base.version} {told.base.checksum}" if told else ""
    return FailedPrecondition("BASE_NOT_HELD", text, base=wanted, held=", ".join(held))
