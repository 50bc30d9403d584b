"""Prompts of conversations are vLLM's own, over tables and over random messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.contracts.errors import InvalidArgument
from services.facade.dialects.chat import PART_FIELDS, RESERVED, ChatBody, chat_prompt
from services.facade.dialects.vllm import CompletionBody, completion_prompts
from services.facade.text import FolderTokenizer, not_by_template, traits_of
from tests.support.vllm_chat import VllmChat, byte_ids

HEAD = "{% for m in messages %}<{{ m.role }}{{ '/' ~ m.name if m.name else '' }}>"
STRING = (
    "{{ bos_token }}" + HEAD + "{{ m['content'] }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}[{{ c | tojson }}]{% endfor %}{% endif %}"
    "{% if m.tool_call_id is defined %}({{ m.tool_call_id }}){% endif %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning }}</think>{% endif %}{% if m.task %}!{{ m.task }}{% endif %}"
    "{% endfor %}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS = (
    HEAD + "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ part | tojson }}{% endfor %}{% endif %}{{ m.tool_calls | tojson if m.tool_calls else '' }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATES = {
    "string": STRING,
    "parts": PARTS,
    "developer": STRING.replace("<assistant>", "<assistant>{# 'developer' #}"),
    "parts of a variable": (
        "{% set rest = messages[1:] %}{% set other = rest %}{% for m in other %}<{{ m.role }}>"
        "{% for part in m['content'] | list %}{{ part.text }}{% endfor %}{% endfor %}"
    ),
    "content by name": (
        "{% for m in messages %}{% set content = m.content %}{% for part in content %}({{ part }}){% endfor %}"
        "{% endfor %}"
    ),
    "parts in a macro": (
        "{% macro show(given) %}{% for part in given %}({{ part.text }}){% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ m.role }}{{ show(m.content) }}{% endfor %}"
    ),
    "a macro by keyword": (
        "{% macro show(x, given) %}{% for part in given %}({{ part.text }}){% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ m.role }}{{ show(x=1, given=m.content) }}{% endfor %}"
    ),
    "letters in a macro": (
        "{% macro show(content) %}{% for part in content %}({{ part }}){% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ m.role }}{{ show('ab') }}{{ m.content }}{% endfor %}"
    ),
    "pairs": "{% for a, b in messages | items %}{{ a }}{% endfor %}{% for p in content %}{% endfor %}",
    "namespace": (
        "{% set ns = namespace(m=0) %}{% set ns.m = messages %}{% for m in messages %}"
        "{% for part in m.content %}{{ part }}{% endfor %}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% generation %}{{ m.content | upper }}{% endgeneration %}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    ),
    "refuses": "{% for m in messages %}{{ raise_exception('no ' ~ m.role) }}{% endfor %}",
}
SPECIAL = [  # names of what a test is about, and messages
    [{"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]}],
    [{"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": "b"}]}],
    [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"b": 1}, "closed": 1}]}],
    [{"role": "user", "content": []}, {"role": "user"}, {"role": "user", "content": ""}],
    [{"role": "assistant", "content": None}, {"role": "function", "content": None, "name": "f"}],
    [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}],
    [{"role": "developer", "content": [{"type": "text", "text": "d"}]}, {"role": "system", "content": "s"}],
    [{"role": "developer", "content": "d", "name": "n"}, {"role": "user", "content": "u"}],
    [{"role": "user", "content": "u"}, {"role": "developer", "content": ""}],
    [{"role": "system", "content": "x-anthropic-billing-header: 1\nmine"}],
    [{"role": "system", "content": "x-anthropic-billing-header: 1"}, {"role": "user", "content": "x"}],
    [{"role": "user", "content": "x-anthropic-billing-header: 1\nmine"}],
    [{"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    [{"role": "tool", "content": [{"type": "tool_reference", "name": "f"}], "tool_call_id": None}],
    [{"role": "assistant", "content": "a", "refusal": "r", "audio": None, "function_call": {"name": "f"}}],
    [{"role": "assistant", "content": "a", "reasoning_content": "r", "reasoning": None}],
    [{"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "other"}],
    [{"role": "user", "content": "é語😀\0\n", "name": "", "task": "t", "unknown": 5}],
]
WRONG = {  # messages, and the field that is named
    "messages[0].role": [{"content": "a"}],
    "messages[1].content": [{"role": "user", "content": "a"}, {"role": "user", "content": None}],
    "messages[0].content": [{"role": "user", "content": {"type": "text", "text": "a"}}],
    "messages[0].content[1]": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}],
    "messages[0].content[0].type": [{"role": "user", "content": [{"type": "odd", "text": "a"}]}],
    "messages[0].content[1].type": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
        }
    ],
    "messages[0].content[0].text": [{"role": "user", "content": [{"type": "text", "text": None}]}],
    "messages[0].content[0].uuid": [
        {"role": "user", "content": [{"type": "text", "text": "a", "uuid": "u"}]}
    ],
    "messages[0].name": [{"role": "user", "content": "a", "name": 5}],
    "messages[0].reasoning": [{"role": "assistant", "content": "a", "reasoning": 5}],
    "messages[0].tool_calls": [{"role": "assistant", "content": "a", "tool_calls": {}}],
    "messages[0].tool_calls[0].type": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}],
    "messages[0].tool_calls[0].function.arguments": [
        {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f"}}]}
    ],
    "messages[0].tools": [{"role": "developer", "content": "a", "tools": [{"type": "function"}]}],
}

TEXTS = st.text("aé😀\n\0<|{%x", max_size=5) | st.just("x-anthropic-billing-header\nrest")
JSON = st.none() | st.booleans() | st.integers(-9, 9) | TEXTS | st.just([]) | st.just({})
EXTRAS = {"cache_control": JSON, "uuid": st.none(), "closed": JSON}
PART = st.one_of(
    *(
        st.fixed_dictionaries({"type": st.just(kind), kind: TEXTS}, optional=EXTRAS)
        for kind in ("text", "refusal", "thinking")
    ),
    st.fixed_dictionaries({"type": st.just("tool_reference"), "name": TEXTS}),
)
CALL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "id": TEXTS,
        "function": st.fixed_dictionaries(
            {
                "name": TEXTS,
                "arguments": st.sampled_from(['{"b": 1, "a": [2]}', "", "[1]", "{", "null", '"x"', "NaN"]),
            },
            optional={"strict": JSON},
        ),
    },
    optional={"index": JSON},
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "function", "odd"])},
    optional={
        "content": TEXTS | st.lists(PART, max_size=3) | st.none(),
        "name": TEXTS,
        "tool_calls": st.none() | st.lists(CALL, max_size=2),
        "tool_call_id": TEXTS,
        "reasoning": st.none() | TEXTS,
        "reasoning_content": st.none() | TEXTS,
        "task": TEXTS,
        "tools": st.none(),
        "metadata": JSON,
    },
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[FolderTokenizer, VllmChat]]:
    root = tmp_path_factory.mktemp("templates")
    folders = {
        name: byte_ids(root / str(place), text) for place, (name, text) in enumerate(TEMPLATES.items())
    }
    return {name: (FolderTokenizer(folder), VllmChat(folder)) for name, folder in folders.items()}


def ours(tokenizer: FolderTokenizer, body: dict[str, Any]) -> list[int] | InvalidArgument:
    try:
        return chat_prompt(ChatBody(**body), tokenizer)
    except InvalidArgument as error:
        return error


def bare(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None or name == "content"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_vllm(name: str, pairs: dict[str, tuple[FolderTokenizer, VllmChat]]) -> None:
    tokenizer, reference = pairs[name]
    for messages in SPECIAL:
        wanted = reference.prompt({"messages": messages})
        found = ours(tokenizer, {"messages": messages})
        assert (wanted is None) == isinstance(found, InvalidArgument), (messages, found)
        assert wanted in (None, found), (messages, found)
    if name not in ("refuses", "pairs"):
        assert any(isinstance(ours(tokenizer, {"messages": messages}), list) for messages in SPECIAL)


def test_prompts_by_templates_of_known_models_are_those_of_vllm(tmp_path: Path) -> None:
    folder = byte_ids(tmp_path, "")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2]}'}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "u"}, {"type": "text", "text": "v"}]},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "t"}], "tool_call_id": "a"},
        {"role": "assistant", "content": "<think>x</think>y"},
        {"role": "user", "content": "é"},
    ]
    rendered = 0
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        if path.stem.endswith("_training"):  # variants that mark what the assistant wrote
            continue
        (folder / "chat_template.jinja").write_text(template := path.read_text())
        tokenizer, reference = FolderTokenizer(folder), VllmChat(folder, template)
        for messages in (turns, turns[:1], turns[3:], [{"role": "developer", "content": "d"}, *turns[:1]]):
            wanted, found = reference.prompt({"messages": messages}), ours(tokenizer, {"messages": messages})
            assert wanted == (None if isinstance(found, InvalidArgument) else found), (path.name, found)
            rendered += wanted is not None
    assert rendered > 80


@pytest.mark.parametrize("name", ["string", "parts"])
def test_prompts_of_random_messages_are_those_of_vllm(
    name: str, pairs: dict[str, tuple[FolderTokenizer, VllmChat]]
) -> None:
    tokenizer, reference = pairs[name]

    @settings(max_examples=200)
    @given(st.lists(MESSAGE, min_size=1, max_size=4), st.booleans())
    def compare(messages: list[Any], generation: bool) -> None:
        body = {"messages": messages, "add_generation_prompt": generation}
        wanted, found = reference.prompt(body), ours(tokenizer, body)
        if isinstance(found, InvalidArgument):
            assert found.violations[0].field.startswith("messages")
            assert wanted is None, found
        else:
            # Null is as left out here, also where vLLM refuses it beside content that is null.
            assert found == (
                wanted or reference.prompt({**body, "messages": [bare(each) for each in messages]})
            )

    compare()


@pytest.mark.parametrize("field", WRONG)
def test_what_no_template_can_be_given_is_refused_by_its_field(
    field: str, pairs: dict[str, tuple[FolderTokenizer, VllmChat]]
) -> None:
    refused = ours(pairs["string"][0], {"messages": WRONG[field]})
    assert isinstance(refused, InvalidArgument)
    assert [violation.field for violation in refused.violations] == [field]


@pytest.mark.parametrize("last", ["ab", "ab ", [{"type": "text", "text": "ab"}]])
def test_an_answer_is_gone_on_with_as_in_vllm(
    last: Any, pairs: dict[str, tuple[FolderTokenizer, VllmChat]]
) -> None:
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": last}]
    for name in ("string", "parts"):
        tokenizer, reference = pairs[name]
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        found, wanted = ours(tokenizer, body), reference.prompt(body)
        assert found == wanted or (wanted is None and isinstance(found, InvalidArgument))
        both = ours(tokenizer, {**body, "add_generation_prompt": True})
        assert isinstance(both, InvalidArgument)
        assert both.violations[0].field == "add_generation_prompt"


def test_a_request_sets_variables_of_the_template_and_nothing_else(
    pairs: dict[str, tuple[FolderTokenizer, VllmChat]],
) -> None:
    from vllm.renderers.hf import _get_hf_base_chat_template_params

    tokenizer, reference = pairs["string"]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "u"}]}
    for options in (
        {"enable_thinking": False},
        {"enable_thinking": None},
        {"bos_token": "b"},
        {"bos_token": "auto"},
        {"x": 5},
        {},
    ):
        asked = {**body, "chat_template_kwargs": options}
        assert ours(tokenizer, asked) == reference.prompt(asked)
    assert {*_get_hf_base_chat_template_params(), "messages"} == RESERVED
    for name in RESERVED:
        refused = ours(tokenizer, {**body, "chat_template_kwargs": {name: 1}})
        assert isinstance(refused, InvalidArgument)
        assert refused.violations[0].field == f"chat_template_kwargs.{name}"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TEXTS.filter(bool), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_prompts_of_texts_are_those_of_vllm(
    pairs: dict[str, tuple[FolderTokenizer, VllmChat]], texts: list[str], one: bool, special: bool
) -> None:
    tokenizer, reference = pairs["string"]
    for prompt in (texts[0] if one else texts, [1, 2], [[1], [2, 3]], [[1, 0]]):
        body = {"prompt": prompt, "add_special_tokens": special}
        assert completion_prompts(CompletionBody(**body), tokenizer) == reference.prompts(body)


def test_fields_of_parts_are_those_of_vllm() -> None:
    from vllm.renderers.chat_utils import _KNOWN_CONTENT_PART_FIELDS

    assert PART_FIELDS == _KNOWN_CONTENT_PART_FIELDS


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config.json": {"model_type": "gpt_oss"}}, "code of its own"),
        ({"config.json": {"architectures": ["DeepseekV32ForCausalLM"]}}, "code of its own"),
        ({"tekken.json": {}, "consolidated.safetensors": {}}, "mistral-common"),
        ({"tekken.json": {}, "model.safetensors": {}}, ""),
        ({"chat_template.json": {"chat_template": "a"}}, "chat_template.json"),
        ({"chat_template.json": {"chat_template": "a"}, "tokenizer_config.json": {"chat_template": "a"}}, ""),
        ({"config.json": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}}, ""),
        ({}, ""),
    ],
)
def test_models_whose_conversations_vllm_writes_otherwise_are_refused(
    files: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert reason in not_by_template(tmp_path)
    assert bool(reason) == bool(not_by_template(tmp_path))


def test_all_of_vllms_ways_to_write_conversations_are_known() -> None:
    from vllm.renderers.registry import _VLLM_RENDERERS

    # Those of `not_by_template`, and two that an option of the server has to ask for: cohere and terratorch.
    other = {"deepseek_v32", "deepseek_v4", "deepseek_v41", "inkling", "kimi_k3", "mistral"}
    assert set(_VLLM_RENDERERS) == {"hf", "kimi_audio", "cohere", "terratorch", *other}


def test_what_is_no_template_is_told() -> None:
    with pytest.raises(ValueError, match="is no template"):
        traits_of("{% for m in messages %}")
