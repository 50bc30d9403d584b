"""What moves have been found to cost and to bring. Pure; bounded, and it fades: what has not been tried for a while
is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.reallocator.lifetimes import Lifetimes
from services.reallocator.price import By, WayCost
from services.reallocator.records import Move, Rule

# Before anything is measured: one reads again what the other sends. The engine time is what an instance's
# Python takes between two steps, which hardly depends on the model: measured on a small machine, and rounded
# up.
_GUESSES = {
    By.KV: WayCost(stall_steps=2.0, donor=0.001, receiver=0.002),
    By.PREFIX: WayCost(stall_steps=2.0, donor=0.0005, receiver=0.0005, reading=1.0),
}
# Weight of the newest move, or transfer, in what is remembered; and of the guess, with every decision.
_SMOOTHING, _FADING = 0.2, 0.01
# What one observation may say, so that one freak does not end all moves: engine steps, and times what was known.
_LEAST_STALL, _MOST_STALL = 0.5, 50.0
_MOST_LOSS = 8.0
_SURPRISE, _LEAST_READING, _MOST_READING = 2.0, 0.25, 64.0
# The same for what a rule has brought, as a share of what it promised.
_TRUST_SMOOTHING, _FORGIVING = 0.3, 0.005


class Costs:
    """What a move costs by either way. Seconds."""

    def __init__(self, ways: Sequence[By] = tuple(By)) -> None:
        """`ways`: those that may be taken."""
        self._ways = {way: _GUESSES[way] for way in ways}

    @property
    def ways(self) -> Mapping[By, WayCost]:
        """As known by now; a gain is no cost."""
        return {
            way: replace(cost, donor=max(0.0, cost.donor), receiver=max(0.0, cost.receiver))
            for way, cost in self._ways.items()
        }

    def stalled(self, by: By, stall_steps: float, sending_seconds: float, tokens: int) -> None:
        """A sample stood still for so many steps, and its KV was under way for so long."""
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

    def lost(
        self, moves: Sequence[Move], donor: float | None, receiver: float | None, step_seconds: float
    ) -> None:
        """Engine time that both sides lost while these samples moved, None where that cannot be told; a step takes
        `step_seconds`. Of moves of both ways nothing can be told apart."""
        ways = {move.by for move in moves}
        if len(ways) != 1 or (by := ways.pop()) not in self._ways:
            return
        known, most = self._ways[by], _MOST_LOSS * step_seconds
        if donor is not None:
            loss = min(max(donor / len(moves), -most), most)
            known = replace(known, donor=_towards(known.donor, loss, _SMOOTHING))
        reading = sum(move.reading for move in moves)
        if receiver is not None and reading > 0:
            factor = min(max(receiver / reading, 1 / _SURPRISE), _SURPRISE)
            found = min(max(known.reading * factor, _LEAST_READING), _MOST_READING)
            known = replace(known, reading=_towards(known.reading, found, _SMOOTHING))
        elif receiver is not None:
            loss = min(max(receiver / len(moves), -most), most)
            known = replace(known, receiver=_towards(known.receiver, loss, _SMOOTHING))
        self._ways[by] = known

    def fade(self) -> None:
        """A decision went by: what is known turns to the guess a little."""
        for way, known in self._ways.items():
            guess = _GUESSES[way]
            self._ways[way] = WayCost(
                _towards(known.stall_steps, guess.stall_steps, _FADING),
                _towards(known.seconds_per_token, guess.seconds_per_token, _FADING),
                _towards(known.donor, guess.donor, _FADING),
                _towards(known.receiver, guess.receiver, _FADING),
                _towards(known.reading, guess.reading, _FADING),
            )


class Trust:
    """What share of its predicted gain each rule has brought, from 0 to 1."""

    def __init__(self) -> None:
        self._shares = dict.fromkeys(Rule, 1.0)

    @property
    def shares(self) -> Mapping[Rule, float]:
        """As known by now."""
        return dict(self._shares)

    def brought(self, rule: Rule, predicted: float, achieved: float) -> None:
        """So much was achieved of a gain; a prediction of nothing says nothing."""
        if predicted <= 0:
            return
        share = min(max(achieved / predicted, 0.0), 1.0)
        self._shares[rule] = _towards(self._shares[rule], share, _TRUST_SMOOTHING)

    def fade(self) -> None:
        """A decision went by: a little is forgiven."""
        for rule, share in self._shares.items():
            self._shares[rule] = _towards(share, 1.0, _FORGIVING)


@dataclass(slots=True)
class Learned:
    """All of it. Belongs to a process, not to its term as the one that decides. `lifetimes` are by model."""

    costs: Costs = field(default_factory=Costs)
    trust: Trust = field(default_factory=Trust)
    lifetimes: dict[str, Lifetimes] = field(default_factory=dict)

    def lifetimes_of(self, model: str) -> Lifetimes:
        """Of a model's samples."""
        return self.lifetimes.setdefault(model, Lifetimes())

    def fade(self) -> None:
        """A decision went by."""
        self.costs.fade()
        self.trust.fade()


def _towards(known: float, found: float, weight: float) -> float:
    return known + (found - known) * weight
