"""The network of the cluster: a process that has a bridge, a namespace for each pod, and the addresses of Services.

`python -m tests.support.cluster.network` reads orders as JSON lines and answers each. When it ends, all of it is
gone.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from typing import Any

from services.platform.launching import tied
from tests.support.cluster import kernel
from tests.support.cluster.dns import Route
from tests.support.cluster.policies import Opening, Openings

_BRIDGE = "10.244.0.1"
_SERVICES = "10.96.0.0/16"
_Plain = dict[str, list[list[Any]]]
# Servers' ports, in the eyes of policies: from the next one on are those that callers have.
_LAST_PORT = 32767


class Network:
    """The process, for the one that starts it. Start it from the main thread, with which it dies."""

    def __init__(self) -> None:
        """RuntimeError where namespaces are not allowed."""
        self._process = subprocess.Popen(
            tied([sys.executable, "-m", __name__]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lock = threading.Lock()
        self._numbers = itertools.count(2)
        self._order("hello")

    def add(self, pod: str) -> tuple[str, str]:
        """Give a pod a network. Returns the address, and the path of the namespace."""
        number = next(self._numbers)
        address = f"10.244.{number // 250}.{number % 250}"
        return address, f"/proc/{self._process.pid}/fd/{self._order('add', pod, address, number)}"

    def remove(self, pod: str) -> None:
        """End the network of a pod."""
        self._order("remove", pod)

    def cut(self, pod: str) -> None:
        """Let nothing in or out of a pod from now on, as if its machine had no power."""
        self._order("cut", pod)

    def publish(self, routes: list[Route]) -> None:
        """Relay Services by these routes. Connections that stand stay where they are."""
        self._order("publish", *[astuple(each) for each in routes])

    def restrict(self, openings: Openings, exits: Openings) -> None:
        """Let nothing but this into pods and out of them, by their address.

        A connection that a pod refuses is not answered; who may not make one is told so by its own kernel.
        """
        self._order("restrict", *[_plain(each) for each in (openings, exits)])

    def unanswered(self, pod: str) -> int:
        """Return how many answers of a pod's ports the kernel has dropped because of `restrict`.

        A caller repeats what is not answered, so that one refused connection may count more than once.
        """
        return int(self._order("unanswered", pod))

    def answers(self, address: str, port: int, path: str, timeout: float) -> bool:
        """Say if a GET of a path succeeds, or without a path if a connection to the port can be made."""
        return bool(self._order("dial", address, port, path, timeout))

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _order(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
                self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the network has ended: see stderr")
        error, result = json.loads(answer)
        if error:
            raise RuntimeError(f"{name} {arguments}: {error}")
        return result


# -- in the process -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pod:
    address: str
    number: int
    descriptor: int
    rules: set[str] = field(default_factory=set)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"


class _Bridge:
    def __init__(self) -> None:
        kernel.unshare(kernel.NEWNET)
        _ip("link set lo up", "link add br0 type bridge", f"addr add {_BRIDGE}/16 dev br0", "link set br0 up")
        self._pods: dict[str, _Pod] = {}
        self._relays: dict[tuple[str, int], _Relay] = {}
        self._openings: dict[str, list[Opening]] = {}
        self._exits: dict[str, list[Opening]] = {}

    async def hello(self) -> None:
        """Answer, which says that the bridge is there."""

    async def add(self, pod: str, address: str, number: int) -> int:
        descriptor = await asyncio.to_thread(_new_namespace)
        made = self._pods[pod] = _Pod(address, number, descriptor)
        _ip(f"link add v{number} type veth peer name eth0 netns {made.path}")
        _ip(f"link set v{number} master br0", f"link set v{number} up")
        _ip(
            "link set lo up",
            f"addr add {address}/16 dev eth0",
            "link set eth0 up",
            f"route add default via {_BRIDGE}",
            within=made.path,
        )
        return descriptor

    async def remove(self, pod: str) -> None:
        gone = self._pods.pop(pod)
        # The other end goes with it. The namespace goes when its last process has ended.
        _ip(f"link del v{gone.number}")
        os.close(gone.descriptor)

    async def cut(self, pod: str) -> None:
        _ip(f"link set v{self._pods[pod].number} down")

    async def publish(self, *routes: list[Any]) -> None:
        for address, port, to in routes:
            relay = self._relays.get((address, port))
            if relay is None:
                _ip(f"addr add {address}/32 dev br0")
                relay = self._relays[address, port] = _Relay(address, port, self._admits)
            await relay.lead([(host, number) for host, number in to])

    async def restrict(self, openings: _Plain, exits: _Plain) -> None:
        self._openings, self._exits = _read(openings), _read(exits)
        for pod in self._pods.values():
            wanted = set()
            if pod.address in self._openings:
                wanted |= _rules(self._openings[pod.address])
            if pod.address in self._exits:
                wanted |= _exit_rules(self._exits[pod.address])
            changes = [f"rule add {each}" for each in wanted - pod.rules]
            changes += [f"rule del {each}" for each in pod.rules - wanted]
            if changes:
                _ip(*changes, within=pod.path)
            pod.rules = wanted

    async def unanswered(self, pod: str) -> int:
        return _unrouted(self._pods[pod].path)

    def _admits(self, source: str, address: str, port: int) -> bool:
        opened, left = self._openings.get(address), self._exits.get(source)
        return (opened is None or any(each.admits(source, port) for each in opened)) and (
            left is None or any(each.admits(address, port) for each in left)
        )

    async def dial(self, address: str, port: int, path: str, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_connection(address, port)
                try:
                    return not path or await _get(reader, writer, path)
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False


class _Relay:
    """One port of a Service. Connections are refused while it leads nowhere, as in a cluster.

    Those that policies refuse are closed.
    """

    def __init__(self, address: str, port: int, admits: Callable[[str, str, int], bool]) -> None:
        self._place = address, port
        self._admits = admits
        self._to: list[tuple[str, int]] = []
        self._turn = itertools.count()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def lead(self, to: list[tuple[str, int]]) -> None:
        self._to = to
        if to and self._server is None:
            self._server = await asyncio.start_server(self._accepted, *self._place)
        elif not to and self._server is not None:
            self._server.close()
            self._server = None

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target = self._to[next(self._turn) % len(self._to)]
            if not self._admits(writer.get_extra_info("peername")[0], *target):
                raise ConnectionRefusedError
            other_reader, other_writer = await asyncio.open_connection(*target)
        except (OSError, ZeroDivisionError):
            writer.transport.abort()
            return
        for source, sink in ((reader, other_writer), (other_reader, writer)):
            task = asyncio.ensure_future(_copy(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> bool:
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    return (await reader.readline()).startswith((b"HTTP/1.0 200 ", b"HTTP/1.1 200 "))


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        sink.write_eof()
    except OSError:
        sink.transport.abort()


def _rules(opened: Sequence[Opening]) -> set[str]:
    """Return rules of routing for a pod: answers of its ports go nowhere but to those who may connect to them.

    The bridge is the kubelet, which asks where it likes, and the relays, which look at the policies themselves.
    """
    found = {
        f"to {_BRIDGE} lookup main priority 100",
        f"ipproto tcp sport 1-{_LAST_PORT} blackhole priority 200",
    }
    for each in opened:
        ports = f"ipproto tcp sport {each.first}-{min(each.last, _LAST_PORT)} lookup main priority 100"
        found |= {ports} if each.peers is None else {f"to {one} {ports}" for one in each.peers}
    return found


def _exit_rules(left: Sequence[Opening]) -> set[str]:
    """Return rules of routing for a pod: it sends to ports of others only where it may.

    What is sent to the relays goes through: they look at the policies themselves.
    """
    found = {
        f"to {_SERVICES} lookup main priority 100",
        f"ipproto tcp dport 1-{_LAST_PORT} prohibit priority 200",
    }
    for each in left:
        ports = f"ipproto tcp dport {each.first}-{min(each.last, _LAST_PORT)} lookup main priority 100"
        found |= {ports} if each.peers is None else {f"to {one} {ports}" for one in each.peers}
    return found


def _plain(openings: Openings) -> _Plain:
    return {address: [list(astuple(each)) for each in those] for address, those in openings.items()}


def _read(openings: _Plain) -> dict[str, list[Opening]]:
    return {address: [Opening(*each) for each in those] for address, those in openings.items()}


def _new_namespace() -> int:
    """Return a descriptor of a new network namespace; called in a thread, which alone is in it."""
    found: list[int] = []

    def make() -> None:
        kernel.unshare(kernel.NEWNET)
        found.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return found[0]


def _unrouted(namespace: str) -> int:
    """Return the kernel's count of packets of a network namespace that had no route."""
    command = ["nsenter", f"--net={namespace}", "cat", "/proc/net/snmp"]
    counters = subprocess.run(command, text=True, check=True, stdout=subprocess.PIPE).stdout.splitlines()
    names, values = (line.split() for line in counters if line.startswith("Ip:"))
    return int(values[names.index("OutNoRoutes")])


def _ip(*lines: str, within: str = "") -> None:
    command = ["nsenter", f"--net={within}"] if within else []
    subprocess.run(
        [*command, "ip", "-batch", "-"], input="\n".join(lines), text=True, check=True, stderr=subprocess.PIPE
    )


async def _serve() -> None:
    bridge = _Bridge()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := await reader.readline():
        name, *arguments = json.loads(line)
        try:
            answer = "", await getattr(bridge, name)(*arguments)
        except (OSError, KeyError, subprocess.CalledProcessError) as error:
            answer = f"{type(error).__name__} {error} {getattr(error, 'stderr', '')}", None
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve())
