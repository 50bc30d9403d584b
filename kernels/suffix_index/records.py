"""Records of an index: names and texts, prompts and their cost, continuations, and the saved form.

The saved form is a JSON header that names and measures the texts, the texts, and a digest. No numba here.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from kernels.suffix_index.compiled.layout import HISTORY, NOWHERE

Name: TypeAlias = "str | int | tuple[str | int, ...]"
"""A string, an integer, or a flat tuple of these: it can be saved and loaded unchanged."""
TEXT_COST = 16
"""Cost of a prompt or rollout in addition to its tokens, so that empty ones are bounded as well."""
_MAGIC = b"paceline suffix index 1\n"
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 16
_TOKEN = np.dtype("<i4")


def check_name(name: Any) -> None:
    """Raise TypeError if `name` is no Name."""
    parts = name if type(name) is tuple else (name,)
    if not all(type(part) in (str, int) for part in parts):
        raise TypeError(f"a name is a str, an int or a tuple of such, not {name!r}")


def check_version(version: Any) -> None:
    """Raise TypeError or ValueError if `version` is no policy version."""
    if type(version) is not int:
        raise TypeError(f"a version is an int, not {version!r}")
    if abs(version) >= 1 << 53:
        raise ValueError(f"version {version} is beyond 2**53")


def token_array(tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Return token ids as a new int32 array; ValueError unless they are integers in [0, 2**31), in one row."""
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"tokens must be one row, got shape {list(array.shape)}")
    if not array.size:
        return np.empty(0, np.int32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers, got {array.dtype}")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= 1 << 31:
        raise ValueError(f"token ids must be in [0, 2**31), got {lowest if lowest < 0 else highest}")
    return np.array(array, np.int32)


@dataclass(frozen=True, slots=True)
class Branches:
    """Alternatives to some predicted tokens of n growing rollouts, and their continuations.

    tokens [n, m] int32; shares [n, m] float32: the estimated probability of a token given all earlier ones of its
    path, 0 without a token; parents [n, m] int64: its predecessor, -1 for the text itself, an index into the
    continuation below its window, and from there on window + the index of an earlier token of the branches.
    """

    tokens: npt.NDArray[np.int32]
    shares: npt.NDArray[np.float32]
    parents: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Continuations:
    """Continuations of n growing rollouts.

    tokens [n, window] int32 and shares [n, window] float32: predicted tokens and, for each, the estimated
    probability that it comes if all before it have; only the first counts[i] of row i are valid. counts [n]
    int32: predicted tokens, 0 for none. matches [n] int32: context tokens on which the first one is based.
    branches: if requested.
    """

    tokens: npt.NDArray[np.int32]
    shares: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]
    matches: npt.NDArray[np.int32]
    branches: Branches | None = None


@dataclass(frozen=True, slots=True, eq=False)
class IndexedRollout:
    """Rollout that no longer grows."""

    version: int
    tokens: NDArray[np.int32]

    @property
    def cost(self) -> int:
        """Cost against the bound, in tokens."""
        return len(self.tokens) + TEXT_COST


@dataclass(frozen=True, slots=True)
class GrowingRollout:
    """Growing rollout: its prompt, its name and its version."""

    prompt: Name
    rollout: Name
    version: int


@dataclass(slots=True, eq=False)
class IndexedPrompt:
    """Texts of a prompt and its automaton.

    `root` is NOWHERE while the automaton has to be rebuilt; `end` is the state where the prompt ends. Rollouts of
    version `base` weigh 1. `hashes` [HISTORY] and `hashed` are the hash state after the prompt. `growing` holds
    handles.
    """

    base: int = 0
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    rollouts: dict[Name, IndexedRollout] = field(default_factory=dict)
    growing: dict[Name, int] = field(default_factory=dict)
    root: int = NOWHERE
    end: int = NOWHERE
    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(HISTORY, np.uint64))
    hashed: int = 0

    @property
    def built(self) -> bool:
        """True if the automaton is built."""
        return self.root != NOWHERE

    @property
    def empty(self) -> bool:
        """True if it has no tokens and no rollouts."""
        return not (self.growing or self.rollouts or len(self.tokens))

    @property
    def fixed_cost(self) -> int:
        """Cost against the bound without finished rollouts and tokens of growing ones."""
        return len(self.tokens) + TEXT_COST * (1 + len(self.growing))

    @property
    def finished_cost(self) -> int:
        """Cost of its finished rollouts against the bound."""
        return sum(rollout.cost for rollout in self.rollouts.values())


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """The arguments of a SuffixIndex."""

    max_tokens: int
    decay: float
    reach: int
    min_match: int
    floor: float

    def as_arguments(self) -> dict[str, Any]:
        """Return them as keyword arguments of the constructor."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SavedPrompt:
    """A prompt, its tokens and its rollouts."""

    name: Name
    tokens: NDArray[np.int32]
    rollouts: Mapping[Name, IndexedRollout]


def write(settings: IndexSettings, prompts: Sequence[SavedPrompt]) -> bytes:
    """Return the bytes that `read` reads."""
    listed = [
        [
            each.name,
            len(each.tokens),
            [[name, one.version, len(one.tokens)] for name, one in each.rollouts.items()],
        ]
        for each in prompts
    ]
    header = json.dumps({"settings": asdict(settings), "prompts": listed}).encode()
    texts = [
        text for each in prompts for text in (each.tokens, *(one.tokens for one in each.rollouts.values()))
    ]
    body = b"".join(
        [_MAGIC, _LENGTH.pack(len(header)), header, *(text.astype(_TOKEN).tobytes() for text in texts)]
    )
    return body + _digest(body)


def read(data: bytes) -> tuple[IndexSettings, list[SavedPrompt]]:
    """Read the bytes of `write`; ValueError for any others."""
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if not body.startswith(_MAGIC):
        raise ValueError("no saved suffix index, or one of another format")
    if _digest(body) != digest:
        raise ValueError("the saved suffix index is damaged")
    try:
        start = len(_MAGIC) + _LENGTH.size
        (length,) = _LENGTH.unpack(body[len(_MAGIC) : start])
        header = json.loads(body[start : start + length])
        return IndexSettings(**header["settings"]), _prompts(header["prompts"], body[start + length :])
    except (KeyError, TypeError, ValueError, RecursionError, struct.error) as error:
        raise ValueError(f"the saved suffix index cannot be read: {error}") from error


def _prompts(listed: Any, texts: bytes) -> list[SavedPrompt]:
    rest = np.frombuffer(texts, _TOKEN)

    def take(count: int) -> NDArray[np.int32]:
        nonlocal rest
        if not 0 <= count <= len(rest):
            raise ValueError("texts are missing")
        text, rest = rest[:count], rest[count:]
        return token_array(text)

    prompts = []
    for name, length, rollouts in listed:
        tokens = take(length)
        saved = {
            _name(one): IndexedRollout(_version(version), take(count)) for one, version, count in rollouts
        }
        prompts.append(SavedPrompt(_name(name), tokens, saved))
    if len(rest):
        raise ValueError("there are more texts than the header names")
    return prompts


def _name(value: Any) -> Name:
    name = tuple(value) if isinstance(value, list) else value
    check_name(name)
    return name


def _version(value: Any) -> int:
    check_version(value)
    return int(value)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
