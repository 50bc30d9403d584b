"""What is watched while an attack goes on: probes, another tenant's step, and memory; and what is left of it."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline import Client, Group, SamplingParams
from paceline.calls.caller import RetryPolicy
from services.contracts.seeds import sample_seed
from tests.support.fake_instance import EOS, token_at

DEADLINE = 20.0
"""Seconds that what an honest caller does may take: far above what it takes on a busy machine."""
LIMIT = 60.0
"""Seconds after which all that an attack took must be given back."""
TENANT, SEED = "alice", 11
_VALUES = Path(__file__).parents[2] / "helm" / "paceline" / "values.yaml"
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_SAMPLED_EVERY = 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Pools of threads and of worker processes fill up to their sizes; a worker has its pipes and threads.
_MORE_PROCESSES, _MORE_THREADS, _MORE_FILES = 4, 24, 40


def memory_limit(component: str) -> int:
    """Return the chart's limit for a component, in bytes."""
    text = yaml.safe_load(_VALUES.read_text())[component]["resources"]["limits"]["memory"]
    return int(text[:-2]) * _UNITS[text[-2:]]


def tree(pid: int) -> list[int]:
    """Return a process and all that it has started. psutil would read the table of all processes for it."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _each(pids: list[int], measure: Callable[[psutil.Process], Any]) -> Iterator[Any]:
    for pid in pids:
        with suppress(psutil.Error, OSError):
            yield measure(psutil.Process(pid))


def resident(pid: int) -> int:
    """Return the memory of a process and its children; pages that several have count for each."""
    total = 0
    for each in tree(pid):
        with suppress(OSError):
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return total * _PAGE


class MemoryMeter:
    """The most memory of some processes while its context is entered, in bytes by their names."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)
        self.peaks = dict.fromkeys(pids, 0)

    def __enter__(self) -> MemoryMeter:
        for pid in self._pids.values():
            # VmHWM begins anew.
            with suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for name, pid in self._pids.items():
            self.peaks[name] = max(self.peaks[name], _high_water(pid))

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLED_EVERY):
            for name, pid in self._pids.items():
                self.peaks[name] = max(self.peaks[name], resident(pid))


def _high_water(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    (found,) = [line.split()[1] for line in lines if line.startswith("VmHWM")] or ["0"]
    return int(found) << 10


@dataclass(frozen=True)
class Addresses:
    """Where the processes are found, as "host:port"."""

    gateway: str
    facade: str
    probe: str
    """Of the facade's probes."""


class Witness:
    """Another tenant: probes, steps over the SDK and requests over HTTP, again and again until its context is left.

    At least one round begins after it was entered and ends before it is left.
    """

    def __init__(self, addresses: Addresses, token: str, client: Client, first_step: int) -> None:
        self._addresses = addresses
        self._token = token
        self._client = client
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="witness", daemon=True)
        self.step = first_step
        self.rounds = 0
        self.slowest: dict[str, float] = {}
        self.faults: list[str] = []
        self._doing = ""
        over_http = (self.completion, self.middling_completion, self.large_completion)
        self._honest = (self.livez, self.health, self.rollout, *over_http)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(4 * DEADLINE)
        if self._thread.is_alive():
            self.faults.append(f"{self._doing}: it hangs")

    def _watch(self) -> None:
        while True:
            for what in self._honest:
                self._time(what)
            self.rounds += 1
            if self.faults or self._over.wait(0.1):
                return

    def _time(self, what: Callable[[], None]) -> None:
        name = self._doing = what.__name__
        began = time.monotonic()
        try:
            what()
        except Exception as error:
            self.faults.append(f"{name}: {type(error).__name__} {error}"[:500])
        seconds = time.monotonic() - began
        self.slowest[name] = max(self.slowest.get(name, 0.0), round(seconds, 3))
        if seconds > DEADLINE:
            self.faults.append(f"{name}: took {seconds:.1f} s")

    def livez(self) -> None:
        """Probe the facade."""
        status, _, body = ask(self._addresses.probe, "GET", "/livez")
        assert status == 200, (status, body[:200])

    def health(self) -> None:
        """Probe the gateway."""
        with grpc.insecure_channel(self._addresses.gateway) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            found = stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE)
        assert found.status == health_pb2.HealthCheckResponse.SERVING

    def rollout(self) -> None:
        """Have a step generated, every sample of which is as it must be."""
        self.step += 1
        run = self._client.run(f"{TENANT}-run", seed=SEED)
        groups = [Group(f"p{number}", [1, 2, 3 + number], samples=2) for number in range(2)]
        version = self._client.versions().policy_version
        sampling = SamplingParams(max_tokens=8)
        rollout = run.rollout(self.step, groups, sampling, policy_version=version)
        samples = list(rollout)
        rollout.ack()
        assert len(samples) == 4, samples
        for sample in samples:
            seed = sample_seed(SEED, self.step, sample.key.prompt_id, sample.key.slot)
            # Whoever may push weights changes them for all: what is left of a sample is of the new ones then, which
            # is all of it if they came before its first token.
            expected = [
                token_at(seed, place, span.policy_version)[0]
                for span in sample.version_spans
                for place in range(span.begin, span.end)
            ]
            assert sample.token_ids.tolist() == expected, sample
            assert len(expected) == 8 or expected[-1] == EOS, sample

    def completion(self) -> None:
        """Ask the facade for samples of a text."""
        self._complete({"prompt": "ab cd", "max_tokens": 4, "seed": 5})

    def middling_completion(self) -> None:
        """Ask with a body of 100 KB."""
        self._complete({"prompt": [[7] * 400] * 8, "max_tokens": 4, "seed": 5}, 100_000)

    def large_completion(self) -> None:
        """Ask with a body of more than 1 MB."""
        self._complete({"prompt": [[7] * 400] * 8, "max_tokens": 4, "seed": 5}, 1_100_000)

    def _complete(self, asked: dict[str, Any], size: int = 0) -> None:
        body = json.dumps(asked).encode().ljust(size)
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._token}"}
        headers["x-paceline-run"] = f"{TENANT}-http"
        deadline = time.monotonic() + DEADLINE
        while True:
            status, _, answer = ask(self._addresses.facade, "POST", "/v1/completions", body, headers)
            # Somebody who may push weights has pushed some: the answer says to come again.
            if status != 409 or b"UPDATE_APPLYING" not in answer or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        assert status == 200, (status, answer[:300])
        assert json.loads(answer)["usage"]["completion_tokens"] > 0, answer[:400]


