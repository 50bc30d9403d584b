"""Keeper of processes: restarts those that died, by the restart policy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from services.local.child import Child
from services.local.config import RestartPolicy
from services.platform.backoff import ExponentialBackoff

_POLL_SECONDS = 0.1


class Restarts:
    """Deaths of one process, and the restarts that follow from them."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths: list[float] = []
        self._backoff = ExponentialBackoff(policy.initial, policy.maximum)

    def died(self, now: float) -> float | None:
        """Record a death at `now` (monotonic seconds) and return when to restart; None for never again."""
        self._deaths = [death for death in self._deaths if now - death < self._policy.window] + [now]
        self._backoff.failures = len(self._deaths)
        return None if len(self._deaths) > self._policy.limit else now + self._backoff.delay


class Keeper:
    """A thread that watches processes until it is stopped.

    `expected` returns those that are to be alive; `checked` is called after each check of them.
    """

    def __init__(
        self,
        policy: RestartPolicy,
        expected: Callable[[], Iterable[Child]],
        checked: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy = policy
        self._expected = expected
        self._checked = checked
        self._restarts: dict[str, Restarts] = {}
        self._due: dict[str, float | None] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keeper", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop to watch; after that nothing is restarted."""
        self._stopping.set()
        self._thread.join()

    def gave_up(self, child: Child) -> bool:
        """Return True if a dead process will not be restarted, since it died too often."""
        return child.spec.name in self._due and self._due[child.spec.name] is None

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL_SECONDS):
            for child in self._expected():
                self._look_after(child, time.monotonic())
            self._checked()

    def _look_after(self, child: Child, now: float) -> None:
        name = child.spec.name
        if child.alive:
            self._due.pop(name, None)  # started by a caller
        elif name not in self._due:
            self._due[name] = self._restarts.setdefault(name, Restarts(self._policy)).died(now)
        elif (due := self._due[name]) is not None and now >= due:
            del self._due[name]
            child.start()
