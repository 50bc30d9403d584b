"""Choices of the reference drafter and a suffix lookup together: what an instance drafts from, with branches.

Where the services' reference drafter thinks its token likelier than not, that is the first choice, and the lookup's
choices come after it; elsewhere its token comes after the lookup's first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bench.branches.choices import CHOICES, Choices
from bench.branches.suffixes import RankedTokens
from paceline import SampleKey
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.engine.types import EngineSampleState
from services.generation.speculation.drafter import DraftContext

_LIKELY = 0.5


def choices(
    drafter: ReferenceDrafter,
    references: Mapping[SampleKey, Sequence[int]],
    responses: Mapping[SampleKey, Sequence[int]],
    looked_up: Mapping[SampleKey, Sequence[RankedTokens]],
) -> dict[SampleKey, Choices]:
    """Return the choices along samples that run in step, a token at a time; `drafter` learns from them."""
    guesses = _guesses(drafter, references, responses)
    found = {}
    for key, response in responses.items():
        ranks, certainty = [], []
        for place, (token, likely) in enumerate(guesses[key]):
            tokens, sure = looked_up[key][place]
            after = 0 if likely >= _LIKELY else 1
            both = tokens if token < 0 else list(dict.fromkeys([*tokens[:after], token, *tokens[after:]]))
            truth = response[place + 1]
            ranks.append(min(both.index(truth), CHOICES) if truth in both else CHOICES)
            # Certain references, of either kind of agreement, above all lookups.
            certainty.append((1.0 + likely + (both[:1] == tokens[:1])) if likely >= _LIKELY else sure)
        found[key] = Choices(np.array(ranks, np.int64).reshape(1, -1), np.array(certainty).reshape(1, -1))
    return found


def _guesses(
    drafter: ReferenceDrafter,
    references: Mapping[SampleKey, Sequence[int]],
    responses: Mapping[SampleKey, Sequence[int]],
) -> dict[SampleKey, list[tuple[int, float]]]:
    """Return the token that follows in each sample's reference, -1 for none, and how likely it is, by place."""
    names = {key: f"{key.prompt_id}/{key.slot}" for key in responses}
    for key, name in names.items():
        drafter.begin(DraftContext(name, [], references.get(key, ()), source="own"))
    found: dict[SampleKey, list[tuple[int, float]]] = {key: [] for key in responses}
    for length in range(1, max(map(len, responses.values()))):
        here = [key for key, response in responses.items() if length < len(response)]
        states = [EngineSampleState(names[key], [], list(responses[key][:length]), 1, length) for key in here]
        made = drafter.propose(states, 1, {})
        for i, key in enumerate(here):
            likely = float(made.acceptance[i, 0]) if made is not None else 0.0
            found[key].append((int(made.tokens[i, 0]) if made is not None and likely else -1, likely))
    for key, name in names.items():
        drafter.end(name, responses[key])
    return found
