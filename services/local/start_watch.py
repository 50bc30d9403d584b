"""Says what a start is waiting for: a line as each process becomes ready, and what is awaited every ten seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Self

_SECONDS = 10.0
_POLL_SECONDS = 0.2


class StartWatch:
    """Lines about a start, as its processes become ready. `tell` gets each line."""

    def __init__(self, tell: Callable[[str], None], began: float) -> None:
        self._tell = tell
        self._began = self._told_at = began
        self._ready: set[str] = set()

    def look(self, now: float, ready: Iterable[str], awaited: Iterable[str]) -> None:
        """Say which processes have become ready, and name the others after ten seconds of silence.

        Args:
            now: on the clock of `began`, in seconds.
            ready: names of all processes that are ready.
            awaited: what is not.
        """
        gone = f"{now - self._began:.0f} s"
        for name in ready:
            if name not in self._ready:
                self._ready.add(name)
                self._say(now, f"{name} is ready after {gone}")
        waiting = ", ".join(awaited)
        if waiting and now - self._told_at >= _SECONDS:
            self._say(now, f"{gone} gone, waiting for {waiting}")

    def _say(self, now: float, line: str) -> None:
        self._told_at = now
        self._tell(line)


class WatchedStart:
    """A thread that looks at a start until the block ends."""

    def __init__(
        self, watch: StartWatch, ready: Callable[[], list[str]], awaited: Callable[[], list[str]]
    ) -> None:
        self._watch, self._names, self._awaited = watch, ready, awaited
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="start-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        over = False
        while not over:
            over = self._over.wait(_POLL_SECONDS)
            self._watch.look(time.monotonic(), self._names(), [] if over else self._awaited())
