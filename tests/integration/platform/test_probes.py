"""The port that a kubelet asks, of a real server."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest

from services.platform.config import ServiceConfig
from services.platform.observability.http_ports import MAX_CONNECTIONS, ProbeServer
from tests.support.waiting import until

CALL = 60


def ask(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """Return the status and the text of an answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=CALL) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def asked(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    return await asyncio.to_thread(ask, port, path, method)


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "mutual-tls"])
async def test_a_kubelet_needs_neither_certificate_nor_token(
    serve: Any, authority: Any, secured: bool
) -> None:
    tls = authority("ours").tls("toy", client_auth=True) if secured else None
    async with serve(ServiceConfig(token="t", tls=tls, probe_port=0)) as toy:
        port = toy.server.probe_port
        assert await asked(port, "/livez") == (200, "ok\n")
        assert (await asked(port, "/readyz"))[0] == 503
        await toy.server.set_serving(True)
        assert await asked(port, "/readyz") == (200, "ok\n")
        await toy.server.set_serving(False)
        assert (await asked(port, "/readyz"))[0] == 503
    with pytest.raises(urllib.error.URLError):
        await asked(port, "/livez")


async def test_nothing_else_is_on_the_port(serve: Any) -> None:
    async with serve(ServiceConfig(probe_port=0)) as toy:
        for path in ("/", "/metrics", "/livez/", "/health", "/..%2flivez"):
            assert (await asked(toy.server.probe_port, path))[0] == 404
        assert (await asked(toy.server.probe_port, "/livez", "POST"))[0] == 404


async def test_a_server_has_no_such_port_unless_it_is_told_to(serve: Any) -> None:
    async with serve(ServiceConfig()) as toy:
        assert toy.server.probe_port == 0


async def test_an_event_loop_that_hangs_fails_every_probe() -> None:
    probes = ProbeServer({"/readyz": _fine}, answer_seconds=0.1)
    probes.start("127.0.0.1", 0)
    free = threading.Event()
    found: list[tuple[int, str]] = []

    def ask_both() -> None:
        found.extend(ask(probes.port, path) for path in ("/livez", "/readyz"))
        free.set()

    asking = threading.Thread(target=ask_both)
    asking.start()
    free.wait(CALL)  # blocks the event loop
    asking.join()
    assert found == [(503, "the event loop has not answered within 0.1 s\n")] * 2
    assert await asked(probes.port, "/livez") == (200, "ok\n")
    await probes.stop()


async def test_few_probes_wait_for_a_loop_that_hangs_and_none_is_kept_out_after_it() -> None:
    hung, asking = asyncio.Event(), 0

    async def check() -> str:
        nonlocal asking
        asking += 1
        await hung.wait()
        return ""

    probes = ProbeServer({"/readyz": check}, answer_seconds=CALL)
    probes.start("127.0.0.1", 0)

    def threads() -> int:
        # Without those that this test itself waits with, of which there may be any number up to a bound.
        return sum(not each.name.startswith("asyncio_") for each in threading.enumerate())

    before = threads()
    opened = []
    try:
        for number in range(2 * MAX_CONNECTIONS):
            opened.append(socket.create_connection(("127.0.0.1", probes.port), timeout=CALL))
            opened[-1].sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
            if number < MAX_CONNECTIONS:
                await until(lambda number=number: asking > number, "the event loop is asked")
        # Their threads wait, although their connections have made way.
        answers = [await asyncio.to_thread(each.recv, 64) for each in opened[MAX_CONNECTIONS:]]
        assert {each.split()[1] for each in answers} == {b"503"}
        assert asking == MAX_CONNECTIONS
        assert threads() <= before + 2 * MAX_CONNECTIONS
    finally:
        hung.set()
        for each in opened:
            each.close()
    await until(lambda: threads() <= before + 2, "the threads end")
    assert (await asked(probes.port, "/readyz"))[0] == 200
    await probes.stop()


async def _fine() -> str:
    return ""
