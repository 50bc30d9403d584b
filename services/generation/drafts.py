"""What the samples of an engine draft from: cached rollouts, and what drafters offer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from services.drafts.rollout import Rollout
from services.generation.drafting import reuse
from services.generation.drafting.drafter import Arrival, DraftContext
from services.generation.drafting.plan import StepShape
from services.generation.drafting.reuse import Reuse
from services.generation.drafting.speculation import Speculation
from services.generation.engine.types import SampleState, SampleStep
from services.generation.metrics import EngineMetrics
from services.generation.rollouts.cache import DraftCache, Shards
from services.generation.rollouts.origin import Origin
from services.generation.samples import RunningSample
from services.generation.step_engine import StepEngine


class SampleDrafts:
    """Drafts for the samples of one engine. Used by its thread only; the parts are set before it has samples."""

    def __init__(self, metrics: EngineMetrics) -> None:
        # None: nothing is drafted, and the engine runs plain.
        self.speculation: Speculation | None = None
        # Rollouts that samples may follow; None: there are none to be had.
        self.cache: DraftCache | None = None
        self.reuse = Reuse()
        self._metrics = metrics

    def begin(self, sample: RunningSample, policy_version: int) -> None:
        """A sample enters the engine."""
        self.reuse.begin(sample.request)
        self.resume(sample, policy_version, {})

    def resume(self, sample: RunningSample, policy_version: int, carried: Mapping[str, bytes]) -> None:
        """A sample comes from another engine, with what drafters knew of it there."""
        if self.speculation is not None:
            self.speculation.begin(_context(sample, policy_version, carried))

    def end(self, sample_id: str, response: Sequence[int] = ()) -> None:
        """A sample left the engine, with this response where it is known."""
        self.reuse.end(sample_id)
        if self.speculation is not None:
            self.speculation.end(sample_id, response)

    def carry(self, sample_id: str) -> Mapping[str, bytes]:
        """What drafters know of a sample beyond its tokens, for another engine."""
        return {} if self.speculation is None else self.speculation.carry(sample_id)

    def follow(self, sample: RunningSample) -> Rollout | None:
        """Let a sample follow the cached rollout of its own seed; None when it follows one as long, or there is
        none."""
        rollout = self.cached(sample.origin, sample.request.seed)
        return rollout if rollout is not None and sample.follow(rollout) else None

    def cached(self, origin: Origin, seed: int) -> Rollout | None:
        """The best rollout in the cache that was made with a sample's own noise."""
        return None if self.cache is None else self.cache.same_seed(origin, seed)

    # Rollouts that come ----------------------------------------------------------------------------------

    def keep(self, rollouts: Iterable[Rollout], samples: Mapping[str, RunningSample]) -> None:
        """Cache rollouts that were made here, and draft from what is new in them, in running samples too."""
        if self.cache is not None:
            self._adopt(self.cache, self.cache.add(rollouts), samples)

    def adopt(self, shards: Shards, samples: Mapping[str, RunningSample]) -> None:
        """Cache what the store has of some prompts, and draft from what is new in it, in running samples too."""
        if self.cache is not None:
            self._adopt(self.cache, self.cache.add_shards(shards), samples)

    def _adopt(
        self, cache: DraftCache, rollouts: Sequence[Rollout], samples: Mapping[str, RunningSample]
    ) -> None:
        """Draft from rollouts that have come into the cache."""
        self._metrics.rollouts.cache_bytes.set(cache.nbytes)
        given: dict[str, Rollout] = {}
        prompts = {(rollout.run_id, rollout.prompt_id) for rollout in rollouts}
        for sample_id, sample in samples.items():
            if sample.origin.prompt not in prompts:
                continue
            rollout = self.follow(sample)
            if rollout is not None and not sample.request.given:
                given[sample_id] = rollout
        if self.speculation is not None:
            self.speculation.adopt(Arrival(rollouts, given))

    # Each step -------------------------------------------------------------------------------------------

    def tend(self) -> bool:
        """Work that drafters put off, a slice of it, while the engine idles; whether there is more."""
        return self.speculation is not None and self.speculation.tend()

    def put(self, engine: StepEngine) -> StepShape | None:
        """Set the coming step's drafts. Its shape, where the plan asks for step times and the step just decodes.

        A step that also reads prompts takes longer than its decoding samples explain.
        """
        if self.speculation is None and not self.reuse:
            return None
        if not self.reuse and self.speculation is not None and self.speculation.rests_on(engine.load.running):
            return None
        states, load = engine.decoding(), engine.load
        decodes = load.running == len(states) and not load.waiting
        drafts = self._drafts(states, engine.row_capacity - (0 if decodes else engine.prompt_rows))
        engine.put_drafts(drafts)
        return self.speculation.shape(states, drafts) if decodes and self.speculation is not None else None

    def _drafts(self, samples: Sequence[SampleState], rows: int) -> dict[str, list[int]]:
        """Those of cached rollouts for the samples that follow one, else as speculated.

        `rows`: that the samples and their draft tokens may have together, at most.
        """
        made: dict[str, list[int]] = {}
        free = samples
        if self.reuse:
            made = self.reuse.drafts(samples, rows - len(samples))
            free = [sample for sample in samples if sample.sample_id not in self.reuse]
        if self.speculation is not None:
            taken = len(samples) - len(free) + sum(map(len, made.values()))
            made |= self.speculation.drafts(free, rows - taken)
        return made

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """A step of the shape that `put` gave took so long."""
        if self.speculation is not None:
            self.speculation.plan.stepped(shape, seconds)

    def learn(self, step: SampleStep) -> str:
        """Tell the source of a sample's drafts what became of them; its name, "" when there were none."""
        reused = self.reuse.learn(step)
        if reused is not None:
            self._metrics.reused(reused.tokens, reused.rows)
            return reuse.SOURCE
        if self.speculation is None:
            return ""
        self.speculation.learn(step)
        return self.speculation.drafter_of(step.sample_id)


def _context(sample: RunningSample, version: int, carried: Mapping[str, bytes]) -> DraftContext:
    """What drafters are told of a sample. A guess of the caller's goes before the rollout of the same seed."""
    request, origin, rollout = sample.request, sample.origin, sample.rollout
    given: Sequence[int]
    given, source = reuse.guess_of(request)
    if rollout is not None and not request.given:
        given, source = rollout.tokens.tolist(), rollout.kind.value
    return DraftContext(
        request.sample_id,
        request.prompt,
        given,
        request.prompt_id,
        origin.run_id,
        request.seed,
        version,
        source,
        carried,
    )
