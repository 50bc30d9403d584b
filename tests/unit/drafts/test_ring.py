"""Assignment of prompts to replicas."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from services.drafts.client import owner

PLACES = [f"drafts-{number}" for number in (1, 0, 2, 0, 0, 1, 1, 1)]

replica_sets = st.sets(st.text(min_size=1, max_size=12), min_size=1, max_size=8)
prompts = st.tuples(st.text(max_size=12), st.text(max_size=12))


def test_without_replicas_a_prompt_has_no_place() -> None:
    assert owner("run", "prompt", []) is None


def test_the_place_is_the_same_in_every_process_and_for_ever() -> None:
    """Gateway and instances are different processes, perhaps of different versions."""
    replicas = ["drafts-0", "drafts-1", "drafts-2"]
    assert [owner("run", f"p{number}", replicas) for number in range(8)] == PLACES


def test_the_names_do_not_run_into_each_other() -> None:
    replicas = [f"drafts-{number}" for number in range(100)]
    assert owner("a", "bc", replicas) != owner("ab", "c", replicas)


@given(prompts, replica_sets)
def test_the_order_of_the_replicas_does_not_matter(prompt: tuple[str, str], replicas: set[str]) -> None:
    place = owner(*prompt, sorted(replicas))
    assert place in replicas
    assert place == owner(*prompt, sorted(replicas, reverse=True))


@given(st.lists(prompts, min_size=1, max_size=30), replica_sets, st.data())
def test_a_replica_that_leaves_moves_only_its_own_prompts(
    names: list[tuple[str, str]], replicas: set[str], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(replicas)))
    for name in names:
        before, after = owner(*name, replicas), owner(*name, replicas - {gone})
        assert (after in replicas - {gone} or after is None) if before == gone else after == before


def test_replicas_get_equal_shares() -> None:
    for count in (2, 3, 7):
        replicas = [f"drafts-{number}" for number in range(count)]
        shares = Counter(owner("run", f"gsm8k-{number}", replicas) for number in range(7000))
        expected = 7000 / count
        assert set(shares) == set(replicas)
        # Five standard deviations of a binomial.
        assert all(
            abs(share - expected) < 5 * (expected * (1 - 1 / count)) ** 0.5 for share in shares.values()
        )


def test_the_prompts_of_a_replica_that_left_are_shared_out_equally() -> None:
    replicas = ["a", "b", "c", "d"]
    names = [f"p{number}" for number in range(4000)]
    orphans = [name for name in names if owner("run", name, replicas) == "d"]
    shares = Counter(owner("run", name, "abc") for name in orphans)
    assert all(abs(shares[each] - len(orphans) / 3) < 75 for each in "abc")
