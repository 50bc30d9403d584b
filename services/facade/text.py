"""Convert between text and tokens with the tokenizer and the chat template of the served model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import Violation
from paceline.files import read_object
from paceline.text import until_stop
from services.contracts.errors import InvalidArgument

_OTHER_TYPES = frozenset({"gpt_oss"})
_OTHER_ARCHITECTURES = frozenset(
    {
        *("DeepseekV32ForCausalLM", "DeepseekV41ForCausalLM", "DeepseekV4ForCausalLM"),
        *("DeepseekV4ForConditionalGeneration", "InklingForCausalLM", "InklingForConditionalGeneration"),
        *("KimiK3ForConditionalGeneration", "MoonshotKimiaForCausalLM"),
    }
)
"""Architectures for which vLLM's server does not use the chat template."""
_MISTRAL = ("tekken.json", "tokenizer.model.v*")
_UNFINISHED = "\ufffd"
"""Replacement character, which decoders return for incomplete bytes."""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Form of the messages that a chat template expects."""

    openai_content: bool = False
    """True: contents are lists of parts; otherwise they are strings."""
    developer: bool = False
    """True: messages may have the role `developer`; otherwise they become system messages."""
    variables: frozenset[str] = frozenset()
    """Variables that the template reads."""


class _Generation(Extension):
    """Tag that marks the text of an assistant; it does not change the text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
)


def traits_of(template: str) -> TemplateTraits:
    """Return the traits of a template, by its syntax tree and the rules of vLLM's server.

    ValueError: it is invalid.
    """
    try:
        tree = _ENVIRONMENT.parse(template)
        variables = meta.find_undeclared_variables(tree)
    except TemplateError as error:
        raise ValueError(f"is no template: {error}") from error
    developer = any(f"{quote}developer{quote}" in template for quote in "\"'")
    return TemplateTraits(_iterates_over_parts(tree), developer, frozenset(variables))


def _iterates_over_parts(tree: nodes.Template) -> bool:
    """Return True if a loop iterates over the content of a message."""
    conversations = _aliases(tree, "messages")
    if conversations is None:
        return False
    messages = set()
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in conversations):
            if not isinstance(loop.target, nodes.Name):
                return False
            messages.add(loop.target.name)
    through_arguments = dict(_argument_loops(tree, messages))
    for loop in tree.find_all(nodes.For):
        given = loop.iter
        names = through_arguments.get(id(loop), {"content"})
        if any(_reads(given, name, "content") for name in messages) or (
            isinstance(given, nodes.Name) and given.name in names
        ):
            return isinstance(loop.target, nodes.Name)
    return False


def _aliases(tree: nodes.Template, name: str) -> set[str] | None:
    """Return the names assigned from a variable or a part of it; None: a target is not a plain name."""
    found, waiting = {name}, [name]
    while waiting:
        known = waiting.pop(0)
        for assignment in tree.find_all(nodes.Assign):
            if not _reads(assignment.node, known):
                continue
            if not isinstance(assignment.target, nodes.Name):
                return None
            if assignment.target.name not in found:
                found.add(assignment.target.name)
                waiting.append(assignment.target.name)
    return found


def _argument_loops(tree: nodes.Template, messages: Iterable[str]) -> Iterator[tuple[int, set[str]]]:
    """Yield each loop in a macro, with the arguments of the macro that receive the content of a message."""
    for macro in tree.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        contents = set()
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                given = [
                    *zip(names, call.args, strict=False),
                    *((each.key, each.value) for each in call.kwargs),
                ]
                contents |= {
                    name
                    for name, value in given
                    if name in names and any(_reads(value, message, "content") for message in messages)
                }
        for loop in macro.find_all(nodes.For):
            yield id(loop), contents


def _reads(node: nodes.Node | None, name: str, attribute: str = "") -> bool:
    """Return True if an expression is a variable or an attribute of it, possibly filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if attribute:
        if isinstance(node, nodes.Getattr):
            if node.attr != attribute:
                return False
        elif not (
            isinstance(node, nodes.Getitem)
            and isinstance(node.arg, nodes.Const)
            and node.arg.value == attribute
        ):
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def not_by_template(folder: Path) -> str:
    """Return the reason why the tokenizer's template yields other prompts than vLLM; empty if there is none."""
    config = _json(folder / "config.json")
    if config.get("model_type") in _OTHER_TYPES or _OTHER_ARCHITECTURES & {
        *(config.get("architectures") or ())
    }:
        return "vLLM writes the conversations of this model by code of its own; send token ids"
    if any(any(folder.glob(name)) for name in _MISTRAL) and any(folder.glob("consolidated*.safetensors")):
        return "vLLM writes the conversations of this folder with mistral-common; send token ids"
    own = _json(folder / "tokenizer_config.json").get("chat_template")
    if _json(folder / "chat_template.json").get("chat_template", own) != own:
        return "chat_template.json, which vLLM uses, differs from the template of the tokenizer"
    return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


