"""Text instead of token ids: prompts from chat messages, and samples as text.

Needs the extra `text` (transformers and jinja2), which is imported when a tokenizer is loaded; torch is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from paceline.errors import extra_missing, invalid_argument
from paceline.types import Sample, SampleStatus, TokenIds

EXTRA = "text"
_UNFINISHED = "\ufffd"
"""Decoders return this for bytes that are an incomplete character."""
Messages = Sequence[Mapping[str, Any]]


class Text:
    """Tokenizer of a model, for a client that works with text.

        text = Text.of("models/Qwen3-8B")
        group = Group("p0", text.prompt([{"role": "user", "content": "What is 6 x 7?"}]), samples=4)
        for sample in run.rollout(0, [group]):
            print(text.response(sample))

    A trainer that already has a tokenizer of transformers uses `Text(tokenizer)`.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Use a tokenizer of transformers, such as `AutoTokenizer` loads."""
        self.tokenizer = tokenizer
        """The tokenizer itself, for everything that this class does not offer."""

    @classmethod
    def of(cls, model: str | Path) -> Self:
        """Load the tokenizer of a model, without code that its folder may hold.

        Args:
            model: folder in Hugging Face layout, or name of a model of the hub, whose tokenizer is downloaded. It
                must be the model that the instances serve: other tokenizers give other tokens.

        Raises:
            FailedPreconditionError: the extra `text` is not installed (reason EXTRA_MISSING).
            InvalidArgumentError: `model` has no tokenizer that can be loaded.
        """
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise extra_missing(EXTRA, "a tokenizer", error) from error
        try:
            return cls(AutoTokenizer.from_pretrained(str(model), trust_remote_code=False))
        except (OSError, ValueError, KeyError) as error:
            found = f"{str(model)!r} has no tokenizer that can be loaded: {error}"
            raise invalid_argument({"model": found}) from error

    def prompt(self, messages: str | Messages, **variables: Any) -> list[int]:
        """Return the prompt's tokens, [prompt_len], to which the model answers.

        Args:
            messages: a conversation, such as `[{"role": "user", "content": "..."}]`, which the chat template of the
                model writes, with the beginning of the answer. A string is taken as it is, with the special tokens
                that the model expects around a text: for models without a chat template.
            variables: of the template, such as `tools` or `enable_thinking`.

        Raises:
            InvalidArgumentError: the messages are empty, are refused by the template, or hold more than text.
            FailedPreconditionError: the extra `text` is not installed (reason EXTRA_MISSING).
        """
        if isinstance(messages, str):
            tokens = self._encoded(messages, special=True)
        else:
            _check(messages)
            # The template writes the special tokens itself.
            tokens = self._encoded(self._written(messages, variables), special=False)
        if not tokens:
            raise invalid_argument({"messages": "are empty: they give no token"})
        return tokens

    def response(self, sample: Sample, *, skip_special: bool = True) -> str:
        """Return a sample's response as text, without the stop string that ended it.

        Args:
            sample: of a model with this tokenizer. Tokens of its environment are part of the text.
            skip_special: leave special tokens out, such as the end of the turn.

        Raises:
            InvalidArgumentError: the sample has failed, and has no text.
        """
        if sample.status is SampleStatus.FAILED:
            raise invalid_argument(
                {"sample": f"{sample.prompt_id!r}, slot {sample.slot}, has failed: {sample.error}"}
            )
        tokens = sample.token_ids.tolist()
        return until_stop(lambda ids: self.decode(ids, skip_special=skip_special), tokens, sample.stop_string)

    def decode(self, token_ids: Sequence[int] | TokenIds, *, skip_special: bool = False) -> str:
        """Return the text of tokens, [tokens], as it is in the model's data: no spaces are tidied."""
        return str(
            self.tokenizer.decode(
                [int(token) for token in token_ids],
                skip_special_tokens=skip_special,
                clean_up_tokenization_spaces=False,
            )
        )

    def _encoded(self, text: str, special: bool) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=special)]

    def _written(self, messages: Messages, variables: Mapping[str, Any]) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            found = "are a conversation, and the tokenizer has no chat template; give the prompt as a string"
            raise invalid_argument({"messages": found})
        options = {"add_generation_prompt": True, **variables}
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        except ImportError as error:
            raise extra_missing(EXTRA, "a chat template", error) from error
        except Exception as error:  # templates raise whatever they like
            raise invalid_argument({"messages": f"are refused by the chat template: {error}"}) from error


def until_stop(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], stop_string: str) -> str:
    """Return the text of tokens up to the stop string that the last of them completes; empty: there is none."""
    text = decode(token_ids)
    if not stop_string:
        return text
    before = decode(token_ids[:-1]).rstrip(_UNFINISHED)
    begin = text.find(stop_string, max(0, len(before) - len(stop_string) + 1))
    return text if begin < 0 else text[:begin]


def _check(messages: object) -> None:
    if not isinstance(messages, Sequence):
        raise invalid_argument(
            {"messages": f"is a {type(messages).__name__}; must be a list of messages, or a string"}
        )
    if not messages:
        raise invalid_argument({"messages": "is empty; must have at least one message"})
    faults: dict[str, str] = {}
    for at, message in enumerate(messages):
        place = f"messages[{at}]"
        if not isinstance(message, Mapping):
            faults[place] = f"is a {type(message).__name__}; must be a mapping with `role` and `content`"
        elif not isinstance(message.get("role"), str):
            faults[f"{place}.role"] = "is missing; must be a string, such as 'user'"
        else:
            faults |= _other_parts(message.get("content"), f"{place}.content")
    if faults:
        raise invalid_argument(faults)


def _other_parts(content: object, place: str) -> dict[str, str]:
    """Return descriptions, by field, of the parts of a content that are no text and cannot be tokenized."""
    if content is None or isinstance(content, str):
        return {}
    if not isinstance(content, Sequence):
        return {place: f"is a {type(content).__name__}; must be a string or a list of parts"}
    return {
        f"{place}[{at}]": "is no part of type 'text'; only text can be a prompt"
        for at, part in enumerate(content)
        if not (isinstance(part, Mapping) and part.get("type") == "text")
    }
