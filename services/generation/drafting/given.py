"""The `given` drafter: a guess of a whole response, such as the pre-generated rollout of the sample's own seed.

The sequence is position-aligned: with shared noise, its token at a position is what the target samples there
too, most of the time. After a mismatch it is not thrown away: it is realigned where the latest tokens of the
sample occur in it near the current place, and else followed at the same offset, where the noise is still
coupled, with a lower prediction until tokens match again.

How likely its next token is depends on how long ago the last one mismatched; that is learned by comparing every
token of every response with its sequence, whether it was offered or not, for each source apart.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.generation.drafting.acceptance import AcceptanceTable
from services.generation.drafting.drafter import Arrival, DraftContext, Offers
from services.generation.engine.types import SampleState

# Tokens that must match for a realignment, and how far from the current place it is looked for. Fewer tokens
# find places that only look alike; further away the text is about something else.
_ANCHOR = 4
_REACH = 64
# Matches in a row of a sequence that has never mismatched; a bucket of its own, and above all counts.
_UNBROKEN = 1 << 40
# First match count of each bucket, and its acceptance before anything was seen: text that diverged once and is
# finding its way back.
_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, _UNBROKEN)
_PRIORS = (0.35, 0.55, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.96, 0.96, 0.96)
# The bucket of each match count below the last wide one, and of as many more as a draft can have tokens.
_RAMP = [bisect_right(_BUCKETS, matched) - 1 for matched in range(_BUCKETS[-2] + 256)]
_FAR = _BUCKETS[-2]
_RAMP_INDEX = np.array(_RAMP)
# Of what was learned under the policy before, so much counts under the next.
_KNOWN_OF_OLD = 0.5

# Of an alignment that is carried along: length of the sequence, offset, seen, matched.
_STATE = struct.Struct("<4q")


@dataclass(slots=True)
class _Alignment:
    """How a sample lies along its given sequence: response position p is compared with given[p + offset]."""

    given: list[int]
    source: str
    tokens: NDArray[np.int32] = field(init=False)
    """The same as `given`: one is faster to compare with, the other to offer from."""
    offset: int = 0
    # Response tokens compared so far, and how many of the latest matched in a row.
    seen: int = 0
    matched: int = _UNBROKEN

    def __post_init__(self) -> None:
        self.tokens = np.asarray(self.given, np.int32)

    def state(self) -> bytes:
        """All but the sequence."""
        return _STATE.pack(len(self.given), self.offset, self.seen, self.matched)

    def go_on(self, state: bytes) -> None:
        """Reads `state`; that of another sequence says nothing here. struct.error when it is none."""
        length, offset, seen, matched = _STATE.unpack(state)
        if length == len(self.given):
            self.offset, self.seen, self.matched = offset, seen, matched


class GivenDrafter:
    """Follows each sample's given sequence."""

    name = "given"

    def __init__(self) -> None:
        self._alignments: dict[str, _Alignment] = {}
        self._tables: dict[str, AcceptanceTable] = {}
        # The newest policy version that a sample came with.
        self._version = 0

    def begin(self, context: DraftContext) -> None:
        """Take the given sequence of a sample, where it has one."""
        if context.version > self._version:
            self._version = context.version
            for table in self._tables.values():
                table.fade(_KNOWN_OF_OLD)
        if len(context.given):
            self._follow_from_start(context.sample_id, list(context.given), context.source)
            if state := context.carried.get(self.name):
                self._alignments[context.sample_id].go_on(state)

    def carry(self, sample_id: str) -> bytes:
        """Where a sample lies along its sequence."""
        alignment = self._alignments.get(sample_id)
        return b"" if alignment is None else alignment.state()

    def adopt(self, arrival: Arrival) -> None:
        """Take sequences that came late; what there is of the response is compared with the next offer."""
        for sample_id, rollout in arrival.given.items():
            self._follow_from_start(sample_id, rollout.tokens.tolist(), rollout.kind.value)

    def offer(self, samples: Sequence[SampleState], window: int) -> Offers | None:
        """The next tokens of each sample's given sequence."""
        if not self._alignments:
            return None
        # What all samples' tokens say of the tables comes first: to ask these takes longer than to tell them.
        followed = [self._compared(sample) for sample in samples]
        tokens = np.zeros((len(samples), window), np.int32)
        counts = np.zeros(len(samples), np.int64)
        matched = np.zeros(len(samples), np.int64)
        by_source: dict[str, list[int]] = {}
        for i, alignment in enumerate(followed):
            if alignment is None or (begin := alignment.seen + alignment.offset) < 0:
                continue
            ahead = alignment.tokens[begin : begin + window]
            if count := len(ahead):
                tokens[i, :count] = ahead
                counts[i], matched[i] = count, alignment.matched
                by_source.setdefault(alignment.source, []).append(i)
        if not by_source:
            return None
        buckets = _buckets(matched, window)
        acceptance = np.zeros((len(samples), window))
        sources = [""] * len(samples)
        for source, places in by_source.items():
            acceptance[places] = self._tables[source].probabilities[buckets[places]]
            for i in places:
                sources[i] = source
        acceptance[np.arange(window) >= counts[:, None]] = 0.0
        return Offers(tokens, acceptance, sources)

    def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
        """Nothing: the next offer sees the tokens themselves."""

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        """Forget the sequence."""
        self._alignments.pop(sample_id, None)

    def tend(self) -> bool:
        """Nothing to do."""
        return False

    def _follow_from_start(self, sample_id: str, given: list[int], source: str) -> None:
        self._alignments[sample_id] = _Alignment(given, source)
        if source not in self._tables:
            self._tables[source] = AcceptanceTable(_PRIORS)

    def _compared(self, sample: SampleState) -> _Alignment | None:
        """How a sample lies along its sequence, its latest tokens included."""
        alignment = self._alignments.get(sample.sample_id)
        if alignment is not None and alignment.seen != len(sample.response):
            _compare(alignment, sample.response, self._tables[alignment.source])
        return alignment


