"""A facade of one's own in front of a gateway with fake instances."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry

from services.contracts.seeds import sample_seed
from services.facade.app import FacadeProcess, app
from services.facade.config import FacadeConfig
from services.facade.dialects.body import prompt_id_of
from services.facade.samples import SampleGroup
from services.platform.tasks import end
from tests.integration.gateway.conftest import CALL, Cluster, RunningGateway, cluster
from tests.support.fake_instance import VOCAB, FakeInstance, response_of
from tests.support.word_tokenizer import word_tokenizer

__all__ = ["cluster"]


MOST_CHECKED = 64 * 1024
"""Most bytes of an answer that is compared with its description, which takes about a millisecond a KiB."""


@cache
def descriptions() -> dict[tuple[str, str], Draft202012Validator]:
    """Return a validator of the answers to each method and path, which allows no field that is not described."""
    described = app(FacadeConfig(), CollectorRegistry()).openapi()
    for schema in described["components"]["schemas"].values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    found = {}
    for path, methods in described["paths"].items():
        for method, route in methods.items():
            for status, answer in route["responses"].items():
                schema = answer.get("content", {}).get("application/json", {}).get("schema")
                if schema is not None:
                    checked = {"components": described["components"], **schema}
                    found[f"{method.upper()} {path}", status[0]] = Draft202012Validator(checked)
    return found


async def is_described(response: httpx.Response) -> None:
    """Fail unless an answer is as the page of the API describes it."""
    kind = response.headers.get("content-type", "")
    wanted = descriptions().get(
        (f"{response.request.method} {response.request.url.path}", str(response.status_code)[0])
    )
    if wanted is None or kind != "application/json":
        return
    await response.aread()
    if len(response.content) <= MOST_CHECKED:
        wanted.validate(response.json())


class RunningFacade:
    """A facade in this process, and clients of it."""

    def __init__(self, config: FacadeConfig, **options: Any) -> None:
        self.registry = CollectorRegistry()
        self.process = FacadeProcess(config, self.registry, warm=False)
        self._scheme = "http" if config.tls is None else "https"
        self._options = options
        self._task: asyncio.Task[None] | None = None
        self.http: httpx.AsyncClient
        self.openai: AsyncOpenAI

    async def start(self) -> RunningFacade:
        await self.process.start()
        self._task = asyncio.create_task(self.process.run())
        self.url = f"{self._scheme}://127.0.0.1:{self.process.port}"
        self.http = httpx.AsyncClient(
            base_url=self.url, timeout=CALL, event_hooks={"response": [is_described]}, **self._options
        )
        self.openai = AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="unused", timeout=CALL, max_retries=0, http_client=self.http
        )
        return self

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the answer to a body; fails unless it is 200."""
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"paceline_facade_{name}", labels) or 0.0

    def work(self) -> list[SampleGroup]:
        """Return the requests in work."""
        application: Any = self.process.application
        return list(application.state.samples.groups)

    async def stop(self) -> None:
        await self.http.aclose()
        assert self._task is not None
        await end([self._task])
        await self.process.stop(0)


@dataclass(frozen=True)
class Stack:
    """A gateway that leads, its instances, and a facade."""

    gateway: RunningGateway
    fakes: list[FakeInstance]
    facade: RunningFacade


StackMaker = Callable[..., Awaitable[Stack]]


@pytest.fixture
async def stack_of(cluster: Cluster) -> AsyncIterator[StackMaker]:
    """Return a function that starts all of it; its arguments are settings of the facade."""
    running: list[RunningFacade] = []

    async def make(
        instances: int = 1,
        http: dict[str, Any] | None = None,
        gateway: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Stack:
        leader = await cluster.gateway(**(gateway or {}))
        fakes = [await cluster.instance(f"i{number}") for number in range(instances)]
        await cluster.serving(leader, instances)
        config = FacadeConfig(port=0, **{"gateway": leader.gateway.address, **settings})
        facade = await RunningFacade(config, **(http or {})).start()
        running.append(facade)
        return Stack(leader, fakes, facade)

    yield make
    for facade in running:
        await facade.stop()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB)


def expected(
    prompt: list[int], slot: int, seed: int, max_tokens: int, **options: Any
) -> tuple[list[int], list[float]]:
    """Return the tokens and log-probabilities that a sample must have."""
    return response_of(sample_seed(seed, 0, prompt_id_of(prompt), slot), 0, max_tokens, **options)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()
