"""Bodies as workers prepare them: bounded before anything is done that takes time by their size."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from services.contracts.sampling import MOST_ALLOWED
from services.facade.dialects.body import MOST_STOP_TOKENS, Body, Limits
from services.facade.dialects.chat import ChatBody
from services.facade.dialects.paceline import HintBody
from services.facade.dialects.sglang import GenerateBody
from services.facade.dialects.tokens import DetokenizeBody, TokenizeBody, TokensBody
from services.facade.dialects.trl import TrlBody
from services.facade.dialects.vllm import CompletionBody
from services.facade.work.jobs import Invalid, RefusedBody, prepared
from services.facade.work.pool import FairSemaphore
from tests.unit.facade.test_text import Bytes

LIMITS = Limits(("m",), vocab_size=256, max_model_len=32)


class Counted(Bytes):
    """A tokenizer of which a token is at most two characters, and that counts what it was given."""

    longest_token = 2
    characters = 0

    def encode(self, text: str, special: bool) -> list[int]:
        self.characters += len(text)
        return super().encode(text, special)


def found(kind: type[Body], limits: Limits | None = LIMITS, **body: Any) -> Any:
    return prepared(Counted(), json.dumps(body).encode(), kind, limits)


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (CompletionBody, {"prompt": "TEXT"}, "prompt"),
        (CompletionBody, {"prompt": ["a", "TEXT"]}, "prompt[1]"),
        (GenerateBody, {"text": "TEXT"}, "text"),
        (HintBody, {"step": 1, "prompts": ["TEXT"]}, "prompts"),
        (TokenizeBody, {"prompt": "TEXT"}, "prompt"),
        (TrlBody, {"prompts": ["TEXT"]}, "prompts"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    kind: type[Body], body: dict[str, Any], field: str
) -> None:
    for length, fits in ((20, True), (65, False)):
        tokenizer = Counted()
        raw = json.dumps(body).replace("TEXT", "a" * length).encode()
        refused = prepared(tokenizer, raw, kind, LIMITS)
        assert isinstance(refused, RefusedBody) != fits
        if not fits:
            (violation,) = refused.violations
            assert (violation.field, tokenizer.characters <= 1) == (field, True)
            assert all(number in violation.description for number in ("65", "32", "64"))


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (CompletionBody, {"prompt": "TEXTS"}, "prompt"),
        (GenerateBody, {"text": "TEXTS"}, "text"),
        (HintBody, {"step": 1, "prompts": "TEXTS"}, "prompts"),
        (TrlBody, {"prompts": "TEXTS"}, "prompts"),
    ],
)
def test_more_texts_than_a_request_may_have_are_refused_before_one_is_tokenized(
    kind: type[Body], body: dict[str, Any], field: str
) -> None:
    limits = replace(LIMITS, max_samples=8, max_hinted_samples=8)
    for count, fits in ((8, True), (9, False)):
        tokenizer = Counted()
        raw = json.dumps(body).replace('"TEXTS"', json.dumps(["ab"] * count)).encode()
        refused = prepared(tokenizer, raw, kind, limits)
        assert isinstance(refused, RefusedBody) != fits
        assert (tokenizer.characters > 0) == fits
        if not fits:
            (violation,) = refused.violations
            assert violation.field == field
            assert "9 prompts are more than 8" in violation.description


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (CompletionBody, {"prompt": [1] * 32}, "prompt"),
        (CompletionBody, {"prompt": [1], "stop": ["a"] * 17}, "stop"),
        (CompletionBody, {"prompt": [1], "stop_token_ids": [1] * (MOST_STOP_TOKENS + 1)}, "stop_token_ids"),
        (CompletionBody, {"prompt": [1], "allowed_token_ids": [1] * (MOST_ALLOWED + 1)}, "allowed_token_ids"),
        (CompletionBody, {"prompt": [1], "n": 5000}, "n"),
        (CompletionBody, {"prompt": [[1]] * 5000}, "prompt"),
        (CompletionBody, {"prompt": [1], "structured_outputs": {"json": "a" * 70_000}}, "json_schema"),
        (GenerateBody, {"input_ids": [1] * 32}, "prompt"),
        (TokensBody, {"token_ids": [1] * 32, "sampling_params": {}}, "prompt"),
        (TrlBody, {"prompts": [[1] * 32]}, "prompt"),
        (HintBody, {"step": 1, "prompts": [[1] * 32]}, "prompt"),
        (ChatBody, {"messages": [{"role": "user", "content": "a"}], "chat_template": "a"}, "chat_template"),
    ],
)
def test_what_is_too_much_is_refused_by_its_field(kind: type[Body], body: dict[str, Any], field: str) -> None:
    refused = found(kind, **body)
    assert isinstance(refused, RefusedBody)
    names = {refused.names.get(field, field), field}
    assert refused.violations[0].field.partition("[")[0] in names
    assert refused.names == (kind.model_construct(**body).names_in_body() if refused.names else {})


def test_a_template_of_a_request_needs_a_setting_of_that_name() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template": "{% for %}"}
    refused = found(ChatBody, **body)
    assert "trust_request_chat_template" in refused.violations[0].description
    trusted = found(ChatBody, replace(LIMITS, trust_request_chat_template=True), **body)
    assert (trusted.violations[0].field, "no template" in trusted.violations[0].description) == (
        "chat_template",
        True,
    )


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"[" * 200_000, "nested too deep"),
        (b'{"prompt": ' + b"[" * 200_000, "nested too deep"),
        (b'{"prompt": [%b]}' % (b"9" * 5000), "cannot be read"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', "no Unicode"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(raw: bytes, reason: str) -> None:
    refused = prepared(None, raw, CompletionBody, LIMITS)
    assert isinstance(refused, RefusedBody)
    assert reason in refused.violations[0].description


def test_the_problems_that_are_told_are_few() -> None:
    wrong = prepared(None, json.dumps({"prompt": ["a", 1] * 20_000}).encode(), CompletionBody, LIMITS)
    assert isinstance(wrong, Invalid)
    assert len(wrong.problems) <= 32
    unknown = prepared(
        None,
        json.dumps({"prompt": [1], **{f"x{n}": 1 for n in range(5000)}}).encode(),
        CompletionBody,
        LIMITS,
    )
    assert len(unknown.violations) <= 32


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": [[1, 2]] * 400}),
        (GenerateBody, {"input_ids": [[1, 2]] * 400}),
        (TrlBody, {"prompts": [[1, 2]] * 400}),
        (TokensBody, {"token_ids": [1] * 31, "sampling_params": {}}),
        (HintBody, {"step": 1, "prompts": [[1, 2]] * 400}),
        (DetokenizeBody, {"tokens": [97] * 2000}),
    ],
)
def test_a_prepared_body_has_its_prompts_as_arrays_and_nowhere_else(
    kind: type[Body], body: dict[str, Any]
) -> None:
    extra = {f"x{number}": None for number in range(1000)}
    made = found(kind, **body, **extra)
    assert isinstance(made, kind), made
    small = found(kind, **{**body, **{name: [97] for name in body if name in ("tokens", "token_ids")}})
    assert len(json.dumps(made.model_dump())) <= len(json.dumps(small.model_dump()))
    assert pickle.loads(pickle.dumps(made)).model_dump() == made.model_dump()


async def test_callers_take_turns_and_none_has_more_than_its_share() -> None:
    turns, order = FairSemaphore(10, share=5), []
    ends: dict[str, asyncio.Event] = {}
    changed = asyncio.Event()

    async def hold(caller: str, name: str, count: int) -> None:
        ends[name] = asyncio.Event()
        async with turns.hold(caller, count):
            order.append(name)
            changed.set()
            await ends[name].wait()

    async def ordered(*names: str) -> None:
        async with asyncio.timeout(60):
            while len(order) < len(names):
                changed.clear()
                await changed.wait()
        assert order == [*names]

    def start(caller: str, name: str, count: int) -> asyncio.Task[None]:
        return asyncio.create_task(hold(caller, name, count))

    tasks = [start("a", f"a{number}", 4) for number in range(3)]
    await ordered("a0")
    # Another's share is free, and no demand of the first caller comes before it.
    tasks += [start("b", "b0", 5), start("b", "b1", 5), start("c", "c0", 20)]
    await ordered("a0", "b0")
    tasks[4].cancel()
    ends["b0"].set()
    ends["a0"].set()
    # More than there is: when nothing else is held.
    await ordered("a0", "b0", "c0")
    ends["c0"].set()
    await ordered("a0", "b0", "c0", "a1")
    for end in ends.values():
        end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a0", "b0", "c0", "a1", "a2"]
    assert (turns._total, turns._held, turns._waiting) == (0, {}, {})
