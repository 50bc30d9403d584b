"""What is done in an engine's process for tests of its check of drafts (see `EngineActor`)."""

from __future__ import annotations

from typing import Any

from services.contracts.errors import FailedPrecondition
from services.generation.engine.model_support import ModelSupport
from services.generation.engine.startup import check_drafts
from services.generation.engine.types import EngineRequest


def refused_by_check(engine: Any) -> dict[str, str]:
    """Let an engine that allows everything check itself; returns what it refuses then."""
    engine.support = ModelSupport()
    check_drafts(engine)
    return listed(engine)


def refused_without_copies(engine: Any) -> dict[str, str]:
    """Let an engine check itself that takes no copy of a recurrent state back; returns what it refuses then."""
    from services.generation.engine.recurrent_states import RecurrentStates

    RecurrentStates.take_back = lambda *_: None  # type: ignore[method-assign]
    return refused_by_check(engine)


def refused_by_failing_check(engine: Any) -> dict[str, str]:
    """Let an engine check itself in which no draft can be put; returns what it refuses then."""

    def fail(*_: object) -> None:
        raise ValueError("no draft can be put")

    engine.put_drafts = fail
    check_drafts(engine)
    del engine.put_drafts
    return listed(engine)


def refused_to_resume(engine: Any, request: EngineRequest) -> str:
    """Return what an engine says of a sample with a prefix; "" if it takes it."""
    try:
        engine.add(request)
    except FailedPrecondition as error:
        return f"{error.reason}: {error.message}"
    return ""


def listed(engine: Any) -> dict[str, str]:
    """Return what an engine refuses."""
    found: dict[str, str] = engine.support.by_name()
    return found
