"""Hints of coming steps, what drafts change about placement, and how idle a step left its instances."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from paceline.internal.v1 import bubble_pb2
from paceline.v1 import rollout_pb2, sample_pb2
from services.gateway.api.hints import Hint, HintBook, HintedRun, HintOutcome, hinted_batch, make_hint
from services.gateway.feeds.step_report import IdleTimeBook, TimedSample
from services.gateway.scheduler.estimator import DraftCoverage, remaining_work
from services.gateway.state.messages import BatchBuilder
from services.gateway.state.sample import GatewaySample, GenerationSpan


def request(
    step: int = 5, groups: int = 2, samples: int = 3, **fields: Any
) -> rollout_pb2.HintNextBatchRequest:
    return rollout_pb2.HintNextBatchRequest(
        run_id="run",
        step=step,
        run_seed=11,
        sampling=sample_pb2.SamplingParams(max_tokens=40),
        groups=[
            rollout_pb2.Group(prompt_id=f"p{number}", prompt_token_ids=[1, 2 + number], samples=samples)
            for number in range(groups)
        ],
        **fields,
    )


def a_hint(step: int, run_id: str = "run", groups: int = 2) -> Hint:
    asked = request(step, groups)
    asked.run_id = run_id
    return make_hint(asked)


@pytest.mark.parametrize("level", [0, 1, 2, 4])
def test_a_hint_names_the_very_samples_that_the_batch_will_have(level: int) -> None:
    asked = request(exactness=sample_pb2.Exactness(level=level))  # type: ignore[arg-type]
    asked.groups[1].sampling.temperature = 0.5
    asked.groups[1].samples = 1
    batch = BatchBuilder(max_seconds=1, max_attempts=1).from_submission(hinted_batch(asked), accepted_at=0)
    hint = make_hint(asked)
    found = [
        (group.prompt_id, slot, value, list(group.prompt_token_ids), group.sampling)
        for group in hint.message.groups
        for slot, value in enumerate(group.seeds)
    ]
    assert found == [
        (spec.prompt_id, sample.slot, sample.seed, list(spec.prompt_token_ids), spec.sampling)
        for sample in batch.samples
        for spec in [batch.groups[sample.group]]
    ]
    assert hint.message.exactness == batch.exactness
    assert hint.samples == len(batch.samples) == 4


def test_samples_with_a_schema_are_not_generated_ahead() -> None:
    asked = request()
    asked.groups[0].sampling.json_schema = "{}"
    hint = make_hint(asked)
    assert [group.prompt_id for group in hint.message.groups] == ["p1"]
    assert (hint.samples, len(hint.expected), len(hint.limits)) == (3, 1, 1)


def test_seeds_of_coupled_history_leave_the_step_out() -> None:
    history = sample_pb2.Exactness(level=sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY)
    one, two = (make_hint(request(step, exactness=history)) for step in (5, 6))
    assert one.message.groups[0].seeds == two.message.groups[0].seeds
    assert make_hint(request(5)).message.groups[0].seeds != one.message.groups[0].seeds


def test_the_same_hint_has_the_same_id_and_another_one_another() -> None:
    assert make_hint(request()).hint_id == make_hint(request()).hint_id
    assert make_hint(request()).hint_id != make_hint(request(samples=4)).hint_id
    assert make_hint(request(5)).hint_id != make_hint(request(6)).hint_id


def test_lengths_are_predicted_with_what_the_trainer_says() -> None:
    asked = request()
    asked.groups[0].expected_tokens = 33
    asked.groups[1].sampling.temperature = 1
    seen = []

    def length_of(run_id: str, prompt_id: str, expected: int, limit: int | None) -> float:
        seen.append((run_id, prompt_id, expected, limit))
        return 7.0 * len(seen)

    hint = make_hint(asked)
    hint.predict(length_of)
    assert seen == [("run", "p0", 33, 40), ("run", "p1", 0, None)]
    assert [group.expected_tokens for group in hint.message.groups] == [7.0, 14.0]
    assert hint.message.ByteSize() == hint.size


def test_a_hint_is_kept_until_its_step_begins_or_is_passed() -> None:
    book = HintBook(8, 1 << 20)
    for step in (5, 6, 8):
        assert book.put(a_hint(step), 0.0) == (HintOutcome.KEPT, [])
    assert book.is_hinted("run", 6)
    assert not book.is_hinted("run", 7)
    assert not book.is_hinted("other", 6)
    assert sorted(book.begin("run", 6, 3, 0.0)) == [5, 6]
    assert sorted(book.runs["run"].hints) == [8]
    assert book.put(a_hint(6), 0.0) == (HintOutcome.LATE, [])
    assert book.put(a_hint(7), 0.0) == (HintOutcome.KEPT, [])


def test_a_later_hint_for_a_step_replaces_the_earlier_one() -> None:
    book = HintBook(1, 1 << 20)
    book.put(a_hint(5), 0.0)
    other = a_hint(5, groups=3)
    assert book.put(other, 0.0) == (HintOutcome.KEPT, [])
    assert book.runs["run"].hints == {5: other}
    assert (book.samples(), book.size()) == (9, other.size)


def test_of_too_many_steps_the_nearest_are_kept() -> None:
    book = HintBook(2, 1 << 20)
    book.put(a_hint(5), 0.0)
    book.put(a_hint(9), 0.0)
    assert book.put(a_hint(10), 0.0) == (HintOutcome.FAR, [])
    assert book.put(a_hint(7), 0.0) == (HintOutcome.KEPT, [9])
    assert sorted(book.runs["run"].hints) == [5, 7]


def test_a_hint_that_there_is_no_room_for_is_not_kept() -> None:
    size = a_hint(5).size
    book = HintBook(8, 2 * size + 9)
    assert book.put(a_hint(5), 0.0)[0] is HintOutcome.KEPT
    assert book.put(a_hint(5, "other"), 0.0)[0] is HintOutcome.KEPT
    assert book.put(a_hint(6), 0.0) == (HintOutcome.FULL, [])
    assert book.put(a_hint(5), 0.0)[0] is HintOutcome.KEPT, "it takes the place of its predecessor"
    assert "third" not in book.runs
    assert book.put(a_hint(5, "third"), 0.0)[0] is HintOutcome.FULL
    assert "third" not in book.runs


def test_runs_that_nothing_is_heard_of_are_idle() -> None:
    book = HintBook(8, 1 << 20)
    book.put(a_hint(5), 10.0)
    book.begin("other", 1, 0, 20.0)
    assert book.idle(15.0) == ["run"]
    book.begin("run", 5, 0, 30.0)
    assert book.idle(15.0) == []
    book.forget("run")
    book.forget("run")
    assert book.idle(99.0) == ["other"]


def test_of_too_many_runs_those_touched_longest_ago_are_idle() -> None:
    book = HintBook(8, 1 << 20, max_runs=3)
    for number in range(5):
        book.begin(f"r{number}", 1, 0, 10.0 + number)
    book.begin("r0", 2, 0, 20.0)
    assert book.idle(0.0) == ["r1", "r2"]
    assert book.idle(13.5) == ["r1", "r2", "r3"]


def test_the_phases_of_a_run() -> None:
    run = HintedRun("run", 0.0)
    rollout, update = bubble_pb2.RUN_PHASE_ROLLOUT, bubble_pb2.RUN_PHASE_UPDATE
    assert run.phase(0, 3, applying=False) == rollout
    run.step, run.version = 1, 3
    assert run.phase(4, 3, applying=False) == rollout
    assert run.phase(0, 3, applying=False) == update
    assert run.phase(0, 3, applying=True) == bubble_pb2.RUN_PHASE_APPLYING
    assert run.phase(0, 4, applying=False) == rollout


def test_before_its_first_step_a_run_is_just_before_the_nearest_hint() -> None:
    book = HintBook(8, 1 << 20)
    book.put(a_hint(9), 0.0)
    book.put(a_hint(5), 0.0)
    assert book.runs["run"].position() == 4
    book.begin("run", 2, 0, 0.0)
    assert book.runs["run"].position() == 2
    book.put(a_hint(0, "new"), 0.0)
    assert book.runs["new"].position() == 0


def test_work_that_is_drafted_counts_less() -> None:
    assert remaining_work(100.0, 0, None, 0.1) == 100.0
    assert remaining_work(100.0, 30, None, 0.1) == 70.0
    assert remaining_work(100.0, 200, None, 0.1) == 1.0
    # A finished draft says how long the sample becomes.
    assert remaining_work(100.0, 0, DraftCoverage(40, finished=True), 0.1) == pytest.approx(4.0)
    assert remaining_work(100.0, 0, DraftCoverage(400, finished=True), 0.1) == pytest.approx(40.0)
    # An unfinished one says how long at least.
    assert remaining_work(100.0, 0, DraftCoverage(40), 0.1) == pytest.approx(4.0 + 60.0)
    assert remaining_work(100.0, 0, DraftCoverage(400), 0.1) == pytest.approx(40.0)
    # What exists already is not verified again.
    assert remaining_work(100.0, 30, DraftCoverage(40), 0.1) == pytest.approx(1.0 + 60.0)
    assert remaining_work(100.0, 50, DraftCoverage(40), 0.1) == pytest.approx(50.0)


@given(
    predicted=st.floats(1, 1e5),
    have=st.integers(0, 10_000),
    tokens=st.integers(0, 10_000),
    finished=st.booleans(),
    cost=st.floats(0, 1),
)
def test_a_draft_never_makes_a_sample_longer_than_it_is(
    predicted: float, have: int, tokens: int, finished: bool, cost: float
) -> None:
    work = remaining_work(predicted, have, DraftCoverage(tokens, finished), cost)
    length = tokens if finished else max(predicted, tokens)
    assert 1.0 <= work <= max(1.0, length - have) + 1e-6
    without = remaining_work(predicted, have, None, cost)
    if not finished and tokens <= predicted:
        assert work <= without + 1e-6


def ended(tokens: int, **ends: float) -> TimedSample:
    """Return a sample that ended last on these instances, each with its end."""
    spans = [GenerationSpan(name, 0, 1, 0.0, end) for name, end in ends.items()]
    return TimedSample(GatewaySample(0, 0, 0, 1, spans=spans), "p", tokens, 0.0, max(ends.values()))


def test_the_bubble_of_an_instance_is_from_its_last_sample_to_the_end_of_the_step() -> None:
    book = IdleTimeBook()
    book.begin("run", 3, 3, 100.0)
    assert book.end("run", 3, ended(10, a=104.0)) is None
    assert book.end("run", 3, ended(20, a=102.0, b=107.0)) is None
    report = book.end("run", 3, ended(30, b=110.0))
    assert report is not None
    assert report.bubbles(["a", "c"]) == {"a": 6.0, "b": 0.0, "c": 10.0}
    assert (report.tokens, report.pregenerated) == (60, None)
    assert book.end("run", 3, ended(0, a=111.0)) is None


def test_batches_of_one_step_and_dropped_ones_count_as_they_should() -> None:
    book = IdleTimeBook()
    book.begin("run", 3, 1, 100.0, 40)
    book.begin("run", 3, 1, 101.0, 2)
    book.begin("run", 4, 1, 101.0)
    assert book.end("run", 3, ended(10, a=104.0)) is None
    report = book.end("run", 3, ended(10, a=105.0), ahead=7)
    assert report is not None
    assert (report.begun_at, report.pregenerated, report.tokens) == (100.0, 49, 20)
    book.drop("run", 4, 1)
    book.drop("run", 4, 1)
    assert book.end("run", 4, ended(1, a=106.0)) is None
    book.begin("run", 5, 0, 100.0)
    assert book.end("run", 5, ended(1, a=106.0)) is None
