"""Names of the modes: knobs, configuration and simulator know the modes that there are."""

from __future__ import annotations

from typing import get_args

from services.contracts import knobs
from services.generation.config import GenerationConfig
from services.generation.speculation.modes import MODES
from services.simulator import command


def test_knobs_and_configuration_name_the_modes() -> None:
    assert set(get_args(knobs.Mode)) == set(MODES)
    assert set(get_args(GenerationConfig.model_fields["speculation"].annotation)) == {"off", *MODES}


def test_the_simulator_offers_the_modes() -> None:
    assert set(get_args(command.Mode)) == set(MODES)
