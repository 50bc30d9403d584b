"""Very many short samples of one prompt, for statistics: made and counted inside the engine's process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.contracts.sampling import Sampling
from services.generation.draft_cache.lenient_reuse import Reuse
from services.generation.engine.types import EngineRequest, EngineSampleState, Verifier


@dataclass(frozen=True, slots=True)
class Census:
    """`count` samples of `length` tokens of one prompt at temperature 1; seeds count up from first_seed.

    With `drafts` > 0, each step verifies that many tokens that look random; they depend on seed and position only.
    With LENIENT all take over `cached`, at lenience 1.
    """

    prompt: tuple[int, ...]
    count: int
    length: int = 3
    first_seed: int = 0
    drafts: int = 0
    verifier: Verifier = Verifier.COUPLED
    cached: tuple[int, ...] = ()
    cached_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tokens by seed, [count, length], tokens taken over, [count], and the draft tokens verified and accepted."""

    tokens: npt.NDArray[np.uint16]
    reused: npt.NDArray[np.uint16]
    drafted: int
    accepted: int


def take_census(engine: Any, census: Census, serial: int, batch: int) -> Sequences:
    """Run the samples, at most `batch` at once."""
    # One token more than is counted, so that a draft has room for all of those.
    sampling = Sampling(max_tokens=census.length + (1 if census.drafts else 0), ignore_eos=True)
    vocab_size = engine.limits.vocab_size
    found: list[list[int]] = [[] for _ in range(census.count)]
    reused = np.zeros(census.count, np.uint16)
    reuse = Reuse()
    started = drafted = accepted = 0
    while started < census.count or engine.has_work:
        while started < census.count and len(engine._scheduler.requests) < batch:
            seed = census.first_seed + started
            sample_id = f"{serial}/{started}"
            request = EngineRequest(
                sample_id,
                census.prompt,
                (),
                sampling,
                seed,
                verifier=census.verifier,
                cached=census.cached,
                cached_logprobs=census.cached_logprobs,
            )
            engine.add(request)
            reuse.begin(request)
            started += 1
        if census.drafts:
            engine.put_drafts(
                {
                    state.sample_id: _draft(state, vocab_size, census.drafts)
                    for state in engine.decoding()
                    if state.room > 0
                }
            )
        elif reuse:
            states = engine.decoding()
            engine.put_drafts(reuse.drafts(states, engine.row_capacity - len(states)))
        for step in engine.step():
            sample = int(step.sample_id.partition("/")[2])
            found[sample] += step.token_ids
            reused[sample] += step.reused
            reuse.learn(step)
            drafted += step.drafted
            accepted += step.accepted
    tokens = np.array([response[: census.length] for response in found], np.uint16)
    return Sequences(tokens, reused, drafted, accepted)


def _draft(state: EngineSampleState, vocab_size: int, count: int) -> list[int]:
    sample = int(state.sample_id.partition("/")[2])
    here = len(state.response)
    places = range(here, here + min(state.room, count))
    # Knuth's multiplicative hash.
    return [((sample * 8 + place) * 2654435761 % 2**32 >> 9) % vocab_size for place in places]