class Tokenizer(Protocol):
    """Tokenizer of a model."""

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text; with `special`, also the special tokens that the model expects around it."""

    def decode(self, token_ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of tokens."""

    def token(self, token_id: int) -> str:
        """Return the text of one token."""

    def template(self) -> TemplateTraits:
        """Return the traits of the chat template; InvalidArgument if there is no usable one."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        max_model_len: int | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation in the form that the template expects.

        InvalidArgument: the template refuses it, or its text cannot fit into the model.
        """


def leave_out_torch() -> None:
    """Hide torch from transformers in this process: loading it takes seconds and hundreds of megabytes."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


class FolderTokenizer:
    """Tokenizer of a model folder in Hugging Face layout."""

    def __init__(self, folder: Path) -> None:
        """OSError or ValueError if the folder has no tokenizer. Code in the folder is not run."""
        # Imported late, because it takes seconds, and a facade for token ids needs no tokenizer.
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        self.fast = bool(self._tokenizer.is_fast)
        """False: it is written in Python, and slow."""
        self.longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        """Most characters of a token in the vocabulary."""
        self._traits: TemplateTraits | None = None
        self._no_chat = not_by_template(folder)
        if not self._no_chat:
            try:
                self._traits = traits_of(self._tokenizer.get_chat_template())
            except ValueError as error:
                self._no_chat = str(error)

    def encode(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=special)]

    def decode(self, token_ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of tokens without tidying spaces, as in the model's data."""
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )
        )

    def token(self, token_id: int) -> str:
        """Return the text of one token."""
        return self.decode([token_id], skip_special=False)

    def template(self) -> TemplateTraits:
        """Return the traits of the chat template."""
        if self._traits is None:
            raise InvalidArgument([Violation("messages", f"cannot be written as a prompt: {self._no_chat}")])
        return self._traits

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        max_model_len: int | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation."""
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        except Exception as error:  # templates may raise anything
            raise InvalidArgument(
                [Violation("messages", f"the chat template refuses them: {error}")]
            ) from error
        check_text(text, self, max_model_len, "messages")
        # The template writes the special tokens itself.
        return self.encode(text, special=False)


def needs_text(tokenizer: Tokenizer | None, field: str) -> Tokenizer:
    """Return the tokenizer; InvalidArgument that names the field if there is none."""
    if tokenizer is None:
        raise InvalidArgument(
            [Violation(field, "is text, and this facade has no tokenizer; send token ids, or set `model`")]
        )
    return tokenizer


def check_text(text: str, tokenizer: Tokenizer, max_model_len: int | None, field: str) -> None:
    """Refuse a text that is too long for the model with any tokens, as vLLM's server does."""
    longest = getattr(tokenizer, "longest_token", None)
    if max_model_len is not None and longest is not None and len(text) > max_model_len * longest:
        found = (
            f"has {len(text)} characters; the model takes {max_model_len} tokens of at most {longest} each"
        )
        raise InvalidArgument([Violation(field, f"{found}: {max_model_len * longest}")])


def text_of(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special: bool, stop_string: str = "") -> str:
    """Return the text of tokens, up to the stop string that the last token completes, if there is one."""
    return until_stop(lambda ids: tokenizer.decode(ids, skip_special), token_ids, stop_string)


def longest_beginning(stop: Sequence[str]) -> int:
    """Return the most characters at the end of a text that may be the beginning of a stop string."""
    return max(map(len, stop), default=1) - 1


def settled(token_ids: Sequence[int], stop: Sequence[str]) -> Sequence[int]:
    """Return the tokens of an unfinished sample that complete no string of `stop`, for the last one may.

    A sample ends with the token that completes a stop string, and its end comes after its tokens.
    """
    return token_ids[:-1] if stop else token_ids


class TextStream:
    """Text of a growing sample, in whole characters, although their bytes may be in several tokens."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special: bool, stop: Sequence[str] = ()) -> None:
        """Give no part of the strings in `stop`, one of which the last token may complete."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stop = stop
        self._waiting = ""
        self._begin = 0
        self._given = 0

    def grow(self, token_ids: Sequence[int], ended: bool, stop_string: str = "") -> str:
        """Return the new text; `token_ids` are all tokens so far. At the end no text is held back.

        `stop_string`, which the last token completes, is cut off.
        """
        if self._tokenizer is None:
            return ""
        known = token_ids if ended else settled(token_ids, self._stop)
        text = self._waiting + self._decoded(known, ended, self._tokenizer)
        if ended and stop_string:
            whole = text_of(self._tokenizer, token_ids, self._skip_special)
            kept = text_of(self._tokenizer, token_ids, self._skip_special, stop_string)
            text = text[: max(0, len(text) - (len(whole) - len(kept)))]
        given = len(text) if ended else max(0, len(text) - longest_beginning(self._stop))
        self._waiting = text[given:]
        return text[:given]

    def _decoded(self, token_ids: Sequence[int], ended: bool, tokenizer: Tokenizer) -> str:
        # Decoded with the previous tokens, because some tokenizers decode a first token differently.
        before = tokenizer.decode(token_ids[self._begin : self._given], self._skip_special)
        now = tokenizer.decode(token_ids[self._begin :], self._skip_special)
        if now.endswith(_UNFINISHED) and not ended:
            return ""
        if len(token_ids) > self._given:
            self._begin, self._given = self._given, len(token_ids)
        return now[len(before) :]
