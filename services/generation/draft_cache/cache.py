"""Cache of rollouts on an instance, and the rules by which samples may reuse them. Pure: no clock, no I/O.

A group whose rollouts have become alike teaches little, and reusing them keeps them alike. Below a floor of
diversity part of the samples is therefore generated again: the share that reuses its cached rollout falls linearly
from all samples at the floor to none where all rollouts are equal. A uniform number keyed by the sample's seed
selects these samples, so the choice is the same on every instance, and differs between steps.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.contracts.rollout import RolloutKind, StoredRollout
from services.generation.draft_cache.origin import Origin, PromptKey
from services.generation.engine.sampling.inputs import RecordedTokens
from services.platform.observability.metrics import MetricSet, counter, gauge, histogram

_FETCH_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
NGRAM = 4
"""Tokens of an n-gram: long enough that unlike texts share few, short enough that paraphrases share some."""
_PERSON = b"paceline-diverse"
# Odd 64-bit constants (fractions of square roots of primes): they make one integer of an n-gram. Two unlike
# n-grams of a group get the same one with a probability of about 2**-64.
_MIX = np.array(
    [0x6A09E667F3BCC909, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1], dtype=np.uint64
)
ROLLOUT_OVERHEAD = 512
"""Bytes charged for a rollout in addition to its arrays."""
PROMPT_OVERHEAD = 512
"""Bytes charged for a prompt, with or without rollouts."""


class RolloutMetrics(MetricSet, prefix="paceline_drafts_"):
    """Metrics of fetching and caching rollouts."""

    fetch_seconds = histogram("fetch_seconds", "Time of a fetch of rollouts.", _FETCH_BUCKETS)
    fetch_failures = counter("fetch_failures_total", "Fetches that the draft store did not answer in full.")
    fetched_rollouts = counter("fetched_rollouts_total", "Rollouts fetched.")
    fetched_tokens = counter("fetched_tokens_total", "Tokens of fetched rollouts.")
    waits_expired = counter(
        "waits_expired_total", "Lenient samples that stopped waiting for their cached rollouts."
    )
    cache_bytes = gauge("cache_bytes", "Rollouts held in memory.")

    def fetched(self, seconds: float, rollouts: int, tokens: int) -> None:
        """Count a fetch that was answered."""
        self.fetch_seconds.observe(seconds)
        self.fetched_rollouts.inc(rollouts)
        self.fetched_tokens.inc(tokens)


def distinct_share(rollouts: Sequence[Sequence[int]]) -> float:
    """Return the share of distinct n-grams in all n-grams of the rollouts, in (0, 1].

    Repetitions within a rollout count once, so 1 means that no two rollouts share an n-gram, and 1 / len(rollouts)
    that all are equal. Empty rollouts are ignored; if all are empty it is 1.
    """
    grams = [_ngrams(rollout) for rollout in rollouts if len(rollout)]
    total = sum(len(each) for each in grams)
    if total == 0:
        return 1.0
    return len(np.unique(np.concatenate(grams))) / total


def keep(seed: int, distinct: float, floor: float) -> bool:
    """Return True if the sample with this seed reuses its cached rollout.

    It does with probability distinct / floor, at most 1; `floor` is in (0, 1].
    """
    return _uniform(seed) * floor < distinct


def reuse_allowed(rollouts: Sequence[Sequence[int]], floor: float, seed: int) -> bool:
    """Return True if a sample may reuse its cached rollout, by the cached rollouts of its whole group (token ids).

    ValueError when `floor` is not in (0, 1].
    """
    if not 0 < floor <= 1:
        raise ValueError(f"the diversity floor must be in (0, 1], got {floor}")
    return keep(seed, distinct_share(rollouts), floor)


def _ngrams(rollout: Sequence[int]) -> NDArray[np.uint64]:
    """Return the distinct n-grams of one rollout, each as an integer; a shorter rollout is one n-gram."""
    # 1 is added because padding is 0.
    tokens = np.asarray(rollout, dtype=np.uint64) + np.uint64(1)
    if len(tokens) < NGRAM:
        tokens = np.pad(tokens, (0, NGRAM - len(tokens)))
    windows = np.lib.stride_tricks.sliding_window_view(tokens, NGRAM)
    # Products and sums are meant to wrap around.
    mixed: NDArray[np.uint64] = (windows * _MIX).sum(axis=1, dtype=np.uint64)
    return np.unique(mixed)


def _uniform(seed: int) -> float:
    """Return a number in [0, 1) with 53 bits, a function of the seed that nothing else uses."""
    digest = hashlib.blake2b(struct.pack("<Q", seed), digest_size=8, person=_PERSON).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


class ShardQuery(NamedTuple):
    """Query to the store: a prompt's rollouts for a step, `whole` or without history that is covered."""

    step: int
    whole: bool = True


