"""Starts processes again that died, by the restart policy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from services.local.child import Child
from services.local.restarts import RestartPolicy, Restarts

_POLL_SECONDS = 0.1


class Keeper:
    """A thread that watches processes until it is stopped. `wanted` says which are to be alive; `looked` is called
    after each look at them."""

    def __init__(
        self,
        policy: RestartPolicy,
        wanted: Callable[[], Iterable[Child]],
        looked: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy = policy
        self._wanted = wanted
        self._looked = looked
        self._restarts: dict[str, Restarts] = {}
        self._due: dict[str, float | None] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="keeper", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Returns when nothing will be started any more."""
        self._stopping.set()
        self._thread.join()

    def gave_up(self, child: Child) -> bool:
        """True when a dead process is not started again: it died too often."""
        return child.spec.name in self._due and self._due[child.spec.name] is None

    def _watch(self) -> None:
        while not self._stopping.wait(_POLL_SECONDS):
            for child in self._wanted():
                self._look_after(child, time.monotonic())
            self._looked()

    def _look_after(self, child: Child, now: float) -> None:
        name = child.spec.name
        if child.alive:
            self._due.pop(name, None)  # started by a caller
        elif name not in self._due:
            self._due[name] = self._restarts.setdefault(name, Restarts(self._policy)).died(now)
        elif (due := self._due[name]) is not None and now >= due:
            del self._due[name]
            child.start()
