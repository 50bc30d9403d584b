"""The samples in an engine: real ones, and background samples that run while there is nothing real to do.

A sample is real when a caller waits for it, and in the background when its stream says so. Background samples
take only what real ones leave: they are ended, with the tokens they have, as soon as more than `threshold` real
samples are in the engine, or one of these has to wait.
"""

from __future__ import annotations

from services.generation.engine.types import EngineLoad
from services.generation.loop.metrics import BackgroundMetrics
from services.generation.loop.samples import RunningSample
from services.generation.rollouts.origin import Origin


class SampleTable(dict[str, RunningSample]):
    """Running samples by id. Changed by the engine thread only.

    `background` holds the ids of background samples; `background_steps` counts the engine steps that had some.
    """

    def __init__(self, metrics: BackgroundMetrics, threshold: int = 0) -> None:
        super().__init__()
        self.background: set[str] = set()
        self.background_steps = 0
        self._metrics = metrics
        self._threshold = threshold

    @property
    def real_count(self) -> int:
        """Number of samples that a caller waits for."""
        return len(self) - len(self.background)

    def background_samples(self) -> list[RunningSample]:
        """Return the background samples in the order in which they came."""
        return [sample for sample_id, sample in self.items() if sample_id in self.background]

    def origin_of(self, sample_id: str) -> Origin | None:
        """Return the run and step of a real sample; None for any other sample."""
        sample = self.get(sample_id)
        if sample is None or not sample.origin.run_id or sample_id in self.background:
            return None
        return sample.origin

    def add(self, sample: RunningSample) -> None:
        """Add a sample that has entered the engine."""
        sample_id = sample.request.sample_id
        self[sample_id] = sample
        if sample.stream.background:
            self.background.add(sample_id)
            self._metrics.samples.set(len(self.background))

    def remove(self, sample_id: str) -> None:
        """Remove a sample that has left the engine."""
        del self[sample_id]
        if sample_id in self.background:
            self.background.discard(sample_id)
            self._metrics.samples.set(len(self.background))

    def allows_background(self, real: int) -> bool:
        """Return True if background samples may be in the engine beside so many real ones."""
        return real <= self._threshold

    def real_load(self, load: EngineLoad) -> EngineLoad:
        """Return the load of an engine that is due to its real samples.

        KV of background samples is free as soon as it is wanted, so alone they count as none; beside real
        samples the two cannot be distinguished, and all of it counts.
        """
        if not self.background:
            return load
        real = self.real_count
        running = min(real, load.running)
        return EngineLoad(running, real - running, load.kv_usage if real else 0.0)

    def record_background_step(self, seconds: float, tokens: int, forked: int, real: int) -> None:
        """Count a step of background samples and their forks, in which `real` other samples ran too."""
        self.background_steps += 1
        self._metrics.record_step(seconds, tokens, forked, real > 0)

    def record_yield(self, samples: int, seconds: float) -> None:
        """Count background samples that were ended `seconds` after a real one arrived."""
        self._metrics.yielded.inc(samples)
        self._metrics.yield_seconds.observe(seconds)