Shards = Mapping[PromptKey, tuple[ShardQuery | None, Sequence[StoredRollout]]]
"""Rollouts of some prompts from the store: for each prompt, the query that they answer, and all rollouts.
None instead of the query: there may be more, which did not arrive."""

_Name = tuple[int, RolloutKind, int | None, int]


@dataclass(slots=True)
class _Prompt:
    """Rollouts of a prompt by slot, kind, version of HISTORY, and fork."""

    rollouts: dict[_Name, StoredRollout] = field(default_factory=dict)
    # Last query to the store; None before the first.
    fetched_for: ShardQuery | None = None
    # Record of the pre-generated rollouts, until they change.
    recorded: RecordedTokens | None = None


class DraftCache:
    """Rollouts by prompt, bounded in bytes; the prompt that was used least recently is dropped first.

    Used by the engine thread. `fetched_for` may be called from other threads, because it only reads.
    """

    def __init__(self, vocab_size: int, budget_bytes: int) -> None:
        """Begin empty. Rollouts with tokens outside of `vocab_size` are of another model, and are not added."""
        self._vocab_size = vocab_size
        self._budget = budget_bytes
        self._prompts: OrderedDict[PromptKey, _Prompt] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._prompts)

    def fetched_for(self, prompt: PromptKey) -> ShardQuery | None:
        """Return the query that last fetched the rollouts of a prompt; None if they are not cached."""
        known = self._prompts.get(prompt)
        return None if known is None else known.fetched_for

    def add(self, rollouts: Iterable[StoredRollout]) -> list[StoredRollout]:
        """Add rollouts; return the ones with new tokens.

        History replaces history of the same version; a pre-generated rollout replaces one of an earlier step or a
        shorter one. Unsound rollouts are left out.
        """
        taken = [rollout for rollout in rollouts if self._is_sound(rollout) and self._add(rollout)]
        self._shrink()
        return taken

    def add_shards(self, shards: Shards) -> list[StoredRollout]:
        """Add the store's rollouts of some prompts; return the sound ones, cached before or not.

        Where they are complete, other history, and rollouts pre-generated for an earlier step, are forgotten.
        """
        sound: list[StoredRollout] = []
        for key, (query, rollouts) in shards.items():
            prompt = self._prompt(key)
            if query is not None:
                self._forget_others(prompt, {_name(rollout) for rollout in rollouts}, query.step)
                prompt.fetched_for = query
            taken = [rollout for rollout in rollouts if self._is_sound(rollout)]
            for rollout in taken:
                self._add(rollout)
            sound += taken
        self._shrink()
        return sound

    def same_seed(self, origin: Origin, seed: int, version: int | None = None) -> StoredRollout | None:
        """Return the best of the rollouts made with a sample's own noise, by this policy version or by any."""
        found = [
            rollout
            for rollout in self.all(origin.prompt)
            if (rollout.seed, rollout.slot) == (seed, origin.slot)
            and version in (None, rollout.version)
            and not rollout.fork
        ]
        best: StoredRollout | None = None
        for rollout in sorted(found, key=_age):
            if best is None or is_better(rollout, best):
                best = rollout
        return best

    def forks(self, origin: Origin, seed: int) -> list[StoredRollout]:
        """Return the forks of a sample's pre-generated rollout, the earliest near-tie first."""
        found = [
            rollout
            for rollout in self.all(origin.prompt)
            if rollout.fork and (rollout.seed, rollout.slot) == (seed, origin.slot)
        ]
        return sorted(found, key=lambda rollout: rollout.fork)

    def of_slot(self, origin: Origin, delay: int = 0) -> StoredRollout | None:
        """Return the newest history of a sample's slot, or the `delay`-th version before it, if there is one."""
        return _older([each for each in self.all(origin.prompt) if each.slot == origin.slot], delay)

    def group(self, origin: Origin, delay: int = 0) -> list[StoredRollout]:
        """Return `of_slot` for every slot of a sample's group."""
        slots: dict[int, list[StoredRollout]] = {}
        for rollout in self.all(origin.prompt):
            slots.setdefault(rollout.slot, []).append(rollout)
        found = (_older(rollouts, delay) for rollouts in slots.values())
        return [rollout for rollout in found if rollout is not None]

    def recorded(self, origin: Origin, prompt: Sequence[int]) -> RecordedTokens | None:
        """Return the record of the pre-generated rollouts of a sample's prompt; None where there are none."""
        known = None if origin.prompt is None else self._prompts.get(origin.prompt)
        if known is None:
            return None
        if known.recorded is None:
            made = (each for each in known.rollouts.values() if each.kind is RolloutKind.PREGENERATED)
            whole = [(each.tokens, each.logprobs) for each in made if has_logprobs(each)]
            if not whole:
                return None
            known.recorded = RecordedTokens.of(prompt, whole)
            self.nbytes += known.recorded.nbytes
        return known.recorded

    def all(self, prompt: PromptKey | None) -> list[StoredRollout]:
        """Return every rollout of a prompt."""
        known = None if prompt is None else self._prompts.get(prompt)
        if prompt is None or known is None:
            return []
        self._prompts.move_to_end(prompt)
        return list(known.rollouts.values())

    def _is_sound(self, rollout: StoredRollout) -> bool:
        named = rollout.run_id and rollout.prompt_id and len(rollout.tokens)
        whole = len(rollout.logprobs) in (0, len(rollout.tokens))
        return bool(named and whole and int(rollout.tokens.max()) < self._vocab_size)

    def _forget_others(self, prompt: _Prompt, names: set[_Name], step: int) -> None:
        """Forget rollouts that the store does not have for a step."""
        for name, rollout in list(prompt.rollouts.items()):
            if name not in names and (rollout.kind is RolloutKind.HISTORY or rollout.step < step):
                self._drop(prompt, name)

    def _add(self, rollout: StoredRollout) -> bool:
        prompt = self._prompt((rollout.run_id, rollout.prompt_id))
        name = _name(rollout)
        known = prompt.rollouts.get(name)
        if known is not None:
            if rollout.kind is RolloutKind.PREGENERATED and _rank(known) >= _rank(rollout):
                return False
            self._drop(prompt, name)
        prompt.rollouts[name] = rollout
        self._forget_record(prompt)
        self.nbytes += rollout.nbytes + ROLLOUT_OVERHEAD
        return known is None or not np.array_equal(known.tokens, rollout.tokens)

    def _drop(self, prompt: _Prompt, name: _Name) -> None:
        self.nbytes -= prompt.rollouts.pop(name).nbytes + ROLLOUT_OVERHEAD
        self._forget_record(prompt)

    def _forget_record(self, prompt: _Prompt) -> None:
        if prompt.recorded is not None:
            self.nbytes -= prompt.recorded.nbytes
            prompt.recorded = None

    def _prompt(self, key: PromptKey) -> _Prompt:
        known = self._prompts.get(key)
        if known is None:
            known = self._prompts[key] = _Prompt()
            self.nbytes += PROMPT_OVERHEAD
        self._prompts.move_to_end(key)
        return known

    def _shrink(self) -> None:
        while self.nbytes > self._budget:
            _, prompt = self._prompts.popitem(last=False)
            for name in list(prompt.rollouts):
                self._drop(prompt, name)
            self.nbytes -= PROMPT_OVERHEAD


