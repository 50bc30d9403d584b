"""Near-ties of pre-generated samples, the forks that begin at them, and how many an instance can afford."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.internal.v1 import bubble_pb2 as pb
from services.contracts.rollout import RolloutKind
from services.generation.pregeneration.background import work_item
from services.generation.pregeneration.leases import DraftLease, DraftLeases, affordable

MARGIN = 0.1


def taken(leases: DraftLeases, *slots: int, most: int = 0) -> list[DraftLease]:
    tasks = [
        pb.PregenerationTask(lease=slot + 1, run_id="run", prompt_id="p", slot=slot, step=4, seed=100 + slot)
        for slot in slots
    ]
    for task in tasks:
        if most:
            task.sampling.max_tokens = most
    return leases.take(tasks, version=1, room=9)


def grow(leases: DraftLeases, lease: DraftLease, tokens: list[int], margins: list[float]) -> None:
    """Add tokens whose runners-up are 1000 more."""
    runners_up = [1000 + token for token in tokens]
    leases.grow(lease.handle, tokens, [-1.0] * len(tokens), runners_up, margins, MARGIN)


def forked(leases: DraftLeases, most: int, room: int) -> list[tuple[list[int], int]]:
    """Tokens and places of the forks that are started; none is ended."""
    started, ended = leases.fork(most, room)
    assert ended == []
    return [(each.tokens.tolist(), each.fork) for each in started]


def test_the_nearest_ties_are_forked_first_as_far_as_there_is_room() -> None:
    leases = DraftLeases()
    one, other = taken(leases, 0, 1)
    grow(leases, one, [5, 6, 7], [0.05, 3.0, 0.02])
    grow(leases, other, [8, 9], [0.01, 0.5])
    assert forked(leases, most=2, room=2) == [([1008], 1), ([5, 6, 1007], 3)]
    assert forked(leases, most=2, room=0) == []
    assert forked(leases, most=2, room=5) == [([1005], 1)]
    assert forked(leases, most=2, room=5) == []
    assert (leases.running, leases.forks) == (2, 3)


def test_a_nearer_tie_takes_the_place_of_the_farthest_fork_of_its_task() -> None:
    leases = DraftLeases()
    (lease,) = taken(leases, 0)
    grow(leases, lease, [5, 6], [0.05, 0.02])
    (near, far), _ = leases.fork(most=2, room=2)
    grow(leases, lease, [7], [0.06])
    assert leases.fork(most=2, room=2) == ([], [])
    grow(leases, lease, [8], [0.01])
    (nearest,), ended = leases.fork(most=2, room=0)
    assert nearest.tokens.tolist() == [5, 6, 7, 1008]
    assert ended == [far.handle]
    leases.end(far.handle, finished=False)
    # One that has ended by itself makes place as well.
    leases.end(near.handle, finished=True)
    grow(leases, lease, [9, 3], [0.004, 0.003])
    started, ended = leases.fork(most=2, room=9)
    assert [each.fork for each in started] == [6, 5]
    assert ended == [nearest.handle]


def test_a_fork_is_stored_as_one_of_its_sample_and_the_coordinator_never_hears_of_it() -> None:
    leases = DraftLeases()
    (lease,) = taken(leases, 3)
    grow(leases, lease, [5, 6], [3.0, 0.02])
    (fork,), _ = leases.fork(most=1, room=1)
    item = work_item(fork)
    assert (item.slot, item.seed, item.policy_version) == (3, 103, 1)
    leases.grow(fork.handle, [7], [-1.0])
    assert not fork.worth_storing
    assert leases.end(fork.handle, finished=True) is fork
    stored = fork.store()
    assert (stored.tokens.tolist(), stored.fork, stored.kind) == ([5, 1006, 7], 2, RolloutKind.PREGENERATED)
    assert (stored.slot, stored.seed, stored.version, stored.finished) == (3, 103, 1, True)
    assert not len(stored.logprobs)
    assert [each.lease for each in leases.progress()] == [4]
    assert leases.news == 0


def test_a_task_that_has_ended_is_forked_until_other_work_comes() -> None:
    leases = DraftLeases()
    (lease,) = taken(leases, 0)
    grow(leases, lease, [5, 6, 7], [0.05, 3.0, 0.02])
    leases.end(lease.handle, finished=True)
    leases.reported(leases.progress())
    assert len(forked(leases, most=2, room=1)) == 1
    leases.end_forking()
    assert forked(leases, most=2, room=1) == []


def test_a_revoked_task_takes_its_forks_along() -> None:
    leases = DraftLeases()
    one, other = taken(leases, 0, 1)
    for lease in (one, other):
        grow(leases, lease, [5, 6], [0.05, 0.02])
    started, _ = leases.fork(most=1, room=2)
    own = next(each for each in started if each.task.slot == 0)
    assert leases.revoke([one.number]) == [one.handle, own.handle]
    assert {each.task.slot for each in leases.fork(most=2, room=9)[0]} == {1}


def test_a_fork_is_not_taken_for_the_task_of_its_sample() -> None:
    leases = DraftLeases()
    (lease,) = taken(leases, 0)
    grow(leases, lease, [5], [0.05])
    (fork,), _ = leases.fork(most=1, room=1)
    leases.end(lease.handle, finished=False)
    leases.void(epoch=2)
    assert leases.forks == 1
    (again,) = taken(leases, 0)
    assert again is not fork


def test_the_last_token_of_a_response_is_not_forked() -> None:
    leases = DraftLeases()
    (lease,) = taken(leases, 0, most=2)
    grow(leases, lease, [5, 6], [0.05, 0.01])
    (fork,), _ = leases.fork(most=4, room=4)
    assert fork.tokens.tolist() == [1005]


@given(st.integers(1, 64), st.integers(0, 64), st.floats(0, 2), st.floats(0.001, 1), st.floats(0, 0.1))
def test_forks_slow_the_tasks_down_by_no_more_than_is_asked(
    running: int, forks: int, slowdown: float, step: float, row: float
) -> None:
    def seconds(samples: int) -> float:
        return step + row * samples

    more = affordable(seconds, running, forks, slowdown)
    most = (1 + slowdown) * seconds(running)
    fits = forks + more
    assert fits >= 0
    assert not fits or seconds(running + fits) <= most
    assert fits >= 4095 or seconds(running + fits + 1) > most


def test_alone_there_may_be_any_number_and_where_no_time_is_known_none() -> None:
    assert affordable(lambda samples: 1.0 * samples, 0, 5, 0.0) > 1000
    assert affordable(lambda samples: 0.0, 3, 0, 1.0) == 0
    assert affordable(lambda samples: 0.0, 3, 2, 1.0) == -2


@given(running=st.integers(0, 50), forks=st.integers(0, 50), usage=st.floats(0, 1))
def test_a_nearly_full_cache_lets_no_fork_join_and_surplus_ones_still_end(
    running: int, forks: int, usage: float
) -> None:
    def seconds(samples: int) -> float:
        return 1.0 + 0.01 * samples

    free = affordable(seconds, running, forks, 0.1)
    more = affordable(seconds, running, forks, 0.1, usage)
    assert more == (free if usage <= 0.8 else min(free, 0))


def test_forks_that_are_too_many_are_ended_from_the_farthest_on() -> None:
    leases = DraftLeases()
    one, other = taken(leases, 0, 1)
    grow(leases, one, [5, 6], [0.05, 0.02])
    grow(leases, other, [8, 9], [0.01, 0.03])
    started, _ = leases.fork(most=2, room=4)
    by_margin = [each.handle for each in started]
    assert leases.farthest(3) == [*reversed(by_margin)][:3]
    leases.end(by_margin[-1], finished=True)
    assert leases.farthest(1) == [by_margin[-2]]
    assert leases.farthest(9) == [*reversed(by_margin[:-1])]
