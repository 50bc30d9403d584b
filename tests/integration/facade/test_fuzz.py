"""Random bodies to every route: never a fault, and always an error in the dialect's form that names a field."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from services.facade.dialects import sglang, tokens, trl, vllm
from services.facade.http_errors import fault
from services.facade.serving import Facade
from tests.integration.facade.conftest import StackMaker
from tests.integration.gateway.conftest import CALL
from tests.support.fake_instance import VOCAB

SAMPLING = {"max_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/abort_request": {"rid": "none"},
    "/abort_requests": {"request_ids": ["none"]},
    "/detokenize": {"tokens": [1, 2]},
    "/generate": {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}},
    "/generate/": {"prompts": [[1]], **SAMPLING},
    "/inference/v1/abort_requests": {"request_ids": ["none"]},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": SAMPLING},
    "/paceline/v1/hint": {"step": 1, "prompts": [[1]], **SAMPLING},
    "/paceline/v1/rewards": {"step": 1, "rewards": [{"prompt_id": "p", "slot": 0, "reward": 1.0}]},
    "/pause_generation": {"mode": "unknown"},
    "/tokenize": {"prompt": "w1"},
    "/update_weights": {"weight_dir": "relative"},
    "/update_weights_from_disk": {"model_path": "relative"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w1"}], **SAMPLING},
    "/v1/completions": {"prompt": [1], **SAMPLING},
}
"""A body for each route that has one; where one that is right would change the fleet, it is wrong."""
NEUTRAL = {*vllm.NEUTRAL, *tokens.NEUTRAL, *tokens.NEUTRAL_SAMPLING, *sglang.NEUTRAL, *trl.NEUTRAL}
NUMBERS = [0, 1, -1, 2, 1000, -(1 << 31), 1 << 31, 1 << 32, 1 << 63, 1 << 64, -(1 << 63) - 1, 10**30, 10**400]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.sampled_from([0.5, -0.0, 1e308, float("nan"), float("inf")]),
    st.sampled_from(["", "w1", "\ud83d", "a\udc00b", "\0", "{", "/", "x" * 300, "1" * 5000]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "type", "\ud800"]), inner)
    ),
)


def routes(application: Any) -> dict[str, type[BaseModel]]:
    """Return the routes that have a body, and its class."""
    found: dict[str, type[BaseModel]] = {}
    for route in application.routes:
        if isinstance(route, APIRoute) and route.body_field is not None:
            annotation = route.body_field.field_info.annotation
            (body,) = (
                each
                for each in (annotation, *getattr(annotation, "__args__", ()))
                if hasattr(each, "model_fields")
            )
            found[route.path] = body
    return found


def check(path: str, response: httpx.Response) -> None:
    """Fail unless an answer is in the form of its dialect."""
    assert response.status_code < 500, (path, response.text)
    assert response.headers["x-request-id"]
    if response.status_code == 200:
        return
    answer = response.json()
    error = answer["error"]
    assert {*error} == {"message", "type", "param", "code"}
    assert error["message"], answer
    assert ("success" in answer) == (
        path in ("/abort_request", "/pause_generation", "/update_weights_from_disk")
    )


@pytest.mark.parametrize(
    "examples", [80, pytest.param(3000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
async def test_random_bodies_are_answered_in_the_dialects_form(
    stack_of: StackMaker, tokenizer_folder: Path, examples: int
) -> None:
    stack = await stack_of(model=tokenizer_folder)
    application: Any = stack.facade.process.application
    known = routes(application)
    assert set(known) == set(BODIES)
    client = httpx.Client(base_url=stack.facade.url, timeout=CALL)

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(st.data(), st.sampled_from(sorted(BODIES)))
    def send(data: st.DataObject, path: str) -> None:
        names = sorted(
            {*known[path].model_fields, *NEUTRAL, "sampling_params", "generation_kwargs", "unknown"}
        )
        changes = data.draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=3))
        body: Any = {**BODIES[path], **changes}
        if isinstance(inner := body.get("sampling_params"), dict):
            body["sampling_params"] = {
                **inner,
                **data.draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=2)),
            }
        response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        check(path, response)
        if response.status_code == 400:
            param = response.json()["error"]["param"]
            first = (param or "").partition(".")[0].partition("[")[0]
            assert param is None or first in (*names, *known[path].model_fields), (path, body, response.text)

    @settings(max_examples=examples // 3, suppress_health_check=list(HealthCheck))
    @given(
        st.binary(max_size=20) | VALUES.map(lambda value: json.dumps(value).encode()),
        st.sampled_from(sorted(BODIES)),
    )
    def send_bytes(body: bytes, path: str) -> None:
        check(path, client.post(path, content=body, headers={"content-type": "application/json"}))

    try:
        await asyncio.to_thread(send)
        await asyncio.to_thread(send_bytes)
    finally:
        await asyncio.to_thread(client.close)


async def test_half_a_character_is_refused_in_every_field(
    stack_of: StackMaker, tokenizer_folder: Path
) -> None:
    stack = await stack_of(model=tokenizer_folder)
    tried = 0
    for path, known in routes(stack.facade.process.application).items():
        for name in known.model_fields:
            content = json.dumps({**BODIES[path], name: ["a\ud83d"]})
            response = await stack.facade.http.post(
                path, content=content, headers={"content-type": "application/json"}
            )
            check(path, response)
            assert (response.status_code, response.json()["error"]["param"]) == (400, f"{name}[0]"), path
            tried += 1
    assert tried > 100


async def test_ids_that_the_model_does_not_have_are_refused(
    stack_of: StackMaker, tokenizer_folder: Path
) -> None:
    stack = await stack_of(model=tokenizer_folder)
    for path in ("/detokenize", "/generate", "/generate/", "/inference/v1/generate", "/v1/completions"):
        name, base = next(iter(BODIES[path])), BODIES[path]
        for wrong in (-1, VOCAB, 1 << 32, 10**30, 1.5, 2.0, "1", True, None):
            ids: Any = [[1, wrong]] if path == "/generate/" else [1, wrong]
            response = await stack.facade.http.post(path, json={**base, name: ids})
            check(path, response)
            error = response.json()["error"]
            assert (response.status_code, error["param"].partition("[")[0]) == (400, name), (wrong, error)


async def test_a_defect_is_answered_in_the_dialects_form(
    stack_of: StackMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = await stack_of()

    def broken(*_: Any) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(Facade, "run_id", broken)
    for path, body in (
        ("/paceline/v1/rewards", BODIES["/paceline/v1/rewards"]),
        ("/update_weights_from_disk", {"model_path": "/a"}),
    ):
        response = await stack.facade.http.post(path, json=body, headers={"x-request-id": "mine"})
        assert response.status_code == 500
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["error"] == fault().body["error"]
        assert ("success" in response.json()) == (path == "/update_weights_from_disk")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{'a': 1}", "no JSON"),
        (b'{"prompt": [1],', "no JSON"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "\xed\xa0\xbd"}', "UTF-8"),
        (b"[1]", "the body"),
    ],
)
async def test_a_body_that_is_none_names_no_field(stack_of: StackMaker, body: bytes, reason: str) -> None:
    stack = await stack_of()
    response = await stack.facade.http.post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (None, "INVALID_ARGUMENT")
    assert reason in error["message"]