def _compare(alignment: _Alignment, response: Sequence[int], table: AcceptanceTable) -> None:
    """Compare the tokens that are new since the last call, and realign when the latest one mismatched."""
    begin, end = alignment.seen, len(response)
    alignment.seen = end
    given, offset = alignment.given, alignment.offset
    news = response[begin:end]
    if begin + offset >= 0 and given[begin + offset : end + offset] == news:
        _observe_run(table, alignment.matched, end - begin)
        alignment.matched += end - begin
        return
    for position in range(begin, min(end, len(given) - offset)):
        place = position + offset
        # Outside of the sequence there is nothing that could have matched: that says nothing of it.
        if place >= 0:
            same = given[place] == response[position]
            table.observe(_bucket(alignment.matched), 1, int(same))
            alignment.matched = alignment.matched + 1 if same else 0
    if end + offset > len(given):
        alignment.matched = 0
    if alignment.matched == 0 and end >= _ANCHOR:
        _realign(alignment, response)


def _observe_run(table: AcceptanceTable, matched: int, count: int) -> None:
    """Count tokens that matched in a row, after `matched` that did before."""
    while count > 0:
        bucket = _bucket(matched)
        within = count if bucket + 1 >= len(_BUCKETS) else min(count, _BUCKETS[bucket + 1] - matched)
        table.observe(bucket, within, within)
        matched += within
        count -= within


def _bucket(matched: int) -> int:
    return len(_BUCKETS) - 1 if matched >= _UNBROKEN else _RAMP[min(matched, _FAR)]


def _buckets(matched: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """For the next tokens of each sample, [n, window], the bucket of each if all before it match."""
    # Behind the last wide bucket's beginning all are of it.
    buckets = _RAMP_INDEX[np.minimum(matched, _FAR)[:, None] + np.arange(window)]
    buckets[matched >= _UNBROKEN] = len(_BUCKETS) - 1
    return buckets


def _realign(alignment: _Alignment, response: Sequence[int]) -> None:
    """Move to the place nearest the current one where the last tokens of the response occur."""
    given, here = alignment.given, len(response) + alignment.offset
    anchor = list(response[-_ANCHOR:])
    best: int | None = None
    for end in _ends_with(given, anchor[-1], here - _REACH + 1, here + _REACH):
        nearer = best is None or (abs(end - here), here - end) < (abs(best - here), here - best)
        if nearer and end != here and given[end - _ANCHOR : end] == anchor:
            best = end
    if best is not None:
        alignment.offset = best - len(response)
        alignment.matched = _ANCHOR


def _ends_with(given: list[int], token: int, low: int, high: int) -> Iterator[int]:
    """The lengths in [low, high), at least `_ANCHOR`, of beginnings of `given` that end in `token`."""
    place = max(low, _ANCHOR) - 1
    # The list's own search: this runs for every sample that has lost its place, in every step.
    while True:
        try:
            place = given.index(token, place, max(high - 1, 0)) + 1
        except ValueError:
            return
        yield place
