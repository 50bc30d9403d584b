"""The step-time model: what it knows of architectures, and what every prediction has in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policy.step_time import Architecture, StepTime, UnsupportedArchitecture
from tests.unit.policy.test_residual import residuals

QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}
ARCHITECTURE = Architecture.of(QWEN3_8B, 2)

positive = st.floats(1e3, 1e16)
seconds = st.floats(0, 1e-2)
# Without a residual times rise with contexts, too.
smooth_models = st.builds(
    StepTime,
    architecture=st.just(ARCHITECTURE),
    throughput=positive,
    bandwidth=positive,
    kv_scale=st.floats(0, 100),
    base=seconds,
    per_request=seconds,
    per_row=seconds,
    per_attended_token=st.floats(0, 1e-6),
    verify_per_request=seconds,
)
models = st.builds(
    lambda model, residual: model.model_copy(update={"residual": residual}),
    smooth_models,
    st.none() | residuals,
)
requests = st.integers(1, 512)
drafted = st.integers(0, 4096)
contexts = st.integers(0, 1 << 22)


def test_a_dense_model_is_known_by_its_config() -> None:
    # 8.19e9 parameters, less the embedding of 0.62e9, which no step reads whole; norms do not count.
    assert ARCHITECTURE.weight_bytes / 2 == pytest.approx(7.57e9, rel=1e-2)
    assert ARCHITECTURE.dense_flops == ARCHITECTURE.weight_bytes
    # Keys and values, 36 layers, 8 heads of 128, two bytes.
    assert ARCHITECTURE.kv_bytes == 2 * 36 * 8 * 128 * 2
    assert ARCHITECTURE.attention_flops == 4 * 36 * 32 * 128


def test_head_width_and_key_value_heads_have_their_usual_defaults() -> None:
    config = {key: value for key, value in QWEN3_8B.items() if key not in ("head_dim", "num_key_value_heads")}
    assert Architecture.of(config, 2).kv_bytes == 4 * ARCHITECTURE.kv_bytes


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts": 128}, "mixture"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_other_models_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=named):
        Architecture.of(QWEN3_8B | change, 2)


def test_the_slower_of_memory_and_compute_counts() -> None:
    model = StepTime(architecture=ARCHITECTURE, throughput=1e15, bandwidth=2e12)
    one, many = model.seconds(1, 1, 0), model.seconds(4096, 4096, 0)
    assert one == pytest.approx(ARCHITECTURE.weight_bytes / 2e12)
    assert many == pytest.approx(4096 * ARCHITECTURE.dense_flops / 1e15)


@given(models, requests, drafted, drafted, contexts)
def test_more_draft_tokens_never_take_less_time(
    model: StepTime, requests: int, few: int, more: int, context: int
) -> None:
    few, more = sorted((few, more))
    sooner, later = model.seconds(requests, requests + np.array([few, more]), context)
    assert sooner <= later * (1 + 1e-12)


@given(smooth_models, requests, drafted, contexts, contexts)
def test_more_context_never_takes_less_time(
    model: StepTime, requests: int, drafted: int, short: int, long: int
) -> None:
    short, long = sorted((short, long))
    rows = requests + drafted
    assert model.seconds(requests, rows, short) <= model.seconds(requests, rows, long)


@given(models, requests, drafted, contexts)
def test_times_are_finite_and_those_of_real_steps_positive(
    model: StepTime, requests: int, drafted: int, context: int
) -> None:
    found = float(model.seconds(requests, requests + drafted, context))
    assert np.isfinite(found)
    assert found > 0


@given(models, contexts)
def test_an_empty_step_takes_no_time_and_one_sample_some(model: StepTime, context: int) -> None:
    assert model.seconds(0, 0, 0) == 0
    assert model.seconds(1, 1, context) > 0


@given(models)
def test_arguments_broadcast(model: StepTime) -> None:
    rows = np.arange(4, 9)
    together = model.seconds(4, rows, 100)
    assert together.shape == (5,)
    assert together.tolist() == [float(model.seconds(4, each, 100)) for each in rows]


@given(models)
def test_a_model_survives_being_written_down(model: StepTime) -> None:
    assert StepTime.model_validate_json(model.model_dump_json()) == model
