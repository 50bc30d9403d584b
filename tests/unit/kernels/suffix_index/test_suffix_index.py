"""What the index offers, refuses, forgets and saves."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.suffix_index import SuffixIndex
from kernels.suffix_index.compiled import layout as at
from tests.unit.kernels.suffix_index.reference import check_memory, evidence, held

PLENTY = 100_000


def make(**settings) -> SuffixIndex:
    return SuffixIndex(**{"max_tokens": PLENTY, **settings})


def step(index: SuffixIndex, handles, texts, window: int = 4, asked=None):
    cu = np.cumsum([0, *map(len, texts)])
    flat = np.array([token for text in texts for token in text], np.int32)
    return index.step(np.array(handles, np.int64), flat, cu, window, asked=asked)


def offered(index: SuffixIndex, handle: int, text, window: int = 4) -> list[int]:
    offers = step(index, [handle], [text], window)
    return offers.tokens[0, : offers.counts[0]].tolist()


def test_what_followed_in_another_rollout_is_offered():
    index = make()
    index.put_prompt("p", [1, 2, 3])
    index.insert("p", "old", 0, [10, 11, 12, 13, 14, 15])
    handle = index.open("p", "new", 0)
    assert offered(index, handle, []) == [10, 11, 12, 13]
    offers = step(index, [handle], [[99, 11, 12]])
    assert offers.tokens[0, : offers.counts[0]].tolist() == [13, 14, 15]
    assert offers.matches.tolist() == [2]


def test_what_followed_earlier_in_the_same_rollout_is_offered():
    index = make()
    handle = index.open("p", "new", 0)
    assert offered(index, handle, [5, 6, 7, 8, 5, 6]) == [7, 8, 5, 6]


def test_growing_rollouts_of_a_prompt_see_each_other_at_once():
    index = make()
    first, second = index.open("p", 1, 0), index.open("p", 2, 0)
    step(index, [first, second], [[1, 2, 3, 4], [2, 3]])
    assert offered(index, second, []) == [4]


def test_the_frequent_continuation_wins_and_among_equals_the_latest():
    index = make()
    for name, last in enumerate([7, 8, 8, 9]):
        index.insert("p", name, 0, [1, 2, 3, last])
    handle = index.open("p", "new", 0)
    assert offered(index, handle, [1, 2, 3], 1) == [8]
    index.insert("p", "another", 0, [1, 2, 3, 9])
    assert offered(index, handle, [], 1) == [9]


def test_a_newer_version_outweighs_two_old_ones_by_decay():
    for decay, expected in ((0.4, 9), (0.6, 8)):
        index = make(decay=decay)
        index.insert("p", 0, 0, [1, 2, 3, 8])
        index.insert("p", 1, 0, [1, 2, 3, 8])
        index.insert("p", 2, 1, [1, 2, 3, 9])
        handle = index.open("p", "new", 1)
        assert offered(index, handle, [5, 1, 2, 3], 1) == [expected]


def test_versions_far_apart_keep_their_order():
    index = make()
    index.insert("p", 0, 0, [1, 2, 3, 8])
    index.insert("p", 1, 1_000_000, [1, 2, 3, 9])
    handle = index.open("p", "new", 1_000_001)
    assert offered(index, handle, [1, 2, 3], 1) == [9]
    _, weights, total, _ = evidence(index, handle)
    assert weights.keys() == {8, 9}
    assert 0 < weights[8] / total < 1e-9
    assert np.isfinite(total)
    check_memory(index)


def test_the_prompt_counts_only_where_no_rollout_has_been():
    index = make()
    index.put_prompt("p", [1, 2, 3, 1, 2, 3, 1, 2, 3])
    handle = index.open("p", "new", 0)
    # Behind 1, 2, 3 the prompt went on with 1 twice, and this rollout with 9.
    assert offered(index, handle, [9, 1, 2], 2) == [3, 9]
    for name in ("one", "two"):
        index.insert("p", name, 0, [8, 1, 2, 7])
    other = index.open("p", "other", 0)
    assert offered(index, other, [6, 1, 2], 1) == [7]


def test_other_prompts_help_where_the_own_says_nothing():
    index = make()
    index.insert("p", 0, 0, list(range(100, 130)))
    handle = index.open("q", 0, 0)
    assert offered(index, handle, [104, 105, 106]) == [107, 108, 109, 110]


def test_what_followed_a_prompt_helps_another_prompt_that_ends_like_it():
    index = make()
    index.put_prompt("p", [1, 2, 3, 4])
    index.insert("p", 0, 0, [50, 51])
    index.put_prompt("q", [9, 2, 3, 4])
    assert offered(index, index.open("q", 0, 0), [], 2) == [50, 51]


def test_one_dissenting_prompt_does_not_overturn_several():
    index = make()
    for prompt, last in enumerate([8, 8, 8, 9]):
        index.insert(prompt, 0, 0, [1, 2, 3, last])
    handle = index.open("new", 0, 0)
    assert offered(index, handle, [1, 2, 3], 1) == [8]
    for prompt in range(10, 20):
        index.insert(prompt, 0, 0, [1, 2, 3, 9])
    assert offered(index, index.open("newer", 0, 0), [1, 2, 3], 1) == [9]


def test_what_all_prompts_share_survives_the_growth_of_its_table():
    index = SuffixIndex(max_tokens=200_000)
    fewest = len(index._arena.arrays.entries)
    text = np.random.default_rng(0).permutation(20_000)
    for start in range(0, 20_000, 500):
        index.insert(start, 0, 0, text[start : start + 500])
    assert len(index._arena.arrays.entries) >= 16 * fewest
    found = 0
    for place in range(100, 20_000, 500):
        handle = index.open(("new", place), 0, 0)
        found += offered(index, handle, text[place : place + 13], 1) == [text[place + 13]]
    assert found >= 34  # of 40: where a bucket is full, entries are overwritten


def test_the_own_prompt_wins_over_others_with_a_context_as_long():
    index = make()
    for name in range(20):
        index.insert("p", name, 0, [1, 2, 3, 4, 50])
    index.insert("q", 0, 0, [9, 1, 2, 3, 4, 60])
    handle = index.open("q", 1, 0)
    assert offered(index, handle, [8, 1, 2, 3, 4], 1) == [60]


def test_a_match_grows_with_what_is_offered():
    index = make()
    for prompt in range(20):
        index.insert(prompt, 0, 0, [1, 2, 3, 4, 60])
    index.insert("q", 0, 0, [1, 2, 3, 4, 50])
    handle = index.open("q", 1, 0)
    # Behind 4 the prompt's own match is of four tokens, as long as the context that the other prompts share.
    assert offered(index, handle, [8, 1, 2, 3], 2) == [4, 50]


def test_a_context_shorter_than_min_match_is_not_used():
    for min_match, expected in ((2, []), (1, [4])):
        index = make(min_match=min_match)
        index._arena.arrays.entries[:] = 0
        index.insert("p", 0, 0, [3, 4])
        index._arena.arrays.entries[:] = 0  # without what all prompts share
        handle = index.open("p", 1, 0)
        step(index, [handle], [[9]])
        index._arena.arrays.entries[:] = 0
        state = index._arena.arrays.cursors["state"][handle & 0xFFFFFFFF]
        assert index._arena.arrays.states["length"][state] == 1
        found = step(index, [handle], [[3]], 1)
        index._arena.arrays.entries[:] = 0
        found = step(index, [handle], [[]], 1)
        assert found.tokens[0, : found.counts[0]].tolist() == expected


def test_predictions_that_come_true_get_likelier_and_others_less_likely():
    index = make()
    lesson = list(range(1, 400))
    index.insert("p", 0, 0, lesson)
    handle = index.open("p", 1, 0)
    before = step(index, [handle], [lesson[:20]]).shares[0, 0]
    after = step(index, [handle], [lesson[20:300]]).shares[0, 0]
    assert before < after
    assert after > 0.95
    # What follows 20, 21, 22 is new every time.
    surprises = [token for i in range(60) for token in (20, 21, 22, 1000 + i)]
    before = step(index, [handle], [[20, 21, 22]]).shares[0, 0]
    after = step(index, [handle], [[5, *surprises, 20, 21, 22]]).shares[0, 0]
    assert after < before
    assert after < 0.3


def test_an_offer_ends_where_it_gets_too_unlikely():
    lesson = list(range(1, 60))
    long, short = make(), make(floor=0.2)
    counts = []
    for index in (long, short):
        index.insert("p", 0, 0, lesson)
        handle = index.open("p", 1, 0)
        offers = step(index, [handle], [[7, 8]], 32)
        counts.append(int(offers.counts[0]))
        assert np.prod(offers.shares[0, : counts[-1]]) >= index._settings.floor
    assert 0 < counts[1] < counts[0] == 32


def test_removed_rollouts_are_not_offered_and_growing_ones_go_on():
    index = make()
    index.insert("p", "a", 0, [1, 2, 3, 4, 5])
    index.insert("p", "b", 1, [1, 2, 3, 6, 7])
    handle = index.open("p", "new", 1)
    step(index, [handle], [[1, 2]])
    index._arena.arrays.entries[:] = 0
    assert index.has("p", "b")
    assert index.has("p", "new")
    assert index.remove("p", "b")
    assert not index.has("p", "b")
    assert not index.has("q", "a")
    assert offered(index, handle, []) == [3, 4, 5]
    assert index.remove("p", "a")
    index._arena.arrays.entries[:] = 0
    assert offered(index, handle, []) == []
    assert index.tokens == 2
    assert not index.remove("p", "a")
    assert not index.remove("q", "a")


def test_a_closed_rollout_is_kept_or_removed():
    for keep in (True, False):
        index = make()
        first, second = index.open("p", 0, 0), index.open("p", 1, 0)
        step(index, [first], [[1, 2, 3, 4]])
        index.close(first, keep=keep)
        assert (0 in held(index)["p"][1]) is keep
        step(index, [second], [[1, 2]])
        assert evidence(index, second)[0] == (2 if keep else 0)


def test_inserting_the_same_again_changes_nothing_and_another_text_replaces_it():
    index = make()
    index.put_prompt("p", [1])
    index.insert("p", 0, 0, [1, 2, 3])
    before = index._arena.arrays.scalars.copy()
    index.insert("p", 0, 0, np.array([1, 2, 3], np.int64))
    index.put_prompt("p", (1,))
    assert (index._arena.arrays.scalars == before).all()
    index.insert("p", 0, 0, [4, 5])
    assert held(index) == {"p": ([1], {0: (0, [4, 5])})}
    assert index.tokens == 3


def test_a_prompt_that_comes_late_becomes_the_context_of_its_rollouts():
    index = make()
    index.insert("p", 0, 0, [7, 8])
    handle = index.open("p", 1, 0)
    index.put_prompt("p", [1, 2, 3])
    assert offered(index, handle, []) == [7, 8]
    assert evidence(index, handle)[0] == 3


def test_empty_texts_are_allowed():
    index = make()
    index.put_prompt("p", [])
    index.insert("p", 0, 0, [])
    handle = index.open("p", 1, 0)
    assert offered(index, handle, []) == []
    empty = index.step(np.empty(0, np.int64), np.empty(0, np.int32), np.zeros(1, np.int64), 3)
    assert empty.tokens.shape == (0, 3)
    index.close(handle)
    assert held(SuffixIndex.load(index.dump())) == held(index)
    assert index.tokens == 0


@pytest.mark.parametrize("reach", [1, 4, 64])
def test_one_token_repeated_costs_no_more_than_reach_for_each(reach):
    # A prompt, so that nothing is counted at the root; work is what was added to the totals of all states.
    length = 20_000
    index = make(reach=reach)
    handle = index.open("p", 0, 0)
    offers = step(index, [handle], [[5] * length])
    arrays = index._arena.arrays
    live = arrays.states["length"] >= 0
    counted = float(arrays.states["total"][live].sum())
    assert length - 1 <= counted <= reach * length
    assert live.sum() == length + 1
    assert arrays.scalars[at.EDGES] == 0
    assert offers.tokens[0].tolist() == [5, 5, 5, 5]
    index.insert("p", 1, 0, [5] * length + [6])
    assert int((arrays.states["length"] >= 0).sum()) <= 2 * index.tokens
    assert (
        float(arrays.states["total"][arrays.states["length"] >= 0].sum()) <= (reach + 1) * 2 * length + length
    )
    check_memory(index)


@pytest.mark.parametrize(
    "tokens", [[-1], [2**31], [1.5], [[1, 2]], ["a"], [True], np.array([2**40]), np.array([2**63], np.uint64)]
)
def test_what_is_no_token_id_is_refused(tokens):
    index = make()
    handle = index.open("p", 0, 0)
    for call in (
        lambda: index.put_prompt("q", tokens),
        lambda: index.insert("q", 0, 0, tokens),
        lambda: index.step(np.array([handle]), tokens, np.array([0, len(tokens)]), 1),
    ):
        with pytest.raises(ValueError, match="token"):
            call()
    assert held(index) == {"p": ([], {0: (0, [])})}


@pytest.mark.parametrize("name", [None, 1.0, True, b"x", ("a", None), ("a", ("b",)), ["a"], np.int64(1)])
def test_what_is_no_name_is_refused(name):
    index = make()
    for call in (
        lambda: index.put_prompt(name, [1]),
        lambda: index.insert(name, 0, 0, [1]),
        lambda: index.insert("p", name, 0, [1]),
        lambda: index.open("p", name, 0),
    ):
        with pytest.raises(TypeError, match="name"):
            call()
    assert held(index) == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 0},
        {"max_tokens": 2**40},
        {"decay": 0.0},
        {"decay": 1.1},
        {"reach": 0},
        {"min_match": 0},
        {"floor": -0.1},
        {"floor": float("nan")},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        make(**settings)


def test_versions_are_integers_of_a_sensible_size():
    index = make()
    with pytest.raises(TypeError, match="version"):
        index.insert("p", 0, 1.5, [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="version"):
        index.open("p", 0, 2**60)


def test_a_bad_handle_appends_nothing_anywhere():
    index = make()
    good, closed, dropped = index.open("p", 0, 0), index.open("p", 1, 0), index.open("q", 0, 0)
    index.close(closed)
    index.drop("q")
    again = index.open("p", 2, 0)  # in a row that was used before
    assert again not in (closed, dropped)
    for bad in (closed, dropped, -1, 0, 12345, 2**62, good + 2**32):
        for handles in ([good, bad], [bad, good]):
            with pytest.raises(KeyError):
                step(index, handles, [[1, 2], [3]])
    assert held(index)["p"][1][0] == (0, [])
    with pytest.raises(KeyError):
        index.close(closed)


@pytest.mark.parametrize(
    ("tokens", "cu", "window"),
    [
        ([1, 2], [0, 2], 0),
        ([1, 2], [0, 1], 1),
        ([1, 2], [1, 2], 1),
        ([1, 2], [0, 1, 2], 1),
        ([1, 2], [0], 1),
        ([1, 2], [[0, 2]], 1),
    ],
)
def test_a_batch_that_does_not_fit_together_is_refused(tokens, cu, window):
    index = make()
    handle = index.open("p", 0, 0)
    with pytest.raises(ValueError, match=r"window|cu"):
        index.step(np.array([handle]), np.array(tokens, np.int32), np.array(cu), window)
    both = [handle, index.open("p", 1, 0)]
    with pytest.raises(ValueError, match="cu"):
        index.step(np.array(both), np.array([1], np.int32), np.array([0, 2, 1]), 1)
    with pytest.raises(ValueError, match="asked"):
        index.step(
            np.array([handle]), np.array([1], np.int32), np.array([0, 1]), 1, asked=np.ones(2, np.bool_)
        )
    assert index.tokens == 0


@given(
    st.lists(
        st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=5), st.booleans()), min_size=3, max_size=3)
    )
)
def test_what_is_not_asked_for_is_indexed_and_changes_no_other_continuation(steps):
    whole, part = make(), make()
    handles = [[index.open("p", name, 0) for name in range(3)] for index in (whole, part)]
    for each in steps:
        texts, asked = [text for text, _ in each], np.array([wanted for _, wanted in each])
        expected = step(whole, handles[0], texts)
        found = step(part, handles[1], texts, asked=asked)
        assert found.counts.tolist() == np.where(asked, expected.counts, 0).tolist()
        assert np.array_equal(found.tokens[asked], expected.tokens[asked])
        assert np.array_equal(found.shares[asked], expected.shares[asked])
    assert whole.dump() == part.dump()


def test_all_kinds_of_names_survive_saving():
    index = make(decay=0.25, reach=7, min_match=3, floor=0.125)
    names = ["", "1", 1, -(2**70), (), ("a",), ("a", 1), (1, "ü\n\0"), "\ud800", "ü"]
    for i, name in enumerate(names):
        index.put_prompt(name, [i])
        for j, rollout in enumerate(names):
            index.insert(name, rollout, j - 3, [i, j])
    growing = index.open("", "growing", 5)
    step(index, [growing], [[1, 2, 3]])
    loaded = SuffixIndex.load(index.dump())
    assert held(loaded) == held(index)
    assert loaded._settings == index._settings
    assert loaded.tokens == index.tokens
    with pytest.raises(KeyError):
        loaded.close(growing)
    check_memory(loaded)


def test_what_is_no_saved_index_is_refused():
    index = make()
    index.put_prompt("p", [1, 2, 3])
    index.insert("p", 0, 0, [4, 5, 6])
    saved = index.dump()
    # One bit of the magic, of a token, and of the digest behind it.
    flipped = [bytearray(saved) for _ in range(3)]
    for copy, place in zip(flipped, (0, -18, -1), strict=True):
        copy[place] ^= 1
    for damaged in (b"", b"x" * 100, saved[:-1], saved[:40], saved + b"x", *map(bytes, flipped)):
        with pytest.raises(ValueError, match="saved suffix index"):
            SuffixIndex.load(damaged)


def test_texts_survive_the_growth_of_every_array():
    rng = np.random.default_rng(0)
    index = SuffixIndex(max_tokens=400_000)
    texts = {(p, r): rng.integers(0, 50 + 3000 * (p % 2), 3000) for p in range(6) for r in range(4)}
    handles = {}
    for (p, r), text in texts.items():
        if r == 3:
            handles[p] = index.open(p, r, 0)
        else:
            index.insert(p, r, 0, text)
    for start in range(0, 3000, 100):
        step(index, list(handles.values()), [texts[p, 3][start : start + 100] for p in handles])
    check_memory(index)
    kept = held(index)
    for p, handle in handles.items():
        assert kept[p][1][3] == (0, texts[p, 3].tolist())
        index.close(handle)
        probe = index.open(p, "probe", 0)
        place = 100 + 7 * p
        found = offered(index, probe, texts[p, 3][place : place + 20], 8)
        assert found == texts[p, 3][place + 20 : place + 28].tolist()
    for p in range(6):
        assert index.drop(p)
    assert index.tokens == 0
    check_memory(index)


def test_importing_the_index_does_not_import_numba():
    code = "import kernels.suffix_index, sys; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
