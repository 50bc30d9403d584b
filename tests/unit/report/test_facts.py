"""Facts that are read from the decision log."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from paceline import Decision
from paceline.report.facts import DraftCounts, Filled, RunFacts, newest_run, parsed, read_facts
from paceline.report.plots import phases
from paceline.report.timeline import filled_share
from tests.unit.report.facts_of_a_run import BEGIN, run_entries


def test_everything_that_services_write_is_read() -> None:
    facts = read_facts(run_entries())
    assert (facts.run_id, facts.unread) == ("run", 0)
    assert [step.step for step in facts.steps] == [0, 1, 2]
    first = facts.steps[0]
    assert (first.samples, first.tokens, first.instances, len(first.rows)) == (12, 60, 3, 3)
    assert first.reward == pytest.approx(0.5)
    assert (first.reward_low, first.reward_high, first.rewards) == (0.0, 1.0, 3)
    assert (first.predicted_seconds, first.measured_seconds, first.engine_steps) == (1.0, 1.5, 10)
    assert facts.drafts["suffix"].positions() == [(30, 24), (30, 12), (30, 0)]
    assert facts.drafts["suffix"].verifications == 30
    assert [each.version for each in facts.published] == [1, 2, 3]
    assert [(move.donor, move.receiver) for move in facts.moves] == [("instance-2", "instance-0")] * 3
    assert {each.kind for each in facts.decisions} == {"migration", "speculation"}


def test_the_parts_of_the_last_sample_are_all_of_its_time() -> None:
    for step in read_facts(run_entries()).steps:
        last = step.last[0]
        assert last.ended_at == pytest.approx(step.ended)
        assert sum(last.parts.values()) == pytest.approx(last.seconds, abs=1e-3)
        assert last.parts["moves"] > 0
        assert [span.instance_id for span in last.spans] == ["instance-2", "instance-0"]


def test_a_step_is_rollout_then_trainer_then_weights() -> None:
    first, *_, last = phases(read_facts(run_entries()))
    length = 1 + 5 * 11 / 12
    assert first == pytest.approx({"rollout": length, "trainer": 9 - length, "weights": 1}, abs=1e-3)
    # Nothing follows it: it ends when its weights serve.
    assert last == pytest.approx({"rollout": length, "trainer": 8 - length, "weights": 1}, abs=1e-3)


def test_the_share_of_bubbles_that_were_filled_is_known() -> None:
    step = replace(read_facts(run_entries(steps=1)).steps[0], ended=BEGIN + 8)
    idle, busy = step.rows[0], step.rows[1]
    step.rows = (replace(idle, end=BEGIN + 4), replace(busy, end=BEGIN + 8))
    facts = RunFacts("run", steps=[step], filled=[Filled("instance-0", BEGIN + 5, BEGIN + 7)])
    assert filled_share(facts) == pytest.approx(0.5)
    facts.filled.append(Filled("instance-0", BEGIN + 6, BEGIN + 20))
    assert filled_share(facts) == pytest.approx(0.75)
    assert filled_share(RunFacts("run")) is None


def test_the_newest_run_is_reported_unless_another_is_named() -> None:
    later = [replace(each, time=each.time + 1000) for each in run_entries(run="later")]
    entries = [*run_entries(), *later]
    assert newest_run(entries) == read_facts(entries).run_id == "later"
    assert read_facts(entries, "run").run_id == "run"
    assert read_facts(()).run_id == newest_run(()) == ""


@pytest.mark.parametrize("details", [{"left_out": "99999 bytes of details"}, {"step": 1}, {"rows": 3}])
def test_an_entry_that_cannot_be_read_is_counted_and_harms_no_other(details: dict[str, object]) -> None:
    entries = run_entries()
    bad = [Decision(BEGIN + 99, kind, "", 0.0, details, "run") for kind in ("step", "weights", "migration")]
    facts = read_facts([*entries, *bad])
    assert facts.unread == 3
    assert len(facts.steps) == 3


def test_a_reward_or_plan_of_a_step_that_is_not_over_is_passed_over() -> None:
    entries = [each for each in run_entries() if each.kind != "step"]
    facts = read_facts(entries, "run")
    assert (facts.steps, facts.unread) == ([], 0)
    assert facts.drafts["suffix"].drafted == 90


def test_entries_of_another_release_without_lengths_are_counted() -> None:
    counts = DraftCounts()
    counts.add([10, 30, 12], ())
    assert (counts.verifications, counts.drafted, counts.accepted, counts.positions()) == (10, 30, 12, [])


def test_entries_go_through_a_file() -> None:
    entries = run_entries()
    assert parsed([json.dumps(asdict(entry)) for entry in entries] + ["", "  "]) == entries
    with pytest.raises(ValueError, match="line 2 is no entry"):
        parsed([json.dumps(asdict(entries[0])), '{"kind": "step"}'])
