"""Compiled alignments against the same rules, one sample and token at a time."""

from __future__ import annotations

import struct
from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generation.drafters.reference.alignment import Alignments
from services.generation.drafters.reference.row import ANCHOR, LATEST, REACH
from services.generation.engine.types import EngineSampleState
from tests.support import plain_given
from tests.support.plain_given import BUCKETS, LAST, Follower

RAMP = np.array([bisect_right(BUCKETS, matched) - 1 for matched in range(BUCKETS[-1] + 1)])
WINDOW = 8
letters = st.lists(st.integers(0, 2), max_size=60)


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Return a sequence, and a response that is like it in parts."""
    sequence = draw(letters)
    response = list(sequence)
    for _ in range(draw(st.integers(0, 5))):
        at = draw(st.integers(0, len(response)))
        cut = draw(st.integers(0, 4))
        response[at : at + cut] = draw(st.lists(st.integers(0, 3), max_size=4))
    return sequence, response


def test_both_go_by_the_same_numbers() -> None:
    assert (plain_given.ANCHOR, plain_given.REACH, plain_given.LATEST) == (ANCHOR, REACH, LATEST)


@given(st.lists(texts(), min_size=1, max_size=6), st.data())
def test_compiled_alignments_are_those_of_the_rules(
    batch: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    alignments = Alignments(RAMP)
    plain: dict[str, Follower] = {}
    lengths = dict.fromkeys(map(str, range(len(batch))), 0)
    sources = {name: data.draw(st.integers(0, 1)) for name in lengths}
    counts, expected = np.zeros((2, 2, LAST + 1), np.int64), np.zeros((2, 2, LAST + 1), np.int64)
    probabilities = np.arange(2 * (LAST + 1)).reshape(2, -1) / 100 + 0.01
    for _ in range(data.draw(st.integers(1, 12))):
        for name, (sequence, _) in zip(lengths, batch, strict=True):
            event = data.draw(st.sampled_from(["", "", "", "follow", "forget"]))
            if event == "follow":
                alignments.follow(name, sequence, sources[name])
                plain[name] = Follower(sequence)
            elif event == "forget":
                alignments.forget(name)
                plain.pop(name, None)
        samples = []
        for name, (_, response) in zip(lengths, batch, strict=True):
            lengths[name] = min(lengths[name] + data.draw(st.integers(0, 9)), len(response))
            samples.append(EngineSampleState(name, [], response[: lengths[name]], 9, lengths[name]))
        tokens, acceptance = np.full((len(samples), WINDOW), -1, np.int32), np.zeros((len(samples), WINDOW))
        followed = alignments.compare(samples, *counts)
        made = alignments.propose(followed, probabilities, tokens, acceptance)
        wanted = []
        for sample in samples:
            follower = plain.get(sample.sample_id)
            if follower is not None:
                for bucket, same in follower.take(sample.response):
                    expected[:, sources[sample.sample_id], bucket] += (1, same)
            wanted.append([] if follower is None else follower.ahead(WINDOW))
        assert made == sum(map(bool, wanted))
        for i, (sample, ahead) in enumerate(zip(samples, wanted, strict=True)):
            count = len(ahead)
            assert tokens[i, :count].tolist() == [token for token, _ in ahead]
            row = probabilities[sources[sample.sample_id]]
            assert acceptance[i, :count].tolist() == [row[bucket] for _, bucket in ahead]
            assert not acceptance[i, count:].any()
    assert counts.tolist() == expected.tolist()
    assert len(alignments) == len(plain)
    for name, follower in plain.items():
        fresh = Alignments(RAMP)
        fresh.follow(name, follower.given, 0)
        fresh.resume(name, alignments.state(name))
        assert fresh.state(name) == alignments.state(name)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=120))
def test_sequences_keep_their_places_when_others_come_and_go(sizes: list[int]) -> None:
    alignments, kept = Alignments(RAMP), {}
    for i, size in enumerate(sizes):
        name = f"{i % 40}"
        kept[name] = np.random.default_rng(i).integers(0, 1000, size)
        alignments.follow(name, kept[name], 0)
        if i % 3 == 2:
            alignments.forget(name)
            del kept[name]
    samples = [EngineSampleState(name, [], [], 9, 0) for name in kept]
    counts = np.zeros((2, 1, LAST + 1), np.int64)
    followed = alignments.compare(samples, *counts)
    tokens, acceptance = np.zeros((len(samples), WINDOW), np.int32), np.zeros((len(samples), WINDOW))
    alignments.propose(followed, np.ones((1, LAST + 1)), tokens, acceptance)
    for row, name in zip(tokens, kept, strict=True):
        assert row[: len(kept[name][:WINDOW])].tolist() == kept[name][:WINDOW].tolist()


@pytest.mark.parametrize(
    "state", [(3, 0, -9, 1), (3, 1 << 62, 2, 1), (3, -5, 2, 1), (3, 0, 2, -7), (4, 0, 2, 1)]
)
def test_an_impossible_state_from_elsewhere_is_passed_over(state: tuple[int, ...]) -> None:
    alignments = Alignments(RAMP)
    alignments.follow("s", [1, 2, 3], 0)
    before = alignments.state("s")
    alignments.resume("s", struct.pack("<4q", *state))
    assert alignments.state("s") == before
