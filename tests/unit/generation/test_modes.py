"""The registry of modes: what it names is there, and knobs, settings, simulator and documentation have it all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from services.contracts.knobs import Knobs
from services.contracts.modes import MODES, OFF, PlanReason
from services.generation.config import GenerationConfig
from services.generation.speculation.decision import Mode
from services.simulator import command

POLICY_PAGE = (Path(__file__).parents[3] / "docs/policy.md").read_text()


def _rows(heading: str) -> list[str]:
    """Return the names in the first column of the table below a head."""
    table = POLICY_PAGE.split(heading)[1].split("\n\n")[0]
    return [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]


def test_every_mode_is_where_the_registry_says() -> None:
    for mode in MODES.values():
        assert issubclass(mode.load(), Mode)


def test_knobs_and_configuration_take_the_modes() -> None:
    for mode in MODES:
        assert Knobs(mode=mode).mode == mode
    for mode in (OFF, *MODES):
        assert GenerationConfig(model="/models/policy", speculation=mode).speculation == mode
    schema: Any = GenerationConfig.model_json_schema()["properties"]["speculation"]
    assert schema["enum"] == [*MODES, OFF]


@pytest.mark.parametrize("mode", ["best", OFF, ""])
def test_what_is_no_mode_is_refused_with_the_modes(mode: str) -> None:
    with pytest.raises(ValidationError, match="is no mode; there are planner, fixed"):
        Knobs(mode=mode)


def test_the_simulator_offers_the_modes() -> None:
    told = CliRunner().invoke(command.app, ["--mode=best", "--instances=1", "--prompts=1", "--samples=1"])
    assert told.exit_code == 2
    assert all(mode in told.output for mode in MODES)


def test_the_page_on_speculation_has_all_modes_and_reasons() -> None:
    assert set(_rows("| mode |")) == set(MODES)
    assert set(_rows("| reason |")) == set(PlanReason)
