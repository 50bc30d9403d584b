"""Constraints of samples on a real instance: where they end, what they are made of, and what is told of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.rpc import code_pb2

from paceline.v1 import sample_pb2
from tests.integration.generation.conftest import Policy
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.instances import calling
from tests.support.models import END_TOKEN, VOCAB_SIZE

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9999}}, "required": ["n"]}


@pytest.fixture
def text(tmp_path: Path) -> list[bytes]:
    return byte_tokenizer(tmp_path, VOCAB_SIZE)


async def test_a_stop_string_ends_the_sample_and_is_told(policy: Policy, text: list[bytes]) -> None:
    """Drafted by the whole response, resumed just before its end, and by a prefix that is the whole sample."""
    asked = {"ignore_eos": True, "max_tokens": 60}
    whole = (await policy.tokens([1], **asked))[1]
    stop = b"".join(text[token] for token in whole[30:34]).decode()
    end = next(n for n in range(61) if stop.encode() in b"".join(text[token] for token in whole[:n]))
    ways: list[dict[str, list[int]]] = [
        {},
        {"reference_token_ids": whole},
        {"prefix_token_ids": whole[: end - 1]},
    ]
    ways.append({"prefix_token_ids": whole[:end]})
    items = [
        policy.item(
            handle, seed=1001, prompt=policy.item(1).prompt_token_ids, stop=[stop, "@@@@"], **asked, **way
        )
        for handle, way in enumerate(ways)
    ]
    found = await policy.ask(*items)
    for handle, way in enumerate(ways):
        finished = found[handle].finished
        assert finished is not None
        assert finished.finish_reason == sample_pb2.FINISH_REASON_STOP
        assert finished.stop_string == stop
        assert [*way.get("prefix_token_ids", []), *found[handle].tokens] == whole[:end]


async def test_json_of_a_schema(policy: Policy, text: list[bytes]) -> None:
    schema = json.dumps(SCHEMA)
    found = await policy.ask(
        *[policy.item(handle, json_schema=schema, max_tokens=100) for handle in range(12)]
    )
    ended = [outcome.tokens for outcome in found.values() if outcome.tokens[-1] == END_TOKEN]
    assert len(ended) > 3
    for tokens in ended:
        assert isinstance(json.loads(b"".join(text[token] for token in tokens[:-1]))["n"], int)


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"json_schema": '{"type": "nonsense"}'}, "sampling.json_schema", "nonsense"),
        ({"json_schema": '{"type": "number", "multipleOf": 3}'}, "sampling.json_schema", "multipleOf"),
        ({"json_schema": "{}", "prefix_token_ids": [END_TOKEN]}, "sampling.json_schema", "prefix"),
        ({"json_schema": "{}", "min_tokens": 3}, "sampling.min_tokens", "json_schema"),
        ({"stop": [""]}, "sampling.stop[0]", "0 bytes"),
        ({"allowed_token_ids": [END_TOKEN], "min_tokens": 1}, "sampling.allowed_token_ids", "stop tokens"),
        ({"top_logprobs": 21}, "sampling.top_logprobs", "21"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name_and_harms_nobody(
    policy: Policy, fields: dict[str, object], field: str, says: str
) -> None:
    found = await policy.ask(policy.item(1, **fields), policy.item(2))
    refused = found[1].refused
    assert refused is not None
    assert refused.field == field
    assert says in refused.message
    assert found[2].finished is not None


async def test_a_schema_that_leads_to_no_token_is_named_and_harms_nobody(policy: Policy) -> None:
    """Its first character can be written, and then one that no token of the model has."""
    schema = json.dumps({"const": "\N{SNOWMAN}"}, ensure_ascii=False)
    found = await policy.ask(policy.item(1, json_schema=schema, max_tokens=9), policy.item(2))
    refused = found[1].refused
    assert refused is not None
    assert refused.code == code_pb2.INVALID_ARGUMENT
    assert refused.field == "sampling.json_schema"
    assert "no token of the model's vocabulary at response position 1" in refused.message
    assert found[2].finished is not None


async def test_a_model_without_a_tokenizer_says_so(fresh: Policy) -> None:
    for fields in ({"stop": ["a"]}, {"json_schema": "{}"}):
        found = await fresh.ask(fresh.item(1, **fields))
        refused = found[1].refused
        assert refused is not None
        assert "no tokenizer" in refused.message


async def test_the_likeliest_tokens_and_the_prompt_are_told_once(policy: Policy) -> None:
    item = policy.item(1, max_tokens=20, ignore_eos=True, top_logprobs=3, prompt_logprobs=2)
    async with calling(policy.address) as caller:
        await caller.send([item])
        await caller.ended(1)
        deltas = [delta for response in caller.responses for delta in response.deltas]
    tokens = [token for delta in deltas for token in delta.tokens.token_ids]
    assert len(tokens) == 20
    assert [len(delta.tokens.top_token_ids) for delta in deltas] == [
        3 * len(delta.tokens.token_ids) for delta in deltas
    ]
    told = [delta.prompt_logprobs for delta in deltas if delta.HasField("prompt_logprobs")]
    assert [(len(each.logprobs), len(each.top_token_ids)) for each in told] == [
        (len(item.prompt_token_ids) - 1, 2 * (len(item.prompt_token_ids) - 1))
    ]
