"""The `suffix` drafter: what followed, in all known rollouts of the prompt, a text that ends like this one.

All samples of an instance share one index. A running sample is a growing text in it, so that samples of a group
draft from each other, and stays there when it has ended. Rollouts from elsewhere wait in a queue of which a part
is put in with each step, so that decoding never waits for the index, and the rest while the engine idles. Nothing
is ever taken out by name, nor a prompt put in after its rollouts: then all of it would have to be built anew.

How likely an offered token is kept is the index's own estimate: it compares every offer with how the text went on,
verified or not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from services.drafts.rollout import Rollout
from services.generation.drafting.backlog import Backlog
from services.generation.drafting.drafter import Arrival, DraftContext, Offers
from services.generation.engine.types import SampleState

if TYPE_CHECKING:
    from services.drafts.index import Name
    from services.drafts.index import Offers as Found

# Tokens that the index holds by default, and that may wait for it.
_CAPACITY = 4_000_000
# Tokens of waiting rollouts that are put in with a step by default: a fraction of a millisecond.
_TOKENS_PER_STEP = 4096


class Index(Protocol):
    """What is used of `services.drafts.index.SuffixIndex`."""

    def has(self, prompt: Name, rollout: Name) -> bool: ...
    def put_prompt(self, prompt: Name, tokens: npt.ArrayLike) -> None: ...
    def insert(self, prompt: Name, rollout: Name, version: int, tokens: npt.ArrayLike) -> None: ...
    def open(self, prompt: Name, rollout: Name, version: int) -> int: ...
    def close(self, handle: int, *, keep: bool = True) -> None: ...
    def step(
        self,
        handles: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int32],
        cu: npt.NDArray[np.int64],
        window: int,
    ) -> Found: ...


class BuildMetrics(Protocol):
    """Where the cost of the index is counted: `insert` of rollouts, `step` of running samples and their offers."""

    def indexed(self, phase: str, seconds: float, tokens: int) -> None: ...


@dataclass(slots=True)
class _Sample:
    """A growing text: its handle, its prompt, and response tokens taken over into it."""

    handle: int
    prompt: Name
    taken: int = 0


class SuffixDrafter:
    """Repeats what followed in other rollouts of the prompt, and earlier in the sample's own."""

    name = "suffix"

    def __init__(
        self,
        index: Index | None = None,
        *,
        capacity: int = _CAPACITY,
        tokens_per_step: int = _TOKENS_PER_STEP,
        metrics: BuildMetrics | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            index: empty; without one, one for `capacity` tokens is made, which imports numba.
            capacity: tokens that may wait for the index; the oldest rollouts beyond are left out.
            tokens_per_step: tokens of waiting rollouts that are put in with a step.
            metrics: where the cost is counted.
            clock: seconds.
        """
        self._index = _new_index(capacity) if index is None else index
        self._tokens_per_step = tokens_per_step
        self._metrics = metrics
        self._clock = clock
        self._samples: dict[str, _Sample] = {}
        # Running samples by prompt.
        self._running: Counter[Name] = Counter()
        # Rollouts for the index; and those whose prompt has no sample here, which it must have first.
        self._waiting = Backlog(capacity)
        self._early = Backlog(capacity)

    def begin(self, context: DraftContext) -> None:
        """Open a text for the sample; its response follows with the first offer."""
        prompt = _prompt_name(context)
        name: Name = (context.seed, context.version)
        if not context.run_id or self._index.has(prompt, name):
            # Its rollout is there already, or is growing: this is another attempt.
            name = context.sample_id
        try:
            self._index.put_prompt(prompt, np.asarray(context.prompt, np.int32))
            handle = self._index.open(prompt, name, context.version)
        except ValueError:
            # There is no room beside all that is running: the sample goes without.
            return
        self._samples[context.sample_id] = _Sample(handle, prompt)
        self._running[prompt] += 1
        for rollout in self._early.pop_prompt((context.run_id, context.prompt_id)):
            self._waiting.push(rollout)

    def adopt(self, arrival: Arrival) -> None:
        """Queue rollouts for the index."""
        for rollout in arrival.rollouts:
            self._waiting.push(rollout)

    def offer(self, samples: Sequence[SampleState], window: int) -> Offers | None:
        """For each sample, how the index says that it goes on."""
        self._absorb(self._tokens_per_step)
        known = [self._samples.get(state.sample_id) for state in samples]
        taking: list[_Sample] = []
        news: list[Sequence[int]] = []
        for state, sample in zip(samples, known, strict=True):
            if sample is None:
                continue
            taking.append(sample)
            news.append(state.response[sample.taken :])
            sample.taken = len(state.response)
        return _offers(known, self._step(taking, news, window)) if taking else None

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        """Nothing: the next offer sees the tokens themselves."""

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        """Keep the text for the samples to come, with the tokens of the last step."""
        sample = self._samples.pop(sample_id, None)
        if sample is None:
            return
        if rest := response[sample.taken :]:
            self._step([sample], [rest], 1)
        self._index.close(sample.handle)
        self._running[sample.prompt] -= 1
        if not self._running[sample.prompt]:
            del self._running[sample.prompt]

    def tend(self) -> bool:
        """Put one step's worth of waiting rollouts into the index."""
        self._absorb(self._tokens_per_step)
        return bool(self._waiting)

    def _step(self, samples: Sequence[_Sample], news: Sequence[Sequence[int]], window: int) -> Found:
        """Append new tokens to growing texts, and ask how they may go on."""
        began = self._clock()
        handles = np.fromiter((sample.handle for sample in samples), np.int64, len(samples))
        cu = np.zeros(len(news) + 1, np.int64)
        np.cumsum([len(each) for each in news], out=cu[1:])
        tokens = np.fromiter(chain.from_iterable(news), np.int32, int(cu[-1]))
        offers = self._index.step(handles, tokens, cu, window)
        self._built("step", began, len(tokens))
        return offers

    def _absorb(self, budget: int) -> None:
        """Put waiting rollouts in until `budget` tokens were; at least one, as long as it may be."""
        if not self._waiting:
            return
        began, tokens = self._clock(), 0
        while self._waiting and tokens < budget:
            tokens += self._insert(self._waiting.pop())
        self._built("insert", began, tokens)

    def _insert(self, rollout: Rollout) -> int:
        """Put a rollout in, unless it is there; the tokens that this brought."""
        prompt, name = (rollout.run_id, rollout.prompt_id), (rollout.seed, rollout.version)
        if not self._running[prompt]:
            self._early.push(rollout)
            return 0
        if self._index.has(prompt, name):
            return 0
        try:
            self._index.insert(prompt, name, rollout.version, rollout.tokens.astype(np.int32))
        except ValueError:
            # There is no room for it beside all that is running.
            return 0
        return len(rollout.tokens)

    def _built(self, phase: str, began: float, tokens: int) -> None:
        if self._metrics is not None:
            self._metrics.indexed(phase, self._clock() - began, tokens)


def _offers(known: Sequence[_Sample | None], found: Found) -> Offers | None:
    """The offers in the order of `known`, of which `found` has a row for each sample."""
    if not found.counts.any():
        return None
    if len(found.counts) == len(known):
        return Offers(found.tokens, found.shares.astype(np.float64))
    rows = [i for i, sample in enumerate(known) if sample is not None]
    shape = (len(known), found.tokens.shape[1])
    offers = Offers(np.zeros(shape, np.int32), np.zeros(shape))
    offers.tokens[rows], offers.acceptance[rows] = found.tokens, found.shares
    return offers


def _prompt_name(context: DraftContext) -> Name:
    """A prompt without a name is known by its tokens."""
    if context.prompt_id:
        return (context.run_id, context.prompt_id)
    return blake2b(np.asarray(context.prompt, np.int32).tobytes(), digest_size=16).hexdigest()


def _new_index(capacity: int) -> Index:
    from services.drafts.index import SuffixIndex

    return SuffixIndex(max_tokens=capacity)
