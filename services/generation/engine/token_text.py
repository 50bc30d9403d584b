"""Text of a model's tokens, as bytes: the text of a response is that of its tokens, one after another.

By bytes, because a character may be spread over several tokens. A tokenizer whose text is not put together like
that (one that sets spaces between words) tells nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import structlog

_log = structlog.get_logger(__name__)

# Any of these is in a folder that has a tokenizer.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Decoders of tokenizers that put the texts of tokens together and add nothing.
_JOINING = {"ByteLevel", "ByteFallback", "Fuse"}


def token_bytes(folder: Path, vocab_size: int) -> Sequence[bytes] | None:
    """Return the bytes of each token, [vocab_size], empty for ids that the tokenizer does not use.

    None if the folder has no tokenizer, or none that tells them.
    """
    vocabulary = vocabulary_of(folder, vocab_size)
    return None if vocabulary is None else [bytes(each) for each in vocabulary.decoded_vocab]


@lru_cache(maxsize=1)
def vocabulary_of(folder: Path, vocab_size: int) -> Any | None:
    """Return the tokens of a model in the form of xgrammar, which has their bytes; None as above."""
    if not any((folder / name).exists() for name in _FILES):
        return None
    try:
        # Imported late: they take seconds, and token ids need no tokenizer.
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
