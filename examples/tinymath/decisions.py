"""Record the platform's decisions during a run, because its decision log ends with the platform.

with DecisionWatch(client) as watch:
    ...
    watch.wait_for(steps - 1)
write_report(watch.decisions, folder / "report.html")
"""

from __future__ import annotations

import threading
import time
from typing import Self

from paceline import Client, Decision, PacelineError

LAST = ("speculation", "reward")
"""Kinds of the last decisions of a step, on drafting and on rewards, which come in either order."""
_WAIT_SECONDS = 30.0


class DecisionWatch:
    """Reader of decisions in a thread, from `__enter__` to `__exit__`. It closes its client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._decisions: list[Decision] = []
        self._changed = threading.Condition()
        self._since = time.time()
        self._thread = threading.Thread(target=self._watch, name="decision-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._thread.join()

    @property
    def decisions(self) -> list[Decision]:
        """All decisions so far."""
        with self._changed:
            return list(self._decisions)

    def wait_for(self, step: int, seconds: float = _WAIT_SECONDS) -> None:
        """Wait until the last decisions of a step are known, or at most `seconds`: some may never be made."""

        def known() -> bool:
            kinds = {each.kind for each in self._decisions if each.details.get("step") == step}
            return kinds.issuperset(LAST)

        with self._changed:
            self._changed.wait_for(known, seconds)

    def _watch(self) -> None:
        try:
            for decision in self._client.watch_decisions(since=self._since):
                with self._changed:
                    self._decisions.append(decision)
                    self._changed.notify_all()
        except (PacelineError, ValueError):
            return  # the client was closed, or the gateway is gone
