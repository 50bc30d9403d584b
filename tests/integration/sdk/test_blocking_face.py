"""The sync client on threads, in a running event loop, when interrupted, and when a stream is abandoned."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import paceline
from paceline import Client, Group
from tests.integration.sdk.gateway_double import GatewayDouble, until


@pytest.fixture
def client(gateway: GatewayDouble) -> Iterator[Client]:
    with Client(gateway.address, timeout=60) as client:
        yield client


def test_threads_share_a_client(client: Client) -> None:
    def step(number: int) -> list[int]:
        rollout = client.run(f"run-{number}").rollout(number, [Group("a", [1], 5)])
        return [sample.slot for sample in rollout]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(step, range(40))) == [[0, 1, 2, 3, 4]] * 40


def test_a_stream_that_is_left_is_cancelled_at_the_gateway(gateway: GatewayDouble, client: Client) -> None:
    for _ in client.watch_fleet():
        break
    assert gateway.state.left.wait(60)


def test_close_ends_a_stream_in_progress(gateway: GatewayDouble) -> None:
    client = Client(gateway.address)
    fleet = client.watch_fleet()
    next(fleet)
    threading.Timer(0.2, client.close).start()
    with pytest.raises(paceline.CancelledError):
        next(fleet)


async def test_it_works_inside_a_running_event_loop(client: Client) -> None:
    run = client.run("run")
    rollout = run.rollout(0, [Group("a", [1], 4)])
    first = next(iter(rollout)).slot
    assert run.stats(0)["rollout/samples"] == rollout.stats()["rollout/samples"] == 1
    await asyncio.sleep(0)
    assert [first, *(sample.slot for sample in rollout)] == [0, 1, 2, 3]


@pytest.fixture
def interrupted(gateway: GatewayDouble) -> Iterator[None]:
    """Interrupts the main thread as soon as a call hangs at the gateway."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        if gateway.state.hung.wait(60):
            # In the middle of its own code gRPC may keep a lock.
            until(lambda: sys._current_frames()[main].f_code.co_name in ("wait", "_blocking"))
            signal.pthread_kill(main, signal.SIGINT)

    # A process that was started in the background ignores the signal otherwise.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupted")
def test_an_interrupt_ends_a_call(gateway: GatewayDouble, client: Client) -> None:
    gateway.state.hanging.add("GetVersions")
    # Nothing else ends it but its deadline, with another error.
    with pytest.raises(KeyboardInterrupt):
        client.versions()
    assert client.instances()[0].epoch == 2, "the client is still of use"


@pytest.mark.usefixtures("interrupted")
def test_an_interrupted_iteration_says_how_to_end_the_batch(
    gateway: GatewayDouble, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    rollout = client.run("run").rollout(0, [Group("a", [1], 4)])
    gateway.state.hanging.add("StreamRollouts")
    with pytest.raises(KeyboardInterrupt):
        list(rollout)
    assert "client.cancel('run', 'step-000000.v4.0'), ends it" in caplog.text
    gateway.state.hanging.clear()
    assert len(list(rollout)) == 4, "the next iteration continues"


def test_a_process_ends_with_a_client_and_a_stream_open(gateway: GatewayDouble) -> None:
    code = f"import paceline; s = paceline.Client({gateway.address!r}).watch_fleet(); print(next(s)[0].epoch)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
