"""The record of what is published, and the learner's own state on disk."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.contracts.learner import DrafterHistory, FedSample, PublishedDrafter
from services.drafter.config import DrafterConfig
from services.drafter.metrics import DrafterMetrics
from services.drafter.training import session as sessions
from services.drafter.training.process import TrainingProcess
from services.drafter.training.session import LEARNER, MANIFEST, Manifest, States, TrainingSession
from services.platform.redis.connection import connect
from tests.support.fake_learner import FACTORY, log_of, write_drafter

published = st.builds(
    PublishedDrafter,
    st.integers(1, 10**6),
    st.text(max_size=20),
    st.text("0123456789abcdef", max_size=8),
    st.floats(0, 9),
    st.integers(0, 99),
    st.floats(0, 1e9),
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    st.integers(0, 10**6),
)


@given(st.none() | published, st.lists(published, max_size=4))
def test_a_record_is_read_as_it_was_written(
    current: PublishedDrafter | None, earlier: list[PublishedDrafter]
) -> None:
    history = DrafterHistory(current, tuple(earlier))
    assert DrafterHistory.from_json(history.to_json()) == history


@given(st.lists(published, min_size=1, max_size=8), st.integers(1, 4))
def test_going_back_goes_the_way_that_publishing_came(versions: list[PublishedDrafter], keep: int) -> None:
    history = DrafterHistory()
    for each in versions:
        history = history.with_published(each, keep)
    for expected in versions[::-1][1 : keep + 1]:
        back = history.rolled_back()
        assert back is not None
        history = back
        assert history.current == expected
    assert history.rolled_back() is None


@pytest.mark.parametrize("text", ["3", "[]", '{"current": {"version": 1}}', "no json"])
def test_what_is_no_record_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        DrafterHistory.from_json(text)


def write(states: States, manifest: Manifest) -> Path:
    fresh = states.new()
    (fresh / LEARNER).write_text(str(manifest.updates))
    return states.commit(fresh, manifest)


def test_the_latest_state_comes_first_and_few_are_kept(tmp_path: Path) -> None:
    states = States(tmp_path / "state")
    assert list(states.latest()) == []
    for number in range(4):
        write(states, Manifest(updates=number, used=("1-0", "2-0"), forced=(2**64 - 1,)))
    found = list(states.latest())
    assert [manifest.updates for _, manifest in found] == [3, 2]
    assert found[0][1] == Manifest(updates=3, used=("1-0", "2-0"), forced=(2**64 - 1,))
    assert (found[0][0] / LEARNER).read_text() == "3"
    assert len(list((tmp_path / "state").iterdir())) == 2


def test_half_a_state_and_a_broken_one_are_passed_over(tmp_path: Path) -> None:
    states = States(tmp_path)
    write(states, Manifest(updates=1))
    broken = write(states, Manifest(updates=2))
    (broken / MANIFEST).write_text("{")
    (states.new() / LEARNER).write_text("never committed")
    assert [manifest.updates for _, manifest in states.latest()] == [1]
    write(States(tmp_path), Manifest(updates=3))
    assert not list(tmp_path.glob(".*")), "what nobody committed is removed"


@pytest.fixture
async def opened(
    redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[[], TrainingSession]]:
    """Opens sessions of one learner, each with a training process without a model."""
    monkeypatch.setenv("FAKE_LEARNER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(sessions, "_IDLE_SECONDS", 0.0)
    config = DrafterConfig(
        redis_url=redis_url, namespace=namespace, model=tmp_path, folder=tmp_path, held_out_share=1e-9
    )
    redis, made = connect(config), list[TrainingSession]()

    def session() -> TrainingSession:
        metrics = DrafterMetrics(CollectorRegistry())
        made.append(TrainingSession(config, redis, 1, metrics, TrainingProcess(config, FACTORY)))
        return made[-1]

    yield session
    for each in made:
        await each.stop()
    await redis.aclose()


def take(session: TrainingSession, *numbers: int) -> None:
    """Takes in samples of one prompt, each an entry of the feed."""
    session.samples.take_in(
        (f"{number}-0", FedSample(("run", "step"), "p", number, None, 0, (1, 2), (3, 4)))
        for number in numbers
    )


async def test_while_no_state_can_be_saved_no_more_is_learned_from(
    opened: Callable[[], TrainingSession], tmp_path: Path
) -> None:
    """Samples that were learned from are in memory until a state has them."""
    session = opened()
    await session.start(None)
    (tmp_path / "full").touch()
    take(session, 1, 2)
    assert await session.update()
    take(session, 3)
    await session.prepare()
    assert not await session.update()
    assert len(session.samples.buffer) == 1, "it waits, and the buffer is bounded"
    assert session.samples.entries.take_done() == []
    assert list((tmp_path / "state").iterdir()) == [], "half a state takes no room"
    (tmp_path / "full").unlink()
    await session.prepare()
    assert sorted(session.samples.entries.take_done()) == ["1-0", "2-0"]
    assert await session.update()
    assert session.samples.entries.take_done() == ["3-0"]
    assert [len(each["names"]) for each in log_of(tmp_path) if each["did"] == "updated"] == [2, 1]


async def test_a_rollback_outlives_the_process_that_made_it(
    opened: Callable[[], TrainingSession], tmp_path: Path
) -> None:
    """The record has it, and the leader or its training process died before a state had it."""
    session, states = opened(), States(tmp_path / "state")
    fresh = states.new()
    (fresh / LEARNER).write_text("[2.0, []]")
    states.commit(fresh, Manifest(updates=5, rollbacks=1, since_roll_back=4, rolled_back_from=3))
    earlier = write_drafter(tmp_path / "checkpoints", 1, 7.0)
    back = PublishedDrafter(1, str(earlier.path), earlier.sha256, rolled_back_from=4)

    def counted() -> tuple[int, int | None]:
        return session.manifest.rollbacks, session.manifest.since_roll_back

    await session.start(back)
    assert counted() == (2, 0)
    # What is learned meanwhile is not saved as if it had gone back.
    take(session, 1)
    assert await session.update()
    assert next(states.latest())[1].rolled_back_from == 3
    await session.prepare()
    path, manifest = next(states.latest())
    assert json.loads((path / LEARNER).read_text())[0] == 7.0
    assert (manifest.rollbacks, manifest.rolled_back_from) == (2, 4)
    # Now a state has it.
    await session.start(back)
    await session.prepare()
    assert counted() == (2, 1)
    assert len([each for each in log_of(tmp_path) if each["did"] == "adopt"]) == 1
