"""Values that are read anew when their files change."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.platform.security.certificates import CHECK_SECONDS, RELOADS, Watched


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def tick(self) -> None:
        self.now += CHECK_SECONDS


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("1")
    return path


def watched(file: Path, clock: Clock) -> Watched[int]:
    return Watched("test", [file], lambda: int(file.read_text()), clock)


def test_a_change_is_seen_at_the_next_look(file: Path, clock: Clock) -> None:
    value = watched(file, clock)
    file.write_text("22")
    assert value.current() == 1, "not looked at yet"
    clock.tick()
    assert value.current() == 22


def test_what_did_not_change_is_not_made_anew(file: Path, clock: Clock) -> None:
    made: list[object] = []
    value = Watched("test", [file], lambda: made.append(object()) or made[-1], clock)
    for _ in range(3):
        clock.tick()
        assert value.current() is made[0]
    assert len(made) == 1


def test_a_bad_change_leaves_the_last_value_and_is_tried_again(file: Path, clock: Clock) -> None:
    failed = RELOADS.labels("test", "failed")
    before = failed._value.get()
    value = watched(file, clock)
    file.write_text("broken")
    for _ in range(3):
        clock.tick()
        assert value.current() == 1
    assert failed._value.get() == before + 1, "said once"
    file.write_text("333")
    clock.tick()
    assert value.current() == 333


def test_a_file_that_is_gone_changes_nothing(file: Path, clock: Clock) -> None:
    value = watched(file, clock)
    file.unlink()
    clock.tick()
    assert value.current() == 1


def test_a_turned_link_is_a_change(tmp_path: Path, clock: Clock) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    (tmp_path / "old" / "secret").write_text("1")
    (tmp_path / "new" / "secret").write_text("2")
    data = tmp_path / "data"
    data.symlink_to("old")
    value = watched(data / "secret", clock)
    data.unlink()
    data.symlink_to("new")
    clock.tick()
    assert value.current() == 2


def test_the_first_value_has_to_be_good(file: Path, clock: Clock) -> None:
    file.write_text("broken")
    with pytest.raises(ValueError, match="broken"):
        watched(file, clock)
