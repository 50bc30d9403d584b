"""Decoding without an engine: the services' own drafters and planner, and verification against known responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline import SampleKey
from services.generation.engine.types import EngineSampleState, SampleStep
from services.generation.speculation.drafter import DraftContext
from services.generation.speculation.speculation import Speculation


@dataclass(frozen=True, slots=True)
class ReplayedSample:
    """A sample whose response is known, and what drafters are told of it."""

    key: SampleKey
    context: DraftContext
    response: Sequence[int]


class Verification(NamedTuple):
    """A decode step of a sample: response tokens before it, draft tokens, those accepted, and their source."""

    at: int
    drafted: int
    accepted: int
    source: str


@dataclass(slots=True)
class StrictMetrics:
    """Metrics of drafts that nobody reads; a fault ends the benchmark."""

    def verified(self, drafter: str, drafted: int, accepted: int) -> None:
        """Do nothing."""

    def fault(self, drafter: str) -> None:
        """Raise RuntimeError: a replay must not go on without a drafter."""
        raise RuntimeError(f"drafter {drafter} failed")


def decode(
    speculation: Speculation, samples: Sequence[ReplayedSample], longest: int
) -> dict[SampleKey, list[Verification]]:
    """Decode samples in step, all from the token that their prefill sampled; every step of each.

    The samples are begun already. `longest` is the limit on response tokens.
    """
    found: dict[SampleKey, list[Verification]] = {sample.key: [] for sample in samples}
    states = {sample.context.sample_id: _first_state(sample, longest) for sample in samples}
    live = {sample.context.sample_id: sample for sample in samples}
    for sample in samples:
        if len(sample.response) == 1:
            del live[sample.context.sample_id]
            speculation.end(sample.context.sample_id, sample.response)
    while live:
        drafts = speculation.drafts([states[sample_id] for sample_id in live])
        for sample_id, sample in list(live.items()):
            found[sample.key].append(_verify(speculation, sample, states[sample_id], drafts))
            if len(states[sample_id].response) == len(sample.response):
                del live[sample_id]
                speculation.end(sample_id, sample.response)
    return found


def _first_state(sample: ReplayedSample, longest: int) -> EngineSampleState:
    prompt = list(sample.context.prompt)
    return EngineSampleState(
        sample.context.sample_id, prompt, list(sample.response[:1]), longest - 2, len(prompt) + 1
    )


def _verify(
    speculation: Speculation,
    sample: ReplayedSample,
    state: EngineSampleState,
    drafts: Mapping[str, Sequence[int]],
) -> Verification:
    """Let a sample emit the draft tokens that are its own and the one after them."""
    guess, at = drafts.get(state.sample_id, ()), len(state.response)
    truth = sample.response[at : at + len(guess) + 1]
    accepted = matching(guess, truth)
    emitted = list(truth[: accepted + 1])
    step = SampleStep(state.sample_id, emitted, [], drafted=len(guess), accepted=accepted)
    source = speculation.learn(step)
    state.response += emitted
    state.length += len(emitted)
    state.room -= len(emitted)
    return Verification(at, len(guess), accepted, source)


def matching(guess: Sequence[int], truth: Sequence[int]) -> int:
    """Return how many leading tokens two sequences share."""
    for place, (one, other) in enumerate(zip(guess, truth, strict=False)):
        if one != other:
            return place
    return min(len(guess), len(truth))
