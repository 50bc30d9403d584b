"""A tokenizer with one token for each character.

`encode` and `decode` need no library. `save` writes the same mapping in Hugging Face layout, for engines and
trainers that read it from a model folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
ALPHABET = "\n #%()*+,-./0123456789:;=>?abcdefghijklmnopqrstuvwxyz"
TOKENS: tuple[str, ...] = (PAD, BOS, EOS, *ALPHABET)
"""All tokens; the position of a token is its id."""
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
SIZE = 64
"""Rows of the embedding: the tokens, and spare rows."""

_IDS = {token: index for index, token in enumerate(TOKENS)}
_PIECES = re.compile(rf"{PAD}|{BOS}|{EOS}|.", re.DOTALL)


def encode(text: str) -> list[int]:
    """Return the token ids of a text, which may contain names of special tokens. KeyError: an unknown character."""
    return [_IDS[piece] for piece in _PIECES.findall(text)]


def decode(ids: Iterable[int]) -> str:
    """Return the text of token ids, special tokens by name; spare ids are dropped."""
    return "".join(TOKENS[index] for index in ids if index < len(TOKENS))


def prompt_ids(question: str) -> list[int]:
    """Return the token ids of a prompt: the begin token, then the question."""
    return [BOS_ID, *encode(question)]


def save(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, which AutoTokenizer loads without a network."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.WordLevel(_IDS, unk_token=PAD))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
