"""Reports of runs whose trainer was started again: pictures, first and last steps, and what is counted."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from xml.etree import ElementTree

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import Decision
from paceline.cli import options
from paceline.cli import report as command
from paceline.report import plots
from paceline.report.chart import PageChart
from paceline.report.facts import RunFacts, counted, number_attempts, read_facts
from paceline.report.page import render
from services.gateway.api.reports import RewardBook
from services.gateway.feeds.step_report import StepReport, TimedSample, step_record
from services.gateway.state.sample import GatewaySample, GenerationSpan
from services.platform.redis.decision_log import DecisionRecord
from tests.unit.report.facts_of_a_run import BEGIN, entry

OUTLIER = 1e6


@dataclass(frozen=True, slots=True)
class Planned:
    """A step as it is to be in the log: seconds of rollout and of the time after it."""

    step: int
    attempt: int
    rollout: float
    after: float
    reward: float


def entries_of(plan: list[Planned], run: str = "run") -> list[Decision]:
    return [each for version, step in enumerate(plan) for each in _step(plan, version, step, run)]


def _step(plan: list[Planned], version: int, step: Planned, run: str) -> Iterator[Decision]:
    begun = BEGIN + sum(each.rollout + each.after for each in plan[:version])
    ended = begun + step.rollout
    sample = GatewaySample(0, 0, 0, 1, spans=[GenerationSpan("i", 0, 5, begun, ended)], first_step_at=begun)
    sample.generation_seconds = sample.plain_seconds = step.rollout
    last = deque([TimedSample(sample, "p", 5, begun, ended)])
    report = StepReport(run, step.step, begun, ended, samples=1, tokens=5, last=last)
    yield entry(step_record(report, report.bubbles(["i"]), version))
    posted: list[DecisionRecord] = []
    book = RewardBook(posted.append)
    book.add(run, step.step, [step.reward])
    book.write()
    yield from (replace(entry(record), time=ended) for record in posted)


@st.composite
def plans(draw: st.DrawFn) -> list[Planned]:
    """Runs of one to four attempts; numbers have gaps, each attempt goes back, and one time may be an outlier."""
    found: list[Planned] = []
    seconds = st.floats(0.01, 20.0)
    for attempt in range(1, draw(st.integers(1, 4)) + 1):
        number = draw(st.integers(0, found[-1].step if found else 3))
        for _ in range(draw(st.integers(1, 8))):
            times = draw(seconds), draw(seconds)
            found.append(Planned(number, attempt, *times, draw(st.floats(-5, 5)) + 0.0))
            number += draw(st.integers(1, 3))
    if draw(st.booleans()):
        place, field = draw(st.integers(0, len(found) - 1)), draw(st.booleans())
        old = found[place]
        times = (OUTLIER, old.after) if field else (old.rollout, OUTLIER)
        found[place] = Planned(old.step, old.attempt, *times, old.reward)
    return found


def assert_inside(chart: PageChart) -> None:
    for _, drawing in chart.drawings:
        picture = ElementTree.fromstring(f"<svg>{drawing.markup}</svg>")
        for each in picture.iter():
            for x, y in _points(each):
                assert -0.01 <= x <= drawing.width + 0.01, each.attrib
                assert -0.01 <= y <= drawing.height + 0.01, each.attrib


def _points(mark: ElementTree.Element) -> Iterator[tuple[float, float]]:
    """Return the outermost points of a mark; letters are taken as of 6.5 pixels."""
    at = {name: float(mark.get(name, 0)) for name in ("x", "y", "x1", "y1", "x2", "y2", "width", "height")}
    if mark.tag == "rect":
        yield from ((at["x"], at["y"]), (at["x"] + at["width"], at["y"] + at["height"]))
    elif mark.tag == "line":
        yield from ((at["x1"], at["y1"]), (at["x2"], at["y2"]))
    elif mark.tag == "text":
        length = 6.5 * len(mark.text or "")
        left = {"end": 1.0, "middle": 0.5}.get(mark.get("text-anchor", ""), 0.0)
        yield from ((at["x"] - left * length, at["y"]), (at["x"] + (1 - left) * length, at["y"]))
    elif mark.tag == "path" and "a" not in mark.get("d", ""):
        numbers = [float(each) for each in re.findall(r"-?\d+(?:\.\d+)?", mark.get("d", ""))]
        yield from zip(numbers[::2], numbers[1::2], strict=True)
    elif mark.tag == "path":
        left, middle = map(float, re.findall(r"-?[\d.]+", mark.get("d", ""))[:2])
        yield from ((left, middle), (left + 9, middle))


@settings(max_examples=25, deadline=None)
@given(plans())
def test_pictures_are_whole_and_first_and_last_are_right(plan: list[Planned]) -> None:
    facts = read_facts(entries_of(plan))
    assert facts.unread == 0
    assert [(step.step, step.attempt) for step in facts.steps] == [(each.step, each.attempt) for each in plan]
    assert [step.reward for step in facts.steps] == [each.reward for each in plan]
    valid = [
        each
        for each in plan
        if not any(other.step <= each.step for other in plan if other.attempt > each.attempt)
    ]
    assert [(step.step, step.attempt) for step in counted(facts.steps)] == [
        (each.step, each.attempt) for each in valid
    ]
    numbers = [each.step for each in valid]
    assert numbers == sorted(set(numbers)), "each is counted once, in order"
    first, last = valid[0], valid[-1]
    page = render(facts)
    assert f"Steps {first.step} to {last.step}, from " in page
    found = _charts(facts)
    assert found[0].summary.startswith(
        f"Mean reward {first.reward:.3f} in step {first.step}, {last.reward:.3f} in step {last.step}."
    )
    for chart in found:
        assert_inside(chart)
    restarts = plan[-1].attempt - 1
    for chart in found:
        assert chart.drawings[0][1].markup.count("The trainer was started again") == restarts


@settings(max_examples=25, deadline=None)
@given(plans())
def test_rewards_go_from_left_to_right_and_no_bar_flattens_the_others(plan: list[Planned]) -> None:
    facts = read_facts(entries_of(plan))
    for _, drawing in _charts(facts)[0].drawings:
        places = [float(x) for x in re.findall(r'd="M(-?[\d.]+) [\d.-]+a', drawing.markup)]
        assert len(places) == len(plan)
        assert places == sorted(places)
        assert len(plan) == 1 or places[-1] - places[0] > drawing.width / 2
    lengths = [sum(parts.values()) for parts in plots.phases(facts)]
    limit = plots.longest_drawn(lengths)
    assert limit <= max(lengths)
    if len(lengths) > 1:
        assert limit <= 3 * sorted(lengths)[-2]
    cut = sum(length > limit for length in lengths)
    chart = plots.where_time_goes(facts)
    assert chart is not None
    assert chart.drawings[0][1].markup.count('class="cut"') == 2 * cut
    assert (f"({cut} of them)" in chart.note) is (cut > 0)


@settings(max_examples=25, deadline=None)
@given(plans())
def test_a_pause_between_two_trainers_is_no_time_of_a_trainer(plan: list[Planned]) -> None:
    steps = plots.phases(read_facts(entries_of(plan)))
    for place, (step, parts) in enumerate(zip(plan, steps, strict=True)):
        followed = place + 1 < len(plan) and plan[place + 1].attempt == step.attempt
        assert parts["trainer"] == pytest.approx(step.after if followed else 0.0, rel=1e-4, abs=1e-4)


def _charts(facts: RunFacts) -> list[PageChart]:
    found = plots.rewards(facts), plots.where_time_goes(facts), plots.critical_path(facts)
    return [chart for chart in found if chart is not None]


def test_a_run_from_its_beginning_again_is_reported_from_there() -> None:
    plan = [Planned(step, 1, 1.0, 1.0, step / 40) for step in range(40)]
    plan[-1] = Planned(39, 1, 1.0, 720.0, 0.975)
    plan += [Planned(step, 2, 1.0, 1.0, step / 20) for step in range(16)]
    facts = read_facts(entries_of(plan))
    chart, time, _ = _charts(facts)
    assert chart.summary.startswith("Mean reward 0.000 in step 0, 0.750 in step 15. 40 steps, in grey,")
    assert time.summary.startswith("Of 110.0 seconds: rollout 51%, trainer 49%")
    page = render(facts)
    assert "0.00 → 0.75" in page
    assert "the trainer was started 2 times, and 40 steps were replaced" in page
    assert "step 39 (replaced)" in page
    assert "step 15, attempt 2" in page


def test_before_the_new_trainer_has_rewards_those_of_the_old_one_are_shown() -> None:
    entries = entries_of([Planned(0, 1, 1, 1, 0.5), Planned(0, 2, 1, 1, 0.7)])
    chart = plots.rewards(read_facts(entries[:-1]))
    assert chart is not None
    assert chart.summary.startswith("Mean reward 0.500 in step 0, 0.500 in step 0. 1 step, in grey,")


def test_steps_that_overlap_and_batches_of_one_version_are_one_attempt() -> None:
    facts = read_facts(entries_of([Planned(step, 1, 4.0, 0.0, 0.0) for step in (1, 2, 3)]))
    one, two, three = facts.steps
    one.ended, two.begun = three.ended + 1, one.begun + 1  # the first one is the last to end
    steps = sorted(facts.steps, key=lambda step: step.ended)
    number_attempts(steps)
    assert [(step.attempt, step.replaced) for step in steps] == [(1, False)] * 3
    two.step, two.version = three.step, three.version
    number_attempts([two, three])
    assert (two.replaced, three.attempt) == (False, 1)
    three.version += 1
    number_attempts([two, three])
    assert (two.replaced, three.attempt) == (True, 2)


def test_rewards_without_bounds_are_passed_over() -> None:
    entries = entries_of([Planned(0, 1, 1, 1, 0.5), Planned(1, 1, 1, 1, float("inf"))])
    facts = read_facts(entries)
    assert (facts.unread, facts.steps[1].reward) == (1, None)
    for chart in _charts(facts):
        assert_inside(chart)


def test_a_run_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [each for run in ("one", "two") for each in entries_of([Planned(0, 1, 1, 1, 0.5)], run)]

    class Log:
        """A client whose decision log is filtered by run, as the gateway's is."""

        def __enter__(self) -> Log:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def watch_decisions(self, run: str, since: float, *, kept: bool) -> Iterator[Decision]:
            assert kept
            return (each for each in entries if run in ("", each.run_id))

    monkeypatch.setattr(options, "Client", lambda *_, **__: Log())
    with pytest.raises(typer.BadParameter, match=r"no step of 'nosuch'.*: ('one', 'two'|'two', 'one')$"):
        command.report(run="nosuch")
