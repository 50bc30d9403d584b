"""Background samples: what the engine generates ahead while it has nothing real to do.

A sample is real when a caller waits for it, and in the background when its stream says so. Background samples
take only what real ones leave: they are ended, with the tokens they have, as soon as more than `threshold` real
samples are in the engine, or one of these has to wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from services.generation.engine.types import EngineLoad
from services.generation.samples import RunningSample


class BackgroundMetrics(Protocol):
    """Where background work is counted."""

    def running(self, samples: int) -> None: ...
    def stepped(self, seconds: float, tokens: int, beside_real: bool) -> None: ...
    def yielded(self, samples: int, seconds: float) -> None: ...


class Background:
    """The background samples in an engine. Changed by the engine thread only.

    `steps` counts the engine steps that had some of them. Set `threshold` and `metrics` before the first one.
    """

    def __init__(self) -> None:
        self.threshold = 0
        self.metrics: BackgroundMetrics | None = None
        self.steps = 0
        self._samples: dict[str, RunningSample] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._samples

    def __iter__(self) -> Iterator[RunningSample]:
        return iter(self._samples.values())

    def add(self, sample: RunningSample) -> None:
        """A background sample enters the engine."""
        self._samples[sample.request.sample_id] = sample
        self._show()

    def discard(self, sample_id: str) -> None:
        """A sample has left the engine; real ones are passed over."""
        if self._samples.pop(sample_id, None) is not None:
            self._show()

    def allowed(self, real: int) -> bool:
        """Whether background samples may be in the engine beside so many real ones."""
        return real <= self.threshold

    def hinders(self, real: int, load: EngineLoad) -> bool:
        """Whether a real sample might be waiting because of them, given the load after a step."""
        return bool(self._samples) and real > 0 and load.waiting > 0

    def apart(self, load: EngineLoad, real: int) -> EngineLoad:
        """The load that the real samples are.

        KV of background samples is free as soon as it is wanted, so alone they count as none; beside real
        samples the two cannot be told apart, and all of it counts.
        """
        if not self._samples:
            return load
        running = min(real, load.running)
        return EngineLoad(running, real - running, load.kv_usage if real else 0.0)

    def stepped(self, seconds: float, tokens: int, real: int) -> None:
        """A step with background samples took so long and gave them so many tokens."""
        self.steps += 1
        if self.metrics is not None:
            self.metrics.stepped(seconds, tokens, real > 0)

    def yielded(self, samples: int, seconds: float) -> None:
        """So many were ended for a real sample, `seconds` after it arrived."""
        if self.metrics is not None:
            self.metrics.yielded(samples, seconds)

    def _show(self) -> None:
        if self.metrics is not None:
            self.metrics.running(len(self._samples))
