"""The time of draft steps of the 4-bit twin and of an EAGLE-3 head."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from services.policy.correction import CorrectedStepTime, Correction
from services.policy.drafter_time import (
    DrafterTime,
    eagle3_architecture,
    eagle3_time,
    self_w4_time,
    w4_architecture,
)
from services.policy.residual import DRAFTS, Residual
from services.policy.step_time import Architecture, StepTime

# Qwen3-8B.
CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


def _target(limit: float = 4.0) -> CorrectedStepTime:
    step_time = StepTime(architecture=Architecture.of(CONFIG, 2), throughput=8e14, bandwidth=4e12)
    return CorrectedStepTime(step_time, Correction(limit))


def test_the_twin_of_an_8b_model_is_about_a_third_of_it() -> None:
    target = Architecture.of(CONFIG, 2)
    twin = w4_architecture(target, CONFIG, 2, 128)
    # EfficientRollout, appendix D.2: the head stays as it is, so it is more than a quarter.
    assert 0.25 < twin.weight_bytes / target.weight_bytes < 0.36
    head = 4096 * 151936 * 2
    assert twin.weight_bytes == pytest.approx(head + (target.weight_bytes - head) * (0.25 + 1 / 128))
    assert (twin.dense_flops, twin.kv_bytes) == (target.dense_flops, target.kv_bytes)


def test_draft_steps_are_cheap_where_memory_is_what_counts_and_no_cheaper_where_it_is_not() -> None:
    target = _target()
    time = DrafterTime(lambda: target, w4_architecture(target.model.architecture, CONFIG, 2, 128))
    few, many = np.array([1, 4096])
    ratio = time.seconds([few, many], [few, many], [1000 * few, many]) / target.seconds(
        [few, many], [few, many], [1000 * few, many]
    )
    assert ratio[0] < 0.4
    assert ratio[1] == pytest.approx(1.0)


def test_it_follows_the_targets_correction_until_it_was_measured_itself() -> None:
    target = _target()
    time = DrafterTime(lambda: target, target.model.architecture)
    raw = float(target.model.seconds(8, 8, 800))
    for _ in range(300):
        target.correction.observe(raw, 3 * raw)
    assert float(time.seconds(8, 8, 800)) == pytest.approx(3 * raw, rel=0.02)
    for _ in range(300):
        time.observe(8, 800, raw / 2)
    assert float(time.seconds(8, 8, 800)) == pytest.approx(raw / 2, rel=0.05)
    assert float(target.seconds(8, 8, 800)) == pytest.approx(3 * raw, rel=0.02)


def test_it_is_made_from_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    target = _target()
    time = self_w4_time(tmp_path, "bfloat16", 128, lambda: target)
    assert time is not None
    assert float(time.seconds(1, 1, 100)) < 0.4 * float(target.seconds(1, 1, 100))
    assert self_w4_time(tmp_path, "bfloat16", 128, lambda: None) is None


HEAD = CONFIG | {
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]},
}


def test_the_head_of_an_8b_model_is_a_layer_with_wider_inputs_and_its_ends() -> None:
    target, head = Architecture.of(CONFIG, 2), eagle3_architecture(HEAD, 2)
    one_layer = (target.weight_bytes - 4096 * 151936 * 2) / 36
    wider = 2 * 4096 * 128 * (32 + 2 * 8)
    assert head.weight_bytes == pytest.approx(one_layer + wider + 2 * (3 * 4096 * 4096 + 4096 * 32000))
    assert head.kv_bytes == pytest.approx(target.kv_bytes / 36)
    assert head.attention_flops == pytest.approx(target.attention_flops / 36)
    assert head.weight_bytes < 0.06 * target.weight_bytes


def test_the_time_of_a_head_is_made_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    target = _target()
    time = eagle3_time(tmp_path, "bfloat16", lambda: target)
    assert time is not None
    assert float(time.seconds(1, 1, 100)) < 0.1 * float(target.seconds(1, 1, 100))
    assert eagle3_time(tmp_path, "bfloat16", lambda: None) is None


def test_what_the_targets_kernels_leave_over_is_not_the_drafters() -> None:
    shares = [[[0.5] * len(DRAFTS)]]
    residual = Residual.model_validate({"requests": [1], "lengths": [100], "shares": shares})
    target, slower = _target(), _target()
    slower.model = slower.model.model_copy(update={"residual": residual})
    architecture = Architecture.of(CONFIG, 2)
    times = [
        DrafterTime(lambda each=each: each, architecture).seconds(4, 4, 400) for each in (target, slower)
    ]
    assert slower.seconds(4, 4, 400) == pytest.approx(1.5 * target.seconds(4, 4, 400))
    assert times[0] == times[1]


def test_a_target_that_is_lost_is_an_error_not_a_guess() -> None:
    time = DrafterTime(lambda: None, Architecture.of(CONFIG, 2))
    time.observe(1, 1, 1.0)
    with pytest.raises(ValueError, match="not known"):
        time.seconds(1, 1, 1)
