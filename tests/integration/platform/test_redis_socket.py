"""Nobody else makes the folder of an embedded Redis's socket, or puts another socket there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from paceline.files import NotPrivateError
from services.platform.redis.embedded import LONGEST_SOCKET_PATH, EmbeddedRedis

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
NOBODY = 65534


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """A folder whose name is too long for a socket in it."""
    return tmp_path / ("x" * 150)


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of temporary files, which everybody may write to, that others can reach."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        os.chmod(made, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", made)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Path(made)


def socket_of(server: EmbeddedRedis) -> Path:
    return Path(server.url.removeprefix("unix://"))


def private(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


@as_root
def test_what_another_user_has_prepared_is_not_used(long: Path, shared: Path) -> None:
    """The name was to be guessed: paceline-UID in the folder of temporary files."""
    guessed = shared / f"paceline-{os.getuid()}"
    guessed.mkdir()
    guessed.chmod(0o777)
    os.chown(guessed, NOBODY, NOBODY)
    with EmbeddedRedis(long) as server, Redis.from_url(server.url) as client:
        assert client.ping()
        assert len(os.fsencode(socket_of(server))) <= LONGEST_SOCKET_PATH
        assert private(socket_of(server).parent)
        assert list(guessed.iterdir()) == []


def test_the_runtime_folder_is_preferred(long: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    with EmbeddedRedis(long) as server:
        assert socket_of(server).parent == shared / "paceline"
        assert private(shared / "paceline")
    assert EmbeddedRedis(long).url == server.url


@pytest.mark.parametrize(
    ("owner", "mode", "said"),
    [
        (None, 0o777, "can be written to by others"),
        pytest.param(NOBODY, 0o777, "belongs to the user 65534", marks=as_root),
        pytest.param(NOBODY, 0o700, "belongs to the user 65534", marks=as_root),
    ],
)
def test_a_folder_that_others_have_made_is_refused(
    owner: int | None, mode: int, said: str, long: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    for folder, server in ((shared / "paceline", long), (shared / "data", shared / "data")):
        folder.mkdir()
        folder.chmod(mode)
        if owner is not None:
            os.chown(folder, owner, owner)
        with pytest.raises(NotPrivateError, match=said):
            EmbeddedRedis(server).start()
        assert list(folder.iterdir()) == []


def test_the_folder_of_temporary_files_is_remembered_unless_it_is_gone(long: Path, shared: Path) -> None:
    url = EmbeddedRedis(long).url
    assert EmbeddedRedis(long).url == url
    folder = socket_of(EmbeddedRedis(long)).parent
    assert private(folder)
    folder.rmdir()
    folder.symlink_to(shared)
    other = EmbeddedRedis(long)
    assert other.url != url
    with other:
        assert private(socket_of(other).parent)