def ask(
    address: str,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    timeout: float = DEADLINE,
    source: str = "127.0.0.1",
) -> tuple[int, Any, bytes]:
    """Return status, headers and body of an answer. OSError or HTTPException if there is none."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout, source_address=(source, 0))
    try:
        # An answer may come before a large body was sent.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


@dataclass(frozen=True)
class Footing:
    """What a process and its children hold."""

    processes: int
    threads: int
    files: int
    connections: int
    """Those of the process's own port that are open."""

    @classmethod
    def of(cls, pid: int, port: int) -> Footing:
        """Return what it is now."""
        processes = tree(pid)
        return cls(
            processes=len(processes),
            threads=sum(_each(processes, psutil.Process.num_threads)),
            files=sum(_each(processes, psutil.Process.num_fds)),
            connections=_connections(port),
        )

    def left_over(self, before: Footing) -> list[str]:
        """Return what there is more of than before."""
        found = []
        if self.processes > before.processes + _MORE_PROCESSES:
            found.append(f"processes: {before.processes} -> {self.processes}")
        if self.threads > before.threads + _MORE_THREADS:
            found.append(f"threads: {before.threads} -> {self.threads}")
        if self.files > before.files + _MORE_FILES:
            found.append(f"files: {before.files} -> {self.files}")
        if self.connections > before.connections + 2:
            found.append(f"connections: {before.connections} -> {self.connections}")
        return found


def _connections(port: int) -> int:
    """Return the established connections of a port of this machine."""
    count = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        count += state == "01" and int(local.rpartition(":")[2], 16) == port
    return count


def busy(pids: list[int], seconds: float = 0.2) -> list[float]:
    """Return the processor seconds a second that each process takes together with its children."""
    before = [_processor(pid) for pid in pids]
    threading.Event().wait(seconds)
    return [(_processor(pid) - first) / seconds for pid, first in zip(pids, before, strict=True)]


def _processor(pid: int) -> float:
    return float(sum(_each(tree(pid), lambda each: sum(each.cpu_times()[:2]))))


def patient_client(address: str, token: str) -> Client:
    """Return a client that gives up soon after the deadline of an honest caller."""
    return Client(address, token=token, timeout=DEADLINE, retry=RetryPolicy(seconds=DEADLINE))
