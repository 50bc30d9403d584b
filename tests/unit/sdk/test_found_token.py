"""Sources of a client's token, and files that are not used."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import Client, TokenFileWarning
from paceline.files import private_folder, write_private
from paceline.transport.options import ConnectionOptions, FoundToken, token_file_of

HERE = "127.0.0.1:7400"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which nothing is found yet."""
    for name in ("PACELINE_TOKEN", "PACELINE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def options(address: str, token: str | None = None) -> ConnectionOptions:
    return ConnectionOptions(address, None, token, 1.0, 1.0).with_token()


def sent(address: str, token: str | None = None) -> str | None:
    """Return the token that a client of this address sends."""
    found = options(address, token)
    assert found.parsed()
    return found.found.current() if found.found else found.token


def leave(port: int, token: str = "pl_of_the_platform") -> Path:
    """Leave the token of a platform at a port."""
    path = token_file_of(port)
    private_folder(path.parent)
    write_private(path, f"{token}\n")
    return path


@pytest.mark.parametrize("address", [HERE, "localhost", "[::1]:7400", "::1", "127.0.0.1:7401,127.0.0.1:7400"])
def test_the_token_of_a_platform_on_this_machine_is_found(address: str) -> None:
    leave(7400)
    assert sent(address) == "pl_of_the_platform"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:7401", "192.0.2.2:7400", "gateway:7400", f"{HERE},192.0.2.2:7400", "unix:/run/7400"],
)
def test_it_is_not_for_another_address(address: str) -> None:
    leave(7400)
    assert sent(address) is None


def test_a_given_token_comes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(7400)
    (tmp_path / "secret").write_text("pl_of_a_file\n")
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(tmp_path / "secret"))
    assert sent(HERE) == "pl_of_a_file"
    monkeypatch.setenv("PACELINE_TOKEN", "pl_of_the_environment")
    assert sent(HERE) == "pl_of_the_environment"
    assert sent(HERE, "pl_given") == "pl_given"
    assert sent(HERE, "") == "", "there is to be none"
    with pytest.raises(ValueError, match=r"the token of PACELINE_TOKEN to 192\.0\.2\.2:7400 in plain text"):
        sent("192.0.2.2:7400")


@pytest.mark.parametrize(("contents", "said"), [(None, "cannot be read"), ("two words", "must have a token")])
def test_a_named_file_that_is_none_is_an_error(
    contents: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named"
    if contents is not None:
        named.write_text(contents)
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(named))
    with pytest.raises(ValueError, match=said):
        Client(HERE)


def _readable(path: Path) -> None:
    path.chmod(0o640)


def _linked(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def _piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _broken(path: Path) -> None:
    write_private(path, "pl_one\npl_two")


def _foreign(path: Path) -> None:
    os.chown(path, 65534, -1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_readable, "has the mode 0640; must be 0600"),
        (_linked, "is a symbolic link"),
        (_piped, "is no regular file"),
        (_broken, "must have a token and nothing else"),
        pytest.param(
            _foreign,
            "belongs to the user 65534",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
        ),
    ],
)
def test_a_file_that_others_could_have_read_or_written_is_not_used(
    change: Callable[[Path], None], said: str
) -> None:
    path = leave(7400)
    change(path)
    with pytest.warns(TokenFileWarning, match=said) as told:
        assert sent(HERE) is None
    assert "pl_" not in str(told[0].message)


def test_a_restarted_platform_is_followed() -> None:
    path = leave(7400, "pl_first")
    found = options(HERE).found
    assert found is not None
    path.unlink()
    assert found.current() == "pl_first", "it may still be ending"
    leave(7400, "pl_second")
    assert found.current() == "pl_second"
    path.chmod(0o644)
    write_private(path, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found.current() == "pl_second", "a platform without a token asks for none"


def test_where_there_is_no_home_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")

    def homeless(_: type[Path]) -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", classmethod(homeless))
    assert FoundToken(options(HERE).parsed()).current() is None


def test_a_found_token_does_not_travel_with_a_pickled_client() -> None:
    leave(7400)
    with Client(HERE) as client:
        assert b"pl_of_the_platform" not in pickle.dumps(client)
        assert "pl_of_the_platform" not in repr(client._core._options)
