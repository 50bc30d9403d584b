"""Drafts for the samples of an engine: parts of cached rollouts, and proposals of drafters."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from services.contracts.rollout import RolloutKind, StoredRollout, Tokens
from services.generation.draft_cache.cache import DraftCache, Shards
from services.generation.draft_cache.lenient_reuse import CACHED_SOURCE, Reuse, guess_of
from services.generation.engine.types import EngineSampleState, SampleStep
from services.generation.loop.metrics import EngineMetrics
from services.generation.loop.samples import RunningSample
from services.generation.speculation.drafter import DraftContext, NewRollouts
from services.generation.speculation.plan import StepShape
from services.generation.speculation.speculation import Speculation

if TYPE_CHECKING:
    from services.generation.engine.core import Engine


class SampleDrafts:
    """Drafts for the samples of one engine. Used by its thread only.

    `speculation` is None where the engine decodes without drafters. `cache` holds the rollouts that samples can
    draft from, `reuse` the samples that are taking over a cached rollout.
    """

    def __init__(
        self,
        metrics: EngineMetrics,
        cache: DraftCache | None = None,
        speculation: Speculation | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        """Without a `cache` no rollout is kept."""
        self.cache = DraftCache(vocab_size=0, budget_bytes=0) if cache is None else cache
        self.speculation = speculation
        self.reuse = Reuse() if reuse is None else reuse
        self._metrics = metrics
        # Shapes of the steps in flight; None if the time is not needed.
        self._shapes: deque[StepShape | None] = deque()
        # Samples that verify cached rollouts in the latest step and in the previous one, which may be in flight.
        self._reusing: deque[Collection[str]] = deque(maxlen=2)

    def begin(self, sample: RunningSample, policy_version: int) -> None:
        """Start to draft for a sample that enters the engine."""
        self.reuse.begin(sample.request)
        self.resume(sample, policy_version, {})

    def resume(self, sample: RunningSample, policy_version: int, carried: Mapping[str, bytes]) -> None:
        """Continue to draft for a sample of another engine, with the states of its drafters there."""
        if self.speculation is not None:
            self.speculation.begin(_context(sample, policy_version, carried, self._forks(sample)))

    def end(self, sample_id: str, response: Sequence[int] = ()) -> None:
        """Forget a sample that left the engine, with this response if it is known."""
        self.reuse.end(sample_id)
        if self.speculation is not None:
            self.speculation.end(sample_id, response)

    def carry(self, sample_id: str) -> Mapping[str, bytes]:
        """Return the drafters' states of a sample beyond its tokens, for another engine."""
        return {} if self.speculation is None else self.speculation.carry(sample_id)

    def follow(self, sample: RunningSample) -> StoredRollout | None:
        """Let a sample follow the cached rollout of its seed, and return it.

        None if there is none, or if the sample follows one that is as good.
        """
        rollout = self.cache.same_seed(sample.origin, sample.request.seed)
        return rollout if rollout is not None and sample.follow(rollout) else None

    # New rollouts ----------------------------------------------------------------------------------------

    def add_rollouts(self, rollouts: Iterable[StoredRollout], samples: Mapping[str, RunningSample]) -> None:
        """Cache rollouts that were generated here, and draft from new ones, for running samples too."""
        self._draft_from(self.cache.add(rollouts), samples)

    def add_shards(self, shards: Shards, samples: Mapping[str, RunningSample]) -> None:
        """Cache the store's rollouts of some prompts, and draft from them, for running samples too."""
        self._draft_from(self.cache.add_shards(shards), samples)

    def _draft_from(self, rollouts: Sequence[StoredRollout], samples: Mapping[str, RunningSample]) -> None:
        self._metrics.rollouts.cache_bytes.set(self.cache.nbytes)
        followed: dict[str, StoredRollout] = {}
        forks: dict[str, Sequence[Tokens]] = {}
        prompts = {(rollout.run_id, rollout.prompt_id) for rollout in rollouts}
        forked = {rollout.seed for rollout in rollouts if rollout.fork}
        for sample_id, sample in samples.items():
            if sample.origin.prompt not in prompts:
                continue
            rollout = self.follow(sample)
            if rollout is not None and not sample.request.given:
                followed[sample_id] = rollout
            fresh = rollout is not None or sample.request.seed in forked
            if fresh and (known := self._forks(sample)):
                forks[sample_id] = known
        if self.speculation is not None:
            # For other samples a fork adds nothing to the rollout that it forks from.
            texts = [rollout for rollout in rollouts if not rollout.fork]
            self.speculation.add_rollouts(NewRollouts(texts, followed, forks))

    def _forks(self, sample: RunningSample) -> Sequence[Tokens]:
        """Return the forks of the rollout that a sample follows."""
        rollout = sample.rollout
        if rollout is None or sample.request.given or rollout.kind is not RolloutKind.PREGENERATED:
            return ()
        return [each.tokens for each in self.cache.forks(sample.origin, sample.request.seed)]

    # Each step -------------------------------------------------------------------------------------------

    def idle_work(self) -> bool:
        """Do a slice of the drafters' deferred work while the engine idles; return True if there is more."""
        return self.speculation is not None and self.speculation.idle_work()

    def put(self, engine: Engine) -> StepShape | None:
        """Give the engine the drafts of the next step.

        Return the shape of the step if the planner needs its time and it only decodes: prefill takes time that the
        decoding samples do not explain.
        """
        self._shapes.append(shape := self._put(engine))
        return shape

    def _put(self, engine: Engine) -> StepShape | None:
        speculation = self.speculation
        self._reusing.append(())
        if not self.reuse and speculation is None:
            return None
        states, load = engine.decoding(), engine.load
        decodes = load.running == len(states) and not load.waiting
        # Tokens that a step computes again are rows that verify nothing. The engine counts them as rows of prompts,
        # too, but limits these.
        replayed = sum([state.replayed for state in states])
        rows = engine.row_capacity - (replayed if decodes else max(replayed, engine.prompt_rows))
        drafts = self._drafts(states, rows)
        verified = engine.put_drafts(drafts)
        return speculation.shape(states, verified) if decodes and speculation is not None else None

    def _drafts(self, samples: Sequence[EngineSampleState], rows: int) -> dict[str, Sequence[int]]:
        """Return the draft tokens by sample id: of cached rollouts for samples that take one over, else proposals.

        The samples may have at most `rows` verified tokens together.
        """
        made: dict[str, Sequence[int]] = {}
        free = samples
        if self.reuse:
            made = self.reuse.drafts(samples, rows - len(samples))
            self._reusing[-1] = frozenset(made)
            free = [sample for sample in samples if sample.sample_id not in self.reuse]
        if self.speculation is not None:
            taken = len(samples) - len(free) + sum(map(len, made.values()))
            made |= self.speculation.drafts(free, rows - taken)
        return made

    def stepped(self, seconds: float, in_flight: int = 0) -> None:
        """Report the time of the step that has just ended, while others are still in flight."""
        while len(self._shapes) > in_flight:
            shape = self._shapes.popleft()
            if shape is not None and self.speculation is not None:
                self.speculation.stepped(shape, seconds)

    def settled(self) -> None:
        """Forget the steps that were in flight: their times are not known."""
        self._shapes.clear()

    def learn(self, steps: Sequence[SampleStep], later: int = 0) -> list[str]:
        """Report the outcome of each draft to its source; return the sources' names, "" without a draft.

        Drafts were put `later` times after the ones of this step. A sample that has left its cached rollout
        meanwhile verified a part of it in this step nevertheless.
        """
        reusing = self._reusing[-1 - later] if later < len(self._reusing) else ()
        reused = [self._reused(step, reusing) for step in steps] if self.reuse or reusing else []
        left = [step for step, own in zip(steps, reused, strict=True) if own is None] if reused else steps
        names = [""] * len(left) if self.speculation is None else self.speculation.learn(left, later)
        if not reused:
            return names
        for own in reused:
            if own is not None:
                self._metrics.reused(*own)
        others = iter(names)
        return [next(others) if own is None else CACHED_SOURCE for own in reused]

    def _reused(self, step: SampleStep, reusing: Collection[str]) -> tuple[int, int] | None:
        """Return the tokens kept of a cached rollout, and the rows that they took; None without a rollout."""
        found = self.reuse.learn(step)
        if found is None and step.drafted and step.sample_id in reusing:
            return step.reused, step.drafted + 1
        return found


def _context(
    sample: RunningSample, version: int, carried: Mapping[str, bytes], forks: Sequence[Tokens]
) -> DraftContext:
    """Return the context of a sample for drafters; the caller's draft precedes the rollout of the same seed."""
    request, origin, rollout = sample.request, sample.origin, sample.rollout
    given: Sequence[int]
    given, source = guess_of(request)
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
        forks,
    )
