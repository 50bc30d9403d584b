"""Stage weights: read and check every byte once, in bounded memory, before any of it reaches the engine.

A reload that fails half-way leaves vLLM unusable, so nothing gets there that has not passed here: names, shapes and
dtypes by the headers of all files, then the checksum of each file and the finiteness of each tensor, in one pass of
reads into one buffer. What passed is mapped from the same files when it is applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import Violation
from paceline.overlapped_sha256 import OverlappedSha256
from paceline.safetensors import index_checksum
from services.contracts.errors import DataLoss, InvalidArgument
from services.generation.engine.types import TensorSpec
from services.generation.weights.contents import Proceed, ShardContent, fault_of, read_content, unhindered
from services.generation.weights.manifest import HEAD, embedding_of, same_tensor
from services.generation.weights.naming import naming_hint, shown
from services.generation.weights.shards import FLOATS, MappedTensors, WeightShard, open_shards

# More than this many faults of one kind help nobody.
_MOST_VIOLATIONS = 16


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A complete, checked set of weights on disk, and its checksum (see `paceline.safetensors.checksum`)."""

    version: int
    checksum: str
    tensors: MappedTensors


@dataclass(frozen=True, slots=True)
class WeightHeaders:
    """Headers of a folder's files, whose tensors are those of the model that is served."""

    shards: Sequence[WeightShard]
    placed: Mapping[str, WeightShard]
    """The file of each tensor."""
    index: str
    """Checksum of the index; "" where that has none of the files, or another kind is given."""


def read_headers(folder: Path, expected: Mapping[str, TensorSpec], checksum: str = "") -> WeightHeaders:
    """Read and check the headers of a folder's files. Arguments and errors are those of `stage`.

    They bound what it costs to read or copy the files: each has the size that its header says, and no tensors but
    the model's.
    """
    index = "" if checksum.startswith("sha256:") else _index_checksum(folder)
    if index and checksum not in ("", index):
        raise DataLoss(f"checksum of the index in {folder} is {index}, the sender computed {checksum}")
    shards = open_shards(folder, indexed=bool(index), served=len(expected))
    placed = _placed(shards)
    _drop_tied_head(placed, expected)
    if violations := _compare(placed, expected):
        raise InvalidArgument(violations)
    return WeightHeaders(shards, placed, index)


def stage(
    folder: Path,
    version: int,
    expected: Mapping[str, TensorSpec],
    checksum: str = "",
    read: Mapping[tuple[int, ...], ShardContent] | None = None,
    proceed: Proceed = unhindered,
) -> StagedWeights:
    """Read and check the weights of a policy version.

    Args:
        folder: where the safetensors files are.
        version: the policy version that they will be.
        expected: the manifest of the model that is served.
        checksum: what the sender computed, or "" when it did not.
        read: contents of files that were read already, by the files' stamps.
        proceed: called while files are read.

    Raises:
        InvalidArgument: folder missing, or names, shapes, dtypes or values that cannot be served.
        DataLoss: a file is missing, truncated or corrupt, or a checksum differs.
    """
    headers = read_headers(folder, expected, checksum)
    whole = OverlappedSha256()
    violations = [
        violation
        for shard in headers.shards
        for violation in _check_content(shard, whole, read or {}, expected, proceed)
    ]
    computed = headers.index or f"sha256:{whole.hexdigest()}"
    if checksum not in ("", computed):
        raise DataLoss(f"checksum of {folder} is {computed}, the sender computed {checksum}")
    if violations:
        raise InvalidArgument(violations[:_MOST_VIOLATIONS])
    return StagedWeights(version, computed, MappedTensors(headers.placed))


def _index_checksum(folder: Path) -> str:
    try:
        return index_checksum(folder)
    except ValueError as error:
        raise DataLoss(f"{folder} is corrupt: {error}") from error
    except OSError as error:
        raise InvalidArgument([Violation("disk.path", f"{folder} cannot be read: {error}")]) from error


