"""Saved form of an index: a JSON header that names and measures the texts, the texts, and a digest of it all."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.suffix_index.names import Name, check_name, check_version, token_array

_MAGIC = b"paceline suffix index 1\n"
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 16
_TOKEN = np.dtype("<i4")


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
class SavedRollout:
    """A rollout of a prompt."""

    name: Name
    version: int
    tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SavedPrompt:
    """A prompt, its tokens and its rollouts."""

    name: Name
    tokens: NDArray[np.int32]
    rollouts: Sequence[SavedRollout]


def write(settings: IndexSettings, prompts: Sequence[SavedPrompt]) -> bytes:
    """Return the bytes that `read` reads."""
    listed = [
        [each.name, len(each.tokens), [[one.name, one.version, len(one.tokens)] for one in each.rollouts]]
        for each in prompts
    ]
    header = json.dumps({"settings": asdict(settings), "prompts": listed}).encode()
    texts = [text for each in prompts for text in (each.tokens, *(one.tokens for one in each.rollouts))]
    body = b"".join(
        [_MAGIC, _LENGTH.pack(len(header)), header, *(text.astype(_TOKEN).tobytes() for text in texts)]
    )
    return body + _digest(body)


def read(data: bytes) -> tuple[IndexSettings, list[SavedPrompt]]:
    """Return what `write` wrote; ValueError for anything else."""
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
        saved = [SavedRollout(_name(one), _version(version), take(count)) for one, version, count in rollouts]
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
