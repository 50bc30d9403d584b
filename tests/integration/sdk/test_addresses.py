"""Wrong addresses fail within seconds and say what to do; proxies are passed by; tokens stay on this machine."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest

import paceline
from paceline import AsyncClient, Client, Group, RetryPolicy, Shard, Tls
from paceline.calls import caller
from paceline.cli.app import run
from paceline.errors import UNREACHABLE, WRONG_ADDRESS
from tests.integration.sdk.gateway_double import GatewayDouble
from tests.support.certificates import Authority
from tests.support.ports import free_port

PROXIES = ("http_proxy", "https_proxy", "grpc_proxy")
BEYOND = "192.0.2.2:7400"
"""Address of no machine, RFC 5737."""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What seems to be a wrong address is tried once."""
    monkeypatch.setattr(caller, "WRONG_ADDRESS_SECONDS", 0.0)


@pytest.fixture
def http_server() -> Iterator[str]:
    """Address of a server that speaks HTTP/1 only."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def refused(client: Client) -> paceline.PacelineError:
    """Return the error of a call that would be repeated for minutes."""
    with client, pytest.raises(paceline.UnavailableError) as caught:
        client.versions()
    return caught.value


@pytest.mark.usefixtures("soon")
def test_a_port_of_http_is_named(http_server: str) -> None:
    error = refused(Client(http_server))
    assert error.reason == WRONG_ADDRESS
    assert "speaks HTTP/1" in error.message
    assert http_server in error.message


@pytest.mark.usefixtures("soon")
def test_a_name_that_is_not_known_is_named() -> None:
    error = refused(Client("gateway.invalid"))
    assert error.reason == WRONG_ADDRESS
    assert "gateway.invalid:7400" in error.message


@pytest.mark.usefixtures("soon")
async def test_tls_that_does_not_fit_is_named(tmp_path: Path) -> None:
    own, other = Authority(tmp_path, "own").tls("gateway.example"), Authority(tmp_path, "other").tls("x")
    assert own.key_file is not None
    assert own.cert_file is not None
    with GatewayDouble() as plain:
        assert "has no TLS" in refused(Client(plain.address, tls=Tls(own.ca_file))).message
    pair = (own.key_file.read_bytes(), own.cert_file.read_bytes())
    with GatewayDouble(grpc.ssl_server_credentials([pair])) as secure:
        assert "trusted authority" in refused(Client(secure.address, tls=Tls(other.ca_file))).message
        wrong_name = Tls(own.ca_file, server_name="nope.example")
        assert "another name" in refused(Client(secure.address, tls=wrong_name)).message
        with Client(secure.address, tls=Tls(own.ca_file)) as client:
            assert client.versions().policy_version == 4
        assert "the gateway speaks TLS" in refused(Client(secure.address)).message
        with pytest.raises(paceline.UnavailableError, match="the gateway speaks TLS"):
            async with AsyncClient(secure.address) as plain_client:
                await plain_client.versions()
    assert own.ca_file is not None
    mutual = grpc.ssl_server_credentials([pair], own.ca_file.read_bytes(), True)
    with GatewayDouble(mutual) as secure:
        assert "the gateway speaks TLS" in refused(Client(secure.address)).message


def test_a_server_that_closes_connections_may_be_a_gateway_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def close_all() -> None:
            with suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=close_all, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        error = refused(Client(address, retry=RetryPolicy(seconds=0)))
        server.shutdown(socket.SHUT_RDWR)
    assert (error.reason, "closes the connection" in error.message) == (UNREACHABLE, True)


@pytest.mark.usefixtures("soon")
def test_a_gateway_that_is_starting_is_waited_for(delays: list[float]) -> None:
    del delays
    with GatewayDouble() as gateway:
        gateway.stop()
        threading.Timer(0.3, gateway.start).start()
        with Client(gateway.address, retry=RetryPolicy(seconds=60)) as client:
            assert client.versions().policy_version == 4


def test_nothing_there_says_what_to_do() -> None:
    error = refused(Client(f"127.0.0.1:{free_port()}", retry=RetryPolicy(seconds=0)))
    assert (error.reason, "is the gateway running?" in error.message) == (UNREACHABLE, True)


def test_proxies_of_the_environment_are_passed_by(
    gateway: GatewayDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in PROXIES:
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for use_proxy in (False, True):
        with Client(gateway.address, use_proxy=use_proxy, retry=RetryPolicy(seconds=0)) as client:
            assert client.versions().policy_version == 4, "never to this machine"
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("grpc_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")

        def answer() -> None:
            accepted, _ = proxy.accept()
            asked.append(accepted.recv(1000))
            accepted.close()

        answering = threading.Thread(target=answer)
        answering.start()
        refused(Client(BEYOND, use_proxy=True, retry=RetryPolicy(seconds=0)))
        answering.join(60)
    assert asked[0].startswith(f"CONNECT {BEYOND} ".encode())


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_token_leaves_in_plain_text_only_if_asked(kind: type[Client] | type[AsyncClient]) -> None:
    for address in (BEYOND, f"localhost,{BEYOND}", ["localhost", BEYOND], [Shard(BEYOND, "s")]):
        with pytest.raises(
            ValueError, match=r"will not send the token to 192\.0\.2\.2:7400 in plain text"
        ) as caught:
            kind(address, token="secret")
        assert "secret" not in str(caught.value)
    for more in ({"tls": Tls()}, {"insecure": True}, {"token": None}):
        kind(BEYOND, **{"token": "secret", **more})  # type: ignore[arg-type]
    kind("localhost", token="secret")
    kind("unix:/run/gateway.sock", token="secret")


def test_the_command_line_says_so_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    for arguments in (["--address", BEYOND], ["--address", "http://gateway/v1"]):
        assert run(["status", *arguments]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "in plain text; give --ca-file, or --insecure" in said
    assert "has the path /v1" in said
    assert "secret" not in said


def test_a_client_is_pickled_by_connecting_anew(gateway: GatewayDouble) -> None:
    policy = RetryPolicy(seconds=7)
    with Client(gateway.address, token="secret", timeout=9, retry=policy) as client:
        assert client.versions().policy_version == 4
        pickled = pickle.dumps(client)
        assert "secret" not in repr(client)
    with pickle.loads(pickled) as again:
        assert (again.address, repr(again)) == (gateway.address, f"Client('{gateway.address}')")
        assert again.versions().policy_version == 4
        options = again._core._options
        assert (options["token"], options["timeout"], options["retry"]) == ("secret", 9, policy)
    assert gateway.state.calls[-1][1]["authorization"] == "Bearer secret"
    with Client(gateway.address) as client:
        run = client.run("run", seed=3)
        first = list(run.rollout(0, [Group("p", [1], 2)]))
        copy = pickle.loads(pickle.dumps(run))
    with copy.client:
        assert repr(copy) == repr(run) == "Run('run', seed=3)"
        assert [each.seed for each in copy.rollout(0, [Group("p", [1], 2)])] == [each.seed for each in first]
    shards = [Shard(gateway.address, "a"), Shard("127.0.0.1:9", "b")]
    with Client(shards) as several, pickle.loads(pickle.dumps(several.shard("a"))) as one:
        assert one.versions().policy_version == 4
        assert pickle.loads(pickle.dumps(several)).address == shards


async def test_an_asynchronous_client_is_pickled_too(gateway: GatewayDouble) -> None:
    async with AsyncClient(gateway.address, token="secret") as client:
        pickled = pickle.dumps(client)
    async with pickle.loads(pickled) as again:
        assert (await again.versions()).policy_version == 4
        assert "secret" not in repr(again)


def test_a_closed_client_says_so(gateway: GatewayDouble) -> None:
    client = Client(gateway.address)
    client.close()
    with pytest.raises(paceline.FailedPreconditionError, match="the client is closed"):
        client.versions()
    with pytest.raises(paceline.FailedPreconditionError, match="the client is closed"):
        next(client.watch_fleet())
