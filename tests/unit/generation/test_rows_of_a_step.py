"""Who gets the rows of a step: prompts, samples that follow a cached rollout, and then what is speculated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.contracts.sampling import Sampling
from services.generation.draft_cache.lenient_reuse import Reuse
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.engine.types import (
    EngineLoad,
    EngineRequest,
    EngineSampleState,
    SampleStep,
    Verifier,
)
from services.generation.loop.metrics import EngineMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.speculation.drafter import DraftContext
from services.generation.speculation.plan import FixedLengthPlanner, StepShape
from services.generation.speculation.speculation import Speculation

WINDOW = 8
RESPONSE = tuple(range(40))


@dataclass(slots=True)
class Batch:
    """An engine about to step: so many samples decode, others have their prompts read or wait."""

    samples: int
    row_capacity: int
    prompt_rows: int = 0
    reading: int = 0
    waiting: int = 0
    replayed: int = 0
    drafts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(self.samples + self.reading, self.waiting, 0.5)

    def decoding(self) -> list[EngineSampleState]:
        return [
            EngineSampleState(f"s{i}", [7], [RESPONSE[0]], 1000, 2, self.replayed)
            for i in range(self.samples)
        ]

    def put_drafts(self, drafts: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
        self.drafts = {sample_id: list(tokens) for sample_id, tokens in drafts.items()}
        return drafts

    @property
    def rows(self) -> int:
        """Of the samples that decode, of what they compute again, and of their drafts."""
        return self.samples * (1 + self.replayed) + sum(map(len, self.drafts.values()))

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not to be asked for")


def drafting(samples: int, following: Iterable[int] = ()) -> SampleDrafts:
    """Samples with a guess of their response each, some of which follow it as their cached rollout."""
    metrics = EngineMetrics(CollectorRegistry())
    speculation = Speculation([ReferenceDrafter()], FixedLengthPlanner(WINDOW), 512, metrics)
    made = SampleDrafts(metrics, speculation=speculation)
    made.reuse = Reuse(chunk=16)
    for i in range(samples):
        made.speculation.begin(DraftContext(f"s{i}", (7,), RESPONSE))
    for i in following:
        request = EngineRequest(
            f"s{i}",
            (7,),
            (),
            Sampling(),
            1,
            verifier=Verifier.LENIENT,
            cached=RESPONSE,
            cached_logprobs=(-1.0,) * len(RESPONSE),
        )
        made.reuse.begin(request)
        made.reuse.learn(SampleStep(f"s{i}", [RESPONSE[0]], [-1.0], reused=1))
    return made


def test_a_step_that_just_decodes_has_all_rows_for_drafts_and_is_measured() -> None:
    engine = Batch(4, row_capacity=20, prompt_rows=1000)
    assert drafting(4).put(engine) == StepShape(4, 20, 8)
    assert engine.rows == 20


@pytest.mark.parametrize("others", [{"waiting": 1}, {"reading": 1}])
def test_prompts_get_their_rows_and_the_step_is_not_measured(others: dict[str, int]) -> None:
    engine = Batch(4, row_capacity=20, prompt_rows=8, **others)
    assert drafting(4).put(engine) is None
    assert engine.rows == 12


@pytest.mark.parametrize("prompt_rows", [8, 4])
@pytest.mark.parametrize("waiting", [0, 1])
def test_tokens_that_are_computed_again_take_rows_once(prompt_rows: int, waiting: int) -> None:
    # The engine's rows of prompts are these tokens, or fewer by its limit.
    engine = Batch(4, row_capacity=24, replayed=2, prompt_rows=prompt_rows, waiting=waiting)
    assert drafting(4).put(engine) == (None if waiting else StepShape(4, 24, 8))
    assert engine.rows == 24


def test_samples_that_follow_a_rollout_come_before_what_is_speculated() -> None:
    engine = Batch(3, row_capacity=24)
    drafting(3, following=[1]).put(engine)
    assert {name: len(tokens) for name, tokens in engine.drafts.items()} == {"s1": 16, "s0": 2, "s2": 2}


@given(
    samples=st.integers(1, 6),
    capacity=st.integers(1, 80),
    prompts=st.integers(0, 40),
    following=st.sets(st.integers(0, 5)),
    waiting=st.integers(0, 2),
)
def test_no_step_has_more_rows_than_it_may(
    samples: int, capacity: int, prompts: int, following: set[int], waiting: int
) -> None:
    engine = Batch(samples, capacity, min(prompts, capacity // 2), waiting=waiting)
    followers = {each for each in following if each < samples}
    drafting(samples, followers).put(engine)
    most = capacity - (engine.prompt_rows if waiting else 0)
    # A sample that decodes has its row whatever there is.
    assert engine.rows <= max(samples, most)
    if len(followers) == samples:
        assert engine.rows == max(samples, min(most, samples * 17))
