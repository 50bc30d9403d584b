"""Sentences on slow steps: which was slowest and why, and what changed with the step time."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given, settings

from paceline import Decision
from paceline.report.facts import RunFacts, read_facts
from paceline.report.page import MOST_CHANGES, on_slow_steps
from paceline.report.plots import phases
from tests.unit.report.facts_of_a_run import run_entries
from tests.unit.report.test_restarts import Planned, entries_of, plans


def planned(*rollouts: float, after: float = 1.0) -> list[Planned]:
    return [Planned(step, 1, seconds, after, 0.5) for step, seconds in enumerate(rollouts)]


def facts_of(*rollouts: float) -> RunFacts:
    return read_facts(entries_of(planned(*rollouts)))


def decided(facts: RunFacts, step: int, kind: str, reason: str) -> Decision:
    """Return a decision made just before a step."""
    return Decision(facts.steps[step].begun - 0.1, kind, reason, 0.0, {}, "")


def test_the_slowest_step_and_the_part_that_made_it_so_are_named() -> None:
    slowest, *rest = on_slow_steps(facts_of(4, 4, 4, 20, 4, 4, 4))
    assert slowest == (
        "The slowest is step 3: 21 s; the median of the others is 5 s. The difference is mostly engine steps "
        "without a draft: 20 s instead of 4 s."
    )
    assert rest == [], "one outlier is no lasting change"
    plan = planned(4, 4, 4, 4)
    plan[1] = replace(plan[1], after=30.0)
    assert "mostly the trainer: 30 s instead of 1 s" in on_slow_steps(read_facts(entries_of(plan)))[0]


def test_where_no_step_is_much_slower_or_there_is_one_it_is_said() -> None:
    assert on_slow_steps(facts_of(4, 4.1, 4))[0].startswith("No step was much slower than the others.")
    (only,) = on_slow_steps(facts_of(4))
    assert only == "The slowest is step 0: 4 s, of which engine steps without a draft took 4 s."
    assert on_slow_steps(RunFacts("run")) == []


def test_long_responses_are_named_with_the_step_that_had_them() -> None:
    facts = facts_of(4, 4, 20, 4)
    facts.steps[2].tokens = 50
    assert on_slow_steps(facts)[0].endswith("Its samples had 50 tokens on average; usual are 5.")


def test_what_changed_with_the_step_time_is_named() -> None:
    facts = facts_of(*[4.0] * 6, *[8.0] * 6)
    facts.decisions = [
        decided(facts, 2, "knobs", "too early"),
        decided(facts, 6, "knobs", "fleet: draft_cap 8 -> 0"),
        decided(facts, 6, "migration", "one of many"),
        decided(facts, 6, "drafter_rolled_back", "it collapsed"),
    ]
    (row,) = facts.steps[0].rows
    for step in facts.steps[:6]:
        step.rows, step.instances = (row, replace(row, instance_id="gone")), 2
        step.drafts = {"suffix": (10, 20), "eagle3": (5, 5)}
    for step in facts.steps[6:]:
        step.tokens, step.drafts = 9, {"suffix": (10, 5)}
    _, change = on_slow_steps(facts)
    assert change == (
        "From step 6 on, steps took 9 s instead of 5 s. The difference is mostly engine steps without a draft: 8 s "
        "instead of 4 s. At that time: instances 2 → 1; without gone; drafters eagle3, suffix → suffix; "
        "tokens a sample 5 → 9; tokens a verification 2.67 → 1.5; knobs: fleet: draft_cap 8 -> 0; "
        "drafter rolled back: it collapsed."
    )


def test_what_changed_is_the_fleet_and_its_versions() -> None:
    facts = facts_of(*[8.0] * 5, *[4.0] * 5)
    (row,) = facts.steps[0].rows
    for step in facts.steps[5:]:
        step.rows, step.instances = (row, replace(row, instance_id="new")), 2
    for place, step in enumerate(facts.steps):
        step.version, step.pregenerated = 3 + (place >= 5), 0 if place >= 5 else None
    _, change = on_slow_steps(facts)
    assert change.endswith(
        "At that time: instances 1 → 2; with new; policy version 3 → 4; steps were announced."
    )


def test_a_change_with_nothing_that_explains_it_says_so() -> None:
    _, change = on_slow_steps(facts_of(*[4.0] * 5, *[8.0] * 5))
    assert change.endswith("Nothing else in the log changed then.")


def test_drafts_of_a_step_are_those_of_its_own_entries() -> None:
    assert [step.drafts for step in read_facts(run_entries(2)).steps] == [
        {"suffix": (10, 12), "eagle3": (4, 4)}
    ] * 2


@settings(max_examples=25, deadline=None)
@given(plans())
def test_of_any_run_the_slowest_is_the_slowest_and_changes_are_few_and_in_order(plan: list[Planned]) -> None:
    facts = read_facts(entries_of(plan))
    slowest, *changes = on_slow_steps(facts)
    times = [sum(parts.values()) for parts in phases(facts)]
    named = re.search(r"slowest is (step \d+(?:, attempt \d+)?): ", slowest)
    assert named is not None
    assert max(times) - 1e-3 <= max(
        time for step, time in zip(facts.steps, times, strict=True) if step.name == named[1]
    )
    assert len(changes) <= MOST_CHANGES
    begun = [re.match(r"From (step \d+(?:, attempt \d+)?) on", change) for change in changes]
    names = [each[1] for each in begun if each is not None]
    places = [[step.name for step in facts.steps].index(name) for name in names]
    assert len(places) == len(changes)
    assert places == sorted(places)
