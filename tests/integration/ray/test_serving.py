"""The facade on Ray Serve: two replicas, of which one is killed while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from services.platform.config import ConfigError
from tests.integration.facade.conftest import expected
from tests.integration.gateway.conftest import CALL, Cluster, cluster, until
from tests.support.fake_instance import FakeInstance
from tests.support.local_ray import LOCAL_RAY
from tests.support.ports import free_port

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from services.ray import serving  # noqa: E402

__all__ = ["cluster"]

pytestmark = pytest.mark.timeout(300)

HELD = 5
REQUESTS = 8


@dataclass(frozen=True)
class Served:
    """Two replicas behind Ray's proxy, and what is behind them."""

    url: str
    fakes: list[FakeInstance]

    def running(self) -> int:
        return sum(len(fake.running()) for fake in self.fakes)

    def accepted(self) -> int:
        return sum(len(fake.accepted) for fake in self.fakes)

    def hold(self, place: int | None) -> None:
        for fake in self.fakes:
            fake.hold_at = place


@pytest.fixture(scope="module")
def proxy() -> Iterator[str]:
    """URL of Ray's proxy on a local Ray."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        # Serve kills a proxy that is not ready after five seconds, which a busy machine needs to start it.
        for check in ("READY", "HEALTH"):
            patch.setenv(f"RAY_SERVE_PROXY_{check}_CHECK_TIMEOUT_S", "60")
        # In the main thread: the processes that it starts end with the thread that starts them.
        ray.init(**LOCAL_RAY)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


@pytest.fixture
async def served(proxy: str, cluster: Cluster) -> AsyncIterator[Served]:
    gateway = await cluster.gateway()
    fakes = [await cluster.instance(f"i{number}") for number in range(2)]
    await cluster.serving(gateway, 2)
    settings = {
        "gateway": gateway.gateway.address,
        "insecure": True,
        "min_replicas": 2,
        "max_replicas": 2,
        "cpus_per_replica": 0,
        "max_request_seconds": CALL,
    }
    # Ray's calls block, and the gateway is on this event loop.
    await asyncio.to_thread(serve.run, serving.application(settings), name="facade")
    try:
        yield Served(proxy, fakes)
    finally:
        await asyncio.to_thread(serve.delete, "facade")


def replicas() -> dict[str, Any]:
    """Return the actors of the replicas that live, by name."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in named if each["name"].startswith("SERVE_REPLICA")]
    return {name: ray.get_actor(name, namespace="serve") for name in names}


async def test_no_request_is_lost_with_a_replica(served: Served) -> None:
    served.hold(HELD)
    # Retries are the client's own, as it does them by default.
    client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="unused", timeout=CALL)
    more = {"ignore_eos": True, "return_token_ids": True}

    async def complete(seed: int) -> list[int]:
        answer = await client.completions.create(
            model="fake", prompt=[1, 2], seed=seed, max_tokens=20, extra_body=more
        )
        return answer.choices[0].model_extra["token_ids"]

    asking = [asyncio.create_task(complete(seed)) for seed in range(REQUESTS)]
    await until(lambda: served.running() == REQUESTS, "all samples run")
    before = await asyncio.to_thread(replicas)
    assert len(before) == 2
    # Ray may have sent all requests to one of them.
    held = {name: await each.get_num_ongoing_requests.remote() for name, each in before.items()}
    name = max(held, key=held.__getitem__)
    await asyncio.to_thread(ray.kill, before[name], no_restart=False)
    await until(lambda: served.accepted() > REQUESTS, "requests were sent again")
    assert not any(task.done() for task in asking)
    served.hold(None)
    found = await asyncio.gather(*asking)
    assert found == [expected([1, 2], 0, seed, 20, ignore_eos=True)[0] for seed in range(REQUESTS)]
    # The other one was left alone.
    assert served.accepted() <= REQUESTS + held[name]
    await client.close()

    async def replaced() -> bool:
        living = await asyncio.to_thread(replicas)
        return len(living) == 2 and name not in living

    await until(replaced, "there are two replicas again")
    await check_control(served)


async def check_control(served: Served) -> None:
    """Paths of one facade are refused by replicas, and others are answered."""
    async with httpx.AsyncClient(base_url=served.url, timeout=CALL) as http:
        for path in ("/pause", "/pause_generation", "/abort_request"):
            refused = await http.post(path, json={"abort_all": True})
            assert refused.status_code == 501
            assert "one of several" in refused.json()["error"]["message"]
        assert (await http.get("/health")).status_code == 200
        wrong = await http.post("/v1/completions", json={"prompt": [1], "best_of": 3})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "best_of")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "token"),
        ({"insecure": True, "min_replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"insecure": True, "alone": True, "max_replicas": 2}, "alone"),
        ({"insecure": True, "prot": 1}, "prot"),
    ],
)
def test_settings_that_cannot_be_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        serving.application(given)
