"""A byte-level tokenizer for the tiny models: characters, pairs of letters, and some parts of characters."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from string import ascii_lowercase, printable

END = "<|end|>"
_SPECIAL = ("<|begin|>", END)
# The bytes of é and of 語, under the names that byte-level tokenizers have for them.
_PARTS = "Ã©èªŀ"


def byte_tokenizer(folder: Path, size: int) -> list[bytes]:
    """Write a tokenizer of `size` tokens, END its token 1, into a folder; return the bytes of each token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [each for each in printable[:95] if each != " "]
    pairs = ["".join(pair) for pair in product(ascii_lowercase, repeat=2)]
    words = [*_SPECIAL, "Ġ", *letters, *_PARTS, *pairs][:size]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [(word[0], word[1]) for word in words if word in pairs]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in _SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=_SPECIAL[0])
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    parts = dict(zip(_PARTS, [*"é".encode(), *"語".encode()], strict=True))
    spelled = {"Ġ": b" "} | {word: bytes([value]) for word, value in parts.items()}
    return [spelled.get(word, word.encode()) for word in words]
