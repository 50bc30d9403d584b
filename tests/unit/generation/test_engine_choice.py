"""The choice of a model runner for an instance, and what an instance on V2 refuses."""

from __future__ import annotations

import os
from typing import Any

import pytest
from pydantic import ValidationError

from services.generation.config import GenerationConfig
from services.generation.engine.environment import (
    RUNNER_VARIABLE,
    check_runner,
    runner_of,
    runner_refusal,
    set_variables,
)
from services.generation.engine.types import Eagle3Options, EngineOptions, W4Options


def test_auto_is_v1() -> None:
    assert [runner_of(engine) for engine in ("auto", "v1", "v2")] == ["v1", "v1", "v2"]
    assert GenerationConfig(model="m").engine_options().engine == "auto"


@pytest.mark.parametrize("draft_model", [{"quantized": True}, {"eagle3": "/models/head"}])
def test_an_instance_on_v2_has_no_draft_models(draft_model: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="engine v2 has no draft models"):
        GenerationConfig(model="m", engine="v2", **draft_model)
    assert GenerationConfig(model="m", engine="v1", **draft_model).engine_options().engine == "v1"


def test_an_instance_on_v2_verifies_no_draft_by_its_record() -> None:
    with pytest.raises(ValidationError, match="lenient_drafts must not be set"):
        GenerationConfig(model="m", engine="v2", lenient_drafts=True)
    assert GenerationConfig(model="m", engine="v1", lenient_drafts=True).lenient_drafts


@pytest.mark.parametrize(
    "options", [{"quantized": W4Options()}, {"eagle3": Eagle3Options("/models/head")}, {"coupled": False}]
)
def test_an_engine_says_why_it_is_not_on_v2(options: dict[str, Any]) -> None:
    assert runner_refusal(EngineOptions("m", engine="v2", **options)).startswith("engine v2: ")
    assert not runner_refusal(EngineOptions("m", engine="v1", **options))
    assert not runner_refusal(EngineOptions("m", engine="v2"))


def test_steps_are_counted_ahead_on_v2_only() -> None:
    ahead = [
        GenerationConfig(model="m", engine=engine, schedule_ahead=told).steps_ahead
        for engine, told in (("v1", True), ("v2", False), ("v2", True))
    ]
    assert ahead == [0, 0, 1]


def test_an_engine_of_the_other_runner_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, RUNNER_VARIABLE, "0")
    check_runner("auto")
    with pytest.raises(RuntimeError, match="before vLLM is imported"):
        check_runner("v2")


def test_an_engine_is_asked_for_trees_where_there_are_to_be_branches() -> None:
    assert not GenerationConfig(model="m").engine_options().trees
    assert GenerationConfig(model="m", max_branches=2).engine_options().trees
    assert not GenerationConfig(model="m", max_branches=2, speculation="off").engine_options().trees
    with pytest.raises(ValidationError, match="max_branches"):
        GenerationConfig(model="m", max_branches=9)


def test_compiled_products_are_bounded_unless_an_operator_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    for given, wanted in (({name: "7"}, "7"), ({}, "256")):
        environment: dict[str, str] = dict(given)
        monkeypatch.setattr(os, "environ", environment)
        set_variables()
        assert environment[name] == wanted
