"""Read the text of a model's tokens as bytes, and end a response where its text first has a stop string.

Text is kept as bytes, because a character may be spread over several tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import structlog

from services.contracts.sampling import Sampling
from services.generation.engine.types import Finish, SampleStep

_log = structlog.get_logger(__name__)

# A folder with a tokenizer has at least one of these files.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Decoders that only concatenate the texts of tokens.
_JOINING = {"ByteLevel", "ByteFallback", "Fuse"}


def token_bytes(folder: Path, vocab_size: int) -> Sequence[bytes] | None:
    """Return the bytes of each token, [vocab_size], empty for ids that the tokenizer does not use.

    None if the folder has no tokenizer, or one that does more than join the texts of its tokens, such as one that
    puts spaces between words.
    """
    vocabulary = vocabulary_of(folder, vocab_size)
    return None if vocabulary is None else [bytes(each) for each in vocabulary.decoded_vocab]


@lru_cache(maxsize=1)
def vocabulary_of(folder: Path, vocab_size: int) -> Any | None:
    """Return xgrammar's form of a model's tokens, which has their bytes; None in the cases of `token_bytes`."""
    if not any((folder / name).exists() for name in _FILES):
        return None
    try:
        # Imported late: they take seconds to import, and most requests need no tokenizer.
        import xgrammar
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        if not _JOINING & _decoders(json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder")):
            raise ValueError("its text is more than the texts of its tokens")
        return xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    except Exception as error:
        _log.warning("no_text", folder=str(folder), reason=f"{type(error).__name__}: {error}")
        return None


def _decoders(decoder: Any) -> set[str]:
    """Return the types of a decoder and of its parts."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*map(_decoders, decoder.get("decoders", ())))


class StopSearch:
    """Search for the stop strings of one sample in its growing text.

    The search reads one token at a time, so it does not matter how many tokens a step brings: the first token that
    completes a stop string is the last of the response, and the text alone decides which of several strings it is.
    A sample that was resumed or moved continues as if it had never left, because only the end of the earlier text
    counts.
    """

    __slots__ = ("_count", "_kept", "_least", "_stops", "_tail")

    def __init__(self, stop: Sequence[str], least: int) -> None:
        """Search for `stop`; a string completed by one of the first `least` tokens does not count."""
        self._stops = [each.encode() for each in stop]
        self._least = least
        # Number of trailing bytes in which a stop string may have begun.
        self._kept = max(map(len, self._stops)) - 1
        self._tail = b""
        self._count = 0

    def skip(self, pieces: Sequence[bytes]) -> None:
        """Continue after tokens with these texts, ignoring stop strings in them."""
        self._count += len(pieces)
        text = b""
        for piece in reversed(pieces):
            text = piece + text
            if len(text) >= self._kept:
                break
        self._keep(self._tail + text)

    def find(self, pieces: Sequence[bytes]) -> tuple[int, int] | None:
        """Return how many of these tokens the response keeps, and the index of the string that ends it there."""
        for number, piece in enumerate(pieces):
            text = self._tail + piece
            found = self._first(text)
            self._count += 1
            if found is not None and self._count > self._least:
                return number + 1, found
            self._keep(text)
        return None

    def _first(self, text: bytes) -> int | None:
        """Return the index of the string completed first by the new bytes; of several, the first in the list."""
        best, end = None, len(text) + 1
        for index, stop in enumerate(self._stops):
            place = text.find(stop, max(0, len(self._tail) - len(stop) + 1), end)
            if place >= 0 and place + len(stop) < end:
                best, end = index, place + len(stop)
        return best

    def _keep(self, text: bytes) -> None:
        self._tail = text[-self._kept :] if self._kept else b""


class StopStrings:
    """Stop strings of the samples of one engine. Samples without any cost nothing."""

    def __init__(self, token_bytes: Sequence[bytes] | None) -> None:
        """Use the texts of tokens; None if the model has none, and then no sample may have stop strings."""
        self._bytes = token_bytes
        self._searches: dict[str, tuple[StopSearch, tuple[str, ...]]] = {}

    @property
    def has_text(self) -> bool:
        """True if samples may have stop strings."""
        return self._bytes is not None

    def __len__(self) -> int:
        """Count the samples that have some."""
        return len(self._searches)

    def begin(self, sample_id: str, sampling: Sampling, response: Sequence[int]) -> None:
        """Watch a sample with this response so far. ValueError if it has stop strings and tokens have no text."""
        if not sampling.stop:
            return
        search = StopSearch(sampling.stop, sampling.min_tokens)
        search.skip(self._pieces(response))
        self._searches[sample_id] = (search, sampling.stop)

    def skip(self, sample_id: str, tokens: Sequence[int]) -> None:
        """Continue after tokens that a sample generated elsewhere."""
        if sample_id in self._searches:
            self._searches[sample_id][0].skip(self._pieces(tokens))

    def end(self, sample_id: str) -> None:
        """Forget a sample. Unknown ones are ignored."""
        self._searches.pop(sample_id, None)

    def ended_by(self, sampling: Sampling, response: Sequence[int]) -> str:
        """Return the stop string that the last token of a response completes; empty if it does none."""
        if not sampling.stop:
            return ""
        search = StopSearch(sampling.stop, sampling.min_tokens)
        search.skip(self._pieces(response[:-1]))
        found = search.find(self._pieces(response[-1:]))
        return "" if found is None else sampling.stop[found[1]]

    def cut(self, step: SampleStep) -> bool:
        """End a sample after the first stop string that a step completes; True if nothing else ends it."""
        watched = self._searches.get(step.sample_id)
        if watched is None:
            return False
        search, stop = watched
        unfinished = step.finish is None
        found = search.find(self._pieces(step.token_ids))
        if found is not None:
            kept, index = found
            step.cut(kept)
            step.finish, step.stop_string = Finish.STOP, stop[index]
        if step.finish is not None:
            self.end(step.sample_id)
        return unfinished and found is not None

    def _pieces(self, tokens: Sequence[int]) -> list[bytes]:
        if self._bytes is None:
            raise ValueError("stop strings need the text of tokens, and this model has no tokenizer")
        known = self._bytes
        return [known[token] for token in tokens]
