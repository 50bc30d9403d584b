"""Stage weights: read and check every byte once, in bounded memory, before any of it reaches the engine.

A reload that fails half-way leaves vLLM unusable, so all weights are checked first: names, shapes and dtypes by the
headers of all files, then the checksum of each file and the finiteness of each tensor, in one pass of reads into
one buffer. The checked weights are mapped from the same files when they are applied.

The manifest of the served model lists the tensors that an update must have. If an update names its tensors
differently, the error shows missing and unknown names, and the likely reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from paceline.errors import Violation
from paceline.files import read_object
from paceline.weights.safetensors import OverlappedSha256, index_checksum
from services.contracts.errors import DataLoss, InvalidArgument
from services.generation.engine.types import TensorSpec
from services.generation.weights.files import (
    FLOATS,
    FileContent,
    MappedTensors,
    Proceed,
    WeightFile,
    fault_of,
    never_stop,
    open_weight_file,
    open_weight_files,
    read_content,
    read_header,
    weight_files,
)

# Number of names that are compared: a wrong prefix or part is in all names, or in all of a layer.
_SAMPLE = 64
# Most faults in one error.
_MOST_VIOLATIONS = 16
HEAD = "lm_head.weight"
"""Output head, where a model has one that may be tied to the embedding of its input."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
_BLOCK_ROWS = 4096
# The widest number, the most bytes of a tensor's entry in addition to its numbers, and room to spare.
_NUMBER_BYTES, _TENSOR_BYTES, _SPARE_BYTES = 8, 128 << 10, 64 << 20


def naming_hint(missing: Collection[str], surplus: Collection[str]) -> str:
    """Return how the given names differ from the model's in common; "" if no such difference is found.

    It finds an additional or a missing prefix, and an additional part within the names, as a module's wrapper adds
    it.
    """
    if not missing or not surplus:
        return ""
    wanted, came = frozenset(missing), frozenset(surplus)
    found = Counter[str]()
    examples: dict[str, str] = {}
    for name in sorted(came)[:_SAMPLE]:
        for part, original in _without_a_part(name.split(".")):
            if original in wanted:
                text = f"have {part!r} in them, which the model's have not"
                found[text] += 1
                examples.setdefault(text, f"{name} for {original}")
    for name in sorted(wanted)[:_SAMPLE]:
        for part, original in _without_a_part(name.split(".")):
            if original in came:
                text = f"lack {part!r}, which the model's have"
                found[text] += 1
                examples.setdefault(text, f"{original} for {name}")
    if not found:
        return ""
    text = found.most_common(1)[0][0]
    return f"{len(came)} names came that the model has not; they {text}: {examples[text]}"


