"""When the demo has all decisions of its last step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from examples.tinymath.decisions import DecisionWatch
from paceline import Decision

WAIT = 60.0


class Scripted:
    """A client that tells of the decisions that a test makes."""

    def __init__(self) -> None:
        self._made: queue.Queue[Decision | None] = queue.Queue()

    def make(self, kind: str, step: int) -> None:
        self._made.put(Decision(0.0, kind, "", 0.0, {"step": step}))

    def watch_decisions(self, since: float) -> Iterator[Decision]:
        while (decision := self._made.get(timeout=WAIT)) is not None:
            yield decision

    def close(self) -> None:
        self._made.put(None)


@pytest.mark.parametrize("kinds", [("speculation", "reward"), ("reward", "speculation")])
def test_a_step_is_over_when_its_drafts_and_its_rewards_are_known(kinds: tuple[str, str]) -> None:
    client = Scripted()
    with DecisionWatch(client) as watch:  # type: ignore[arg-type]
        waiting = threading.Thread(target=watch.wait_for, args=(1, WAIT))
        waiting.start()
        client.make("reward", 0)
        client.make(kinds[0], 1)
        while len(watch.decisions) < 2:
            waiting.join(0.001)
        waiting.join(0.05)
        assert waiting.is_alive()
        client.make(kinds[1], 1)
        waiting.join(WAIT)
        assert not waiting.is_alive()
        assert len(watch.decisions) == 3
