"""Enter a container: `python -m tests.support.cluster.container ORDER COMMAND...`, ORDER a JSON file (`Order`).

The process that it is run in has the container's environment already. The commands `python -m module` and
`python -` go on in this process, which has its modules imported if it was forked from where they were; every other
one is executed.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.support.cluster import kernel

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_ACCOUNTS = "root:x:0:0::/root:/bin/sh\npaceline:x:10001:10001::/cache:/usr/sbin/nologin\n"


@dataclass(frozen=True, slots=True)
class Place:
    """A file or folder of this machine at a path of a container; a memory file system if `source` is empty."""

    source: str
    path: str
    read_only: bool
    options: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """How a container is entered: a new one, with a root file system at `root`, or that of process `of`."""

    host: str
    network: str
    root: str
    pid_file: str
    user: int
    group: int
    volume_group: int
    folder: str
    places: tuple[Place, ...]
    read_only: bool
    tree: str
    """Where the product is. Empty: as it is imported here."""
    of: int = 0

    def write(self, path: Path) -> Path:
        """Write it to a file."""
        path.write_text(json.dumps(asdict(self)))
        return path


def system_places(tree: Path) -> list[Place]:
    """Return what an image has: the system, Python, its packages, and the product as it is in `tree`."""
    python = {sys.base_prefix, os.path.realpath(sys.prefix), str(Path(__file__).parents[3])}
    folders = ["/usr", "/etc/ssl", "/etc/alternatives", "/sys", *sorted(python), str(tree)]
    files = ["/etc/ld.so.cache"]
    return [Place(each, each, True) for each in dict.fromkeys([*folders, *files]) if os.path.exists(each)]


def _enter(order: dict[str, Any]) -> None:
    if order["of"]:
        for kind, flag in (("net", kernel.NEWNET), ("uts", kernel.NEWUTS), ("ipc", kernel.NEWIPC)):
            kernel.join(f"/proc/{order['of']}/ns/{kind}", flag)
        os.chroot(f"/proc/{order['of']}/root")
    else:
        kernel.join(order["network"], kernel.NEWNET)
        kernel.unshare(kernel.NEWNS | kernel.NEWUTS | kernel.NEWIPC | kernel.NEWPID)
        socket.sethostname(order["host"])
        kernel.make_mounts_private()
        _become_first(Path(order["pid_file"]))
        _make_root(order)
        os.chroot(order["root"])
    os.chdir(order["folder"])
    os.umask(0o022)
    kernel.become(order["user"], order["group"], order["volume_group"])
    kernel.die_with_parent()


def _become_first(pid_file: Path) -> None:
    """Return as process 1 of the new namespace. The one that made it stays behind, and ends as it ends."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(tell)
        kernel.die_with_parent()
        # Signals are passed on by then.
        os.read(told, 1)
        os.close(told)
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    part = pid_file.with_suffix(".part")
    part.write_text(str(pid))
    part.replace(pid_file)
    os.write(tell, b"x")
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _make_root(order: dict[str, Any]) -> None:
    root = Path(order["root"])
    kernel.mount("tmpfs", root, "mode=755")
    for link in ("bin", "sbin", "lib", "lib64"):
        (root / link).symlink_to(f"usr/{link}")
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text(_ACCOUNTS)
    (root / "etc/group").write_text("root:x:0:\npaceline:x:10001:\n")
    (root / "etc/nsswitch.conf").write_text("hosts: files dns\n")
    (root / "etc/hosts").symlink_to("/run/cluster/hosts")
    kernel.mount("tmpfs", root / "dev", "mode=755")
    for device in _DEVICES:
        kernel.bind(f"/dev/{device}", root / "dev" / device, read_only=False)
    (root / "dev/fd").symlink_to("/proc/self/fd")
    # As container engines have it, where no volume is in its place.
    if all(each["path"] != "/dev/shm" for each in order["places"]):
        kernel.mount("tmpfs", root / "dev/shm", "mode=1777,size=64m")
    for place in sorted(order["places"], key=lambda each: each["path"].count("/")):
        target = root / place["path"].lstrip("/")
        if place["source"]:
            kernel.bind(place["source"], target, read_only=place["read_only"])
        else:
            kernel.mount("tmpfs", target, place["options"])
    # Of this namespace of processes.
    kernel.mount("proc", root / "proc")
    Path(root / order["folder"].lstrip("/")).mkdir(parents=True, exist_ok=True)
    if order["read_only"]:
        kernel.make_read_only(root)


def _run(command: Sequence[str], tree: str) -> None:
    if command[:2] == ["python", "-m"] and not tree:
        sys.argv[1:] = command[3:]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        return
    if command[:2] == ["python", "-"] and not tree:
        sys.argv[:] = command[1:]
        exec(compile(sys.stdin.read(), "<stdin>", "exec"), {"__name__": "__main__"})
        return
    if command[0] == "python":
        # With the packages of this one.
        command = [sys.executable, *command[1:]]
        os.environ["PYTHONPATH"] = tree or str(Path(__file__).parents[3])
    with suppress(FileNotFoundError):
        os.execvpe(command[0], list(command), os.environ)
    sys.exit(127)


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    words = sys.argv[2:]
    _enter(given)
    _run(words, given["tree"])
