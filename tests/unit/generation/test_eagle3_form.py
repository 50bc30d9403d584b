"""Which heads fit which models, and which others."""

from __future__ import annotations

from typing import Any

import pytest

from services.contracts.drafter_checkpoint import unlike_current, unlike_target

TARGET = {
    "hidden_size": 128,
    "vocab_size": 512,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
}
HEAD: dict[str, Any] = {
    "hidden_size": 128,
    "vocab_size": 512,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "draft_vocab_size": 300,
    "intermediate_size": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5], "use_aux_hidden_state": True},
}


def test_a_head_fits_its_model_and_itself() -> None:
    assert unlike_target(HEAD, TARGET) == []
    assert unlike_current(HEAD, dict(HEAD)) == []


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "head_dim", "num_key_value_heads"])
def test_what_it_shares_with_the_model_must_agree(name: str) -> None:
    assert unlike_target(HEAD | {name: 64}, TARGET) == [f"{name} is 64, the model's is {TARGET[name]}"]


def test_it_reads_layers_that_the_model_has() -> None:
    # The last one's output is normalised elsewhere.
    reads_last = HEAD | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}}
    assert unlike_target(reads_last, TARGET) == ["it reads layers [2, 3, 6], the model has 6"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("draft_vocab_size", 200),
        ("intermediate_size", 128),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 500000.0}),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True}),
        ("norm_before_residual", True),
    ],
)
def test_another_form_is_not_swapped_in(name: str, value: Any) -> None:
    (fault,) = unlike_current(HEAD | {name: value}, HEAD)
    assert fault.startswith(f"{name} is ")


def test_what_is_only_said_of_a_head_may_differ() -> None:
    assert unlike_current(HEAD | {"transformers_version": "5.0", "made_by": "a test"}, HEAD) == []
