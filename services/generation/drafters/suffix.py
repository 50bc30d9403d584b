"""Drafter `suffix`: proposes the continuation of the longest matching suffix in all known rollouts of the prompt.

All samples of an instance share one suffix index. A running sample is a growing text in it, so that the samples of
a group draft from each other, and the text stays when the sample ends. Rollouts of other instances wait in a queue;
a part of it is indexed with each step, so that decoding never waits for the index, and the rest while the engine
idles. Texts are never removed by name, and no prompt is added after its rollouts, because both would rebuild its
automaton.

Acceptance is the index's own estimate: it compares every prediction with the text that follows, verified or not.
A sample that another drafter serves well, such as by its reference, is indexed like all others and gets no
continuation: with a large batch predicting one took longer than all else that the host does in a step.

The index is bounded (`draft_index_tokens`). What has no room even after everything idle was evicted is counted: a
sample without room gets no proposals, and a running one that finds no more room gets none from then on.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import structlog
from numpy.typing import DTypeLike, NDArray

from services.contracts.rollout import StoredRollout
from services.generation.speculation.drafter import (
    DraftContext,
    DrafterSetting,
    NewRollouts,
    Proposals,
    ProposalsByName,
    Samples,
    TokenDrafter,
    ignore_lack,
)
from services.generation.speculation.plan import rooms
from services.generation.speculation.selection import Bools, well_served
from services.platform.observability.metrics import MetricSet, counter

if TYPE_CHECKING:
    from kernels.suffix_index import Continuations, Name, SuffixIndex

# Default capacity, in tokens, of the index and of the queues of rollouts.
_CAPACITY = 4_000_000
# Default number of queued tokens that a step indexes: a fraction of a millisecond.
_TOKENS_PER_STEP = 4096
_log = structlog.get_logger(__name__)


class RefusedText(StrEnum):
    """Kind of a text for which the index has no room; a label of metrics."""

    # A sample that began without room: it gets no proposals.
    SAMPLE = "sample"
    # A running sample that found no more room: it gets no proposals from then on.
    HALTED = "halted"
    # A rollout of another instance, or one that waited in the queue.
    ROLLOUT = "rollout"


class IndexMetrics(Protocol):
    """Counters of the index: its cost by phase (`insert` of rollouts, `step` of samples), and what has no room."""

    def indexed(self, phase: str, seconds: float, tokens: int) -> None: ...
    def refused(self, text: RefusedText, texts: int, tokens: int) -> None: ...


class SuffixMetrics(MetricSet, prefix="paceline_drafts_"):
    """Cost of the index, and what it has no room for."""

    index_seconds = counter(
        "index_seconds_total",
        "Time in the suffix index: insert of arrived rollouts; step of running samples, with their proposals.",
        "phase",
    )
    index_tokens = counter("index_tokens_total", "Tokens put into the suffix index.", "phase")
    refused_texts = counter(
        "index_refused_total",
        "Texts without room in the suffix index (draft_index_tokens): sample, which gets no proposals; halted, "
        "a running sample that gets no more; rollout.",
        "text",
        values=RefusedText,
    )
    refused_tokens = counter(
        "index_refused_tokens_total",
        "Tokens of the texts in index_refused_total that were not indexed.",
        "text",
        values=RefusedText,
    )

    def indexed(self, phase: str, seconds: float, tokens: int) -> None:
        """Count work of the index."""
        self.index_seconds.labels(phase).inc(seconds)
        self.index_tokens.labels(phase).inc(tokens)

    def refused(self, text: RefusedText, texts: int, tokens: int) -> None:
        """Count texts, and tokens of texts, for which there is no room."""
        self.refused_texts.labels(text).inc(texts)
        self.refused_tokens.labels(text).inc(tokens)


@dataclass(slots=True)
class _Sample:
    """A growing text: its handle, its prompt, the response tokens given to it, and whether it is halted."""

    handle: int
    prompt: Name
    taken: int = 0
    halted: bool = False


class Backlog:
    """Queue of rollouts to index, by prompt, first in, first out; beyond `capacity` tokens it drops the oldest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._prompts: OrderedDict[tuple[str, str], deque[StoredRollout]] = OrderedDict()
        self.tokens = 0

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def push(self, rollout: StoredRollout) -> list[StoredRollout]:
        """Add a rollout; return the rollouts that were dropped for it."""
        self._prompts.setdefault((rollout.run_id, rollout.prompt_id), deque()).append(rollout)
        self.tokens += len(rollout.tokens)
        dropped: list[StoredRollout] = []
        while self.tokens > self._capacity:
            dropped += self.pop_prompt(next(iter(self._prompts)))
        return dropped

    def pop(self) -> StoredRollout:
        """Remove and return the next rollout; there must be one."""
        prompt, rollouts = next(iter(self._prompts.items()))
        rollout = rollouts.popleft()
        self.tokens -= len(rollout.tokens)
        if not rollouts:
            del self._prompts[prompt]
        return rollout

    def pop_prompt(self, prompt: tuple[str, str]) -> list[StoredRollout]:
        """Remove and return all rollouts of a prompt."""
        rollouts = list(self._prompts.pop(prompt, ()))
        self.tokens -= sum(len(rollout.tokens) for rollout in rollouts)
        return rollouts


