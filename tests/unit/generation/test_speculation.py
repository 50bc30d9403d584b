"""The plan of fixed length, and a speculation that no drafter can harm."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from services.generation.engine.types import EngineSampleState, SampleStep
from services.generation.speculation.drafter import (
    DraftContext,
    NewRollouts,
    Proposal,
    Proposals,
    ProposalsByName,
    Samples,
    TokenDrafter,
)
from services.generation.speculation.plan import UNBOUNDED, Drafts, FixedLengthPlanner
from services.generation.speculation.speculation import MAX_FAULTS, Speculation
from tests.support.proposals import batched

VOCAB = 100
WINDOW = 4


def states(*ids: str, room: int = 50) -> list[EngineSampleState]:
    return [EngineSampleState(sample_id, [1], [], room, 1) for sample_id in ids]


def proposal(*tokens: int, p: float = 0.9) -> Proposal:
    return Proposal(list(tokens), [p] * len(tokens))


# -- the plan -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "room", "count"), [(4, 50, 4), (9, 50, 6), (4, 2, 2), (4, 0, 0), (4, -1, 0), (1, 9, 1)]
)
def test_a_draft_keeps_to_the_window_and_to_the_room(window: int, room: int, count: int) -> None:
    made = {"d": [proposal(1, 2, 3, 4, 5, 6)]}
    chosen = FixedLengthPlanner(window).choose(states("a", room=room), batched(made))
    assert list(chosen.tokens.values()) == ([[1, 2, 3, 4, 5, 6][:count]] if count else [])


def test_a_proposal_that_starts_below_the_floor_is_left_out() -> None:
    made = {"d": [proposal(1, 2, p=0.49), proposal(3, p=0.5)]}
    chosen = FixedLengthPlanner(WINDOW, floor=0.5).choose(states("a", "b"), batched(made))
    assert chosen.tokens == {"b": [3]}


def test_each_sample_gets_the_proposal_that_promises_most() -> None:
    made = {
        "long": [proposal(1, 2, 3, 4, p=0.5), proposal(1, 2, 3, 4, p=0.9), None],
        "sure": [proposal(9, p=0.99), proposal(9, p=0.99), None],
    }
    chosen = FixedLengthPlanner(WINDOW).choose(states("a", "b", "c"), batched(made))
    assert {sample_id: name for sample_id, (name, _) in chosen.origins.items()} == {"a": "sure", "b": "long"}


@pytest.mark.parametrize(
    ("acceptance", "floor", "count"),
    [
        ([0.9, 0.9, 0.9, 0.9], 0.0, 4),
        ([0.9, 0.9, 0.9, 0.9], 0.7, 3),
        ([0.9, 0.1, 0.9, 0.9], 0.5, 1),
        ([0.4, 1.0, 1.0, 1.0], 0.5, 0),
        ([0.5, 1.0, 1.0, 1.0], 0.5, 4),
    ],
)
def test_a_proposal_is_cut_where_it_will_hardly_be_reached(
    acceptance: list[float], floor: float, count: int
) -> None:
    made = {"d": [Proposal([1, 2, 3, 4], acceptance)]}
    chosen = FixedLengthPlanner(WINDOW, survival_floor=floor).choose(states("a"), batched(made))
    assert list(chosen.tokens.values()) == ([[1, 2, 3, 4][:count]] if count else [])


def test_a_proposal_is_worth_only_what_can_be_verified_of_it() -> None:
    made = {"long": [proposal(1, 2, 3, 4, 5, 6, p=0.7)], "sure": [proposal(9, 9, p=0.9)]}
    for room, drafter in ((50, "long"), (2, "sure")):
        assert FixedLengthPlanner(6).choose(states("a", room=room), batched(made)).origins["a"][0] == drafter


def test_a_draft_is_named_after_its_source_or_else_its_drafter() -> None:
    made = {"d": [Proposal([1], [0.9], "pregenerated"), Proposal([1], [0.9])]}
    chosen = FixedLengthPlanner(WINDOW).choose(states("a", "b"), batched(made))
    assert [source for _, source in chosen.origins.values()] == ["pregenerated", "d"]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(-1, 20), st.floats(0, 1))
def test_a_draft_of_fixed_length_ends_where_it_will_hardly_be_reached(
    acceptance: list[float], limit: int, floor: float
) -> None:
    made = batched({"d": [Proposal([1] * len(acceptance), acceptance)]})
    chosen = FixedLengthPlanner(20, survival_floor=floor).choose(states("a", room=limit), made)
    length = len(chosen.tokens.get("a", []))
    assert 0 <= length <= max(limit, 0)
    survival = math.prod(acceptance[:length])
    assert length == 0 or survival >= floor
    if length < min(limit, len(acceptance)):
        left = survival * acceptance[length]
        assert left < floor or left == 0


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(0, 60))
def test_drafts_are_cut_to_equal_lengths_where_the_engine_has_no_rows_for_them(
    offered: list[int], capacity: int
) -> None:
    batch = states(*[f"s{i}" for i in range(len(offered))])
    made = batched({"d": [proposal(*[1] * length) if length else None for length in offered]})
    chosen = FixedLengthPlanner(WINDOW).choose(batch, made, capacity)
    whole = FixedLengthPlanner(WINDOW).choose(batch, made)
    room = max(0, capacity - len(batch))
    assert chosen.count <= room
    longest = max((len(tokens) for tokens in chosen.tokens.values()), default=0)
    for sample_id, tokens in whole.tokens.items():
        assert len(chosen.tokens.get(sample_id, [])) == min(len(tokens), longest)
    # One token more would not fit.
    assert chosen.count == whole.count or sum(min(len(t), longest + 1) for t in whole.tokens.values()) > room


@pytest.mark.parametrize("made", [{}, {"d": [None, None]}])
def test_nothing_offered_is_nothing_verified(made: dict[str, Any]) -> None:
    assert FixedLengthPlanner(WINDOW).choose(states("a", "b"), batched(made)).tokens == {}


@given(st.integers(1, 200), st.integers(1, 8))
def test_every_sample_of_a_batch_gets_its_own_draft(samples: int, window: int) -> None:
    batch = states(*[f"s{i}" for i in range(samples)])
    made = {"d": [proposal(*[i] * 10) for i in range(samples)]}
    chosen = FixedLengthPlanner(window).choose(batch, batched(made))
    assert chosen.tokens == {f"s{i}": [i] * window for i in range(samples)}


# -- the speculation ------------------------------------------------------------------------------------------


class Scripted(TokenDrafter):
    """A drafter that does what the test says."""

    def __init__(self, name: str, answer: Callable[[Sequence[EngineSampleState], int], Any]) -> None:
        self.name = name
        self.answer = answer
        self.asked = 0
        self.learned: list[tuple[str, int, int]] = []
        self.ended: list[tuple[str, list[int]]] = []
        self.adopted: list[NewRollouts] = []
        self.slices = 0

    def propose(self, samples: Samples, window: int, others: ProposalsByName) -> Any:
        self.asked += 1
        answer = self.answer(samples, window)
        return Proposals.of(answer) if type(answer) is list else answer

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        self.learned.append((sample_id, drafted, accepted))

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        self.ended.append((sample_id, list(response)))

    def add_rollouts(self, arrival: NewRollouts) -> None:
        self.adopted.append(arrival)

    def idle_work(self) -> bool:
        self.slices -= 1
        return self.slices > 0


class Counts:
    """Counts what a speculation reports."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self.outcomes: list[tuple[str, int, int]] = []

    def verified(self, drafter: str, drafted: int, accepted: int, count: int) -> None:
        self.outcomes += [(drafter, drafted, accepted)] * count

    def fault(self, drafter: str) -> None:
        self.faults[drafter] += 1


