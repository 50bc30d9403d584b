"""What a kubelet does for one pod: volumes, containers in their order, readiness, restarts, and an orderly end."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.cluster.launcher import Launcher
from tests.support.cluster.spec import POD_IP, Container, Pod
from tests.support.zygote import Forked

_TURN_SECONDS = 0.05
# A kubelet waits from ten seconds on.
_RESTART_SECONDS = 1.0
_EAGER_SECONDS = 1.0
# Tests share processors that a probe of a cluster would have had for itself.
_PATIENCE = 4


@dataclass(slots=True)
class _Running:
    container: Container
    process: Forked
    pid_file: Path
    ready: bool
    failures: int = 0
    due: float = 0.0

    def pid(self) -> int:
        """Return process 1's, as this machine counts; 0 while there is none."""
        return int(self.pid_file.read_text()) if self.pid_file.exists() else 0


class Kubelet:
    """A pod on a node, with a thread of its own. `phase` is Pending, Running, Succeeded or Failed."""

    def __init__(self, pod: Pod, node: str, revision: str, host: Launcher) -> None:
        self.pod = pod
        self.node = node
        self.revision = revision
        self.phase = "Pending"
        self.restarts = 0
        self.lost = False
        self.overran = False
        """Its processes did not end in the time that the pod has for it."""
        self.ending = threading.Event()
        self.gone = threading.Event()
        self.published = threading.Event()
        """Its names, Services and policies are in force. No container starts before: a program may look a name up
        at once, and only once."""
        self._host = host
        self._running: list[_Running] = []
        self.address, self._network = host.network.add(pod.name)
        threading.Thread(target=self._live, name=pod.name, daemon=True).start()

    @property
    def ready(self) -> bool:
        """True while all containers run and their probes say so."""
        running = self._running if self.phase == "Running" else []
        return (
            bool(running) and all(each.ready for each in running) and not (self.lost or self.ending.is_set())
        )

    def end(self) -> None:
        """Have it ended, with as much time as the pod has; returns at once."""
        self.ending.set()

    def lose(self) -> None:
        """Take its node's power: nothing is sent any more, not even that connections are closed."""
        if self.gone.is_set():
            return
        self.lost = True
        self._host.network.cut(self.pod.name)
        for each in self._running:
            each.process.kill()

    def execute(self, command: tuple[str, ...], script: bytes = b"") -> Forked:
        """Run a command in the first container, as `kubectl exec --stdin` does."""
        first = self._running[0]
        return self._host.start(self.pod, first.container, self._network, command, first.pid(), script)

    def _live(self) -> None:
        try:
            while not self.published.wait(_TURN_SECONDS) and not self.ending.is_set() and not self.lost:
                pass
            if all(self._completed(each) for each in self.pod.initial):
                self._run()
            if self.lost:
                # Nobody can say that it has ended, until somebody says so in the node's place.
                self.ending.wait()
        finally:
            self._finish()

    def _completed(self, container: Container) -> bool:
        """Run an initial container until it ends well. False if the pod is to end before."""
        while not self.ending.is_set() and not self.lost:
            self._running = [self._begin(container)]
            process = self._running[0].process
            while process.poll() is None and not self.ending.wait(_TURN_SECONDS):
                pass
            if process.poll() == 0:
                self._running = []
                return True
            self.restarts += 1
            self.ending.wait(_RESTART_SECONDS)
        return False

    def _begin(self, container: Container) -> _Running:
        variables = {name: text.replace(POD_IP, self.address) for name, text in container.environment.items()}
        placed = replace(container, environment=variables)
        process = self._host.start(self.pod, placed, self._network, ())
        pid_file = self._host.folder / self.pod.name / f"{container.name}.pid"
        return _Running(container, process, pid_file, container.readiness is None)

    def _run(self) -> None:
        self._running = [self._begin(each) for each in self.pod.containers]
        self.phase = "Running"
        self._host.changed()
        while not self.ending.wait(_TURN_SECONDS) and not self.lost:
            for place, each in enumerate(self._running):
                status = each.process.poll()
                if status is None:
                    self._ask(each)
                elif not self.pod.restarts:
                    self.phase = "Failed" if status else "Succeeded"
                    return
                else:
                    self._restart(place)

    def _restart(self, place: int) -> None:
        self._running[place].ready = False
        self._host.changed()
        self.restarts += 1
        if not self.ending.wait(_RESTART_SECONDS) and not self.lost:
            self._running[place] = self._begin(self._running[place].container)

    def _ask(self, running: _Running) -> None:
        """Ask a container whether it is ready, if it is time to."""
        probe = running.container.readiness
        if probe is None or time.monotonic() < running.due or not running.pid():
            return
        good = self._host.network.answers(self.address, probe.port, probe.path, probe.timeout * _PATIENCE)
        # Until it is ready sooner than a kubelet asks, whose pauses are most of the time that starting takes.
        pause = probe.period if running.ready else min(probe.period, _EAGER_SECONDS)
        running.due = time.monotonic() + pause
        running.failures = 0 if good else running.failures + 1
        if good != running.ready and (good or running.failures >= probe.failures):
            running.ready = good
            self._host.changed()

    def _finish(self) -> None:
        self._host.changed()
        deadline = time.monotonic() + self.pod.grace
        for each in self._running:
            each.process.send_signal(signal.SIGTERM)
        for each in self._running:
            try:
                each.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.overran = True
                each.process.kill()
                each.process.wait()
        self._host.network.remove(self.pod.name)
        self.gone.set()
        self._host.changed()
