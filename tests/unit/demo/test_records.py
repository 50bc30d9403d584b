"""What is told of a step follows from its samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.tinymath import records, spans
from examples.tinymath.records import StepTiming, UpdateRecord, record_step
from examples.tinymath.spans import SampleSpan
from paceline import FinishReason, InstanceSpan, Provenance, Sample, SampleStatus


def sample(slot: int, *spans: tuple[str, float, float], tokens: int = 3, **provenance: int) -> Sample:
    return Sample(
        prompt_id="p",
        slot=slot,
        token_ids=np.arange(tokens),
        logprobs=np.zeros(tokens, np.float32),
        finish_reason=FinishReason.LENGTH,
        status=SampleStatus.TRUNCATED,
        version_spans=(),
        provenance=Provenance(
            instance_spans=tuple(InstanceSpan(name, 0, tokens, begin, end) for name, begin, end in spans),
            **provenance,  # type: ignore[arg-type]
        ),
        seed=0,
    )


def test_spans_begin_with_the_step() -> None:
    samples = [sample(0, ("a", 100.5, 101.0)), sample(1, ("b", 100.0, 100.25), ("a", 100.25, 102.0))]
    assert spans.step_spans(samples) == (
        SampleSpan("a", 0.5, 1.0),
        SampleSpan("b", 0.0, 0.25),
        SampleSpan("a", 0.25, 2.0),
    )


def test_a_bubble_is_what_is_idle_before_after_and_between() -> None:
    found = [
        SampleSpan("a", 0.0, 10.0),
        SampleSpan("b", 1.0, 3.0),
        SampleSpan("b", 2.0, 4.0),
        SampleSpan("b", 6.0, 7.0),
    ]
    expected = {"a": 0.0, "b": pytest.approx(1.0 + 2.0 + 3.0), "idle": 10.0}
    assert spans.bubble_seconds(found, ["a", "b", "idle"]) == expected


def test_no_spans_no_bubbles() -> None:
    assert spans.bubble_seconds([], ["a"]) == {"a": 0.0}


spans_drawn = st.lists(
    st.builds(
        lambda name, begin, length: SampleSpan(name, begin, begin + length),
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 50),
        st.integers(1, 50),
    ),
    min_size=1,
)


@given(spans_drawn)
def test_bubbles_agree_with_counting_whole_seconds(drawn: list[SampleSpan]) -> None:
    end = int(max(span.end for span in drawn))
    for name, idle in spans.bubble_seconds(drawn, "abc").items():
        own = [span for span in drawn if span.instance_id == name]
        assert idle == sum(not any(s.begin <= second < s.end for s in own) for second in range(end))


def step(number: int = 0, **provenance: int) -> records.StepRecord:
    samples = [sample(0, ("a", 5.0, 6.0), tokens=4, **provenance), sample(1, ("b", 5.0, 9.0), tokens=16)]
    learned = UpdateRecord(reward=0.5, loss=0.1, kl=1e-3, clip_fraction=0.02)
    return record_step(number, samples, learned, StepTiming(4.0, 2.0, 1.0), version=number, fleet=["c"])


def test_a_step_sums_up_its_samples() -> None:
    record = step(drafted=10, accepted=6, verify_steps=3, decode_steps=5)
    assert (record.tokens, record.lengths, record.truncated) == (20, (4, 16), 2)
    assert record.tokens_per_second == 5.0
    assert record.block_efficiency == 3.0
    assert record.bubbles == {"a": 3.0, "b": 0.0, "c": 4.0}


def test_what_was_there_before_is_a_share_of_the_tokens() -> None:
    record = step(cached_tokens=5, reused_prefix=4)
    assert (record.coverage, record.reuse) == (4 / 20, 4 / 20), "a sample is covered at most whole"
    assert records.summarize([record, step(1)], {})["reused_share"] == 4 / 40


def test_without_speculation_the_block_efficiency_is_one() -> None:
    assert step().block_efficiency == 1.0


def test_the_summary_of_a_run() -> None:
    summary = records.summarize([step(0), step(1, drafted=4, accepted=2, verify_steps=1)], {"lr": 0.1})
    assert summary["steps"] == 2
    assert summary["samples"] == 4
    assert summary["tokens"] == 40
    assert summary["rollout_seconds"] == [4.0, 4.0]
    assert summary["tokens_per_second"] == 5.0
    assert summary["block_efficiency"] == 3.0
    assert (summary["kl"], summary["clip_fraction"]) == ([1e-3, 1e-3], [0.02, 0.02])
    assert (summary["reward_first"], summary["reward_last"]) == (0.5, 0.5)


def test_records_are_kept_as_json(tmp_path: Path) -> None:
    records.save_steps(tmp_path / "steps.json", [step(0), step(1, drafted=4, accepted=2, verify_steps=1)])
    first, second = json.loads((tmp_path / "steps.json").read_text())
    assert (first["step"], first["lengths"], first["timing"]["rollout"]) == (0, [4, 16], 4.0)
    assert (second["drafted"], second["accepted"]) == (4, 2)


def test_percentiles_of_nothing_are_zero() -> None:
    assert records.percentiles([]) == (0, 0, 0)
    assert records.percentiles([1, 2, 3]) == (2, 3, 3)
