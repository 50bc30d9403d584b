"""Times in which instances pre-generated, as the decision log gets them."""

from __future__ import annotations

from services.bubbles.service import MOST, FilledSpan, FilledTime, filled_records


def test_an_instance_has_one_span_from_its_first_task_until_it_has_none() -> None:
    filled = FilledTime(silence=5.0)
    filled.note("a", False, 0.5)
    filled.note("a", True, 1.0)
    # A task ends and the next one begins with the same poll.
    filled.note("a", False, 2.0)
    filled.note("a", True, 2.0)
    filled.note("a", True, 2.5)
    filled.note("b", True, 2.5)
    filled.note("a", False, 3.0)
    assert filled.take(3.01) == []
    filled.note("a", True, 4.0)
    assert filled.take(4.5) == [FilledSpan("a", 1.0, 3.0)]


def test_a_long_span_is_told_in_parts_and_a_silent_instance_ends() -> None:
    filled = FilledTime(silence=5.0)
    for second in range(12):
        filled.note("a", True, float(second))
    assert filled.take(11.5) == [FilledSpan("a", 0.0, 11.0)]
    assert filled.take(12.0) == []
    assert filled.take(17.0) == [FilledSpan("a", 11.0, 11.0)]
    assert filled.take(100.0) == []


def test_entries_are_bounded() -> None:
    spans = [FilledSpan(f"i{number}", 0.0, 1.0) for number in range(MOST + 1)]
    records = filled_records(spans)
    assert [len(each.details["filled"]) for each in records] == [MOST, 1]
    assert filled_records([]) == []
