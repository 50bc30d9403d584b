"""Build the plan's views of instances, and estimate remaining response lengths from listed samples. Pure."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from math import expm1, log

import numpy as np
from numpy.typing import NDArray

from paceline.internal.v1 import migration_pb2 as pb
from services.reallocator.planning.records import Candidate, InstanceView
from services.reallocator.planning.throughput import Roofline

# Factor between the edges of bins, the first edge in tokens, and the number of bins.
_GRID, _SHORTEST, _BINS = 1.3, 8.0, 48
# Weight of the prior in endings, and the endings at which a bin is halved, so that old ones fade.
_PRIOR, _MEMORY = 2.0, 64.0


class RemainingLengthEstimator:
    """Estimator of remaining response tokens for the samples of one model, from censored observations.

    Two listings of an instance show which samples have grown and which have ended. The estimator keeps a discrete
    hazard over response length: endings per generated token, in bins that grow by a factor of 1.3. The prior is
    heavy-tailed: a Pareto distribution with index 2, whose expected remaining length equals the present length.
    """

    def __init__(self) -> None:
        self._ended: NDArray[np.float64] = np.zeros(_BINS)
        # Tokens that samples have generated in each bin of lengths.
        self._lived: NDArray[np.float64] = np.zeros(_BINS)
        self._listed: dict[Hashable, dict[Hashable, int]] = {}
        # Limit -> expected remaining tokens at the beginning of each bin, until something is learned.
        self._at_edges: dict[int, list[float]] = {}

    def learn(
        self, place: Hashable, lengths: Mapping[Hashable, int], left: Collection[Hashable] = ()
    ) -> None:
        """Learn from a listing of one place: the length of each sample there, by key.

        Of the samples that the last listing had and this one lacks, `left` were moved; the others have ended.
        """
        before, self._listed[place] = self._listed.get(place, {}), dict(lengths)
        gained = [lengths[key] - tokens for key, tokens in before.items() if key in lengths]
        if not gained:
            # Without a sample that has grown, the lengths of the ended samples are unknown.
            return
        self._at_edges.clear()
        typical = max(1, sorted(gained)[len(gained) // 2])
        for key, tokens in before.items():
            if key in lengths:
                self._add_lived(tokens, lengths[key])
            elif key not in left:
                # It ended between the two listings: half-way, on average.
                self._add_lived(tokens, tokens + typical / 2)
                self._add_ending(tokens + typical / 2)

    def forget(self, place: Hashable) -> None:
        """Forget the last listing of a place that is gone."""
        self._listed.pop(place, None)

    def remaining(self, generated: int, limit: int) -> float:
        """Return the expected remaining tokens of a sample that may have at most `limit`; at least one."""
        if generated >= limit:
            return 1.0
        if limit not in self._at_edges:
            self._at_edges[limit] = self._expected(limit)
        total = self._rest(_place(generated), float(generated), limit, self._at_edges[limit])
        return max(1.0, min(total, float(limit - generated)))

    def _expected(self, limit: int) -> list[float]:
        """Return the expected remaining tokens at the beginning of each bin, and 0 for the end of the last one."""
        found = [0.0] * (_BINS + 1)
        for place in reversed(range(_BINS)):
            if _edge(place) < limit:
                found[place] = self._rest(place, _edge(place), limit, found)
        return found

    def _rest(self, place: int, at: float, limit: int, later: Sequence[float]) -> float:
        """Return the expected remaining tokens at a length in bin `place`, given the ones of later bins."""
        end = min(_edge(place + 1), float(limit)) if place < _BINS - 1 else float(limit)
        hazard = self._hazard(place, at)
        ended = -expm1(-hazard * (end - at))
        return ended / hazard + (1.0 - ended) * later[place + 1]

    def _hazard(self, place: int, at: float) -> float:
        """Return the endings per token."""
        length = max(at, _edge(place), 1.0)
        return float((self._ended[place] + _PRIOR) / (self._lived[place] + _PRIOR * length / 2))

    def _add_lived(self, begin: float, end: float) -> None:
        at = float(begin)
        while at < end:
            place = _place(at)
            stop = min(_edge(place + 1), float(end)) if place < _BINS - 1 else float(end)
            self._lived[place] += stop - at
            at = stop

    def _add_ending(self, at: float) -> None:
        place = _place(at)
        self._ended[place] += 1
        if self._ended[place] > _MEMORY:
            self._ended[place] /= 2
            self._lived[place] /= 2


def _place(length: float) -> int:
    return max(0, min(_BINS - 1, int(log(max(length, 1.0) / _SHORTEST) / log(_GRID) + 1 + 1e-9)))


def _edge(place: int) -> float:
    """Return the shortest length of a bin."""
    return _SHORTEST * _GRID ** (place - 1) if place > 0 else 0.0


def mean_length(listed: pb.ListSamplesResponse) -> float:
    """Return the mean tokens of a sample, prompt included; 1 without samples."""
    lengths = [each.prompt_tokens + each.response_tokens for each in listed.samples]
    return sum(lengths) / len(lengths) if lengths else 1.0


def instance_view(
    instance_id: str,
    model: str,
    listed: pb.ListSamplesResponse,
    roofline: Roofline,
    remaining_lengths: RemainingLengthEstimator,
    *,
    gives: bool,
    receives: bool,
) -> InstanceView:
    """Return the view of an instance. Instances of one model and policy version are peers."""
    curve = roofline.curve()
    samples = len(listed.samples)
    return InstanceView(
        instance_id=instance_id,
        samples=samples,
        room=max(0, min(listed.free_capacity, listed.max_running - samples)),
        free_blocks=listed.free_blocks,
        curve=curve,
        threshold=roofline.threshold(curve),
        candidates=tuple(_candidate(each, remaining_lengths) for each in listed.samples),
        peers=(model, listed.policy_version),
        gives=gives,
        receives=receives,
    )


def _candidate(listed: pb.ListedSample, remaining_lengths: RemainingLengthEstimator) -> Candidate:
    return Candidate(
        key=listed.key,
        tokens=listed.prompt_tokens + listed.response_tokens,
        accepted=listed.acceptance,
        remaining=remaining_lengths.remaining(listed.response_tokens, listed.max_tokens),
        blocks=listed.kv_blocks,
        movable=listed.immovable == pb.MOVE_REASON_UNSPECIFIED,
    )
