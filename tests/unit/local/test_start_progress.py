"""Lines about a start: what is ready, once, and what is awaited, every ten seconds."""

from __future__ import annotations

import threading

from services.local.child import ProgressLines


def test_what_becomes_ready_is_reported_once_and_a_silence_lasts_ten_seconds() -> None:
    lines: list[str] = []
    progress = ProgressLines(lines.append, 100.0, list, list)
    progress.check(101.0, [], ["gateway", "instance-0"])
    assert lines == []
    progress.check(103.0, ["gateway"], ["instance-0"])
    progress.check(104.0, ["gateway"], ["instance-0"])
    assert lines == ["gateway is ready after 3 s"]
    progress.check(112.9, ["gateway"], ["instance-0"])
    assert len(lines) == 1
    progress.check(113.0, ["gateway"], ["instance-0"])
    progress.check(122.0, ["gateway"], ["instance-0"])
    assert lines[1:] == ["13 s gone, waiting for instance-0"]
    progress.check(124.0, ["gateway", "instance-0"], [])
    progress.check(200.0, ["gateway", "instance-0"], [])
    assert lines[2:] == ["instance-0 is ready after 24 s"]


def test_what_is_ready_at_the_end_is_reported_before_the_start_returns() -> None:
    lines: list[str] = []
    ready: list[str] = []
    looked = threading.Event()

    def names() -> list[str]:
        looked.set()
        return list(ready)

    with ProgressLines(lines.append, 0.0, names, list):
        assert looked.wait(60)
        ready.append("gateway")
    assert [line.partition(" after")[0] for line in lines] == ["gateway is ready"]
