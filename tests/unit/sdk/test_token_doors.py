"""No door of the SDK sends a token, or a ticket, in plain text beyond this machine unless that is requested."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import AsyncClient, Client, Shard, Tls
from paceline.cli.app import run
from paceline.files import private_folder, write_private
from paceline.integrations.verl import FleetSettings
from paceline.transport.options import token_file_of

BEYOND, SECRET = "192.0.2.2:7400", "pl_secret"
"""Address of no machine, RFC 5737."""

Door = Callable[[dict[str, Any]], Any]


def _stream(options: dict[str, Any]) -> None:
    """An instance to which weights are pushed, named by a gateway on this machine."""
    Client("127.0.0.1:7400", **options)._core.dial(BEYOND)


def _verl(options: dict[str, Any]) -> FleetSettings:
    known = {name: value for name, value in options.items() if name != "token"}
    return FleetSettings.read({"address": BEYOND, **known}, "here")


DOORS: dict[str, Door] = {
    "Client": lambda options: Client(BEYOND, **options),
    "Client of several": lambda options: Client(f"localhost,{BEYOND}", **options),
    "Client of shards": lambda options: Client(["localhost", Shard(BEYOND, "s")], **options),
    "AsyncClient": lambda options: AsyncClient(BEYOND, **options),
    "WeightStream": _stream,
}
FROM_ENVIRONMENT: dict[str, Door] = {
    **DOORS,
    "verl": lambda options: _verl(options).client(),
    "verl, asynchronous": lambda options: _verl(options).async_client(),
}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(params=["PACELINE_TOKEN", "PACELINE_TOKEN_FILE"])
def environment(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(SECRET)
    value = SECRET if request.param == "PACELINE_TOKEN" else str(tmp_path / "token")
    monkeypatch.setenv(request.param, value)


async def refuses(door: Door, options: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"will not send the token.* to 192\.0\.2\.2:7400 in plain"
    ) as caught:
        door(options)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
async def test_a_token_that_is_given_stays_here(door: Door) -> None:
    await refuses(door, {"token": SECRET})
    for more in ({"tls": Tls()}, {"insecure": True}, {"token": ""}, {"token": None}):
        door({"token": SECRET, **more})


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("door", FROM_ENVIRONMENT.values(), ids=FROM_ENVIRONMENT)
async def test_so_does_one_from_the_environment(door: Door) -> None:
    await refuses(door, {})
    door({"insecure": True})


@pytest.mark.usefixtures("environment")
def test_the_command_line_says_so_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--address", BEYOND]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "in plain text; give --ca-file, or --insecure" in said
    assert SECRET not in said


def test_the_token_of_a_platform_opens_no_instance_elsewhere() -> None:
    private_folder(token_file_of(7400).parent)
    write_private(token_file_of(7400), SECRET)
    with pytest.raises(ValueError, match="the token of your platform to"):
        _stream({})
    Client("127.0.0.1:7400")._core.dial("127.0.0.1:9").close()


def test_there_is_no_other_door() -> None:
    """Every channel of the SDK is opened by its transports, which ask first."""
    root = Path(paceline.__file__).parent
    opens = re.compile(r"(insecure|secure|open|open_aio)_channel\(")
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if path.parent.name != "v1" and opens.search(path.read_text())
    }
    assert found == {"transport/channel.py", "transport/grpc.py"}
