"""Reference drafter: follows its sequence, finds its way back, and never proposes what is not in it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.contracts.rollout import RolloutKind
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.engine.types import EngineSampleState
from services.generation.speculation.drafter import DraftContext, NewRollouts, Proposal
from tests.support.proposals import expected_tokens, unbatched
from tests.unit.generation.rollouts import rollout

WINDOW = 8
few_letters = st.lists(st.integers(0, 2), max_size=40)


def state(response: Sequence[int], sample_id: str = "s") -> EngineSampleState:
    return EngineSampleState(sample_id, [9], list(response), 100, 1 + len(response))


def drafter_with(sequence: Sequence[int]) -> ReferenceDrafter:
    drafter = ReferenceDrafter()
    drafter.begin(DraftContext("s", [9], tuple(sequence)))
    return drafter


def offered(
    drafter: ReferenceDrafter, response: Sequence[int], window: int = WINDOW, sample_id: str = "s"
) -> Proposal | None:
    (proposal,) = unbatched(drafter.propose([state(response, sample_id)], window, {}), 1)
    return proposal


def tokens_after(drafter: ReferenceDrafter, response: Sequence[int]) -> list[int]:
    """What is offered after a response that came token by token."""
    for length in range(len(response)):
        offered(drafter, response[:length])
    proposal = offered(drafter, response)
    return [] if proposal is None else list(proposal.tokens)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.data())
def test_proposes_the_next_tokens_of_a_sequence_that_is_followed(
    sequence: list[int], data: st.DataObject
) -> None:
    drafter = drafter_with(sequence)
    length = 0
    while length < len(sequence):
        window = data.draw(st.integers(1, 12))
        proposal = offered(drafter, sequence[:length], window)
        assert proposal is not None
        assert list(proposal.tokens) == sequence[length : length + window]
        length += data.draw(st.integers(1, 9))
    assert offered(drafter, sequence) is None


@given(few_letters, few_letters, st.integers(1, 10), st.lists(st.integers(1, 5), max_size=40))
def test_every_proposal_is_a_part_of_the_sequence_with_a_probability_per_token(
    sequence: list[int], response: list[int], window: int, steps: list[int]
) -> None:
    drafter = drafter_with(sequence)
    length = 0
    for step in [0, *steps]:
        length = min(length + step, len(response))
        proposal = offered(drafter, response[:length], window)
        if proposal is None:
            continue
        count = len(proposal.tokens)
        assert 0 < count <= window
        assert len(proposal.acceptance) == count
        assert all(0 < probability <= 1 for probability in proposal.acceptance)
        assert any(sequence[i : i + count] == list(proposal.tokens) for i in range(len(sequence)))


@pytest.mark.parametrize("size", [1, 3, 20, 60])
@pytest.mark.parametrize("place", [0, 1, 7, 50])
def test_finds_its_way_back_after_an_insertion(place: int, size: int) -> None:
    sequence = list(range(200))
    response = [*sequence[:place], *range(900, 900 + size), *sequence[place : place + 4]]
    assert tokens_after(drafter_with(sequence), response) == sequence[place + 4 : place + 4 + WINDOW]


@pytest.mark.parametrize("size", [1, 3, 20, 60])
@pytest.mark.parametrize("place", [0, 1, 7, 50])
def test_finds_its_way_back_after_a_deletion(place: int, size: int) -> None:
    sequence = list(range(200))
    after = place + size
    response = [*sequence[:place], *sequence[after : after + 4]]
    assert tokens_after(drafter_with(sequence), response) == sequence[after + 4 : after + 4 + WINDOW]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_goes_on_at_the_same_offset_after_a_substitution(size: int) -> None:
    sequence = list(range(100))
    response = [*sequence[:10], *range(900, 900 + size)]
    assert tokens_after(drafter_with(sequence), response) == sequence[10 + size : 10 + size + WINDOW]


def test_several_differences_one_after_the_other() -> None:
    sequence = list(range(200))
    response = [*sequence[:20], 901, *sequence[20:40], *sequence[45:70], 902, *sequence[71:90]]
    assert tokens_after(drafter_with(sequence), response) == sequence[90 : 90 + WINDOW]


def test_goes_to_the_nearest_of_several_places_that_look_alike() -> None:
    phrase = [1, 2, 3, 4]
    sequence = [*range(100, 110), *phrase, 50, *range(200, 210), *phrase, 60, *range(300, 310)]
    # Five tokens are skipped: the first phrase lies three tokens further, the second eighteen.
    assert tokens_after(drafter_with(sequence), [*range(100, 105), *phrase])[0] == 50


def test_predictions_drop_at_a_mismatch_and_recover_with_every_match() -> None:
    sequence = list(range(100))
    drafter = drafter_with(sequence)
    first = []
    response = [*sequence[:20], 999, *sequence[21:40]]
    for length in range(18, len(response)):
        proposal = offered(drafter, response[:length])
        assert proposal is not None
        first.append(proposal.acceptance[0])
    before, after = first[:3], first[3:]
    assert after[0] == min(first) < min(before)
    assert after[:9] == sorted(after[:9])


def test_predictions_follow_what_matched_by_the_time_since_the_last_mismatch() -> None:
    drafter = ReferenceDrafter()
    # Every tenth token differs: after a mismatch the next nine always match.
    sequence = list(range(400))
    response = [900 + place if place % 10 == 9 else token for place, token in enumerate(sequence)]
    drafter.begin(DraftContext("s", [9], sequence))
    offered(drafter, response[:390])
    at_mismatch = offered(drafter, response[:390])
    before_mismatch = offered(drafter, response[:399])
    assert at_mismatch is not None
    assert before_mismatch is not None
    assert all(probability > 0.85 for probability in at_mismatch.acceptance[:8])
    assert before_mismatch.acceptance[0] < 0.8


def test_a_sequence_that_never_matches_promises_little_whatever_others_did() -> None:
    drafter = ReferenceDrafter()
    drafter.begin(DraftContext("bad", [9], [5] * 100, source="history"))
    drafter.begin(DraftContext("good", [9], list(range(100)), source="pregenerated"))
    response = list(range(60))
    bad, good = unbatched(drafter.propose([state(response, "bad"), state(response, "good")], 8, {}), 2)
    assert bad is not None
    assert good is not None
    assert expected_tokens(bad) < 0.3
    assert expected_tokens(good) > 7
    assert (bad.source, good.source) == ("history", "pregenerated")


def test_under_another_policy_less_is_known_of_how_drafts_hold() -> None:
    sequence = list(range(300))
    expected = []
    for version in (3, 4):
        drafter = ReferenceDrafter()
        drafter.begin(DraftContext("bad", [9], [5] * 300, version=3))
        offered(drafter, sequence[:200], sample_id="bad")
        drafter.begin(DraftContext("new", [9], sequence, version=version))
        proposal = offered(drafter, [], sample_id="new")
        assert proposal is not None
        expected.append(expected_tokens(proposal))
    assert expected[1] > 1.2 * expected[0]


# -- late arrival ---------------------------------------------------------------------------------------------


@given(few_letters, few_letters, st.integers(0, 40), st.integers(1, 8))
def test_a_sequence_that_comes_late_is_offered_as_if_it_had_been_there(
    sequence: list[int], response: list[int], arrives_at: int, window: int
) -> None:
    early, late = ReferenceDrafter(), ReferenceDrafter()
    arrives_at = min(arrives_at, len(response))
    for drafter in (early, late):
        drafter.begin(DraftContext("s", [9], sequence if drafter is early else ()))
        if drafter is late and sequence:
            offered(drafter, response[:arrives_at])
            drafter.add_rollouts(NewRollouts(references={"s": rollout(tokens=sequence)}))
    # The early one sees the same tokens at once: how a response is cut into steps decides where it is realigned.
    first, second = (
        offered(early, response[:arrives_at], window),
        offered(late, response[:arrives_at], window),
    )
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert (list(first.tokens), first.acceptance) == (list(second.tokens), second.acceptance)


def test_a_late_sequence_is_named_by_its_kind_and_takes_the_place_of_a_shorter_one() -> None:
    drafter = drafter_with([1, 2, 3])
    assert offered(drafter, [1]) is not None
    drafter.add_rollouts(
        NewRollouts(references={"s": rollout(tokens=[1, 2, 3, 4, 5], kind=RolloutKind.PREGENERATED)})
    )
    proposal = offered(drafter, [1, 2, 3])
    assert proposal is not None
    assert (list(proposal.tokens), proposal.source) == ([4, 5], "pregenerated")
    drafter.end("s", [1, 2, 3])
    assert offered(drafter, [1, 2, 3]) is None


# -- realignment ----------------------------------------------------------------------------------------------

ANCHOR, REACH, LATEST = 4, 64, 8


def nearest(sequence: list[int], response: list[int]) -> int | None:
    """Where the last tokens of the response end in the sequence, nearest to its own end, later before earlier."""
    here = len(response)
    for distance in range(1, REACH):
        for end in (here + distance, here - distance):
            if ANCHOR <= end <= len(sequence) and sequence[end - ANCHOR : end] == response[-ANCHOR:]:
                return end
    return None


def agreeing(sequence: list[int], response: list[int], place: int) -> int:
    """How many of the latest tokens lie before a place of the sequence as they do in the response."""
    latest = [(place - i, response[-i]) for i in range(1, min(LATEST, len(response)) + 1)]
    return sum(0 <= at < len(sequence) and sequence[at] == token for at, token in latest)


@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=160),
    st.lists(st.integers(0, 1), min_size=4, max_size=120),
)
@example([0] * 12 + [1] * 4 + [0, 0, 0, 1], [0] * 7 + [1])
def test_realigns_to_the_nearest_place_that_looks_more_alike(
    sequence: list[int], response: list[int]
) -> None:
    here = len(response)
    if here <= len(sequence) and sequence[here - 1] == response[-1]:
        response[-1] = 1 - response[-1]
    proposal = offered(drafter_with(sequence), response)
    place = nearest(sequence, response)
    if place is None or (
        here < len(sequence) and agreeing(sequence, response, place) < agreeing(sequence, response, here)
    ):
        place = here
    assert (list(proposal.tokens) if proposal is not None else []) == sequence[place:][:WINDOW]


def test_a_place_that_only_looks_alike_is_no_way_back() -> None:
    # A token differs, and what the sample has instead is in the sequence, too, some tokens further.
    phrase = [1, 2, 3, 9]
    sequence = [*range(100, 120), 1, 2, 3, 4, *range(120, 130), *phrase, *range(130, 150)]
    response = [*sequence[:23], 9]
    assert tokens_after(drafter_with(sequence), response) == sequence[24 : 24 + WINDOW]


def test_a_sequence_that_was_left_at_its_end_is_followed_at_the_same_positions() -> None:
    end = [1, 2, 3, 4]
    sequence = [*range(100, 160), *end]
    drafter = drafter_with(sequence)
    # The sample has what looks like the end of the sequence, and then goes on as that does in its middle.
    response = [*sequence[:8], *[900] * 8, *end]
    assert offered(drafter, response) is None
    response += [*sequence[len(response) : len(response) + 2], 901]
    assert tokens_after(drafter, response) == sequence[len(response) : len(response) + WINDOW]


def test_samples_do_not_mix_and_an_ended_one_is_forgotten() -> None:
    drafter = ReferenceDrafter()
    drafter.begin(DraftContext("a", [9], (1, 2, 3)))
    drafter.begin(DraftContext("b", [9], (4, 5, 6)))
    drafter.begin(DraftContext("none", [9]))
    states = [state([4], "b"), state([], "none"), state([], "unknown"), state([1, 2], "a")]
    proposals = unbatched(drafter.propose(states, WINDOW, {}), len(states))
    assert [None if proposal is None else list(proposal.tokens) for proposal in proposals] == [
        [5, 6],
        None,
        None,
        [3],
    ]
    drafter.end("a", [1, 2, 3])
    drafter.end("never-begun", [])
    assert drafter.propose([state([1], "a")], WINDOW, {}) is None


# -- forks ------------------------------------------------------------------------------------------------


def forked(reference: Sequence[int], *forks: Sequence[int]) -> tuple[ReferenceDrafter, list[None]]:
    """A drafter with a sample that has forks, and a list that grows with each fork that is taken."""
    taken = list[None]()
    drafter = ReferenceDrafter(lambda: taken.append(None))
    drafter.begin(DraftContext("s", [9], tuple(reference), forks=[list(fork) for fork in forks]))
    return drafter, taken


def test_a_sample_that_leaves_its_reference_goes_on_along_the_fork_that_it_takes() -> None:
    reference = list(range(100, 140))
    fork = [*reference[:20], 7, *range(200, 220)]
    drafter, taken = forked(reference, fork)
    assert tokens_after(drafter, fork[:20]) == reference[20:28]
    assert not taken
    proposal = offered(drafter, fork[:21])
    assert proposal is not None
    assert list(proposal.tokens) == fork[21:29]
    assert len(taken) == 1
    # As likely to be accepted as a text that was never left.
    fresh = offered(drafter_with(reference), reference[:20])
    assert fresh is not None
    assert proposal.acceptance == pytest.approx(fresh.acceptance, abs=0.05)


def test_a_fork_of_a_fork_is_taken_after_it() -> None:
    reference = list(range(100, 140))
    first = [*reference[:10], 7, *range(200, 220)]
    second = [*first[:15], 8, *range(300, 320)]
    other = [*reference[:12], 6, *range(400, 420)]
    drafter, taken = forked(reference, first, second, other)
    assert tokens_after(drafter, first[:13]) == first[13:21]
    proposal = offered(drafter, second[:16])
    assert proposal is not None
    assert list(proposal.tokens) == second[16:24]
    assert len(taken) == 2


def test_a_response_that_no_fork_agrees_with_keeps_its_reference() -> None:
    reference = list(range(100, 140))
    drafter, taken = forked(reference, [*reference[:20], 7, *range(200, 220)])
    left = [*reference[:20], 5]
    assert tokens_after(drafter, left) == reference[21:29], "at the same place, as without forks"
    # Its forks are of no use any more, whatever comes.
    offered(drafter, [*left, *reference[21:24]])
    assert not taken


def test_forks_that_come_later_are_taken_too() -> None:
    reference = list(range(100, 140))
    fork = [*reference[:5], 7, *range(200, 220)]
    drafter, taken = forked(reference)
    assert tokens_after(drafter, reference[:3]) == reference[3:11]
    drafter.add_rollouts(NewRollouts(forks={"s": [fork], "gone": [fork]}))
    proposal = offered(drafter, fork[:6])
    assert proposal is not None
    assert list(proposal.tokens) == fork[6:14]
    assert len(taken) == 1
    drafter.end("s", fork[:6])
    assert offered(drafter, fork[:6]) is None


@given(few_letters, st.lists(few_letters, max_size=4), few_letters)
def test_forks_never_offer_what_no_text_has(
    reference: list[int], forks: list[list[int]], response: list[int]
) -> None:
    drafter, _ = forked(reference, *forks)
    texts = [reference, *forks]
    for length in range(len(response) + 1):
        proposal = offered(drafter, response[:length])
        if proposal is not None:
            tokens = list(proposal.tokens)
            assert any(tokens == text[at : at + len(tokens)] for text in texts for at in range(len(text)))