class SuffixDrafter(TokenDrafter):
    """Proposes continuations found in other rollouts of the prompt, and earlier in the sample's own."""

    name = "suffix"
    Metrics = SuffixMetrics
    sequential = True
    alternatives = 0
    """Most alternatives that the index is asked for in addition to a continuation; subclasses propose them."""

    def __init__(
        self,
        index: SuffixIndex | None = None,
        *,
        capacity: int = _CAPACITY,
        tokens_per_step: int = _TOKENS_PER_STEP,
        metrics: IndexMetrics | None = None,
        lacked: Callable[[int], None] = ignore_lack,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin with an empty index.

        Args:
            index: without one, an index of `capacity` tokens is made, which imports numba.
            capacity: most tokens in the queue; the oldest rollouts beyond it are dropped.
            tokens_per_step: queued tokens that a step indexes.
            metrics: of the cost, and of what has no room.
            lacked: see `DrafterSetting`.
            clock: seconds.
        """
        self._index = _new_index(capacity) if index is None else index
        self._tokens_per_step = tokens_per_step
        self._metrics = metrics
        self._lacked = lacked
        self._clock = clock
        self._samples: dict[str, _Sample] = {}
        # Running samples that began without room.
        self._without_room: set[str] = set()
        # Something had no room, ever.
        self._full = False
        # Number of running samples by prompt.
        self._running: Counter[Name] = Counter()
        # Rollouts to index, and rollouts whose prompt has no sample here yet: the prompt must be indexed first.
        self._waiting = Backlog(capacity)
        self._early = Backlog(capacity)

    @classmethod
    def build(cls, setting: DrafterSetting) -> Self:
        """Return the drafter of an engine. Imports numba, which vLLM must come before."""
        from kernels.suffix_index import SuffixIndex, warm_up

        config = setting.config
        warm_up()
        return cls(
            SuffixIndex(max_tokens=config.draft_index_tokens, floor=config.survival_floor),
            capacity=config.draft_index_tokens,
            tokens_per_step=config.draft_index_step_tokens,
            metrics=SuffixMetrics(setting.registry),
            lacked=setting.lacked,
        )

    def begin(self, context: DraftContext) -> None:
        """Open a text for the sample; its response is appended with the first proposal."""
        prompt = _prompt_name(context)
        name: Name = (context.seed, context.version)
        if not context.run_id or self._index.has(prompt, name):
            # A rollout of this name is indexed or still growing, so this is another attempt.
            name = context.sample_id
        try:
            self._index.put_prompt(prompt, np.asarray(context.prompt, np.int32))
            handle = self._index.open(prompt, name, context.version)
        except ValueError:
            # No room in addition to all running samples: this one gets no proposals.
            self._without_room.add(context.sample_id)
            self._refuse(RefusedText.SAMPLE, 1, len(context.prompt))
            return
        self._samples[context.sample_id] = _Sample(handle, prompt)
        self._without_room.discard(context.sample_id)
        self._running[prompt] += 1
        self._queue(self._early.pop_prompt((context.run_id, context.prompt_id)))

    def add_rollouts(self, arrival: NewRollouts) -> None:
        """Queue rollouts to be indexed."""
        self._queue(arrival.rollouts)

    def propose(self, samples: Samples, window: int, others: ProposalsByName) -> Proposals | None:
        """Return the continuation that the index predicts for each sample."""
        self._absorb(self._tokens_per_step)
        known = [self._samples.get(state.sample_id) for state in samples]
        asked = ~well_served(list(others.values()), rooms(samples), window)
        taking: list[_Sample] = []
        news: list[Sequence[int]] = []
        for state, sample in zip(samples, known, strict=True):
            if sample is None:
                continue
            taking.append(sample)
            news.append(state.response[sample.taken :])
            sample.taken = len(state.response)
        if len(taking) < len(known):
            asked = asked[[sample is not None for sample in known]]
        found = self._step(taking, news, window, self.alternatives, asked) if taking else None
        if self._full and (lacking := self._lacking(samples, taking)):
            self._lacked(lacking)
        if found is None or not found.counts.any():
            return None
        all_known = len(found.counts) == len(known)
        rows = None if all_known else [i for i, sample in enumerate(known) if sample is not None]
        return self.proposals(found, rows, len(known))

    def proposals(self, found: Continuations, rows: Sequence[int] | None, count: int) -> Proposals:
        """Return proposals for `count` samples, of which the ones at `rows` have continuations; None: all have."""
        tokens = spread(found.tokens, rows, count, np.int32)
        return Proposals(tokens, spread(found.shares, rows, count, np.float64))

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        """Append the tokens of the last step, and keep the text for later samples."""
        sample = self._samples.pop(sample_id, None)
        if sample is None:
            if sample_id in self._without_room:
                self._without_room.remove(sample_id)
                self._refuse(RefusedText.SAMPLE, 0, len(response))
            return
        if rest := response[sample.taken :]:
            self._step([sample], [rest], 1)
        self._index.close(sample.handle)
        self._running[sample.prompt] -= 1
        if not self._running[sample.prompt]:
            del self._running[sample.prompt]

    def idle_work(self) -> bool:
        """Index as many queued rollouts as a step would; return True if there are more."""
        self._absorb(self._tokens_per_step)
        return bool(self._waiting)

    def _step(
        self,
        samples: Sequence[_Sample],
        news: Sequence[Sequence[int]],
        window: int,
        alternatives: int = 0,
        asked: Bools | None = None,
    ) -> Continuations:
        """Append new tokens to growing texts, and return predicted continuations of the `asked` ones; None: all."""
        began = self._clock()
        handles = np.fromiter((sample.handle for sample in samples), np.int64, len(samples))
        cu = np.zeros(len(news) + 1, np.int64)
        np.cumsum([len(each) for each in news], out=cu[1:])
        tokens = np.fromiter(chain.from_iterable(news), np.int32, int(cu[-1]))
        found = self._index.step(handles, tokens, cu, window, alternatives, asked)
        refused = self._halt(samples, self._index.halted(handles), cu)
        self._built("step", began, len(tokens) - refused)
        return found

    def _halt(self, samples: Sequence[_Sample], halted: NDArray[np.bool_], cu: NDArray[np.int64]) -> int:
        """Note which samples are halted; return how many of their new tokens, by `cu`, were not indexed."""
        if not halted.any():
            return 0
        texts = sum(not samples[i].halted for i in np.flatnonzero(halted))
        for i in np.flatnonzero(halted):
            samples[i].halted = True
        tokens = int(np.diff(cu)[halted].sum())
        self._refuse(RefusedText.HALTED, texts, tokens)
        return tokens

    def _absorb(self, budget: int) -> None:
        """Index queued rollouts, at least one, until `budget` tokens are reached."""
        if not self._waiting:
            return
        began, tokens = self._clock(), 0
        while self._waiting and tokens < budget:
            tokens += self._insert(self._waiting.pop())
        self._built("insert", began, tokens)

    def _insert(self, rollout: StoredRollout) -> int:
        """Index a rollout unless it is there; return the number of tokens indexed."""
        prompt, name = (rollout.run_id, rollout.prompt_id), (rollout.seed, rollout.version)
        if not self._running[prompt]:
            self._early.push(rollout)
            return 0
        if self._index.has(prompt, name):
            return 0
        try:
            self._index.insert(prompt, name, rollout.version, rollout.tokens.astype(np.int32))
        except ValueError:
            # No room for it in addition to all running samples.
            self._refuse(RefusedText.ROLLOUT, 1, len(rollout.tokens))
            return 0
        return len(rollout.tokens)

    def _queue(self, rollouts: Sequence[StoredRollout]) -> None:
        """Queue rollouts of known prompts to be indexed."""
        for rollout in rollouts:
            if dropped := self._waiting.push(rollout):
                self._refuse(RefusedText.ROLLOUT, len(dropped), sum(len(each.tokens) for each in dropped))

    def _lacking(self, samples: Samples, texts: Sequence[_Sample]) -> int:
        """Return how many samples of a step, of which some have `texts`, get nothing for want of room."""
        refused = sum(state.sample_id in self._without_room for state in samples)
        return refused + sum(text.halted for text in texts)

    def _refuse(self, text: RefusedText, texts: int, tokens: int) -> None:
        """Count what has no room; the first time, say so in the log."""
        if self._metrics is not None:
            self._metrics.refused(text, texts, tokens)
        if not self._full:
            self._full = True
            _log.warning(
                "suffix_index_full",
                text=text.value,
                tokens=tokens,
                samples=len(self._samples),
                setting="draft_index_tokens",
            )

    def _built(self, phase: str, began: float, tokens: int) -> None:
        if self._metrics is not None:
            self._metrics.indexed(phase, self._clock() - began, tokens)


def spread(found: NDArray[Any], rows: Sequence[int] | None, count: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return an array of `count` rows with the found ones at the places `rows`; None: they are all rows."""
    if rows is None:
        return found.astype(dtype, copy=False)
    spread = np.zeros((count, found.shape[1]), dtype)
    spread[rows] = found
    return spread


def _prompt_name(context: DraftContext) -> Name:
    """Return the name of a prompt in the index; a hash of its tokens if it has no name."""
    if context.prompt_id:
        return (context.run_id, context.prompt_id)
    return blake2b(np.asarray(context.prompt, np.int32).tobytes(), digest_size=16).hexdigest()


def _new_index(capacity: int) -> SuffixIndex:
    from kernels.suffix_index import SuffixIndex

    return SuffixIndex(max_tokens=capacity)
