"""Requests that take time by their size or their content: they hold up nobody, and end with a typed error."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import psutil

from services.facade.serving import BODY_AT_ONCE
from services.facade.work.pool import WorkerPool
from tests.integration.facade.conftest import StackMaker, expected
from tests.integration.gateway.conftest import until

LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
ENDLESS = {"messages": [{"role": "user", "content": "w1"}], "chat_template": LOOP}
SEED = 5


def workers_of(pool: WorkerPool) -> list[psutil.Process]:
    """Return the workers: children of the pool's process, which has the tokenizer."""
    assert pool._process is not None
    return psutil.Process(pool._process.pid).children()


async def test_a_template_that_never_ends_holds_up_nobody(
    stack_of: StackMaker, tokenizer_folder: Path
) -> None:
    stack = await stack_of(
        model=tokenizer_folder, trust_request_chat_template=True, workers=3, work_seconds=600.0
    )
    pool: Any = stack.facade.process.application.state.workers  # type: ignore[attr-defined]
    await pool.start()
    http = stack.facade.http
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=ENDLESS, timeout=None))
    await until(lambda: len(workers_of(pool)) == 1, "a worker has it")
    (worker,) = workers_of(pool)
    # A body that is too large to be read at once goes by it, as does everything small.
    first, other = [1, 2, 3] * 20, [4] * 60
    prompts = [first, other] * 60
    body = {"prompt": prompts, "seed": SEED, "max_tokens": 12, "return_token_ids": True, "logprobs": 0}
    assert len(json.dumps(body)) > BODY_AT_ONCE
    answer = await stack.facade.post("/v1/completions", **body)
    assert len(answer["choices"]) == len(prompts)
    for slot, choice in enumerate(answer["choices"][::2]):
        found = (choice["token_ids"], choice["logprobs"]["token_logprobs"])
        assert found == expected(first, slot, SEED, 12)
        assert choice["prompt_token_ids"] == first
    assert (await http.get("/livez")).status_code == 200
    assert not asking.done()
    # The client leaves, and its worker is killed.
    asking.cancel()
    await until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "it is killed")
    pool._seconds = 0.5
    late = await http.post("/v1/chat/completions", json=ENDLESS)
    error = late.json()["error"]
    assert (late.status_code, error["code"], "work_seconds" in error["message"]) == (
        504,
        "DEADLINE_EXCEEDED",
        True,
    )
    pool._seconds = 600.0
    # What would be refused with a small body is refused with a large one alike.
    for content, param, told in (
        ({"prompt": "w1 " * 1_000_000}, "prompt", "characters"),
        ({"prompt": [1] * 100_000}, "prompt", "leave no room"),
        ({"prompt": [1], **{f"x{number}": 1 for number in range(10_000)}}, "x0", "not known"),
        ({"prompt": ["w1", 1] * 10_000}, "prompt", "valid"),
        ({"prompt": [1, 2**40] * 5_000}, "prompt", "vocabulary"),
    ):
        refused = await http.post("/v1/completions", json=content)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "INVALID_ARGUMENT"), error
        assert (error["param"] or "").startswith(param), error
        assert told in error["message"], error
    for path, content in (("/tokenize", {"prompt": "w1 " * 4000}), ("/detokenize", {"tokens": [1] * 4000})):
        assert (await http.post(path, json=content)).status_code in (200, 400)


async def test_a_body_that_does_not_come_takes_nothing_from_others(stack_of: StackMaker) -> None:
    stack = await stack_of()
    port = stack.facade.process.port
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 16000000\r\n\r\n{"
    writers = []
    for _ in range(8):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        await writer.drain()
        writers.append(writer)
    body = json.dumps({"prompt": [1], "max_tokens": 1, "user": "a" * 2_000_000})
    async with httpx.AsyncClient(base_url=stack.facade.url, timeout=60) as http:
        response = await http.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
    assert response.status_code == 200, response.text
    for writer in writers:
        writer.close()