def good(name: str = "good", p: float = 0.6) -> Scripted:
    return Scripted(name, lambda samples, window: [proposal(7, p=p) for _ in samples])


def speculation(*drafters: Any, late: int = 0) -> tuple[Speculation, Counts]:
    counts = Counts()
    return Speculation(drafters, FixedLengthPlanner(WINDOW), VOCAB, counts, late=late), counts


def raising(samples: Sequence[EngineSampleState], window: int) -> Any:
    raise RuntimeError("drafter")


def every(made: Any) -> Callable[[Sequence[EngineSampleState], int], Any]:
    """Return the same for every sample."""
    return lambda samples, window: [made for _ in samples]


def rows(
    tokens: Any, acceptance: Any, sources: Any = ()
) -> Callable[[Sequence[EngineSampleState], int], Any]:
    """Return the same row of tokens and of predictions for every sample."""
    return lambda samples, window: Proposals(
        np.array([tokens] * len(samples)), np.array([acceptance] * len(samples)), sources
    )


GARBAGE: dict[str, Callable[[Sequence[EngineSampleState], int], Any]] = {
    "raises": raising,
    "a number": lambda samples, window: 3,
    "too few proposals": lambda samples, window: [proposal(1)] * (len(samples) - 1),
    "too many proposals": lambda samples, window: [proposal(1)] * (len(samples) + 1),
    "proposals one by one": lambda samples, window: (proposal(1) for _ in samples),
    "no arrays": lambda samples, window: Proposals([[1]], [[0.9]]),  # type: ignore[arg-type]
    "None for the tokens": lambda samples, window: Proposals(None, None),  # type: ignore[arg-type]
    "no tokens": rows([], []),
    "one dimension": rows(1, 0.9),
    "too many tokens": every(proposal(1, 2, 3, 4, 5)),
    "a token past the vocabulary": every(proposal(1, VOCAB)),
    "a token of 64 bits": lambda samples, window: Proposals(
        np.full((len(samples), 1), 2**64 - 1, np.uint64),  # type: ignore[arg-type]
        np.ones((len(samples), 1)),
    ),
    "a negative token": every(proposal(-1)),
    "a bool": rows([True], [0.9]),
    "a float": rows([1.0], [0.9]),
    "a text": rows(["a"], [0.9]),
    "None for a token": rows([None], [0.9]),
    "too few predictions": rows([1, 2], [0.9]),
    "too many predictions": rows([1], [0.9, 0.9]),
    "a prediction of NaN": every(proposal(1, p=math.nan)),
    "a prediction of infinity": every(proposal(1, p=math.inf)),
    "a prediction above one": every(proposal(1, p=1.01)),
    "a negative prediction": every(proposal(1, p=-0.1)),
    "a whole number for a prediction": rows([1], [1]),
    "a text for a prediction": rows([1], ["x"]),
    "too few sources": rows([1], [0.9], ["x"]),
    "a number for a source": lambda samples, window: [Proposal([1], [0.9], 3)] * len(samples),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", GARBAGE)
def test_a_faulty_drafter_loses_its_say_and_the_others_go_on(what: str) -> None:
    bad, well = Scripted("bad", GARBAGE[what]), good()
    spec, counts = speculation(bad, well)
    with structlog.testing.capture_logs() as logs:
        for _ in range(MAX_FAULTS + 2):
            assert spec.drafts(states("a", "b")) == {"a": [7], "b": [7]}
            assert spec.learn([SampleStep("a", [7, 8], [0.0, 0.0], None, drafted=1, accepted=1)]) == ["good"]
    assert counts.faults["bad"] >= MAX_FAULTS
    assert counts.faults["good"] == 0
    assert bad.asked == MAX_FAULTS
    assert well.asked == MAX_FAULTS + 2
    assert [entry["event"] for entry in logs] == ["drafter_fault", "drafter_switched_off"]
    assert all(entry["drafter"] == "bad" and (entry.get("fault") or entry.get("last")) for entry in logs)


def test_one_bad_proposal_costs_the_drafter_the_step_and_counts_once() -> None:
    mixed = Scripted("mixed", lambda samples, window: [proposal(5, p=0.9), proposal(VOCAB, p=0.9), None])
    spec, counts = speculation(mixed, good())
    for asked in range(1, MAX_FAULTS + 1):
        assert spec.drafts(states("a", "b", "c")) == {"a": [7], "b": [7], "c": [7]}
        assert (mixed.asked, counts.faults["mixed"]) == (asked, asked)
    spec.drafts(states("a", "b", "c"))
    assert mixed.asked == MAX_FAULTS


def test_good_steps_in_between_do_not_switch_a_drafter_off() -> None:
    answers = [every(proposal(VOCAB)), every(proposal(3)), every(proposal(VOCAB)), every(proposal(3))]
    flaky = Scripted("flaky", lambda samples, window: answers.pop(0)(samples, window))
    spec, _ = speculation(flaky)
    assert [spec.drafts(states("a")) for _ in range(4)] == [{}, {"a": [3]}, {}, {"a": [3]}]


@pytest.mark.parametrize("method", ["begin", "learn", "end", "add_rollouts"])
def test_a_drafter_that_raises_elsewhere_harms_nobody(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, well = good("bad", p=0.9), good("well", p=0.5)

    def fail(*_: Any) -> None:
        raise RuntimeError(method)

    monkeypatch.setattr(bad, method, fail)
    spec, counts = speculation(bad, well)
    for _ in range(MAX_FAULTS + 1):
        spec.begin(DraftContext("a", [1]))
        spec.add_rollouts(NewRollouts())
        drafts = spec.drafts(states("a"))
        assert drafts == {"a": [7]}
        spec.learn([SampleStep("a", [7, 8], [0.0, 0.0], None, drafted=1, accepted=1)])
        spec.end("a")
    assert (counts.outcomes[0][0], counts.outcomes[-1][0]) == ("bad", "well")
    assert counts.faults == {"bad": MAX_FAULTS}


def test_outcomes_go_to_the_drafter_that_made_the_draft() -> None:
    left = Scripted("left", lambda samples, window: [proposal(1, 2, p=0.9), None, None])
    right = Scripted("right", lambda samples, window: [None, proposal(3, p=0.9), None])
    spec, counts = speculation(left, right)
    spec.drafts(states("a", "b", "c"))
    steps = [
        SampleStep("c", [4], [0.0]),
        SampleStep("a", [1, 5], [0.0, 0.0], None, drafted=2, accepted=1),
        SampleStep("b", [4], [0.0], None, drafted=1, accepted=0),
    ]
    assert spec.learn(steps) == ["", "left", "right"]
    assert (left.learned, right.learned) == ([("a", 2, 1)], [("b", 1, 0)])
    assert counts.outcomes == [("left", 2, 1), ("right", 1, 0)]


def test_drafts_with_the_same_outcome_are_reported_together() -> None:
    made = good()
    spec, counts = speculation(made)
    spec.drafts(states("a", "b", "c"))
    kept = [SampleStep(each, [7, 8], [0.0, 0.0], None, drafted=1, accepted=1) for each in "ac"]
    lost = SampleStep("b", [8], [0.0], None, drafted=1, accepted=0)
    calls = list[int]()
    counts.verified = lambda *outcome: calls.append(outcome[-1])  # type: ignore[method-assign]
    assert spec.learn([kept[0], lost, kept[1]]) == ["good"] * 3
    assert calls == [2, 1]
    assert made.learned == [("a", 1, 1), ("b", 1, 0), ("c", 1, 1)]


def test_outcomes_are_counted_by_the_source_of_the_draft() -> None:
    aligned = Scripted(
        "aligned", lambda samples, window: [Proposal([1], [0.9], "history"), proposal(2, p=0.9)]
    )
    spec, counts = speculation(aligned)
    spec.drafts(states("a", "b"))
    assert spec.learn([SampleStep("a", [1, 5], [0.0, 0.0], None, drafted=1, accepted=1)]) == ["history"]
    assert spec.learn([SampleStep("b", [2, 5], [0.0, 0.0], None, drafted=1, accepted=1)]) == ["aligned"]
    assert aligned.learned == [("a", 1, 1), ("b", 1, 1)]
    assert counts.outcomes == [("history", 1, 1), ("aligned", 1, 1)]


def test_outcomes_that_come_two_decisions_late_go_to_the_drafter_of_their_own_draft() -> None:
    """An engine that schedules ahead asks for the drafts of two more steps before the first one's outcome."""
    left, right = (Scripted(name, lambda *_: [proposal(1, p=0.9), None]) for name in ("left", "right"))
    spec, counts = speculation(left, right, late=2)
    wanted = ["left", "right", "", "right", "left", "", "", "left"]
    for step in range(len(wanted) + 2):
        if step < len(wanted):
            for drafter in (left, right):
                p = 0.9 if drafter.name == wanted[step] else 0.5
                drafter.answer = every(proposal(1, p=p)) if wanted[step] else lambda *_: None
            assert set(spec.drafts(states("a"))) == ({"a"} if wanted[step] else set())
        else:
            spec.drafts([])
        if step >= 2:
            # How many were accepted says which step it was.
            due = int(wanted[step - 2] != "")
            outcome = SampleStep("a", [1, 1], [0.0, 0.0], None, drafted=due, accepted=due * step)
            found = spec.learn([outcome], later=2)
            assert found == [wanted[step - 2]]
    assert [each for each, _, _ in counts.outcomes] == [each for each in wanted if each]
    assert [accepted for _, _, accepted in left.learned] == [2, 6, 9]
    assert [accepted for _, _, accepted in right.learned] == [3, 5]


def test_a_draft_that_was_not_verified_takes_no_later_outcome() -> None:
    """While a step is in flight, no token of a draft may be left to verify."""
    left, right = (Scripted(name, lambda *_: [proposal(1, p=0.9)]) for name in ("left", "right"))
    spec, _ = speculation(left, right, late=1)

    def decide(drafter: Scripted, other: Scripted) -> None:
        drafter.answer, other.answer = lambda *_: [proposal(1, p=0.9)], lambda *_: None
        assert set(spec.drafts(states("a"))) == {"a"}

    kept = SampleStep("a", [1, 1], [0.0, 0.0], None, drafted=1, accepted=1)
    decide(left, right)
    decide(right, left)
    assert spec.learn([kept], later=1) == ["left"]
    assert spec.learn([SampleStep("a", [1], [0.0])]) == [""]
    decide(left, right)
    assert spec.learn([kept]) == ["left"]


@pytest.mark.parametrize("late", [0, 2])
def test_a_draft_whose_outcome_never_came_is_forgotten(late: int) -> None:
    spec, counts = speculation(good(), late=late)
    spec.drafts(states("a"))
    for _ in range(1 + late):
        spec.drafts(states("b"))
    assert spec.learn([SampleStep("a", [7, 8], [0.0, 0.0], None, drafted=1, accepted=1)]) == [""]
    assert not counts.outcomes


def test_arrivals_and_ends_reach_every_drafter() -> None:
    left, right = good("left"), good("right")
    spec, _ = speculation(left, right)
    arrival = NewRollouts()
    spec.add_rollouts(arrival)
    spec.end("a", [1, 2])
    assert left.adopted == right.adopted == [arrival]
    assert left.ended == right.ended == [("a", [1, 2])]


def test_an_idle_engine_works_until_no_drafter_has_more_to_do() -> None:
    left, right = good("left"), good("right")
    spec, _ = speculation(left, right)
    left.slices, right.slices = 2, 4
    assert [spec.idle_work() for _ in range(5)] == [True, True, True, False, False]


def test_a_drafter_that_raises_while_the_engine_idles_does_not_keep_it_awake() -> None:
    bad = good("bad")
    bad.idle_work = lambda: raising((), 0)  # type: ignore[method-assign]
    spec, counts = speculation(bad)
    assert not spec.idle_work()
    assert counts.faults["bad"] == 1


def test_an_ended_sample_and_an_idle_step_have_no_draft() -> None:
    spec, _ = speculation(good())
    steps = [SampleStep(each, [7, 8], [0.0, 0.0], None, drafted=1, accepted=1) for each in "ab"]
    spec.drafts(states("a", "b"))
    spec.end("a")
    assert spec.learn(steps) == ["", "good"]
    spec.drafts(states("b"))
    assert spec.drafts([]) == {}
    assert spec.learn(steps[1:]) == [""]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)
arrays = st.tuples(st.integers(0, 4), st.integers(0, 6)).flatmap(
    lambda shape: st.builds(
        Proposals,
        hypothesis_numpy.arrays(np.int32, shape, elements=st.integers(-2, VOCAB + 1)),
        hypothesis_numpy.arrays(np.float64, shape, elements=st.floats(width=64)),
        st.lists(anything, max_size=4),
    )
)


@given(anything | arrays | st.builds(Proposals, anything, anything), st.integers(1, 3))
def test_whatever_a_drafter_answers_only_good_tokens_reach_the_engine(answer: Any, samples: int) -> None:
    spec, _ = speculation(Scripted("any", lambda states, window: answer))
    with structlog.testing.capture_logs():
        drafts = spec.drafts(states(*"abc"[:samples]))
    for tokens in drafts.values():
        assert 0 < len(tokens) <= WINDOW
        assert all(type(token) is int and 0 <= token < VOCAB for token in tokens)


# -- rests ----------------------------------------------------------------------------------------------------


class Unwanted(TokenDrafter):
    """Counts how often it is asked; has no tokens until it is told to."""

    name = "unwanted"

    def __init__(self) -> None:
        self.asked = 0
        self.tokens = False

    def propose(self, samples: Samples, window: int, others: ProposalsByName) -> Proposals | None:
        self.asked += 1
        return batched({"d": [proposal(7)] * len(samples)})["d"] if self.tokens else None


def test_a_drafter_that_never_pays_is_soon_asked_in_few_steps_and_at_once_when_there_is_news() -> None:
    drafter = Unwanted()
    spec = Speculation([drafter], FixedLengthPlanner(WINDOW), VOCAB, Counts())
    for _ in range(200):
        assert spec.drafts(states("a")) == {}
    assert 10 < drafter.asked < 20
    before = drafter.asked
    while drafter.asked == before:
        spec.drafts(states("a"))
    drafter.tokens = True
    assert spec.drafts(states("a")) == {}
    spec.add_rollouts(NewRollouts())
    assert spec.drafts(states("a")) == {"a": [7]}


def test_the_time_of_a_step_is_asked_for_unless_drafters_rest() -> None:
    drafter = Unwanted()
    spec = Speculation([drafter], FixedLengthPlanner(WINDOW), VOCAB, Counts())
    shapes = 0
    for _ in range(200):
        shapes += spec.shape(states("a"), spec.drafts(states("a"))) is not None
    assert shapes == drafter.asked < 200
    assert spec.shape([], {}) is None


@dataclass(frozen=True, slots=True)
class Promising(FixedLengthPlanner):
    """Drafts that are predicted to save so many seconds a step."""

    saved: float = 0.0

    def choose(
        self, samples: Sequence[EngineSampleState], proposals: Mapping[str, Proposals], rows: int = UNBOUNDED
    ) -> Drafts:
        # Named, because a dataclass with slots is another class than the one that `super` knows.
        drafts = FixedLengthPlanner.choose(self, samples, proposals, rows)
        drafts.saved = self.saved
        return drafts


@pytest.mark.parametrize(("saved", "always"), [(1.5, True), (0.5, False)])
def test_drafts_are_asked_for_while_they_save_more_time_than_asking_takes(saved: float, always: bool) -> None:
    drafter = Unwanted()
    drafter.tokens = True
    # Each look at the clock is a second after the last.
    spec = Speculation(
        [drafter], Promising(WINDOW, saved=saved), VOCAB, Counts(), clock=map(float, count()).__next__
    )
    verified = sum(bool(spec.drafts(states("a"))) for _ in range(200))
    assert verified == drafter.asked
    assert drafter.asked == 200 if always else 20 < drafter.asked < 60


def test_a_sample_that_brings_a_sequence_is_asked_for_in_its_first_step() -> None:
    drafter = Unwanted()
    spec = Speculation([drafter], FixedLengthPlanner(WINDOW), VOCAB, Counts())
    for _ in range(200):
        spec.drafts(states("a"))
    for _ in range(3):
        before = drafter.asked
        spec.begin(DraftContext("b", [1], (7, 7)))
        spec.drafts(states("a", "b"))
        assert drafter.asked == before + 1
        spec.drafts(states("a", "b"))
        assert drafter.asked == before + 1
