"""The lenient rule over the rows of a step, against the rule for one position; layouts and marks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.coupled_sampler.noise import Purpose, uniform
from services.generation.engine.marks import pack, unpack
from services.generation.engine.sampling.lenient import candidates, taken_over
from services.generation.engine.sampling.noise import CachedRollout
from services.generation.engine.sampling.rows import Rows

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


def _one_by_one(sample: Sample) -> tuple[int, bool]:
    """(tokens taken over, whether the row behind them can be sampled), looking at one position after the other."""
    rollout = sample.rollout
    if rollout is None:
        return 0, True
    for row in range(len(sample.drafts) + 1):
        if row and sample.drafts[row - 1] != rollout.tokens[sample.position + row - 1]:
            return row, False
        place = sample.position + row
        if place == len(rollout.tokens):
            return row, True
        token, now = rollout.tokens[place], sample.logprobs[row]
        ratio = rollout.lenience * math.exp(float(now[token]) - rollout.logprobs[place])
        accepted = uniform(sample.seed, place, Purpose.LENIENT) < min(1.0, ratio)
        if sample.temperature == 0:
            accepted = token == now.argmax()
        if not accepted:
            return row, True
    return len(sample.drafts) + 1, False


def _take_over(samples: list[Sample]) -> tuple[list[int], list[bool]]:
    rows = _rows(samples)
    found = candidates(rows, {i: s.rollout for i, s in enumerate(samples) if s.rollout is not None})
    table = np.concatenate([s.logprobs for s in samples])
    now = table[found.row, found.token]
    seeds = np.array([s.seed for s in samples], np.uint64)
    temperature = np.array([s.temperature for s in samples], np.float32)
    best = table[found.row].argmax(axis=1)
    count = taken_over(rows, found, now, np.ones(len(now), bool), best, seeds, temperature)
    return count.tolist(), ((count < found.count) | found.beyond).tolist()


@given(st.integers(0, 1 << 32), st.integers(1, 6))
def test_rows_of_many_samples_are_decided_as_one_position_after_the_other(seed: int, count: int) -> None:
    random = Random(seed)
    samples = [_sample(random) for _ in range(count)]
    if all(s.rollout is None for s in samples):
        return
    taken, live = _take_over(samples)
    assert list(zip(taken, live, strict=True)) == [_one_by_one(s) for s in samples]


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
    assert _take_over([_plain([-0.1] * 4, [-9.0] * 4, lenience)])[0] == [4]
    assert _take_over([_plain([-0.1, -0.1, bad, -0.1], [-9.0] * 4, lenience)])[0] == [2]
    assert _take_over([_plain([-0.1] * 4, [-9.0, bad, -9.0, -9.0], lenience)])[0] == [1]
    assert _take_over([_plain([-0.1] * 4, [math.inf, -9.0, -9.0, -9.0], lenience)])[0] == [0]
    assert _take_over([_plain([-0.1, bad, -0.1, -0.1], [-9.0] * 4, lenience, temperature=0.0)])[0] == [1]


def test_what_may_not_be_sampled_is_not_taken_over() -> None:
    for temperature in (0.0, 1.0):
        sample = _plain([-0.1] * 4, [-9.0] * 4, math.inf, temperature)
        rows = _rows([sample])
        assert sample.rollout is not None
        found = candidates(rows, {0: sample.rollout})
        allowed = np.array([True, True, False, True])
        now = np.full(4, -0.1, np.float32)
        seeds, temperatures = np.array([3], np.uint64), np.array([temperature], np.float32)
        best = np.zeros(4, np.int64)
        assert taken_over(rows, found, now, allowed, best, seeds, temperatures).tolist() == [2]


@pytest.mark.parametrize(("lenience", "ratio"), [(1.0, 0.3), (2.0, 0.3), (math.exp(0.5), 0.9), (1.0, 1.4)])
def test_a_token_is_taken_over_as_often_as_the_rule_says(lenience: float, ratio: float) -> None:
    """100,000 seeds that count up, each at two positions; the uniforms of both are independent."""
    n = 100_000
    rows = Rows(np.arange(n + 1), np.zeros(n, np.int64), np.empty(0, np.int64))
    rollout = CachedRollout(np.array([2, 2]), np.array([-1.0, -1.0]), lenience)
    now = np.full(n, -1.0 + math.log(ratio), np.float32)
    seeds, one = np.arange(n, dtype=np.uint64), np.ones(n, np.float32)
    kept = []
    for position in (0, 1):
        at = Rows(rows.cu, rows.positions + position, rows.drafts)
        found = candidates(at, dict.fromkeys(range(n), rollout))
        kept.append(taken_over(at, found, now, np.ones(n, bool), np.zeros(n, np.int64), seeds, one))
    expected = min(1.0, lenience * ratio)
    deviation = math.sqrt(expected * (1 - expected) / n)
    for counts in kept:
        assert abs(counts.mean() - expected) <= 4 * deviation
    if expected < 1:
        assert abs(np.corrcoef(kept[0], kept[1])[0, 1]) < 4 / math.sqrt(n)
        assert abs(np.corrcoef(kept[0][:-1], kept[0][1:])[0, 1]) < 4 / math.sqrt(n)


layouts = st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 4)), min_size=1, max_size=8)


@given(layouts)
def test_a_part_of_the_rows_keeps_positions_and_drafts(layout: list[tuple[int, bool, int]]) -> None:
    lengths = [k + 1 for k, _, _ in layout]
    cu = np.cumsum([0, *lengths])
    # Draft j of sample i is 10 i + j.
    drafts = np.array([10 * i + j for i, (k, _, _) in enumerate(layout) for j in range(k)], np.int64)
    rows = Rows(cu, np.arange(len(layout)) * 100, drafts)
    chosen = np.array([wanted for _, wanted, _ in layout])
    behind = np.array([min(skip, k) for k, _, skip in layout])
    index, part = rows.part(chosen, behind)
    kept = [i for i, wanted in enumerate(chosen) if wanted]
    assert index.tolist() == [int(cu[i]) + j for i in kept for j in range(behind[i], lengths[i])]
    assert np.diff(part.cu).tolist() == [lengths[i] - behind[i] for i in kept]
    assert part.positions.tolist() == [100 * i + behind[i] for i in kept]
    for place, i in enumerate(kept):
        assert part.drafts_of(place).tolist() == [10 * i + j for j in range(behind[i], lengths[i] - 1)]
    whole, same = rows.part(np.ones(len(layout), bool), np.zeros(len(layout), np.int64))
    assert whole.tolist() == list(range(cu[-1]))
    assert same.drafts.tolist() == drafts.tolist()
    assert part.row_positions.tolist() == rows.row_positions[index].tolist()


@given(st.lists(st.tuples(st.integers(0, 130), st.integers(0, 130)), min_size=1, max_size=6))
def test_marks_say_what_was_verified_and_taken_over(samples: list[tuple[int, int]]) -> None:
    drafted = np.array([k for k, _ in samples])
    reused = np.array([min(r, k + 1) for k, r in samples])
    width = int(drafted.max()) + 1
    marks = pack(drafted, reused, width).reshape(len(samples), width)
    for i in range(len(samples)):
        for emitted in range(drafted[i] + 2):
            tokens = marks[i, :emitted]
            assert unpack(tokens) == ((drafted[i], min(reused[i], emitted)) if emitted else (0, 0))
