"""Read the bodies of `/v1/chat/completions`, and convert their conversations to tokens. Pure.

A chat template gets the messages in the same form as from vLLM's server: parts of a content are joined, null is
empty, and arguments of tool calls are objects. Content other than text is refused with the name of its field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from pydantic import Field

from paceline.errors import Violation
from paceline.files import parse_object
from services.contracts.errors import InvalidArgument
from services.facade.dialects.body import Limits, checked_likeliest
from services.facade.dialects.vllm import SamplingBody, names_of
from services.facade.text import TemplateTraits, Tokenizer, needs_text, traits_of

Json = dict[str, Any]

TEXT_PARTS = {"text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Types of content parts with text, and the field of the text."""
PART_FIELDS = frozenset(
    {
        *("audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url"),
        *("input_audio", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid"),
        *("video_embeds", "video_url"),
    }
)
"""Fields of content parts that are hidden from templates; others are passed on, such as `cache_control`."""
_ATTRIBUTION = "x-anthropic-billing-header"
"""Beginning of a line that a client may put before a system prompt; the line differs in each request."""


def conversation_of(messages: Sequence[Json], traits: TemplateTraits) -> list[Json]:
    """Return the messages as a template with these traits expects them. InvalidArgument names a message's field."""
    found = [_message(message, f"messages[{index}]", traits) for index, message in enumerate(messages)]
    if not traits.developer and any(message["role"] == "developer" for message in found):
        return _one_system_message([_as_system(message) for message in found])
    return found


def _message(message: Json, field: str, traits: TemplateTraits) -> Json:
    role = message.get("role")
    if not isinstance(role, str):
        raise _wrong(f"{field}.role", role, "a string")
    content = _content(message, role, f"{field}.content", traits)
    found: Json = {"role": role, "content": content}
    if role == "assistant":
        found |= _of_assistant(message, field)
    elif role == "tool":
        found |= _of_tool(message, content, field)
    for name in ("name", "task"):
        if (value := message.get(name)) is not None:
            found[name] = _text(value, f"{field}.{name}")
    if role == "developer":
        if message.get("tools"):
            raise InvalidArgument([Violation(f"{field}.tools", "is not supported; must be left out")])
        found["tools"] = message.get("tools")
    return found


def _content(message: Json, role: str, field: str, traits: TemplateTraits) -> Any:
    """Return the content as a string or, if the template iterates over parts, as a list of parts."""
    given = message.get("content", [])
    if given is None and (role == "assistant" or (role == "function" and "name" in message)):
        given = []
    elif isinstance(given, str):
        given = [{"type": "text", "text": given}]
    if not isinstance(given, list):
        raise _wrong(field, given, "a string or a list of content parts")
    parts = [_part(part, f"{field}[{index}]") for index, part in enumerate(given)]
    if role == "system":
        texts = [part["type"] == "text" for part in given]
        parts = [
            _without_attribution(part) if text else part for part, text in zip(parts, texts, strict=True)
        ]
        parts = [part for part in parts if part]
    if traits.openai_content:
        return parts
    lines = (part["text"] if part["type"] == "text" else part["name"] for part in parts)
    return "\n".join(filter(None, lines))


def _part(part: Any, field: str) -> Json:
    if not isinstance(part, Mapping):
        raise _wrong(field, part, "an object")
    if part.get("uuid") is not None:
        raise InvalidArgument([Violation(f"{field}.uuid", "is not supported; must be left out")])
    kind = part.get("type")
    if kind == "tool_reference":
        return {"type": kind, "name": _text(part.get("name"), f"{field}.name")}
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        known = ", ".join((*TEXT_PARTS, "tool_reference"))
        found = f"{_short(kind)} is not supported; must be one of {known}: the model reads text"
        raise InvalidArgument([Violation(f"{field}.type", found)])
    text = _text(part.get(TEXT_PARTS[kind]), f"{field}.{TEXT_PARTS[kind]}")
    kept = {name: value for name, value in part.items() if name not in PART_FIELDS}
    return {"type": "text", "text": text, **kept}


def _without_attribution(part: Json) -> Json:
    """Return a part of a system prompt without the attribution line; empty if nothing else remains."""
    if not part["text"].startswith(_ATTRIBUTION):
        return part
    rest = part["text"].partition("\n")[2]
    return {**part, "text": rest} if rest else {}


def _of_assistant(message: Json, field: str) -> Json:
    found: Json = {}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise _wrong(f"{field}.tool_calls", calls, "a list")
    if calls:
        found["tool_calls"] = [
            _tool_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    for name in ("reasoning", "reasoning_content"):
        if (value := message.get(name)) is not None:
            # Under both names, because templates read either.
            reasoning = _text(value, f"{field}.{name}")
            return {**found, "reasoning": reasoning, "reasoning_content": reasoning}
    return found


def _tool_call(call: Any, field: str) -> Json:
    """Return a tool call with its keys in vLLM's order, because some templates write it as JSON."""
    if not isinstance(call, Mapping):
        raise _wrong(field, call, "an object")
    if call.get("type") != "function":
        raise _wrong(f"{field}.type", call.get("type"), "'function'")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise _wrong(f"{field}.function", function, "an object")
    described = {
        "arguments": _arguments(_text(function.get("arguments"), f"{field}.function.arguments")),
        "name": _text(function.get("name"), f"{field}.function.name"),
    }
    described |= {name: value for name, value in function.items() if name not in described}
    found = {"id": _text(call.get("id"), f"{field}.id"), "function": described, "type": "function"}
    return found | {name: value for name, value in call.items() if name not in found}


def _arguments(text: str) -> Json:
    """Return the arguments of a call as an object; empty if a model has written something else."""
    try:
        return parse_object(text)
    except ValueError:
        return {}


def _of_tool(message: Json, content: Any, field: str) -> Json:
    found: Json = {}
    if "tool_call_id" in message:
        value = message["tool_call_id"]
        found["tool_call_id"] = value if value is None else _text(value, f"{field}.tool_call_id")
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        # Most templates that iterate over parts still expect the answer of a tool as a string.
        found["content"] = "\n".join(part["text"] for part in content)
    return found


def _as_system(message: Json) -> Json:
    if message["role"] != "developer":
        return message
    return {**{name: value for name, value in message.items() if name != "tools"}, "role": "system"}


def _one_system_message(messages: list[Json]) -> list[Json]:
    """Return the messages with all system messages merged into the first message."""
    system = [message for message in messages if message["role"] == "system"]
    if system == messages[:1]:
        return messages
    contents = [
        "\n".join(part["text"] for part in message["content"] if "text" in part)
        if isinstance(message["content"], list)
        else message["content"]
        for message in system
    ]
    merged = {"role": "system", "content": "\n\n".join(filter(None, contents))}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise _wrong(field, value, "a string")
    return value


def _wrong(field: str, value: Any, allowed: str) -> InvalidArgument:
    return InvalidArgument([Violation(field, f"{_short(value)} is not allowed; must be {allowed}")])


def _short(value: Any) -> str:
    """Return a value for an error text, shortened: it may be long, and may be private."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    return repr(value[:40]) if isinstance(value, str) else f"a {type(value).__name__}"


RESERVED = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"),
        *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    }
)
"""Names in `chat_template_kwargs` that are not variables of a template."""
_AS_LEFT_OUT = (None, "auto")
"""Values with which vLLM's server leaves a variable to the template."""
NAMES = {"prompt": "messages"}
"""Names of the parameters in a body, where they differ from the SDK's."""


class ChatBody(SamplingBody):
    """Body of /v1/chat/completions."""

    messages: list[Json] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Newer name of `max_tokens`. Neither: up to the model's length."""
    logprobs: bool | None = None
    """True: the answer has the log-probabilities of the sampled tokens."""
    top_logprobs: int | None = None
    """With `logprobs`: number of likeliest tokens at each position, at most 20."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    """Template in place of the model's. Refused unless the facade's `trust_request_chat_template` is set."""
    chat_template_kwargs: Json | None = None
    """Variables for the model's template, such as `enable_thinking`; unused variables have no effect."""

    def names_in_body(self) -> Mapping[str, str]:
        """Return the names of parameters in this body."""
        return names_of(self, NAMES)

    def prompts(self, tokenizer: Tokenizer | None, limits: Limits) -> list[list[int]]:
        """Return the token ids of the conversation."""
        return [chat_prompt(self, tokenizer, limits)]

    def drop_prompts(self) -> None:
        """Drop the conversation."""
        self.messages, self.chat_template, self.chat_template_kwargs = [], None, None

    def likeliest(self) -> int:
        """Return the requested number of likeliest tokens at each position.

        InvalidArgument: they are requested without `logprobs`.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument([Violation("top_logprobs", "is set, which needs logprobs")])
        return checked_likeliest(self.top_logprobs or 0, "top_logprobs")

    def has_logprobs(self) -> bool:
        """Return True if the answer has the log-probabilities of the sampled tokens."""
        return bool(self.logprobs)

    def most_tokens(self) -> int | None:
        """Return the most response tokens, under either name; None: up to the model's length."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def chat_prompt(body: ChatBody, tokenizer: Tokenizer | None, limits: Limits | None = None) -> list[int]:
    """Return the token ids of a conversation. InvalidArgument: there is no tokenizer, or its template refuses."""
    if body.continue_final_message and body.add_generation_prompt:
        found = "is true, as it is when left out; must be false with continue_final_message"
        raise InvalidArgument([Violation("add_generation_prompt", found)])
    if body.chat_template is not None and not (limits and limits.trust_request_chat_template):
        found = "is not allowed: the facade does not run templates of requests; leave it out, or set"
        raise InvalidArgument([Violation("chat_template", f"{found} trust_request_chat_template there")])
    template = needs_text(tokenizer, "messages")
    traits = template.template() if body.chat_template is None else _traits(body.chat_template)
    options = _template_options(body.chat_template_kwargs or {}, traits.variables)
    options |= {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }
    if body.chat_template is not None:
        options["chat_template"] = body.chat_template
    most = limits.max_model_len if limits is not None else None
    return template.chat(conversation_of(body.messages, traits), options, most)


def _traits(template: str) -> TemplateTraits:
    try:
        return traits_of(template)
    except ValueError as error:
        raise InvalidArgument([Violation("chat_template", str(error))]) from error


def _template_options(given: Json, variables: Set[str]) -> Json:
    """Return the variables that the template reads; others have no effect, as in vLLM.

    InvalidArgument: a name is reserved.
    """
    found = [
        Violation(f"chat_template_kwargs.{name}", "is no variable of a template of this server; leave it out")
        for name in given
        if name in RESERVED
    ]
    if found:
        raise InvalidArgument(found)
    return {name: value for name, value in given.items() if name in variables and value not in _AS_LEFT_OUT}