def shown(missing: Collection[str], surplus: Collection[str], most: int) -> tuple[list[str], list[str]]:
    """Return the missing and the surplus names that an error of `most` names has room for, some of both."""
    room = max(most // 2, most - len(surplus))
    first = sorted(missing)[:room]
    return first, sorted(surplus)[: most - len(first)]


def _without_a_part(parts: Sequence[str]) -> list[tuple[str, str]]:
    """Return (part, rest) of a name for each beginning, and for each single part within, that is removed."""
    prefixes = [(".".join(parts[:end]) + ".", ".".join(parts[end:])) for end in range(1, len(parts))]
    within = [
        (parts[place] + ".", ".".join([*parts[:place], *parts[place + 1 :]]))
        for place in range(1, len(parts) - 1)
    ]
    return prefixes + within


def read_manifest(folder: Path, dtype: str = "", ties_head: bool | None = None) -> dict[str, TensorSpec]:
    """Return names, shapes and dtypes of a model's tensors, from the headers of its safetensors.

    An output head that is tied to the embedding is left out, whether or not the checkpoint has a copy of it. As in
    vLLM, a head that differs from the embedding is not tied, whatever the configuration says.

    Args:
        folder: of the model.
        dtype: dtype of the engine's floats, such as bfloat16; "": as they are stored.
        ties_head: True if the engine's configuration ties the head; None: config.json decides.

    Raises:
        InvalidArgument: no such folder, or no safetensors in it.
        DataLoss: a file ends inside its header, or config.json is corrupt.
    """
    served = next((code for code, each in FLOATS.items() if str(each) == f"torch.{dtype}"), "")
    found: dict[str, TensorSpec] = {}
    files: dict[str, Path] = {}
    for file in weight_files(folder):
        for name, entry in read_header(file)[1].items():
            stored = str(entry["dtype"])
            kept = served if stored in FLOATS else ""
            found[name] = TensorSpec(name, tuple(entry["shape"]), stored, kept)
            files[name] = file
    if ties_head is None:
        ties_head = _ties_head(folder / "config.json")
    embedding = embedding_of(found)
    if ties_head and HEAD in found:
        names = (HEAD, embedding) if embedding else ()
        if not names or same_tensor(
            {name: open_weight_file(files[name], "") for name in names}, *names, served
        ):
            del found[HEAD]
    return found


def most_bytes(expected: Iterable[TensorSpec]) -> int:
    """Return the most bytes that the files of a version can have, however its numbers are stored."""
    each = (_NUMBER_BYTES * prod(tensor.shape) + _TENSOR_BYTES for tensor in expected)
    return sum(each) + _SPARE_BYTES


def _ties_head(config: Path) -> bool:
    if not config.is_file():
        return False
    try:
        return bool(read_object(config).get("tie_word_embeddings"))
    except (OSError, ValueError) as error:
        raise DataLoss(f"{config} is corrupt: {error}") from error


def embedding_of(names: Collection[str]) -> str:
    """Return the name of the embedding to which a head may be tied; "" if there is none, or more than one."""
    found = [name for name in names if name.endswith(_EMBEDDINGS)]
    return found[0] if len(found) == 1 else ""


def same_tensor(placed: Mapping[str, WeightFile], one: str, other: str, served: str = "") -> bool:
    """Return True if two tensors are equal, as they are loaded."""
    tensors = MappedTensors(placed)
    left, right = tensors[one], tensors[other]
    if left.shape != right.shape or (not served and left.dtype != right.dtype):
        return False
    dtype = FLOATS.get(served, left.dtype)
    # In blocks, because a copy of the whole embedding may take gigabytes.
    return all(
        torch.equal(left[row : row + _BLOCK_ROWS].to(dtype), right[row : row + _BLOCK_ROWS].to(dtype))
        for row in range(0, max(1, left.shape[0] if left.ndim else 1), _BLOCK_ROWS)
    )


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Complete, checked set of weights on disk, and its checksum (see `safetensors.checksum`)."""

    version: int
    checksum: str
    tensors: MappedTensors


@dataclass(frozen=True, slots=True)
class WeightHeaders:
    """Headers of a folder's files, which have the tensors of the served model."""

    files: Sequence[WeightFile]
    placed: Mapping[str, WeightFile]
    """File of each tensor."""
    index: str
    """Checksum of the index; "" if the index has no checksums, or another kind of checksum is given."""


def read_headers(folder: Path, expected: Mapping[str, TensorSpec], checksum: str = "") -> WeightHeaders:
    """Read and check the headers of a folder's files. Arguments and errors are the same as of `stage`.

    This bounds the cost of reading or copying the files: each has the size that its header gives, and only tensors
    of the model.
    """
    index = "" if checksum.startswith("sha256:") else _index_checksum(folder)
    if index and checksum not in ("", index):
        raise DataLoss(f"checksum of the index in {folder} is {index}, the sender computed {checksum}")
    files = open_weight_files(folder, indexed=bool(index), served=len(expected))
    placed = _placed(files)
    _drop_tied_head(placed, expected)
    if violations := _compare(placed, expected):
        raise InvalidArgument(violations)
    return WeightHeaders(files, placed, index)


def stage(
    folder: Path,
    version: int,
    expected: Mapping[str, TensorSpec],
    checksum: str = "",
    read: Mapping[tuple[int, ...], FileContent] | None = None,
    proceed: Proceed = never_stop,
) -> StagedWeights:
    """Read and check the weights of a policy version.

    Args:
        folder: of the safetensors files.
        version: policy version of the weights.
        expected: manifest of the served model.
        checksum: of the sender, "" if it computed none.
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
        for file in headers.files
        for violation in _check_content(file, whole, read or {}, expected, proceed)
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


def _placed(files: Sequence[WeightFile]) -> dict[str, WeightFile]:
    """Return the file of each tensor."""
    placed: dict[str, WeightFile] = {}
    twice = []
    for file in files:
        twice += [
            _violation(name, f"is in more than one file, also in {placed[name].path.name}", file)
            for name in sorted(placed.keys() & file.tensors.keys())
        ]
        placed |= dict.fromkeys(file.tensors, file)
    if twice:
        raise InvalidArgument(twice[:_MOST_VIOLATIONS])
    return placed


def _drop_tied_head(placed: dict[str, WeightFile], expected: Mapping[str, TensorSpec]) -> None:
    """Drop the tied output head that a trainer's state dict names and the checkpoint leaves out."""
    embedding = embedding_of(expected)
    if HEAD in expected or HEAD not in placed or embedding not in placed:
        return
    if placed[embedding].tensors[embedding].shape != expected[embedding].shape:
        return  # The head is refused, and may have any size.
    names = (HEAD, embedding)
    if same_tensor({name: placed[name] for name in names}, *names, expected[embedding].served):
        del placed[HEAD]


def _compare(placed: Mapping[str, WeightFile], expected: Mapping[str, TensorSpec]) -> list[Violation]:
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


def _compare_names(placed: Mapping[str, WeightFile], expected: Mapping[str, TensorSpec]) -> list[Violation]:
    """Return violations for missing names and the given unknown names, side by side."""
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
    file: WeightFile,
    whole: OverlappedSha256,
    read: Mapping[tuple[int, ...], FileContent],
    expected: Mapping[str, TensorSpec],
    proceed: Proceed,
) -> list[Violation]:
    """Return the tensors that are not finite as they are served; check the file's checksum, or add it to `whole`.

    Raises:
        DataLoss: its checksum differs from the index's, or it changed since its header was read.
    """
    if file.sha256:
        content = read.get(file.stamp) or read_content(file, proceed=proceed)
        if content.sha256 != file.sha256:
            text = f"{file.path} is corrupt: its SHA-256 is {content.sha256}"
            raise DataLoss(f"{text}, the index says {file.sha256}")
    else:
        content = read_content(file, whole, proceed)
    # A tied head that is left out is not expected.
    faults = {
        name: fault_of(file, name, largest, expected[name].served if name in expected else "")
        for name, largest in content.largest.items()
    }
    return [_violation(name, fault, file) for name, fault in faults.items() if fault]


def _violation(name: str, text: str, file: WeightFile) -> Violation:
    return Violation(f"tensors[{name}]", f"{text} ({file.path.name})")
