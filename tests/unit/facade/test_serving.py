"""Streamed answers to clients that read slowly."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.types import Message

from services.facade.config import FacadeConfig
from services.facade.dialects import sglang
from services.facade.dialects.answers import AnswerWriter
from services.facade.dialects.sglang import SglangWriter
from services.facade.dialects.vllm import CompletionBody
from services.facade.gateway import Forecasts, ServedFleet
from services.facade.http_errors import fault
from services.facade.metrics import FacadeMetrics
from services.facade.sample_names import SampleNames
from services.facade.samples import SamplesInWork
from services.facade.serving import EventResponse, EventWriter, Facade
from tests.unit.facade.test_samples import LENGTH, Scripted, request


def facade_of(client: Any) -> Facade:
    metrics = FacadeMetrics(CollectorRegistry())
    return Facade(
        FacadeConfig(),
        lambda: client,
        ServedFleet(lambda: client),
        SamplesInWork(lambda: client, 8, 60.0, lambda _: None),
        None,
        metrics,
        SampleNames(alone=True),
        Forecasts(lambda: client, 0, 0, metrics),
    )


async def staying() -> Message:
    """Receive from a client that does not leave."""
    await asyncio.Event().wait()
    raise AssertionError


async def streamed(writer: EventWriter, last_word: str) -> list[Any]:
    """Return the events that a client gets who has taken the first ones when the sample has already ended."""
    client = Scripted()
    client.held.clear()
    facade = facade_of(client)
    bodies: list[bytes] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])
            client.held.set()
            (group,) = facade.samples.groups
            await group.wait()

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
    http = Request(scope, staying)
    await EventResponse(facade, http, [request(1)], "vllm", writer)(scope, staying, send)
    lines = b"".join(bodies).decode().split("\n\n")
    assert lines[-2:] == [f"data: {last_word}", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_a_slow_client_gets_the_end_of_a_vllm_stream() -> None:
    body = CompletionBody(prompt=[1], return_token_ids=True)
    writer = AnswerWriter(body, "completion", ("cmpl-1", 0, "m"), None)
    found = await streamed(writer, "[DONE]")
    choices = [event["choices"][0] for event in found]
    assert [token for choice in choices for token in choice["token_ids"]] == [100 + n for n in range(LENGTH)]
    assert choices[-1]["finish_reason"] == "length"


async def test_a_slow_client_gets_the_end_of_an_sglang_stream() -> None:
    writer = SglangWriter(sglang.GenerateBody(input_ids=[1]), "id", None, None)
    found = await streamed(writer, "[DONE]")
    assert found[-1]["output_ids"] == [100 + n for n in range(LENGTH)]
    assert found[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": LENGTH}


async def test_a_defect_after_the_first_event_ends_a_stream_with_an_error() -> None:
    class Broken:
        def events(self, _: Any) -> list[dict[str, Any]]:
            return [{"a": 1}]

        def last_events(self, _: Any) -> list[dict[str, Any]]:
            raise KeyError("a defect")

    line = json.dumps(fault().body, separators=(",", ":"))
    assert await streamed(Broken(), line) == [{"a": 1}] * 2
