"""Read the weights of an update in any form, and keep them in the folder of adopted weights.

A folder is linked or copied. A delta is expanded against its base, and an adapter is merged with its base: both
become a full version, which passes the checks of `staging` like any other. A kept version that is found to be
corrupt is made again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import structlog

from paceline.errors import Violation
from paceline.weights import delta, expansion, safetensors
from paceline.weights.adapters import CONFIG
from paceline.weights.expansion import BaseWeights, Expansion, ExpansionKind
from services.contracts.errors import DataLoss, FailedPrecondition, InvalidArgument
from services.contracts.files import check_weight_folder
from services.generation.engine.types import TensorSpec
from services.generation.weights.adapters import merged, read_adapter
from services.generation.weights.adoption import AdoptedWeights
from services.generation.weights.files import FileContent, Proceed, never_stop, weight_files
from services.generation.weights.staging import StagedWeights, most_bytes, read_headers, stage

_log = structlog.get_logger(__name__)
# A quarter of the cores at most, because the engine and other instances use them, too.
_THREADS = max(1, min(8, (os.cpu_count() or 1) // 4))
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class GivenWeights:
    """Weights as an update names them; `checksum` is "" where the sender computed none."""

    folder: Path | None
    checksum: str = ""
    delta: Path | None = None
    """Folder with the changes since a version, for instances that hold that version."""


class WeightReader:
    """Reader of the weights of updates. Its calls take long; they come one at a time."""

    def __init__(
        self,
        model: Path,
        manifest: Mapping[str, TensorSpec],
        root: Path | None,
        adopted: AdoptedWeights | None,
    ) -> None:
        """Read weights for one engine.

        Args:
            model: folder that the instance started with.
            manifest: tensors of the served model.
            root: folder that weights must be in; None: any.
            adopted: folder in which they are kept; without it they are read in place, and nothing is expanded.
        """
        self._model = model
        self._manifest = manifest
        self._root = root
        self._adopted = adopted
        # The base that was checked last: the next adapter builds on it, too.
        self._base: StagedWeights | None = None

    def read(self, version: int, given: GivenWeights, proceed: Proceed = never_stop) -> StagedWeights:
        """Stage the weights of a version; `proceed` is called meanwhile.

        A file is hashed or copied only after its header was found to fit the served model.

        Raises:
            InvalidArgument: folder missing or not allowed, or weights that cannot be served.
            FailedPrecondition: the weights cannot be kept, or build on weights that are not here.
            DataLoss: the weights are corrupt.
        """
        for folder in filter(None, (given.folder, given.delta)):
            check_weight_folder(str(folder), self._root, follow_links=True)
        if self._adopted is None:
            if given.folder is None or expansion.is_expansion(given.folder):
                raise _base_not_held("adopted_weights is not set: this instance keeps no version", [])
            return stage(given.folder, version, self._manifest, given.checksum, proceed=proceed)
        if given.folder is not None and not given.checksum:
            given = replace(given, checksum=self._checksum(given.folder, proceed))
        failure: DataLoss | None = None
        for way in self._ways(self._adopted, version, given, proceed):
            try:
                return self._stage(self._adopted, way(), version, given, proceed)
            except DataLoss as error:
                _log.warning("weights_corrupt", version=version, error=error.message)
                failure = error
        assert failure is not None, "there is a way, or an error that says why there is none"
        raise failure

    def read_received(
        self,
        version: int,
        place: Path,
        checksum: str,
        read: Mapping[tuple[int, ...], FileContent],
        proceed: Proceed = never_stop,
    ) -> StagedWeights:
        """Stage weights that were received and are kept here. Raises as `read`.

        `read` has the contents of files that were read during the reception, by the files' stamps.
        """
        checking = (
            self._adopted.checking(place, DataLoss, InvalidArgument) if self._adopted else nullcontext()
        )
        with checking:
            self._base = stage(place, version, self._manifest, checksum, read, proceed)
        return self._base

    def _checksum(self, folder: Path, proceed: Proceed) -> str:
        """Return the checksum of a folder whose sender gave none."""
        if not expansion.is_expansion(folder):
            read_headers(folder, self._manifest)
        try:
            return expansion.checksum(folder, proceed)
        except (OSError, ValueError) as error:
            text = f"{folder} has no weights that can be read: {error}"
            raise InvalidArgument([Violation("disk.path", text)]) from error

    def _stage(
        self, adopted: AdoptedWeights, place: Path, version: int, given: GivenWeights, proceed: Proceed
    ) -> StagedWeights:
        """Stage a folder; one that is kept here and corrupt is given up."""
        is_merged = given.checksum.startswith(expansion.ADAPTER_CHECKSUM)
        with adopted.checking(place, DataLoss):
            if is_merged:
                # The adapter's checksum names these weights, because no other process knows their own.
                merged_weights = stage(place, version, self._manifest, proceed=proceed)
                return replace(merged_weights, checksum=given.checksum)
            self._base = stage(place, version, self._manifest, given.checksum, proceed=proceed)
        return self._base

    def _ways(
        self, adopted: AdoptedWeights, version: int, given: GivenWeights, proceed: Proceed
    ) -> Iterator[Callable[[], Path]]:
        """Yield functions that return a folder with the weights; each is tried if the previous ones fail.

        A version that is here comes first, then one that can be linked in no time, then the way with the fewest
        bytes.
        """
        held, folder, change = adopted.held(version, given.checksum), given.folder, given.delta
        if held is not None:
            yield lambda: held
        if change is not None and not (folder is not None and adopted.links(folder)):
            described = _delta_of(change, needed=folder is None)
            base = described and adopted.held(described.base.version, described.base.checksum)
            if base:
                yield lambda: self._expand(adopted, base, version, given.checksum, change, proceed)
            elif folder is None:
                raise _base_not_held(
                    f"{change} builds on weights that are not here",
                    adopted.versions(),
                    described.base if described else None,
                )
        if folder is not None and given.checksum.startswith(expansion.ADAPTER_CHECKSUM):
            yield lambda: self._merge(adopted, version, given.checksum, folder, proceed)
        elif folder is not None:
            yield lambda: self._adopt(adopted, version, given.checksum, folder, proceed)

    def _adopt(
        self, adopted: AdoptedWeights, version: int, checksum: str, folder: Path, proceed: Proceed
    ) -> Path:
        return adopted.adopt(read_headers(folder, self._manifest, checksum).files, version, checksum, proceed)

    def _expand(
        self, adopted: AdoptedWeights, base: Path, version: int, checksum: str, change: Path, proceed: Proceed
    ) -> Path:
        most = most_bytes(self._manifest.values())

        def fill(unfinished: Path) -> None:
            try:
                delta.expand(base, change, unfinished, _THREADS, most_bytes=most, proceed=proceed)
            except (ValueError, FileNotFoundError) as error:
                raise DataLoss(f"{change} cannot be expanded: {error}") from error

        return adopted.make(version, checksum, fill)

    def _merge(
        self, adopted: AdoptedWeights, version: int, checksum: str, folder: Path, proceed: Proceed
    ) -> Path:
        described = _adapter_of(folder, checksum)
        base = self._base_of(adopted, described.base, proceed)
        plan, matrices = read_adapter(folder, {name: base.tensors.shape(name) for name in base.tensors})
        _check_files(folder, described)

        def fill(unfinished: Path) -> None:
            made = merged(base.tensors, plan, matrices, _THREADS)
            safetensors.write(unfinished, _interruptible(made, proceed))
            shutil.copyfile(folder / expansion.MANIFEST, unfinished / expansion.MANIFEST)

        return adopted.make(version, checksum, fill)

    def _base_of(self, adopted: AdoptedWeights, base: BaseWeights, proceed: Proceed) -> StagedWeights:
        """Return the full version that an adapter builds on, which is read and checked when it is first needed."""
        if self._base is not None and self._base.checksum == base.checksum:
            with suppress(DataLoss):
                self._base.tensors.check_unchanged()
                return self._base
        place = adopted.held(base.version, base.checksum)
        try:
            if place is None and base.path:
                check_weight_folder(base.path, self._root, follow_links=True)
                place = self._adopt(adopted, base.version, base.checksum, Path(base.path), proceed)
            # Without a path it is the model that the fleet started with.
            place = place or self._model
            with adopted.checking(place, InvalidArgument, DataLoss):
                self._base = stage(place, base.version, self._manifest, base.checksum, proceed=proceed)
        except (InvalidArgument, DataLoss) as error:
            text = f"version {base.version}, which the adapter builds on, is not here: {error.message}"
            raise _base_not_held(text, adopted.versions(), base) from error
        return self._base


def _interruptible(items: Iterable[_Item], proceed: Proceed) -> Iterator[_Item]:
    """Yield the items; `proceed` is called before each."""
    for item in items:
        proceed()
        yield item


def _adapter_of(folder: Path, checksum: str) -> Expansion:
    """Return the description of an adapter; InvalidArgument or DataLoss if it has none that is right."""
    try:
        described = expansion.read(folder)
        if described is None or described.kind is not ExpansionKind.ADAPTER:
            text = f"{folder} is no folder with an adapter that this instance can read"
            raise InvalidArgument([Violation("disk.path", text)])
        if (found := expansion.checksum(folder)) != checksum:
            raise DataLoss(f"checksum of {folder} is {found}, the sender computed {checksum}")
    except (OSError, ValueError) as error:
        raise DataLoss(f"{folder} is corrupt: {error}") from error
    return described


def _check_files(folder: Path, described: Expansion) -> None:
    """Check the files of an adapter, whose sizes were found to be right, against its description."""
    try:
        for name in (CONFIG, *(file.name for file in weight_files(folder))):
            if name not in described.files or expansion.describe(folder / name) != described.files[name]:
                raise DataLoss(f"{folder / name} is corrupt: its SHA-256 is not that of {expansion.MANIFEST}")
    except OSError as error:
        raise DataLoss(f"{folder} is corrupt: {error}") from error


def _delta_of(change: Path, *, needed: bool) -> Expansion | None:
    """Return the description of a delta; None if it has none, unless it is needed."""
    try:
        described = expansion.read(change)
        if described is not None and described.kind is ExpansionKind.DELTA:
            return described
        text = f"{change} is no folder with a delta that this instance can read"
    except (OSError, ValueError) as error:
        text = str(error)
    if needed:
        raise InvalidArgument([Violation("disk.delta", text)])
    _log.warning("delta_not_read", error=text)
    return None


def _base_not_held(text: str, held: Sequence[str], base: BaseWeights | None = None) -> FailedPrecondition:
    wanted = f"{base.version} {base.checksum}" if base else ""
    return FailedPrecondition("BASE_NOT_HELD", text, base=wanted, held=", ".join(held))
