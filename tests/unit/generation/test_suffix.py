"""The suffix drafter against a search through the whole text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from services.generation.drafting.drafter import DraftContext, Offer
from services.generation.drafting.suffix import SuffixDrafter
from services.generation.engine.types import SampleState

NGRAM = 4
LONGEST = 24


def texts(letters: int, size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, letters), max_size=size)


def search(text: list[int], sequence: list[int]) -> tuple[list[int], int] | None:
    """Where the last n-gram of the text occurred before: (the text it is in, place after it), latest first."""
    for source in (text, sequence):
        for end in range(len(source) - 1, NGRAM - 1, -1):
            if len(text) >= NGRAM and source[end - NGRAM : end] == text[-NGRAM:]:
                return source, end
    return None


def common_suffix(text: list[int], source: list[int]) -> int:
    length = 0
    while length < min(len(text), len(source)) and text[-1 - length] == source[-1 - length]:
        length += 1
    return length


def offer_of(
    drafter: SuffixDrafter, prompt: Sequence[int], response: Sequence[int], window: int
) -> Offer | None:
    (offer,) = drafter.offer([SampleState("s", list(prompt), list(response), 100)], window)
    return offer


@settings(max_examples=300)
@given(
    prompt=texts(2, 20),
    sequence=texts(2, 30),
    response=texts(2, 60),
    window=st.integers(1, 9),
    steps=st.lists(st.integers(1, 9), max_size=60),
)
def test_offers_what_followed_the_latest_earlier_occurrence(
    prompt: list[int], sequence: list[int], response: list[int], window: int, steps: list[int]
) -> None:
    drafter = SuffixDrafter()
    drafter.begin(DraftContext("s", prompt, tuple(sequence)))
    length = 0
    for step in [0, *steps]:
        length = min(length + step, len(response))
        text = prompt + response[:length]
        offer = offer_of(drafter, prompt, response[:length], window)
        found = search(text, sequence)
        assert (offer is None) == (found is None)
        if offer is None or found is None:
            continue
        source, end = found
        assert list(offer.tokens) == source[end : end + window]
        match = min(common_suffix(text, source[:end]), LONGEST)
        assert len(set(offer.acceptance)) == 1
        assert offer.acceptance[0] == min(0.4 + 0.05 * (match - NGRAM), 0.95)
        assert len(offer.acceptance) == len(offer.tokens)


def test_a_longer_match_promises_more() -> None:
    loop = list(range(30))
    drafter = SuffixDrafter()
    drafter.begin(DraftContext("s", loop))
    promises = []
    for length in range(NGRAM, 30):
        offer = offer_of(drafter, loop, loop[:length], 1)
        assert offer is not None
        assert list(offer.tokens) == [loop[length]]
        promises.append(offer.acceptance[0])
    assert promises == sorted(promises)
    assert promises[0] < promises[-1] <= 1


def test_a_repetition_within_the_prompt_is_found_at_once() -> None:
    drafter = SuffixDrafter()
    prompt = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]
    drafter.begin(DraftContext("s", prompt))
    offer = offer_of(drafter, prompt, [], 3)
    assert offer is not None
    assert list(offer.tokens) == [5, 6, 7]


def test_an_ended_sample_is_forgotten_and_an_unknown_one_gets_nothing() -> None:
    drafter = SuffixDrafter()
    prompt = [1, 2, 3, 4] * 3
    drafter.begin(DraftContext("s", prompt))
    assert offer_of(drafter, prompt, [], 4) is not None
    drafter.end("s")
    drafter.end("never-begun")
    assert offer_of(drafter, prompt, [], 4) is None


def test_other_samples_of_the_instance_are_found_live_and_finished() -> None:
    drafter = SuffixDrafter()
    drafter.begin(DraftContext("first", [1, 2, 3, 4]))
    drafter.begin(DraftContext("second", [1, 2, 3, 4]))
    first = SampleState("first", [1, 2, 3, 4], [5, 6, 7, 8, 9], 100)
    second = SampleState("second", [1, 2, 3, 4], [5], 100)
    assert list(drafter.offer([first, second], 3)[1].tokens) == [6, 7, 8]
    drafter.end("first")
    assert list(drafter.offer([second], 3)[0].tokens) == [6, 7, 8]


def test_a_sample_finds_nothing_of_texts_beyond_the_capacity() -> None:
    drafter = SuffixDrafter(capacity=12)
    for number in range(5):
        text = [100 * number + i for i in range(10)]
        drafter.begin(DraftContext(str(number), text))
        drafter.offer([SampleState(str(number), text, [], 100)], 2)
        drafter.end(str(number))
    drafter.begin(DraftContext("old", [0, 1, 2, 3]))
    drafter.begin(DraftContext("new", [400, 401, 402, 403]))
    states = [SampleState("old", [0, 1, 2, 3], [], 9), SampleState("new", [400, 401, 402, 403], [], 9)]
    old, new = drafter.offer(states, 2)
    assert old is None
    assert list(new.tokens) == [404, 405]
    assert len(drafter._places) <= 12 + 2 * NGRAM


def test_predictions_follow_what_was_kept() -> None:
    drafter = SuffixDrafter()
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4]
    drafter.begin(DraftContext("s", text))
    (before,) = drafter.offer([SampleState("s", text, [], 9)], 1)
    for _ in range(50):
        drafter.learn("s", 1, 0)
    (after,) = drafter.offer([SampleState("s", text, [], 9)], 1)
    assert after.acceptance[0] < 0.1 < before.acceptance[0]
    for _ in range(500):
        drafter.learn("s", 1, 1)
    (later,) = drafter.offer([SampleState("s", text, [], 9)], 1)
    assert later.acceptance[0] > 0.85