def _name(rollout: StoredRollout) -> _Name:
    version = rollout.version if rollout.kind is RolloutKind.HISTORY else None
    return (rollout.slot, rollout.kind, version, rollout.fork)


def _rank(rollout: StoredRollout) -> tuple[int, int, int]:
    """Return the sort key of usefulness: a later step, then more tokens, then a newer policy."""
    return (rollout.step, len(rollout.tokens), rollout.version)


def _older(rollouts: Sequence[StoredRollout], delay: int) -> StoredRollout | None:
    history = [rollout for rollout in rollouts if rollout.kind is RolloutKind.HISTORY]
    history.sort(key=lambda rollout: rollout.version, reverse=True)
    return history[delay] if delay < len(history) else None


def reusable(
    cache: DraftCache, origin: Origin, seed: int, delay: int = 0, diversity_floor: float | None = None
) -> StoredRollout | None:
    """Return the rollout that a sample may take over, if there is one.

    Args:
        cache: searched for the slot's history; pre-generated rollouts are not samples of any step.
        origin: of the sample.
        seed: of the sample; it decides which samples of a group with too little diversity reuse.
        delay: number of newer versions of the slot's history that are skipped.
        diversity_floor: least share of distinct n-grams in the group's cached rollouts; None: any.
    """
    rollout = cache.of_slot(origin, delay)
    if rollout is None or not has_logprobs(rollout):
        return None
    if diversity_floor is not None:
        group = [each.tokens.tolist() for each in cache.group(origin, delay)]
        if not reuse_allowed(group, diversity_floor, seed):
            return None
    return rollout


def has_logprobs(rollout: StoredRollout) -> bool:
    """Return True if the rollout has a log-probability for each of its tokens."""
    logprobs = rollout.logprobs
    return len(logprobs) == len(rollout.tokens) and bool(np.all(np.isfinite(logprobs) & (logprobs <= 0)))


def is_better(new: StoredRollout, old: StoredRollout) -> bool:
    """Return True if a sample of the same seed should follow `new`: it is newer, and not a mere beginning."""
    return _age(new) > _age(old) and (new.finished or len(new.tokens) >= len(old.tokens))


def _age(rollout: StoredRollout) -> tuple[int, int]:
    return rollout.version, len(rollout.tokens)


def agreement(rollout: StoredRollout, response: Sequence[int]) -> int:
    """Return how many leading tokens a response shares with a rollout."""
    length = min(len(rollout.tokens), len(response))
    differs = rollout.tokens[:length] != np.asarray(response[:length], np.int64)
    return int(differs.argmax()) if differs.any() else length
