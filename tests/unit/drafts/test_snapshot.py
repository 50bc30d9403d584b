"""The snapshot file: whole or not at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.drafts.service import Archive, BadSnapshot, DraftStoreMetrics, open_snapshot, write_snapshot
from services.drafts.store import DraftStore
from tests.unit.drafts.rollouts import ahead, describe, make

ROLLOUTS = [make("a"), make("a", step=2), ahead("b", 3, step=3), make("c", length=300_000)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "snapshots" / "drafts-0.drafts"


def test_what_was_written_is_read(path: Path) -> None:
    write_snapshot(path, ROLLOUTS, at=12.5)
    taken_at, rollouts = open_snapshot(path)
    assert taken_at == 12.5
    assert list(map(describe, rollouts)) == list(map(describe, ROLLOUTS))
    assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing temporary is left"


def test_an_empty_store_has_a_snapshot_too(path: Path) -> None:
    write_snapshot(path, [], at=1)
    assert list(open_snapshot(path)[1]) == []


@pytest.mark.parametrize("place", [0, 9, 12, 20, 24, 200, -33, -1])
def test_a_flipped_bit_anywhere_is_found(path: Path, place: int) -> None:
    write_snapshot(path, ROLLOUTS[:3], at=1)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadSnapshot):
        open_snapshot(path)


@pytest.mark.parametrize("kept", [0, 5, 20, 40, 0.5, -1, -32])
def test_a_file_that_was_cut_off_is_refused(path: Path, kept: float) -> None:
    write_snapshot(path, ROLLOUTS[:3], at=1)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(BadSnapshot):
        open_snapshot(path)


def test_something_behind_the_end_is_refused(path: Path) -> None:
    write_snapshot(path, ROLLOUTS[:3], at=1)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(BadSnapshot, match="damaged"):
        open_snapshot(path)


def test_a_file_of_something_else_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"PK\x03\x04 this is a zip file and no snapshot at all, of no store")
    with pytest.raises(BadSnapshot, match="is not a snapshot"):
        open_snapshot(path)


def test_a_later_format_is_refused_by_its_number(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.drafts.service.SNAPSHOT_FORMAT", 2)
    write_snapshot(path, ROLLOUTS[:1], at=1)
    monkeypatch.undo()
    with pytest.raises(BadSnapshot, match="has format 2; this version reads 1"):
        open_snapshot(path)


def test_a_snapshot_that_cannot_be_finished_leaves_the_last_one(path: Path) -> None:
    write_snapshot(path, ROLLOUTS[:1], at=1)

    def breaking():  # type: ignore[no-untyped-def]
        yield ROLLOUTS[0]
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_snapshot(path, breaking(), at=2)
    assert open_snapshot(path)[0] == 1
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def inode(path: Path) -> int | None:
    """Tells one file at the path from the next; None when there is none."""
    return path.stat().st_ino if path.exists() else None


class Kept:
    """A store with an archive, as one process has them."""

    def __init__(self, path: Path | None) -> None:
        self.store = DraftStore(1 << 30)
        self.archive = Archive(path, self.store)
        self.registry = CollectorRegistry()
        self.metrics = DraftStoreMetrics(self.registry, self.store, lambda: self.archive.taken_at)

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"paceline_drafts_{name}")


async def test_a_new_process_finds_what_its_predecessor_had(path: Path) -> None:
    before, after = Kept(path), Kept(path)
    for each in ROLLOUTS:
        before.store.put(each)
    await before.archive.take(before.metrics)
    after.archive.restore()
    assert list(map(describe, after.store)) == list(map(describe, before.store))
    assert after.archive.taken_at == before.archive.taken_at > 0
    assert after.metric("snapshot_timestamp_seconds") == after.archive.taken_at


async def test_nothing_is_written_when_nothing_has_changed(path: Path) -> None:
    kept = Kept(path)
    await kept.archive.take(kept.metrics)
    assert inode(path) is None
    kept.store.put(ROLLOUTS[0])
    await kept.archive.take(kept.metrics)
    written = inode(path)
    await kept.archive.take(kept.metrics)
    restored = Kept(path)
    restored.archive.restore()
    await restored.archive.take(restored.metrics)
    assert inode(path) == written
    kept.store.evict(run_id="run")
    await kept.archive.take(kept.metrics)
    assert inode(path) != written
    assert kept.metric("snapshot_seconds_count") == 2


def test_a_file_that_is_refused_is_kept_aside(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"nonsense")
    kept = Kept(path)
    kept.archive.restore()
    assert list(kept.store) == []
    assert kept.archive.taken_at == 0
    assert path.with_name("drafts-0.drafts.refused").read_bytes() == b"nonsense"


def test_the_first_start_finds_nothing(path: Path) -> None:
    for kept in (Kept(path), Kept(None)):
        kept.archive.restore()
        assert list(kept.store) == []


async def test_a_disk_that_cannot_be_written_costs_only_the_snapshot(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kept = Kept(tmp_path / "file" / "drafts-0.drafts")
    kept.store.put(ROLLOUTS[0])
    await kept.archive.take(kept.metrics)
    assert kept.metric("snapshot_failures_total") == 1
    assert kept.archive.taken_at == 0


async def test_snapshots_are_taken_until_the_end_is_asked_for(path: Path) -> None:
    kept, stopping = Kept(path), asyncio.Event()
    kept.store.put(ROLLOUTS[0])
    task = asyncio.create_task(kept.archive.run(0.01, stopping, kept.metrics))
    async with asyncio.timeout(60):
        for rollout in ROLLOUTS[1:]:
            before = kept.archive.taken_at
            kept.store.put(rollout)
            while kept.archive.taken_at == before:  # noqa: ASYNC110 (a snapshot sets no event)
                await asyncio.sleep(0.005)
        stopping.set()
        await task
    assert len(list(open_snapshot(path)[1])) == len(ROLLOUTS)
