"""What Redis has of samples that have ended, as a successor reads it."""

from __future__ import annotations

from services.gateway.journal.chunks import WHOLE, Head
from services.gateway.journal.journal import parse_ended


def test_cursors_and_heads_come_as_one_text_and_events_as_another() -> None:
    cursors, heads, there = parse_ended(b"3 17:0:0 1 18:2:1024", b"1 9 3")
    assert cursors == {3: 17, 1: 18}
    assert heads == {3: WHOLE, 1: Head(2, 1024)}
    # An event without a cursor is none.
    assert there == [1, 3]


def test_nothing_has_ended() -> None:
    assert parse_ended(b"", b"") == ({}, {}, [])
