"""The minimal trainer leaves groups out of which a sample has failed."""

from __future__ import annotations

import pytest

from examples.minimal_trainer import whole_groups
from paceline import Sample, convert
from paceline.v1 import sample_pb2
from tests.support.token_columns import columns

FAILED = sample_pb2.SAMPLE_STATUS_FAILED


def sample(prompt_id: str, slot: int, tokens: int, **fields: object) -> Sample:
    ids, logprobs = [1] * tokens, [0.0] * tokens
    return convert.sample(
        sample_pb2.Sample(prompt_id=prompt_id, slot=slot, tokens=columns(ids, logprobs), **fields)  # type: ignore[arg-type]
    )


def test_groups_with_a_failed_or_an_empty_sample_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    whole = [sample("a", 0, 3), sample("a", 1, 1)]
    failed = [sample("b", 0, 3), sample("b", 1, 2, status=FAILED, error="no instance")]
    empty = [sample("c", 0, 0), sample("c", 1, 2)]
    assert whole_groups([whole, failed, empty]) == whole
    assert "left out b: 1 of its samples failed: no instance" in capsys.readouterr().out
    assert whole_groups([]) == []