def _placed(shards: Sequence[WeightShard]) -> dict[str, WeightShard]:
    """Return the file of each tensor."""
    placed: dict[str, WeightShard] = {}
    twice = []
    for shard in shards:
        twice += [
            _violation(name, f"is in more than one file, also in {placed[name].path.name}", shard)
            for name in sorted(placed.keys() & shard.tensors.keys())
        ]
        placed |= dict.fromkeys(shard.tensors, shard)
    if twice:
        raise InvalidArgument(twice[:_MOST_VIOLATIONS])
    return placed


def _drop_tied_head(placed: dict[str, WeightShard], expected: Mapping[str, TensorSpec]) -> None:
    """Drop the tied output head that a trainer's state dict names and the checkpoint leaves out."""
    embedding = embedding_of(expected)
    if HEAD in expected or HEAD not in placed or embedding not in placed:
        return
    if placed[embedding].tensors[embedding].shape != expected[embedding].shape:
        return  # It is refused, and may have any size.
    names = (HEAD, embedding)
    if same_tensor({name: placed[name] for name in names}, *names, expected[embedding].served):
        del placed[HEAD]


def _compare(placed: Mapping[str, WeightShard], expected: Mapping[str, TensorSpec]) -> list[Violation]:
    violations = _compare_names(placed, expected)
    for name in sorted(placed.keys() & expected.keys()):
        got, want = placed[name].tensors[name], expected[name]
        allowed = sorted(FLOATS) if want.dtype in FLOATS else [want.dtype]
        if got.shape != want.shape:
            text = f"has shape {list(got.shape)}, allowed is {list(want.shape)}"
            violations.append(_violation(name, text, placed[name]))
        elif got.dtype not in allowed:
            text = (
                f"has dtype {got.dtype}, allowed {'is' if len(allowed) == 1 else 'are'} {', '.join(allowed)}"
            )
            violations.append(_violation(name, text, placed[name]))
    return violations[:_MOST_VIOLATIONS]


def _compare_names(placed: Mapping[str, WeightShard], expected: Mapping[str, TensorSpec]) -> list[Violation]:
    """Return what is missing and what came instead, beside each other."""
    missing, surplus = expected.keys() - placed.keys(), placed.keys() - expected.keys()
    violations = []
    if hint := naming_hint(missing, surplus):
        violations.append(Violation("tensors", hint))
    first, others = shown(missing, surplus, _MOST_VIOLATIONS - len(violations))
    for place in range(max(len(first), len(others))):
        violations += [
            Violation(f"tensors[{name}]", "is missing; the model that is served has it")
            for name in first[place : place + 1]
        ]
        violations += [
            _violation(name, _not_served(name, expected), placed[name]) for name in others[place : place + 1]
        ]
    return violations


def _not_served(name: str, expected: Mapping[str, TensorSpec]) -> str:
    embedding = embedding_of(expected)
    if name == HEAD and embedding:
        return f"differs from {embedding}, to which it is tied in the model that is served"
    return "is not a tensor of the model that is served"


def _check_content(
    shard: WeightShard,
    whole: OverlappedSha256,
    read: Mapping[tuple[int, ...], ShardContent],
    expected: Mapping[str, TensorSpec],
    proceed: Proceed,
) -> list[Violation]:
    """Return the tensors that are not finite as they are served; check the file's checksum, or add it to `whole`.

    Raises:
        DataLoss: its checksum differs from the index's, or it changed since its header was read.
    """
    if shard.sha256:
        content = read.get(shard.stamp) or read_content(shard, proceed=proceed)
        if content.sha256 != shard.sha256:
            text = f"{shard.path} is corrupt: its SHA-256 is {content.sha256}"
            raise DataLoss(f"{text}, the index says {shard.sha256}")
    else:
        content = read_content(shard, whole, proceed)
    # A tied head that is left out is not expected.
    faults = {
        name: fault_of(shard, name, largest, expected[name].served if name in expected else "")
        for name, largest in content.largest.items()
    }
    return [_violation(name, fault, shard) for name, fault in faults.items() if fault]


def _violation(name: str, text: str, shard: WeightShard) -> Violation:
    return Violation(f"tensors[{name}]", f"{text} ({shard.path.name})")
