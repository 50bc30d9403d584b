"""Learn the cost of moves, the share of the predicted gain that they achieve, and the lengths of responses. Pure.

Estimates are bounded and fade towards their prior, so that a way that has not been tried for a while is tried
again.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import expm1, log

import numpy as np
from numpy.typing import NDArray

from services.reallocator.planning.records import Move, MoveBy, MoveCost, Rule

# Prior. By prefix the context is prefilled, by KV it is sent. Engine times are spent in an instance's Python
# between two steps and hardly depend on the model: measured on a small machine and rounded up.
_PRIORS = {
    MoveBy.KV: MoveCost(stall_steps=2.0, donor=0.001, receiver=0.002),
    MoveBy.PREFIX: MoveCost(stall_steps=2.0, donor=0.0005, receiver=0.0005, prefill=1.0),
}
# Weight of the newest move or transfer in an estimate; and of the prior, at every decision.
_SMOOTHING, _FADING = 0.2, 0.01
# Bounds of one observation, so that an outlier does not end all moves: engine steps, and ratios to the estimate.
_LEAST_STALL, _MOST_STALL = 0.5, 50.0
_MOST_LOSS = 8.0
_OUTLIER_RATIO, _LEAST_PREFILL, _MOST_PREFILL = 2.0, 0.25, 64.0
# Weights of the newest transfer, and of full trust at every decision.
_TRUST_SMOOTHING, _TRUST_FADING = 0.3, 0.005
# Factor between the edges of bins, the first edge in tokens, and the number of bins.
_GRID, _SHORTEST, _BINS = 1.3, 8.0, 48
# Weight of the prior in endings, and the endings at which a bin is halved, so that old ones fade.
_PRIOR, _MEMORY = 2.0, 64.0


class MoveCosts:
    """Cost of a move, by way. Times in seconds."""

    def __init__(self, ways: Sequence[MoveBy] = tuple(MoveBy)) -> None:
        """Start from the priors of the allowed ways to move."""
        self._ways = {way: _PRIORS[way] for way in ways}

    @property
    def ways(self) -> Mapping[MoveBy, MoveCost]:
        """Return the cost of each way; a measured gain counts as no cost."""
        return {
            way: replace(cost, donor=max(0.0, cost.donor), receiver=max(0.0, cost.receiver))
            for way, cost in self._ways.items()
        }

    def learn_stall(self, by: MoveBy, stall_steps: float, sending_seconds: float, tokens: int) -> None:
        """Learn from a move that paused its sample for `stall_steps` and sent its KV in `sending_seconds`."""
        known = self._ways.get(by)
        if known is None:
            return
        steps = min(max(stall_steps, _LEAST_STALL), _MOST_STALL)
        for_each = max(0.0, sending_seconds) / max(1, tokens)
        self._ways[by] = replace(
            known,
            stall_steps=_towards(known.stall_steps, steps, _SMOOTHING),
            seconds_per_token=_towards(known.seconds_per_token, for_each, _SMOOTHING),
        )

    def learn_loss(
        self, moves: Sequence[Move], donor: float | None, receiver: float | None, step_seconds: float
    ) -> None:
        """Learn from the engine time that the donor and the receiver lost by these moves; None if unknown.

        A step takes `step_seconds`. Moves made in different ways cannot be separated, so they are ignored.
        """
        ways = {move.by for move in moves}
        if len(ways) != 1 or (by := ways.pop()) not in self._ways:
            return
        known, most = self._ways[by], _MOST_LOSS * step_seconds
        if donor is not None:
            loss = min(max(donor / len(moves), -most), most)
            known = replace(known, donor=_towards(known.donor, loss, _SMOOTHING))
        prefill = sum(move.prefill for move in moves)
        if receiver is not None and prefill > 0:
            factor = min(max(receiver / prefill, 1 / _OUTLIER_RATIO), _OUTLIER_RATIO)
            found = min(max(known.prefill * factor, _LEAST_PREFILL), _MOST_PREFILL)
            known = replace(known, prefill=_towards(known.prefill, found, _SMOOTHING))
        elif receiver is not None:
            loss = min(max(receiver / len(moves), -most), most)
            known = replace(known, receiver=_towards(known.receiver, loss, _SMOOTHING))
        self._ways[by] = known

    def fade(self) -> None:
        """Move every estimate a little towards its prior; called once per decision."""
        for way, known in self._ways.items():
            prior = _PRIORS[way]
            faded = {
                name: _towards(value, getattr(prior, name), _FADING) for name, value in asdict(known).items()
            }
            self._ways[way] = MoveCost(**faded)


class Trust:
    """Share of its predicted gain that each rule has achieved, from 0 to 1."""

    def __init__(self) -> None:
        self._shares = dict.fromkeys(Rule, 1.0)

    @property
    def shares(self) -> Mapping[Rule, float]:
        """Return the share of each rule."""
        return dict(self._shares)

    def learn(self, rule: Rule, predicted: float, achieved: float) -> None:
        """Learn from a transfer's predicted and achieved gain; a prediction of no gain is ignored."""
        if predicted <= 0:
            return
        share = min(max(achieved / predicted, 0.0), 1.0)
        self._shares[rule] = _towards(self._shares[rule], share, _TRUST_SMOOTHING)

    def fade(self) -> None:
        """Move every share a little towards 1; called once per decision."""
        for rule, share in self._shares.items():
            self._shares[rule] = _towards(share, 1.0, _TRUST_FADING)


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


@dataclass(slots=True)
class LearnedCosts:
    """Learned state, kept by a process across its terms as leader. `remaining_lengths` are by model."""

    costs: MoveCosts = field(default_factory=MoveCosts)
    trust: Trust = field(default_factory=Trust)
    remaining_lengths: dict[str, RemainingLengthEstimator] = field(default_factory=dict)

    def lengths_of(self, model: str) -> RemainingLengthEstimator:
        """Return the estimator for a model's samples."""
        return self.remaining_lengths.setdefault(model, RemainingLengthEstimator())

    def forget(self, instance_id: str) -> None:
        """Drop the state of one instance that is gone."""
        for lengths in self.remaining_lengths.values():
            lengths.forget(instance_id)

    def fade(self) -> None:
        """Move costs and trust a little towards their priors; called once per decision."""
        self.costs.fade()
        self.trust.fade()


def _towards(known: float, found: float, weight: float) -> float:
    return known + (found - known) * weight
