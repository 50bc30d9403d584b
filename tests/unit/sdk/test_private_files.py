"""Folders and files of this user alone, where others were there before."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.files import NotPrivateError, private_folder, read_private, write_private


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    made = private_folder(tmp_path / "a/b")
    assert mode(made) == 0o700
    assert private_folder(made) == made


def test_one_that_others_can_read_is_closed_to_them(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    assert mode(private_folder(folder)) == 0o700


def _writable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _of_a_group(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def _link(folder: Path) -> None:
    folder.with_name("target").mkdir(mode=0o700)
    folder.symlink_to("target")


def _dangling(folder: Path) -> None:
    folder.symlink_to("nowhere")


def _file(folder: Path) -> None:
    folder.touch()


def _foreign(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, -1)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (_writable, r"can be written to by others \(mode 0777\)"),
        (_of_a_group, r"can be written to by others \(mode 0770\)"),
        (_link, "is no folder, or a symbolic link"),
        (_dangling, "is no folder, or a symbolic link"),
        (_file, "is no folder, or a symbolic link"),
        pytest.param(
            _foreign,
            "belongs to the user 65534",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away"),
        ),
    ],
)
def test_one_that_others_have_made_or_can_write_to_is_refused(
    made: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    made(tmp_path / "folder")
    with pytest.raises(NotPrivateError, match=said):
        private_folder(tmp_path / "folder")


def test_a_file_is_replaced_and_never_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    path = tmp_path / "token"
    path.symlink_to(victim)
    write_private(path, "text")
    assert victim.read_text() == "untouched"
    assert not path.is_symlink()
    assert mode(path) == 0o600
    assert read_private(path, 4) == "text"
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_private(path, 3)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["token", "victim"]
