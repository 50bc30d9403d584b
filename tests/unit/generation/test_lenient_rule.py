"""The lenient rule over the rows of a step, against the rule for one position; layouts and marks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.coupled_sampler.noise import Purpose, uniform
from kernels.coupled_sampler.sample import sample
from services.generation.engine.sampling.inputs import BatchSettings, CachedRollout, SampleSettings
from services.generation.engine.sampling.outputs import pack, pack_rows, unpack
from services.generation.engine.sampling.rows import Rows
from services.generation.engine.sampling.sampler import proposals_of
from services.generation.engine.types import Verifier

VOCAB = 4


@dataclass(slots=True)
class Sample:
    """One sample of a step: its logits by row, and its cached rollout unless it follows none."""

    position: int
    drafts: list[int]
    logprobs: np.ndarray
    seed: int
    temperature: float
    rollout: CachedRollout | None


def _rows(samples: list[Sample]) -> Rows:
    cu = np.cumsum([0] + [len(s.drafts) + 1 for s in samples])
    drafts = [token for s in samples for token in s.drafts]
    return Rows(cu, np.array([s.position for s in samples]), np.array(drafts, np.int64))


def _sample(random: Random) -> Sample:
    length = random.randrange(1, 12)
    position = random.randrange(length)
    tokens = [random.randrange(VOCAB) for _ in range(length)]
    # Mostly the rollout's own tokens, with a wrong one here and there, and sometimes beyond its end.
    drafts = [*tokens[position:], 0, 1][: random.randrange(8)]
    drafts = [token if random.random() < 0.9 else random.randrange(VOCAB) for token in drafts]
    table = np.array([[random.gauss(0, 1) for _ in range(VOCAB)] for _ in range(len(drafts) + 1)])
    logprobs = (table - np.log(np.exp(table).sum(axis=1, keepdims=True))).astype(np.float32)
    then = [random.choice([-0.3, -1.0, -2.0, -0.001]) for _ in tokens]
    rollout = CachedRollout(np.array(tokens), np.array(then), random.choice([1.0, 1.6, 50.0, math.inf]))
    return Sample(
        position,
        drafts,
        logprobs,
        random.getrandbits(64),
        random.choice([0.0, 1.0, 1.0]),
        rollout if random.random() < 0.8 else None,
    )


def _one_by_one(sample: Sample) -> int:
    """Return how many tokens are taken over, looking at one position after the other."""
    rollout = sample.rollout
    if rollout is None:
        return 0
    for row in range(len(sample.drafts) + 1):
        place = sample.position + row
        if place == len(rollout.tokens) or (row and sample.drafts[row - 1] != rollout.tokens[place - 1]):
            return row
        token, now = rollout.tokens[place], sample.logprobs[row]
        ratio = rollout.lenience * math.exp(float(now[token]) - rollout.logprobs[place])
        accepted = uniform(sample.seed, place, Purpose.LENIENT) < min(1.0, ratio)
        if sample.temperature == 0:
            accepted = token == now.argmax()
        if not accepted:
            return row
    return len(sample.drafts) + 1


def _take_over(samples: list[Sample]) -> list[int]:
    rows = _rows(samples)
    followed = {i: s.rollout for i, s in enumerate(samples) if s.rollout is not None}
    batch = BatchSettings.of([SampleSettings(seed=s.seed, verifier=Verifier.LENIENT) for s in samples])
    found = sample(
        torch.from_numpy(np.concatenate([s.logprobs for s in samples])),
        torch.from_numpy(np.array([s.seed for s in samples], np.uint64).view(np.int64)),
        torch.from_numpy(rows.positions),
        torch.tensor([s.temperature for s in samples]),
        torch.from_numpy(rows.drafts),
        torch.from_numpy(rows.cu),
        proposals=proposals_of(rows, batch, followed),
    )
    reused: list[int] = found.reused.tolist()
    return reused


@given(st.integers(0, 1 << 32), st.integers(1, 6))
def test_rows_of_many_samples_are_decided_as_one_position_after_the_other(seed: int, count: int) -> None:
    random = Random(seed)
    samples = [_sample(random) for _ in range(count)]
    if all(s.rollout is None for s in samples):
        return
    assert _take_over(samples) == [_one_by_one(s) for s in samples]


def _plain(now: list[float], then: list[float], lenience: float = 1.0, temperature: float = 1.0) -> Sample:
    """Return a sample whose first tokens have these log-probabilities."""
    n = len(now)
    rollout = CachedRollout(np.zeros(n, np.int64), np.array(then), lenience)
    table = np.full((n, VOCAB), -5.0, np.float32)
    table[:, 0] = now
    return Sample(0, [0] * (n - 1), table, 3, temperature, rollout)


@pytest.mark.parametrize("lenience", [1.0, 50.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_no_token_is_taken_over_from_a_row_or_a_cache_that_has_no_probability_for_it(
    bad: float, lenience: float
) -> None:
    assert _take_over([_plain([-0.1] * 4, [-9.0] * 4, lenience)]) == [4]
    assert _take_over([_plain([-0.1, -0.1, bad, -0.1], [-9.0] * 4, lenience)]) == [2]
    assert _take_over([_plain([-0.1] * 4, [-9.0, bad, -9.0, -9.0], lenience)]) == [1]
    assert _take_over([_plain([-0.1] * 4, [math.inf, -9.0, -9.0, -9.0], lenience)]) == [0]
    assert _take_over([_plain([-0.1, bad, -0.1, -0.1], [-9.0] * 4, lenience, temperature=0.0)]) == [1]


def test_what_may_not_be_sampled_is_not_taken_over() -> None:
    for temperature in (0.0, 1.0):
        own = _plain([-0.1] * 4, [-9.0] * 4, math.inf, temperature)
        own.logprobs[2, 0] = -np.inf
        assert _take_over([own]) == [2]


@pytest.mark.parametrize(("lenience", "ratio"), [(1.0, 0.3), (2.0, 0.3), (math.exp(0.5), 0.9), (1.0, 1.4)])
def test_a_token_is_taken_over_as_often_as_the_rule_says(lenience: float, ratio: float) -> None:
    n, then = 20_000, math.log(0.4)
    rollout = CachedRollout(np.array([0, 0]), np.array([then, then]), lenience)
    p = 0.4 * ratio
    table = np.log(np.array([p, *[(1 - p) / (VOCAB - 1)] * (VOCAB - 1)], np.float32))
    kept = []
    for position in (0, 1):
        found = _take_over([Sample(position, [], table[None], seed, 1.0, rollout) for seed in range(n)])
        kept.append(np.array(found))
    expected = min(1.0, lenience * ratio)
    deviation = math.sqrt(expected * (1 - expected) / n)
    for counts in kept:
        assert abs(counts.mean() - expected) <= 4 * deviation
    if expected < 1:
        assert abs(np.corrcoef(kept[0], kept[1])[0, 1]) < 4 / math.sqrt(n)
        assert abs(np.corrcoef(kept[0][:-1], kept[0][1:])[0, 1]) < 4 / math.sqrt(n)


@given(st.lists(st.tuples(st.integers(0, 130), st.integers(0, 130)), min_size=1, max_size=6))
def test_marks_say_what_was_verified_and_taken_over(samples: list[tuple[int, int]]) -> None:
    drafted = np.array([k for k, _ in samples])
    reused = np.array([min(r, k + 1) for k, r in samples])
    accepted = np.array([r // 2 % (k + 1) for k, r in samples])
    width = int(drafted.max()) + 1
    marks = pack(drafted, accepted, reused, width).reshape(len(samples), width)
    for i in range(len(samples)):
        own = torch.arange(drafted[i] + 1)
        taken = (own < int(accepted[i]), own < int(reused[i]))
        by_rows = pack_rows(torch.full_like(own, int(drafted[i])), *taken)
        assert by_rows.tolist() == marks[i, : len(own)].tolist()
        for emitted in range(drafted[i] + 2):
            # The others are behind a stop token.
            counts = (
                (drafted[i], min(accepted[i], emitted), min(reused[i], emitted)) if emitted else (0, 0, 0)
            )
            assert unpack(marks[i, :emitted].tolist()) == counts
