"""The composition root over a scripted engine: an instance has the parts that its config asks for, and they fit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.generation import build as root
from services.generation.build import GenerationProcess, build, build_drafts
from services.generation.config import GenerationConfig
from services.generation.engine.types import EngineLoad
from services.platform.redis.connection import connect
from tests.support.models import tiny_model
from tests.unit.generation.scripted import ScriptedEngine

# Compiled code of the drafters may have to be built first.
WAIT = 120.0


class KvEngine(ScriptedEngine):
    """A scripted engine whose KV cannot be moved."""

    migration: Any = type("NoMigration", (), {"on_withdrawn": None})()


@pytest.fixture
async def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Build instances; their engines are stopped at the end."""
    model = tiny_model(tmp_path / "model", num_hidden_layers=1)
    made: list[GenerationProcess] = []

    def build_engine(config: Any, metrics: Any, origin_of: Any) -> tuple[Any, Any]:
        engine = KvEngine()
        return engine, build_drafts(config, engine, metrics, origin_of)

    monkeypatch.setattr(root, "build_engine", build_engine)

    async def start(**settings: Any) -> GenerationProcess:
        # The scripted engine has no steps to measure.
        settings = {"sweep_seconds": 0, **settings}
        config = GenerationConfig(model=str(model), instance_id="unit", initial_version=3, **settings)
        process = await asyncio.wait_for(build(config, connect(config), CollectorRegistry()), WAIT)
        made.append(process)
        return process

    yield start
    for process in made:
        process.loop.stop().result(WAIT)
        await process.server.start()
        await process.server.stop(0)


async def test_an_instance_has_all_parts_by_default(built: Callable[..., Any]) -> None:
    process = await built(drafters=("reference",))
    assert process.pregenerator is not None
    assert process.fetcher is not None
    assert process.loop.drafts.speculation is not None
    record = process.instance.record()
    assert (record.instance_id, record.policy_version, record.state) == ("unit", 3, "serving")
    assert process.loop.samples.real_load(EngineLoad(0, 0, 0.0)) == EngineLoad(0, 0, 0.0)


async def test_an_instance_whose_steps_cannot_be_measured_serves(
    built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure_steps(_engine: Any, seconds: float) -> Any:
        asked.append(seconds)
        raise RuntimeError("out of memory")

    monkeypatch.setattr("services.generation.engine.startup.measure_steps", measure_steps)
    process = await built(sweep_seconds=2)
    assert asked == [2]
    assert process.instance.record().state == "serving"
    assert process.loop.drafts.speculation is not None


async def test_an_instance_without_drafts_neither_fetches_nor_pregenerates(built: Callable[..., Any]) -> None:
    process = await built(drafts=False, speculation="off")
    assert (process.stores, process.fetcher, process.pregenerator) == (None, None, None)
    assert process.loop.drafts.speculation is None


async def test_an_instance_that_does_not_pregenerate_still_fetches(built: Callable[..., Any]) -> None:
    process = await built(pregenerate=False)
    assert process.pregenerator is None
    assert process.fetcher is not None
