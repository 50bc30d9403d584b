"""Messages of a conversation, as vLLM's server gives them to a chat template. Pure.

A template sees what this module returns and not what a client sent: parts of a content are joined, null is empty,
and arguments of tool calls are objects. What cannot be given to a template of text is refused by its field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import Violation
from paceline.foreign_json import parse_object
from services.contracts.errors import InvalidArgument
from services.facade.chat_template import TemplateTraits

Json = dict[str, Any]

TEXT_PARTS = {"text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Types of content parts that are text, and the field that has it."""
PART_FIELDS = frozenset(
    {
        *("audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url"),
        *("input_audio", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid"),
        *("video_embeds", "video_url"),
    }
)
"""Fields of content parts that no template sees; it does see others, such as `cache_control`."""
_ATTRIBUTION = "x-anthropic-billing-header"
"""Beginning of a line that a client may put before a system prompt; it differs in each request."""


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
    """Return the content as a string or, where the template goes through parts, as a list of them."""
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
    """Return a part of a system prompt without the line of its client; empty if it is nothing else."""
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
            # Both names, whichever came: templates read one of them.
            reasoning = _text(value, f"{field}.{name}")
            return {**found, "reasoning": reasoning, "reasoning_content": reasoning}
    return found


def _tool_call(call: Any, field: str) -> Json:
    """Return a tool call, its keys in the order that vLLM's have: some templates write it as JSON."""
    if not isinstance(call, Mapping):
        raise _wrong(field, call, "an object")
    if call.get("type") != "function":
        raise _wrong(f"{field}.type", call.get("type"), "'function'")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise _wrong(f"{field}.function", function, "an object")
    told = {
        "arguments": _arguments(_text(function.get("arguments"), f"{field}.function.arguments")),
        "name": _text(function.get("name"), f"{field}.function.name"),
    }
    told |= {name: value for name, value in function.items() if name not in told}
    found = {"id": _text(call.get("id"), f"{field}.id"), "function": told, "type": "function"}
    return found | {name: value for name, value in call.items() if name not in found}


def _arguments(text: str) -> Json:
    """Return the arguments of a call as an object; empty where they are none, which a model may have written."""
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
        # Most templates that go through parts expect the answer of a tool as a string nevertheless.
        found["content"] = "\n".join(part["text"] for part in content)
    return found


def _as_system(message: Json) -> Json:
    if message["role"] != "developer":
        return message
    return {**{name: value for name, value in message.items() if name != "tools"}, "role": "system"}


def _one_system_message(messages: list[Json]) -> list[Json]:
    """Return the messages with all system messages as one at their head, unless they are so already."""
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
    """Return a value as it is shown: a text may be long, and may be nobody's business."""
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    return repr(value[:40]) if isinstance(value, str) else f"a {type(value).__name__}"
