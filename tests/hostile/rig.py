"""A real gateway and a real facade, with an instance that has no model, for attackers and for an honest tenant."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import yaml

from paceline import Client
from paceline.errors import PacelineError
from paceline.tokens import hash_token
from paceline.types import InstanceState
from services.local.child import Child, ProcessSpec
from tests.hostile.answers import FAILED, Answer, Attack
from tests.hostile.watching import (
    LIMIT,
    TENANT,
    Addresses,
    Footing,
    MemoryMeter,
    Witness,
    ask,
    busy,
    memory_limit,
    patient_client,
    resident,
)
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.fake_instance import VOCAB
from tests.support.ports import free_port
from tests.support.zygote import launch

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}{{ greeting or '' }}"
"""Reads one variable beside the messages."""
ATTACKER, MOVER, LOOKER, SLOW = "mallory", "mover", "looker", "slow"
"""Tokens of attackers: with rollouts, with weights, with fleet, and with rollouts at a low rate."""
EVERYTHING = "everything"
"""Token with all that a trainer may have, for runs of its own: an abort of all ends what its runs have, no more."""
MOST_CONNECTIONS = 400
"""Of the facade, so that a few hundred connections are as many as it has."""
WATCHED = ("gateway", "facade")
_START = 600.0
_IDLE = 0.5
"""Share of a core that an idle process may take."""


class Rig:
    """Processes, tokens and folders. The attackers' tokens are their names, doubled."""

    def __init__(self, folder: Path, redis_url: str, namespace: str) -> None:
        self.folder = folder
        self.files = folder / "files"
        """Of attackers: what they may have instances read."""
        self.files.mkdir(parents=True)
        self._common = (f"--redis-url={redis_url}", f"--namespace={namespace}")
        # Each process dies with the thread that started it.
        self._spawner = ThreadPoolExecutor(1, "spawner")
        self._children: dict[str, Child] = {}
        self._step = 0
        self._probe_port = free_port()
        self.client: Client
        self.figures: dict[str, object] = {}
        self.patient = False
        """Whether attackers wait for what takes minutes, as in the soak."""

    def start(self) -> Rig:
        """Start all processes and return when the gateway has its instance."""
        model = self.folder / "model"
        byte_tokenizer(model, VOCAB)
        template = model / "chat_template.jinja"
        template.write_text(CHAT_TEMPLATE)
        tokens, own = self.folder / "tokens.yaml", self.folder / "token"
        tokens.write_text(yaml.safe_dump(self._grants()))
        own.write_text(token_of("services"))
        flags = (f"--token-file={own}", f"--tokens-file={tokens}", "--port=0", "--lease-seconds=2")
        self._spawn("gateway", "services.gateway", *self._common, *flags)
        reading = ("--id=i0", f"--folder={self.folder / 'instance'}")
        self._spawn("instance", "tests.hostile.reading_instance", *self._common, *reading)
        self._children["gateway"].start()
        self._children["instance"].start()
        gateway = self._children["gateway"].wait_ready(time.monotonic() + _START).address
        self._of_facades = (
            f"--gateway={gateway}",
            f"--token-file={own}",
            f"--tokens-file={tokens}",
            "--port=0",
        )
        bounds = (
            f"--max-connections={MOST_CONNECTIONS}",
            "--header-seconds=5",
            f"--probe-port={self._probe_port}",
        )
        self._model = f"--model={model}"
        self._spawn("facade", "services.facade", *self._of_facades, self._model, *bounds)
        open_flags = ("--anonymous-scopes", '["rollouts","weights"]')
        self._spawn("open-facade", "services.facade", *self._of_facades, *open_flags)
        for name in ("facade", "open-facade"):
            self._children[name].start()
        for name in ("facade", "open-facade"):
            self._children[name].wait_ready(time.monotonic() + _START)
        self.client = patient_client(gateway, token_of(TENANT))
        self._await_instance()
        self.warm_up()
        return self

    def start_facade(self, name: str, *flags: str) -> None:
        """Start one more facade with the model's tokenizer, for an attack of its own, unless it runs."""
        if name not in self._children:
            self._spawn(name, "services.facade", *self._of_facades, self._model, *flags)
            self._children[name].start()
            self._children[name].wait_ready(time.monotonic() + _START)

    def stop(self) -> None:
        """End all processes."""
        with suppress(AttributeError):
            self.client.close()
        for child in reversed(self._children.values()):
            child.stop(10.0)
        self._spawner.shutdown()

    @property
    def addresses(self) -> Addresses:
        """Where the processes are."""
        return Addresses(self.address("gateway"), self.address("facade"), f"127.0.0.1:{self._probe_port}")

    def address(self, name: str) -> str:
        """Return where a process is, as "host:port"."""
        ready = self._children[name].ready
        assert ready is not None, f"{name} is not ready"
        return ready.address

    def log(self, name: str) -> str:
        """Return what a process has written."""
        return self._children[name].spec.log.read_text(errors="replace")

    def restore(self) -> None:
        """Replace what an attack has ended, or has left so that it does not answer: one attack, one failure."""
        for name in ("gateway", "facade"):
            child = self._children[name]
            if not child.alive or resident(child.pid) > memory_limit(name) or not self._answers(name):
                child.kill()
                port = self.address(name).rpartition(":")[2]
                child.spec = ProcessSpec(
                    child.spec.name,
                    [*child.spec.argv, f"--port={port}"],
                    child.spec.log,
                    child.spec.ready_file,
                    child.spec.environment,
                )
                child.start()
                child.wait_ready(time.monotonic() + _START)
        self._await_instance()

    def _answers(self, name: str) -> bool:
        witness = self._witness()
        try:
            witness.health() if name == "gateway" else witness.livez()
        except Exception:
            return False
        return True

    def attack(self, name: str, attacks: Sequence[Attack], *, at_once: bool = False) -> list[str]:
        """Send attacks, one after the other or all at once, in the sizes of the suite or of the soak.

        Returns what was wrong with their answers, what they did to others, and what they left.
        """
        self.restore()
        before = {name: self._footing(name) for name in WATCHED}
        found: dict[str, Sequence[Answer]] = {}
        with self.watched() as (witness, meter):
            if at_once:
                together([partial(self._send, each, found) for each in attacks])
            else:
                for each in attacks:
                    self._send(each, found)
        faults = [f"{each}: {fault}" for each in attacks for fault in each.faults(found[str(each)])]
        faults += [f"another tenant: {fault}" for fault in witness.faults]
        faults += self.memory_faults(meter)
        faults += self.left_over(before)
        self.figures[name] = {
            "answers": sorted(
                {f"{each.status} {each.reason}".strip() for all in found.values() for each in all}
            ),
            "slowest_seconds": witness.slowest,
            "rounds": witness.rounds,
            "peak_mib": {name: peak >> 20 for name, peak in meter.peaks.items()},
            "faults": faults,
        }
        return faults

    def _send(self, attack: Attack, found: dict[str, Sequence[Answer]]) -> list[Answer]:
        try:
            answers = list(attack.send(self, attack.whole if self.patient else attack.short))
        except Exception as error:
            # It is this attack's, and those that follow are sent.
            answers = [Answer(FAILED, f"{error!r}", untyped="it could not be sent or read")]
        found[str(attack)] = answers
        return answers

    def calls(self, method: str) -> float:
        """Return how often a method of the gateway was called."""
        ready = self._children["gateway"].ready
        assert ready is not None
        status, _, body = ask(
            f"127.0.0.1:{ready.metrics_port}", "GET", "/metrics", headers=bearer("services")
        )
        assert status == 200, body[:200]
        lines = [
            line for line in body.decode().splitlines() if line.startswith("paceline_rpc_requests_total")
        ]
        return sum(float(line.rpartition(" ")[2]) for line in lines if f'"{method}"' in line)

    def secrets_told(self) -> list[str]:
        """Return the processes that have written a token into their logs."""
        return [name for name in self._children if "secret-of-" in self.log(name)]

    @contextmanager
    def watched(self) -> Iterator[tuple[Witness, MemoryMeter]]:
        """Have another tenant work meanwhile, and measure memory."""
        witness = self._witness()
        meter = MemoryMeter({name: self._children[name].pid for name in WATCHED})
        with meter, witness:
            yield witness, meter
        self._step = witness.step

    def memory_faults(self, meter: MemoryMeter) -> list[str]:
        """Return which process took more than the chart's limit, or ended."""
        found = []
        for name, peak in meter.peaks.items():
            if not self._children[name].alive:
                found.append(f"{name} ended with status {self._children[name].returncode}")
            if peak > (limit := memory_limit(name)):
                found.append(f"{name} took {peak >> 20} MiB, more than the {limit >> 20} MiB of the chart")
        return found

    def left_over(self, before: dict[str, Footing]) -> list[str]:
        """Return what is still held a minute later, or still being worked on."""
        deadline = time.monotonic() + LIMIT
        while True:
            found = [
                f"{name} still has {fault}"
                for name in WATCHED
                for fault in self._footing(name).left_over(before[name])
            ]
            if not found:
                shares = busy([self._children[name].pid for name in WATCHED])
                found = [
                    f"{name} is still busy"
                    for name, share in zip(WATCHED, shares, strict=True)
                    if share > _IDLE
                ]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def _footing(self, name: str) -> Footing:
        port = int(self.address(name).rpartition(":")[2])
        return Footing.of(self._children[name].pid, port)

    def _witness(self) -> Witness:
        return Witness(self.addresses, token_of(TENANT), self.client, self._step)

    def warm_up(self) -> None:
        """Have everything imported, connected and started that honest work needs."""
        with self.watched() as (witness, _):
            pass
        assert not witness.faults, (witness.faults, self.log("gateway")[-2000:], self.log("facade")[-2000:])

    def _await_instance(self) -> None:
        deadline = time.monotonic() + _START
        while not self._serving():
            assert time.monotonic() < deadline, f"no instance serves\n{self.log('instance')[-2000:]}"
            time.sleep(0.05)

    def _serving(self) -> bool:
        with suppress(PacelineError):
            return any(each.state is InstanceState.SERVING for each in self.client.instances())
        return False

    def _spawn(self, name: str, module: str, *flags: str) -> None:
        ready = self.folder / f"{name}.ready.json"
        spec = ProcessSpec(
            name=name,
            argv=(sys.executable, "-m", module, *flags, f"--ready-file={ready}"),
            log=self.folder / "logs" / f"{name}.log",
            ready_file=ready,
            environment={"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"},
        )
        self._children[name] = Child(spec, self._spawner, launch)

    def _grants(self) -> list[dict[str, object]]:
        scopes = {
            TENANT: "rollouts",
            ATTACKER: "rollouts",
            SLOW: "rollouts",
            MOVER: "weights",
            LOOKER: "fleet",
        }
        return [
            {
                "name": name,
                "sha256": hash_token(token_of(name)),
                "scopes": [scope],
                "runs": [f"{name}-*"],
                **({"requests_per_second": 0.001, "burst": 1} if name == SLOW else {}),
            }
            for name, scope in scopes.items()
        ] + [
            {
                "name": EVERYTHING,
                "sha256": hash_token(token_of(EVERYTHING)),
                "scopes": ["rollouts", "weights", "fleet"],
                "runs": [EVERYTHING],
            }
        ]


def token_of(name: str) -> str:
    """Return the token of somebody, which is no part of any other text."""
    return f"secret-of-{name}-" + "x" * 20


def bearer(name: str) -> dict[str, str]:
    """Return the header of somebody's requests."""
    return {"authorization": f"Bearer {token_of(name)}"}


def together(calls: Sequence[Callable[[], Sequence[Answer]]]) -> list[Answer]:
    """Make calls, each in a thread of its own, and return their answers."""
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        return [answer for found in pool.map(lambda call: call(), calls) for answer in found]
