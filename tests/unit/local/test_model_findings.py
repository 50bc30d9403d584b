"""Findings about a model, by what vLLM tells of it."""

from __future__ import annotations

from typing import Any

import pytest

from services.local.doctor import FindingState, findings_of

TOLD = {"refusal": "", "unknown": "", "dtype": "float32", "kinds": ["FullAttentionSpec"], "refused": {}}


@pytest.mark.parametrize(
    ("told", "states", "text"),
    [
        ({}, [FindingState.FINE], "float32, KV: FullAttentionSpec"),
        ({"refusal": "head_dim=40"}, [FindingState.MISSING], "does not serve it here: head_dim=40"),
        ({"unknown": "no class"}, [FindingState.SCARCE], "unknown whether vLLM loads it: no class"),
        (
            {"refused": {"drafts": "a state", "trees": "a state", "moves": "a window"}},
            [FindingState.FINE, FindingState.SCARCE, FindingState.SCARCE],
            "drafts, trees: a state",
        ),
    ],
)
def test_each_answer_is_a_finding(told: dict[str, Any], states: list[FindingState], text: str) -> None:
    found = findings_of(TOLD | told)
    assert [each.state for each in found] == states
    assert any(text in each.text for each in found)


def test_no_answer_is_no_promise() -> None:
    (found,) = findings_of({})
    assert found.state is FindingState.SCARCE
    assert "unknown" in found.text
