"""Logs as shown to people."""

import json

from services.local.child import readable_tail


def test_structured_lines_become_text_and_tracebacks_lines() -> None:
    entry = {
        "event": "service_failed",
        "level": "error",
        "timestamp": "12:00",
        "exception": "Trace\nE: bad",
        "a": 1,
    }
    assert readable_tail(["plain", json.dumps(entry)], 10) == [
        "plain",
        "12:00 error service_failed a=1",
        "Trace",
        "E: bad",
    ]


def test_the_end_is_what_is_shown() -> None:
    entry = json.dumps({"event": "e", "exception": "\n".join("abcdef")})
    assert readable_tail(["1", "2", entry], 3) == ["d", "e", "f"]
    assert readable_tail([], 3) == []


def test_what_is_said_at_the_exit_of_python_hides_nothing() -> None:
    complaint = [
        "nanobind: leaked 64 types!",
        *[f' - leaked type "triton.t{number}"' for number in range(40)],
        " - ... skipped remainder",
        "See https://nanobind.readthedocs.io/en/latest/refleaks.html",
    ]
    assert readable_tail(["dtype: no such one", *complaint], 3) == ["dtype: no such one"]


def test_json_that_is_no_event_stays_as_it_is() -> None:
    assert readable_tail(["[1]", '{"a": 1}', "null"], 5) == ["[1]", '{"a": 1}', "null"]
