"""A platform on one machine answers its own user alone, whose clients find its token."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from paceline import Client, UnauthenticatedError
from paceline.cli.app import run as command
from paceline.internal.v1 import draft_pb2, draft_pb2_grpc
from paceline.transport.channel import call_metadata
from paceline.transport.options import token_file_of
from services.local import Platform, PlatformConfig, PlatformError
from services.local.up import how_to_connect
from tests.support.ports import free_port
from tests.support.zygote import launch

CALL = 60.0
STRANGER = """
import os, sys, urllib.error, urllib.request
from paceline import Client, UnauthenticatedError

def ask(token):
    try:
        urllib.request.urlopen(sys.argv[1] + "/v1/models", timeout=60)
        sys.exit("HTTP is open")
    except urllib.error.HTTPError as error:
        assert error.code == 401, error
    with Client(sys.argv[2], token=token) as client:
        try:
            client.instances()
            sys.exit("gRPC is open")
        except UnauthenticatedError as refused:
            return str(refused)

# What Python imports lies where this user alone may look.
ask("wrong")
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for path in sys.argv[3:]:
    try:
        open(path).read()
        sys.exit(f"{path} can be read")
    except PermissionError:
        pass
print(ask(None))
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PlatformConfig:
    """No instances: a model is only looked for."""
    folder = tmp_path_factory.mktemp("token")
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    return PlatformConfig(
        model=folder / "model", instances=0, folder=folder / "runs", port=free_port(), http_port=0
    )


@pytest.fixture(scope="module")
def platform(config: PlatformConfig) -> Iterator[Platform]:
    with Platform(config, launch=launch) as platform:
        yield platform


def gateway_alone(config: PlatformConfig) -> PlatformConfig:
    return replace(
        config,
        draft_stores=0,
        bubbles=False,
        policy=False,
        reallocator=False,
        http_port=None,
        start_timeout=CALL,
    )


def get(url: str, token: str = "") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=CALL) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_no_port_of_it_answers_who_has_no_token(platform: Platform) -> None:
    token = platform.token_file.read_text().strip()
    for child in platform.processes:
        assert child.ready is not None
        name, address = child.spec.name, child.ready.address
        metrics = f"http://127.0.0.1:{child.ready.metrics_port}/metrics"
        assert (get(metrics), get(metrics, "pl_wrong"), get(metrics, token)) == (401, 401, 200), name
        if name == "facade":
            continue
        with grpc.insecure_channel(address) as channel:
            # No service has this method of another one, or anybody without a token learns of it.
            asked = draft_pb2_grpc.DraftServiceStub(channel).GetDraftStats
            for metadata in ((), call_metadata("pl_wrong")):
                with pytest.raises(grpc.RpcError) as caught:
                    asked(draft_pb2.GetDraftStatsRequest(), timeout=CALL, metadata=metadata)
                wanted = grpc.StatusCode.UNAUTHENTICATED
                if not name.startswith("drafts"):
                    assert caught.value.code() in (wanted, grpc.StatusCode.UNIMPLEMENTED), name
                else:
                    assert caught.value.code() is wanted
    with Client(platform.gateway_address, token="") as stranger, pytest.raises(UnauthenticatedError) as told:
        stranger.instances()
    assert "PACELINE_TOKEN_FILE" in str(told.value)


def test_ones_own_clients_find_it(platform: Platform, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(platform.gateway_address) as client:
        assert not client.instances()
    assert command(["status", "--address", platform.gateway_address]) == 0
    assert platform.config.token is not None
    assert platform.config.token not in capsys.readouterr().out
    told = "\n".join(how_to_connect(platform))
    assert platform.config.token not in told
    assert f'curl {platform.http_address}/v1/models -H "Authorization: Bearer $(cat ' in told
    assert get(f"{platform.http_address}/v1/models", platform.token_file.read_text().strip()) == 503


def test_only_this_user_can_read_what_lies_there(platform: Platform, config: PlatformConfig) -> None:
    found = [platform.token_file, token_file_of(config.port)]
    assert [stat.S_IMODE(path.stat().st_mode) for path in found] == [0o600, 0o600]
    assert len({path.read_text() for path in found}) == 1
    folders = [config.folder, config.logs, config.snapshots, config.adopted, config.drafters, found[1].parent]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_another_user_of_this_machine_is_refused(platform: Platform, config: PlatformConfig) -> None:
    command = [sys.executable, "-c", STRANGER, platform.http_address, platform.gateway_address]
    command += [str(platform.token_file), str(token_file_of(config.port))]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "a valid bearer token is needed" in done.stdout


def test_a_client_outlives_a_platform_and_its_token(config: PlatformConfig) -> None:
    alone = gateway_alone(replace(config, port=free_port(), folder=config.folder / "again"))
    path = token_file_of(alone.port)
    with Platform(alone, launch=launch) as first:
        client = Client(first.gateway_address)
        assert not client.instances()
    assert not path.exists()
    assert not first.token_file.exists()
    with Platform(alone, launch=launch) as second, client:
        assert second.config.token != first.config.token
        assert not client.instances()
    with (
        Platform(replace(alone, no_token=True), launch=launch) as third,
        Client(third.gateway_address) as any_,
    ):
        assert not any_.instances()
        assert third.token_file.read_text() == "", "for what reads a token from there"
        assert not path.exists()


def test_a_platform_whose_port_is_taken_leaves_the_other_ones_token(
    platform: Platform, config: PlatformConfig
) -> None:
    other = gateway_alone(replace(config, folder=config.folder / "other"))
    with pytest.raises(PlatformError):
        Platform(other, launch=launch).start()
    with Client(platform.gateway_address) as client:
        assert not client.instances()
