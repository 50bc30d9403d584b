"""System calls for namespaces and mounts, which Python has from 3.12 on only."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_TRIED = """set -e
ip link add br0 type bridge
ip link add v0 type veth peer name v1
mount -t tmpfs t /tmp
mount -t proc p /proc
"""
_libc = ctypes.CDLL(None, use_errno=True)


@functools.cache
def lacks() -> str:
    """Return what this machine lacks for a cluster of processes, "" if nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces and mounts are for root on Linux"
    if missing := [each for each in ("ip", "nsenter", "unshare") if shutil.which(each) is None]:
        return f"{missing[0]} is not installed"
    tried = ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", _TRIED]
    ended = subprocess.run(tried, capture_output=True, text=True)
    return "" if ended.returncode == 0 else f"no namespaces, bridges or mounts here: {ended.stderr.strip()}"


def unshare(flags: int) -> None:
    """Give this thread namespaces of its own. OSError where that is not allowed."""
    _checked(_libc.unshare(flags), "unshare")


def join(path: str, kind: int) -> None:
    """Let this thread join the namespace at a path, such as /proc/1/ns/net."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.setns(descriptor, kind), path)
    finally:
        os.close(descriptor)


def make_mounts_private() -> None:
    """Keep what is mounted from now on in this mount namespace."""
    _mount("none", "/", None, _REC | _PRIVATE)


def bind(source: str, target: Path, *, read_only: bool) -> None:
    """Show a file or folder at another place, which is created."""
    if Path(source).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount(source, str(target), None, _BIND | _REC)
    if read_only:
        _mount("none", str(target), None, _REMOUNT | _BIND | _RDONLY)


def mount(kind: str, target: Path, options: str = "") -> None:
    """Mount a file system of the kernel's: tmpfs or proc."""
    target.mkdir(parents=True, exist_ok=True)
    _mount(kind, str(target), kind, _NOSUID, options)


def make_read_only(target: Path) -> None:
    """Refuse writes to what is mounted at `target`, but not to what is mounted below."""
    _mount("none", str(target), None, _REMOUNT | _BIND | _RDONLY)


def become(user: int, group: int, *others: int) -> None:
    """Take on a user for good: without capabilities, and with no way to gain any."""
    os.setgroups([group, *others])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    # Without the first, files in /proc of a process that was not executed anew are root's; the second is
    # allowPrivilegeEscalation: false.
    for option in (4, 38):
        _checked(_libc.prctl(option, 1, 0, 0, 0), "prctl")


def die_with_parent() -> None:
    """Have this process killed when its parent ends. The kernel forgets it when the user changes."""
    _checked(_libc.prctl(1, signal.SIGKILL, 0, 0, 0), "prctl")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    names = [each.encode() if each is not None else None for each in (source, target, kind)]
    _checked(_libc.mount(*names, ctypes.c_ulong(flags), options.encode()), target)


def _checked(status: int, what: str) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
