"""Show the progress of a benchmark with several parts: the current part, and the time that the rest will take."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

_SHOWN_EVERY = 10.0


class PartsProgress:
    """Print a line on stderr at each part and every ten seconds. Use it as a context manager.

    `planned` lists the names of the parts, in order, and the seconds that each should take. The estimate of the
    rest is corrected by the measured times of the earlier parts.
    """

    def __init__(
        self, planned: Sequence[tuple[str, float]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._planned = list(planned)
        self._clock = clock
        self._place = -1
        self._began = clock()
        self._took = self._should = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def begin(self, name: str) -> None:
        """Begin the next part. ValueError if another part is planned."""
        now = self._clock()
        if self._place >= 0:
            self._took += now - self._began
            self._should += self._planned[self._place][1]
        self._place, self._began = self._place + 1, now
        if self._planned[self._place][0] != name:
            raise ValueError(f"{self._planned[self._place][0]} is next, not {name}")
        self._show()

    def seconds_left(self) -> float:
        """Return the estimated time until all parts are done."""
        # A single part far off its estimate says less about the others than several parts do.
        pace = (self._took + 30.0) / (self._should + 30.0)
        spent = self._clock() - self._began
        _, planned = self._planned[self._place]
        rest = sum(seconds for _, seconds in self._planned[self._place + 1 :])
        return pace * rest + max(0.0, pace * planned - spent)

    def _show(self) -> None:
        name, count = self._planned[self._place][0], len(self._planned)
        left = self.seconds_left()
        print(
            f"{self._place + 1} of {count}: {name}, about {left:.0f} s left in all",
            file=sys.stderr,
            flush=True,
        )

    def _repeat(self) -> None:
        while not self._ended.wait(_SHOWN_EVERY):
            if self._place >= 0:
                self._show()


@dataclass(slots=True)
class BenchProgress:
    """Report after each part how long the others will take."""

    parts: int
    name: str
    began: float = field(default_factory=time.monotonic)
    done: int = 0

    def advance(self, part: str) -> None:
        """Print that a part is done."""
        self.done += 1
        gone = time.monotonic() - self.began
        left = gone / self.done * (self.parts - self.done)
        print(f"{self.name}: {part}; {gone:.0f} s gone, about {left:.0f} s left", flush=True)
