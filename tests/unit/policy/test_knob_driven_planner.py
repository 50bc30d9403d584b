"""The plan by knobs: what each mode may draft, whose knobs count, and the account of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.knobs import Knobs, tallies, tally_message
from services.contracts.modes import PlanReason
from services.generation.draft_cache.origin import Origin
from services.generation.engine.types import EngineSampleState, SampleStep
from services.generation.speculation.decision import PlanDecision
from services.generation.speculation.drafter import (
    DraftContext,
    Proposal,
    Proposals,
    ProposalsByName,
    Samples,
    TokenDrafter,
)
from services.generation.speculation.plan import StepShape
from services.generation.speculation.planner import KnobDrivenPlanner, SpeculationAccount
from services.generation.speculation.speculation import Speculation
from tests.support.step_times import KnownStepTime, settled

MODES = ("fixed", "adaptive", "toggle", "solver", "planner")


def sample(name: str, room: int = 100) -> EngineSampleState:
    return EngineSampleState(name, [1] * 10, [], room, 10)


def proposal(*acceptance: float) -> Proposal:
    return Proposal(list(range(len(acceptance))), list(acceptance))


def origin_of(sample_id: str) -> Origin | None:
    """`run/step/name`, or a sample of no run."""
    parts = sample_id.split("/")
    return Origin(parts[0], "p", 0, int(parts[1])) if len(parts) == 3 else None


def steered(mode: Any = "planner", *, step_time: Any = None, **knobs: Any) -> KnobDrivenPlanner:
    time = KnownStepTime() if step_time is None else step_time
    return KnobDrivenPlanner(
        Knobs(mode=mode, **knobs), time, origin_of, clock=lambda: 5.0, exploration=settled()
    )


def apply(plan: KnobDrivenPlanner, *knobs: Any) -> int:
    """Works knobs out and has them applied, as an instance does."""
    return plan.apply(plan.resolve(*knobs))


def lengths(plan: KnobDrivenPlanner, samples: Sequence[EngineSampleState], tokens: int = 8) -> dict[str, int]:
    """Draft tokens of each sample, when every one is offered as many sure ones."""
    drafts = plan.choose(samples, {"reference": Proposals.of([proposal(*[0.95] * tokens) for _ in samples])})
    return {name: len(tokens) for name, tokens in drafts.tokens.items()}


@pytest.mark.parametrize("mode", MODES)
def test_the_kill_switch_turns_every_mode_to_plain_and_back(mode: str) -> None:
    plan, samples = steered(mode), [sample("r/1/a")]
    assert lengths(plan, samples)
    apply(plan, 1, {"speculation": False}, {}, {})
    assert lengths(plan, samples) == {}
    assert plan.wants("reference", samples) is False
    apply(plan, 2, {}, {}, {})
    assert lengths(plan, samples)
    ((key, totals),) = plan.account.steps()
    assert key == ("r", 1)
    assert totals.reasons[PlanReason.OFF] == 1


def test_older_knobs_than_those_in_force_change_nothing() -> None:
    plan = steered()
    assert apply(plan, 5, {"draft_cap": 3}, {}, {}) == 5
    for revision in (5, 4):
        assert apply(plan, revision, {"draft_cap": 9}, {}, {}) == 5
    assert plan.knobs.shared.draft_cap == 3


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_switched_between_two_steps(mode: str) -> None:
    plan, samples = steered("fixed", draft_cap=4), [sample("r/1/a"), sample("r/1/b")]
    assert lengths(plan, samples) == {"r/1/a": 4, "r/1/b": 4}
    apply(plan, 1, {"mode": mode, "draft_cap": 6}, {}, {})
    assert lengths(plan, samples)
    assert plan.window == 6
    ((_, totals),) = plan.account.steps()
    assert totals.mode == mode


def test_each_run_has_its_own_cap_switch_and_drafters() -> None:
    plan = steered("fixed", draft_cap=8)
    runs = {
        "slow": {"draft_cap": 2},
        "off": {"speculation": False},
        "free": {"drafters": {"reference": False}},
    }
    apply(plan, 1, {}, runs, {"ladder": 3, "slow": 5})
    samples = [sample(f"{run}/1/a") for run in ("slow", "off", "ladder", "other")] + [sample("a")]
    assert lengths(plan, samples) == {"slow/1/a": 2, "ladder/1/a": 3, "other/1/a": 8, "a": 8}
    assert plan.wants("reference", samples) == [True, False, True, True, True]
    assert plan.wants("reference", [sample("free/1/a")]) is False
    assert plan.wants("suffix", [sample("free/1/a"), sample("free/1/b")]) is True
    mixed = [sample("free/1/a"), sample("other/1/a")]
    assert plan.wants("reference", mixed) == [False, True]
    assert plan.wants("suffix", mixed) == [True, True]


def test_a_step_of_one_run_goes_by_its_mode_and_a_mixed_one_by_the_shared() -> None:
    plan = steered("fixed", step_time=KnownStepTime(per_row=1.0))
    apply(plan, 1, {}, {"r": {"mode": "planner"}}, {})
    assert lengths(plan, [sample("r/1/a")]) == {}, "no draft pays on this machine"
    assert lengths(plan, [sample("x/1/a")])
    assert lengths(plan, [sample("r/1/a"), sample("x/1/a")])


def test_a_run_that_speculates_does_so_beside_one_that_does_not() -> None:
    plan = steered("fixed")
    apply(plan, 1, {}, {"off": {"speculation": False}}, {})
    assert lengths(plan, [sample("off/1/a")]) == {}
    assert lengths(plan, [sample("off/1/a"), sample("on/1/a")]) == {"on/1/a": 8}


def test_the_toggle_notes_when_it_turns_within_a_step() -> None:
    plan = steered("toggle", step_time=KnownStepTime(row=5e-5))
    few, many = [sample("r/1/a")], [sample(f"r/1/{n}") for n in range(64)]
    for samples in (many, many, few, few, many):
        lengths(plan, samples, tokens=4)
    assert [(each.on, each.requests) for each in plan.account.switches(0)] == [(True, 1), (False, 64)]
    assert [each.serial for each in plan.account.switches(1)] == [2]
    ((_, totals),) = plan.account.steps()
    assert totals.reasons == {PlanReason.TOGGLED_OFF: 3, PlanReason.TOGGLED_ON: 2}


def test_the_solver_learns_that_drafts_do_not_pay_and_tries_again_later() -> None:
    plan, samples = steered("solver", step_time=KnownStepTime(per_row=2e-4), draft_cap=4), [sample("r/1/a")]
    assert lengths(plan, samples)
    for _ in range(100):
        plan.verified("reference", 4, 0)
    assert lengths(plan, samples), "the table holds for the step"
    assert lengths(plan, [sample("r/2/a")]) == {}
    reasons = {key[1]: totals.reasons for key, totals in plan.account.steps()}
    assert (reasons[1][PlanReason.TABLE], reasons[2][PlanReason.TABLE_PLAIN]) == (2, 1)
    steps = 0
    while not lengths(plan, [sample(f"r/{3 + steps}/a")]):
        steps += 1
        assert steps < 20, "what was seen long ago must fade"


def test_measured_times_and_outcomes_are_on_the_account_of_their_step() -> None:
    plan = steered("fixed")
    lengths(plan, [sample("r/1/a")])
    plan.stepped(StepShape(1, 9, 10), 0.004)
    plan.verified("history", 8, 5)
    lengths(plan, [sample("r/2/a")])
    plan.verified("history", 8, 8)
    lengths(plan, [sample("nobody")])
    plan.verified("history", 8, 8)
    found = {key: totals for key, totals in plan.account.steps()}
    assert set(found) == {("r", 1), ("r", 2)}, "a sample of no run is on nobody's account"
    assert found["r", 1].measured_seconds == pytest.approx(0.004)
    assert found["r", 1].acceptance.accepted == 5
    assert found["r", 2].acceptance.accepted == 8


def test_the_account_is_of_the_latest_steps_only() -> None:
    account = SpeculationAccount()
    for step in range(100):
        account.begin(("r", step))
        account.verified("reference", 1, 1)
        for turn in range(4):
            account.toggled(turn % 2 == 0, 1.1, 2, 0.0)
    assert [key[1] for key, _ in account.steps()] == list(range(92, 100))
    assert len(account.switches(0)) == 64


@given(
    st.sampled_from(MODES),
    st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=8), min_size=1, max_size=6),
    st.floats(1e-7, 1e-1),
    st.floats(0, 1e-2),
    st.floats(0, 1),
    st.booleans(),
    st.integers(1, 8),
)
def test_no_mode_that_predicts_drafts_against_its_own_prediction(
    mode: str, acceptance: list[list[float]], row: float, per_row: float, margin: float, latch: bool, cap: int
) -> None:
    step_time = KnownStepTime(row=row, per_row=per_row)
    plan = steered(mode, step_time=step_time, margin=margin, latch=latch, draft_cap=cap)
    samples = [sample(f"r/1/{n}") for n in range(len(acceptance))]
    for count in (len(samples), max(1, len(samples) // 2)):
        made = [proposal(*each[:cap]) for each in acceptance[:count]]
        drafts = plan.choose(samples[:count], {"reference": Proposals.of(made)})
        expected = 0.0
        for each, offered, odds in zip(samples, made, acceptance, strict=False):
            tokens = drafts.tokens.get(each.sample_id, [])
            assert tokens == list(offered.tokens[: len(tokens)])
            survival = 1.0
            for probability in odds[: len(tokens)]:
                survival *= probability
                expected += survival
        if mode in ("toggle", "planner") and drafts.tokens:
            rows = count + drafts.count
            plain, drafted = (float(step_time.seconds(count, each, 10 * count)) for each in (count, rows))
            assert (count + expected) / drafted >= count / plain * (1 - 1e-6)


@given(
    st.lists(st.integers(1, 80), min_size=1, max_size=12, unique=True).map(sorted).map(tuple),
    st.lists(st.lists(st.floats(0, 1), max_size=8), min_size=1, max_size=12),
    st.integers(1, 8),
    st.integers(0, 2),
)
def test_where_there_are_graphs_steps_have_their_sizes_or_all_tokens_there_are(
    graphs: tuple[int, ...], acceptance: list[list[float]], cap: int, late: int
) -> None:
    swept = KnownStepTime(row=5e-5)
    plan = KnobDrivenPlanner(Knobs(draft_cap=cap), swept.estimator(), origin_of, graphs=graphs)
    samples = [sample(f"r/1/{n}") for n in range(len(acceptance))]
    made = {"reference": Proposals.of([proposal(*each) for each in acceptance])}
    proposed = sum(int((np.cumprod(each[:cap]) > 0).sum()) for each in acceptance)
    due, known = deque[tuple[StepShape, list[int]]](), plan.step_time.seconds(1, 1, 10)
    for _ in range(12):
        tokens = [len(each) for each in plan.choose(samples, made).tokens.values()]
        rows = len(samples) + sum(tokens)
        assert rows in graphs or rows > graphs[-1] or not tokens or sum(tokens) == proposed
        # Some steps later than the next decision.
        due.append((StepShape(len(samples), rows, 10 * len(samples)), tokens))
        if len(due) > late:
            shape, drafted = due.popleft()
            plan.stepped(shape, 2.0 * float(swept.seconds(shape.requests, shape.rows, shape.context)))
            for each in drafted:
                plan.verified("reference", each, each // 2)
    assert plan.step_time.seconds(1, 1, 10) > known, "what came late was learned"


@pytest.mark.parametrize("proposed", [1, 2, 3, 5, 6])
def test_a_short_draft_between_two_graphs_is_verified_whole(proposed: int) -> None:
    """The cap is longer than what is proposed: a step of all of it is padded to the next graph."""
    plan = KnobDrivenPlanner(
        Knobs(draft_cap=16),
        KnownStepTime(),  # type: ignore[arg-type]
        origin_of,
        exploration=settled(),
        graphs=(1, 2, 4, 8, 16, 32),
    )
    made = {"quantized": Proposals.of([proposal(*[0.97] * proposed)])}
    drafts = plan.choose([sample("r/1/a")], made)
    assert [len(each) for each in drafts.tokens.values()] == [proposed]


class Guesser(TokenDrafter):
    """A drafter that counts how often it is asked."""

    name = "reference"

    def __init__(self) -> None:
        self.asked = 0
        self.begun: list[str] = []

    def begin(self, context: DraftContext) -> None:
        self.begun.append(context.sample_id)

    def propose(self, samples: Samples, window: int, others: ProposalsByName) -> Proposals | None:
        self.asked += 1
        return Proposals.of([proposal(*[0.9] * min(window, 3)) for _ in samples])


class Metrics:
    def __init__(self) -> None:
        self.counted = 0

    def verified(self, drafter: str, drafted: int, accepted: int, count: int) -> None:
        self.counted += count * accepted

    def fault(self, drafter: str) -> None:
        raise AssertionError(drafter)


def test_a_drafter_that_is_not_wanted_is_told_everything_and_asked_nothing() -> None:
    plan, drafter, metrics = steered("fixed"), Guesser(), Metrics()
    speculation = Speculation([drafter], plan, 64, metrics)
    apply(plan, 1, {"drafters": {"reference": False}}, {}, {})
    speculation.begin(DraftContext("r/1/a", [1]))
    assert speculation.drafts([sample("r/1/a")]) == {}
    assert (drafter.asked, drafter.begun) == (0, ["r/1/a"])
    apply(plan, 2, {}, {}, {})
    assert speculation.drafts([sample("r/1/a")]) == {"r/1/a": [0, 1, 2]}
    speculation.learn([SampleStep("r/1/a", [0, 1], [0.0, 0.0], drafted=3, accepted=2)])
    assert metrics.counted == 2
    ((_, totals),) = plan.account.steps()
    assert totals.acceptance.accepted == 2


def test_the_planner_says_why_it_decodes_plainly() -> None:
    plan = steered("planner", step_time=KnownStepTime(per_row=1.0))
    lengths(plan, [sample("r/1/a")])
    plan.step_time = KnownStepTime()  # type: ignore[assignment]
    apply(plan, 1, {"margin": 9.0}, {}, {})
    lengths(plan, [sample("r/1/a")])
    ((_, totals),) = plan.account.steps()
    assert totals.reasons == {PlanReason.PLAIN_IS_BEST: 1, PlanReason.WITHIN_MARGIN: 1}


@pytest.mark.parametrize("mode", ["planner", "toggle"])
@pytest.mark.parametrize(("factor", "pays"), [(0.3, True), (3.0, False)])
def test_verification_that_is_priced_wrong_is_found_out(mode: str, factor: float, pays: bool) -> None:
    # By the sweep one token that is kept half of the time is not quite, or only just, worth its time.
    swept = KnownStepTime(per_row=0.55e-3 if pays else 0.45e-3)
    samples = [sample("r/1/a")]
    plan = KnobDrivenPlanner(Knobs(mode=mode, draft_cap=1), swept.estimator(), origin_of)  # type: ignore[arg-type]
    drafted = []
    for i in range(400):
        proposals = {"reference": Proposals.of([proposal(0.5)])}
        rows = 1 + plan.choose(samples, proposals).count
        plain, predicted = swept.predict(1, [1, rows], 10).tolist()
        plan.stepped(StepShape(1, rows, 10), plain + factor * (predicted - plain))
        if rows > 1:
            plan.verified("reference", 1, i % 2)
        drafted.append(rows > 1)
    late = sum(drafted[200:]) / 200
    assert late > 0.9 if pays else late < 0.1, late


def test_a_step_in_which_a_drafter_lacked_room_is_counted_once_and_for_its_run() -> None:
    account = SpeculationAccount()
    decision = PlanDecision(PlanReason.NO_PROPOSALS)
    for key, lacking in ((("run", 1), 0), (("run", 1), 3), (("run", 2), 2), (("run", 2), 0)):
        # Drafters propose before the step is planned, and its run is known.
        if lacking:
            account.lacked(lacking)
        account.begin(key)
        account.planned(decision, "planner")
    reported = dict(tallies(tally_message(key, totals) for key, totals in account.steps()))
    assert [totals.lacking_steps for totals in reported.values()] == [1, 1]
    first, second = reported.values()
    assert first.plus(second).lacking_steps == 2
    assert first.plus(second).plus(first, -1).lacking_steps == 1


def test_drafts_are_counted_by_their_length_and_by_what_was_accepted_of_them() -> None:
    account = SpeculationAccount()
    account.begin(("run", 1))
    for drafted, accepted in ((3, 1), (3, 3), (40, 20), (1, 0)):
        account.verified("suffix", drafted, accepted)
    ((_, totals),) = account.steps()
    counted = totals.drafts["suffix"]
    assert (counted.verifications, counted.drafted, counted.accepted) == (4, 47, 24)
    assert counted.drafted_lengths == (0, 1, 0, 2, *[0] * 12, 1)
    assert counted.accepted_lengths == (1, 1, 0, 1, *[0] * 12, 1)
    ((_, told),) = tallies([tally_message(("run", 1), totals)])
    assert told == totals
    assert totals.plus(totals).plus(totals, -1).drafts == totals.drafts
