"""The flags of the drafters that have a model of their own."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from services.generation.config import GenerationConfig
from services.generation.engine.types import Eagle3Options, W4Options


def _config(**settings: Any) -> GenerationConfig:
    return GenerationConfig(model="/models/policy", **settings)


def test_there_is_no_twin_unless_it_is_asked_for_and_may_draft() -> None:
    assert _config().engine_options().quantized is None
    assert _config(quantized=True, speculation="off").engine_options().quantized is None
    asked = _config(quantized=True, quantized_group="64", quantized_tokens=5)
    assert asked.engine_options().quantized == W4Options(group=64, most_tokens=5)


def test_there_is_no_head_unless_there_is_a_checkpoint_and_it_may_draft() -> None:
    assert _config().engine_options().eagle3 is None
    assert _config(eagle3="/models/head", speculation="off").engine_options().eagle3 is None
    asked = _config(eagle3="/models/head", eagle3_tokens=4, eagle3_catch_up_tokens=100)
    assert asked.engine_options().eagle3 == Eagle3Options("/models/head", most_tokens=4, catch_up_tokens=100)


@pytest.mark.parametrize("group", [0, 31, 512])
def test_a_group_that_no_kernel_has_is_refused(group: int) -> None:
    with pytest.raises(ValidationError, match="allowed are 32, 64, 128, 256"):
        _config(quantized_group=group)
