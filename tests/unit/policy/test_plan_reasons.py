"""Reasons of engine steps: each has words, and its name finds it again."""

from __future__ import annotations

from collections import Counter

from services.contracts.knobs import StepTotals
from services.contracts.modes import MODES, PlanReason
from services.policy.steps import StepEnd, step_ended


def test_every_reason_has_words_of_its_own() -> None:
    assert all(reason.words for reason in PlanReason)
    assert len({reason.words for reason in PlanReason}) == len(PlanReason)


def test_a_name_finds_its_reason() -> None:
    assert [PlanReason.known(str(reason)) for reason in PlanReason] == list(PlanReason)
    assert PlanReason.known("of a later version") is None


def test_the_reasons_of_each_mode_say_whether_drafts_were_verified() -> None:
    for mode in MODES.values():
        assert [reason.drafted for reason in mode.load().REASONS] == [False, True]


def test_an_explanation_counts_every_reason() -> None:
    reasons = Counter({str(reason): 1 for reason in PlanReason}) + Counter({"of a later version": 1})
    told = step_ended(StepEnd("r", 1, StepTotals(reasons=reasons), 1), 0.0).reason
    drafted = sum(reason.drafted for reason in PlanReason)
    assert f"{drafted} of {len(PlanReason) + 1} engine steps verified drafts" in told
    assert all((reason.words in told) != reason.drafted for reason in PlanReason)
    assert "of a later version in 1" in told
