"""Assignment of prompts to shards, and the work that is done on all of them at once."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import Group, Shard
from paceline.calls import GatewayCalls
from paceline.shards import OpenShard, Shards, assign, layout, shards_of
from tests.unit.sdk.scripted_transport import ScriptedTransport

PROMPTS = [f"prompt-{number}" for number in range(600)]

names = st.lists(st.text(max_size=8), min_size=1, max_size=6, unique=True)
weights = st.floats(0.01, 1000.0)
prompts = st.lists(st.text(max_size=12), max_size=80, unique=True)


@st.composite
def shard_lists(draw: st.DrawFn) -> list[Shard]:
    return [Shard("a:1", name, draw(weights)) for name in draw(names)]


def owners(prompt_ids: list[str], shards: list[Shard], slack: float = 0.05) -> dict[str, str]:
    """Return the name of each prompt's shard."""
    assigned = assign(prompt_ids, shards, slack)
    return {prompt: shards[index].name for prompt, index in zip(prompt_ids, assigned, strict=True)}


@given(prompts, shard_lists(), st.floats(0.0, 1.0))
def test_no_shard_gets_more_than_its_share_and_the_slack(
    prompt_ids: list[str], shards: list[Shard], slack: float
) -> None:
    counts = Counter(owners(prompt_ids, shards, slack).values())
    total = math.fsum(shard.weight for shard in shards)
    for shard in shards:
        assert counts[shard.name] <= math.ceil(len(prompt_ids) * shard.weight / total * (1 + slack))


@given(prompts, shard_lists(), st.randoms(use_true_random=False))
def test_neither_the_order_of_prompts_nor_that_of_shards_matters(
    prompt_ids: list[str], shards: list[Shard], random: object
) -> None:
    before = owners(prompt_ids, shards)
    random.shuffle(prompt_ids)  # type: ignore[attr-defined]
    assert owners(prompt_ids, shards[::-1]) == before


@given(prompts, shard_lists(), st.text(max_size=8), weights)
def test_without_a_bound_a_new_shard_takes_prompts_and_none_moves_between_the_others(
    prompt_ids: list[str], shards: list[Shard], name: str, weight: float
) -> None:
    if name in {shard.name for shard in shards}:
        return
    # With so much slack there is room for all prompts everywhere.
    slack = 2000.0 * 600 / 0.01
    before = owners(prompt_ids, shards, slack)
    after = owners(prompt_ids, [*shards, Shard("a:1", name, weight)], slack)
    assert all(after[prompt] in (before[prompt], name) for prompt in prompt_ids)


def test_the_bound_moves_few_prompts_when_a_shard_is_added() -> None:
    for count in (1, 2, 3, 7):
        shards = [Shard(f"s{number}:1", f"s{number}") for number in range(count + 1)]
        before, after = owners(PROMPTS, shards[:-1]), owners(PROMPTS, shards)
        moved = sum(before[prompt] != after[prompt] for prompt in PROMPTS) / len(PROMPTS)
        # The new shard's share has to move.
        assert moved < 1.05 / (count + 1) + 0.05


def test_a_shard_gets_prompts_in_proportion_to_its_weight() -> None:
    counts = Counter(owners(PROMPTS, [Shard("a:1", "a", 300), Shard("b:1", "b", 100)], 0.05).values())
    assert 0.93 * 450 <= counts["a"] <= 1.05 * 450


def test_the_same_prompts_stay_where_they_are_in_other_batches() -> None:
    shards = [Shard("a:1", "a"), Shard("b:1", "b")]
    whole, half = owners(PROMPTS, shards), owners(PROMPTS[::2], shards)
    assert sum(whole[prompt] != half[prompt] for prompt in half) <= 0.05 * len(half)


def test_known_assignments() -> None:
    """A trainer of another release assigns the same, so that it finds the samples that exist already."""
    shards = [Shard("a:1", "a"), Shard("b:1", "b"), Shard("c:1", "c", 2.0)]
    assert assign([f"p{number}" for number in range(8)], shards) == [2, 2, 2, 1, 1, 0, 0, 2]
    assert layout(shards) == layout(shards[::-1]) == "5bd53293"


@pytest.mark.parametrize(
    ("given_shards", "message"),
    [
        ([], "at least one"),
        (["a:1", "b:1", "a:1"], "twice"),
        ([Shard("a:1", weight=0)], "weight"),
        ([Shard("a:1", weight=math.nan)], "weight"),
        ([Shard("a:1", "x"), Shard("b:1", "x")], "twice"),
    ],
)
def test_shards_that_are_none(given_shards: list[str | Shard], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shards_of(given_shards)


def test_an_address_with_commas_is_one_shard() -> None:
    assert shards_of("a:1,b:1") == shards_of(["a:1,b:1"]) == (Shard("a:1,b:1", "a:1,b:1"),)


@given(prompts, shard_lists())
def test_groups_are_split_without_loss_and_in_order(prompt_ids: list[str], shards: list[Shard]) -> None:
    calls = GatewayCalls(ScriptedTransport({}))
    groups = [Group(name, [1], 1 + number % 3) for number, name in enumerate(prompt_ids)]
    parts = Shards([OpenShard("a:1", each.name, each.weight, calls=calls) for each in shards]).split(groups)
    kept = [group for _, own in parts for group in own]
    assert sorted(kept, key=groups.index) == groups
    assert all([groups.index(each) for each in own] == sorted(map(groups.index, own)) for _, own in parts)
    assert all(own for _, own in parts) or not groups
