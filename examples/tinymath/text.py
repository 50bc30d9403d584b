"""Tokenization of problems and answers: tinymath's characters, or the tokenizer of a model folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from examples.tinymath import tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TaskText(Protocol):
    """Interface of a tokenizer for the training loop; the module `tokenizer` implements it."""

    def prompt_ids(self, question: str) -> list[int]:
        """Return the token ids of a problem."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a response, with tinymath's end token if the model ended it."""


class ModelText:
    """Tokenizer of a model, with its chat template if it has one."""

    def __init__(self, known: PreTrainedTokenizerBase) -> None:
        self._known = known

    def prompt_ids(self, question: str) -> list[int]:
        """Return the token ids of a problem."""
        if not self._known.chat_template:
            return list(self._known.encode(question))
        message = {"role": "user", "content": question}
        ids = self._known.apply_chat_template(
            [message], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return [int(token) for token in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a response, with tinymath's end token if the model ended it."""
        given = list(ids)
        ended = bool(given) and given[-1] == self._known.eos_token_id
        return str(self._known.decode(given, skip_special_tokens=True)) + tokenizer.EOS * ended


def text_of(model: Path) -> TaskText:
    """Return the tokenizer of a model folder. OSError, ValueError: it cannot be read."""
    path = model / "tokenizer.json"
    if path.is_file():
        vocabulary = json.loads(path.read_text()).get("model", {}).get("vocab")
        if vocabulary == {token: index for index, token in enumerate(tokenizer.TOKENS)}:
            return tokenizer
    from transformers import AutoTokenizer

    return ModelText(AutoTokenizer.from_pretrained(model))
