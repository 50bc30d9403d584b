"""The order in which weights go through the fleet."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.instances.roster import MOST_PEERS, ChainLink, chain, predecessors

LINKS = st.lists(
    st.builds(
        ChainLink,
        st.uuids().map(str),
        st.tuples(st.integers(1, 5), st.integers(1, 9)).map(lambda each: f"10.0.0.{each[0]}:74{each[1]:02d}"),
        st.booleans(),
    ),
    max_size=40,
    unique_by=lambda each: each.instance_id,
)


@given(LINKS)
def test_everybody_is_in_the_chain_once_and_those_of_a_host_follow_each_other(links: list[ChainLink]) -> None:
    order = chain(links)
    assert sorted(each.instance_id for each in order) == sorted(each.instance_id for each in links)
    hosts = [(each.busy, each.address.rpartition(":")[0]) for each in order]
    changes = sum(one != two for one, two in pairwise(hosts))
    assert changes == max(0, len(set(hosts)) - 1)
    assert [each.busy for each in order] == sorted(each.busy for each in order)
    # Whoever asks in which order: a gateway that takes over has the same chain.
    assert chain(reversed(links)) == order


@given(LINKS)
def test_each_fetches_from_those_before_it_the_nearest_first(links: list[ChainLink]) -> None:
    order = chain(links)
    for place in range(len(order)):
        peers = predecessors(order, place)
        assert peers == [each.address for each in order[:place]][::-1][:MOST_PEERS]
