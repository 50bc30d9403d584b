"""The actor: it starts a process of the platform on its node, and lives as long as that does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

from services.platform.lifeline import tied

_WATCH_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Ready:
    """What a process said when it was ready. Addresses are host:port."""

    pid: int
    address: str
    metrics_port: int


class ServiceActor:
    """Ray starts it again when it dies, and with it the process: under the same name, so that the process takes the
    next epoch, and with a new address, which the registry tells."""

    def __init__(self, module: str, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts `python -m module`; its output is the actor's."""
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-ray-"))
        self._ready_file = self._folder / "ready.json"
        self._stopping = False
        settings = dict(environment)
        if settings.get("PACELINE_HOST") in ("0.0.0.0", "::"):
            settings["PACELINE_ADVERTISE_HOST"] = ray.util.get_node_ip_address()
        # The engine joins the cluster by itself, if it is to.
        settings["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-m", module, *flags, f"--ready-file={self._ready_file}"]
        # It dies with the thread that starts it: this one, which ends with the actor.
        self._process = subprocess.Popen(
            tied(command), stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONUNBUFFERED": "1", **settings}
        )
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def ready(self) -> Ready | None:
        """What the process said when it was ready; None before. Never waits: other calls wait behind this one."""
        if not self._ready_file.exists():
            return None
        said = json.loads(self._ready_file.read_text())
        return Ready(said["pid"], said["address"], said["metrics_port"])

    def stop(self, seconds: float) -> int:
        """Asks the process to end, as Kubernetes would; kills it after `seconds`. Its exit status."""
        self._stopping = True
        self._process.terminate()
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self) -> None:
        while self._process.poll() is None:
            time.sleep(_WATCH_SECONDS)
        if not self._stopping:
            shutil.rmtree(self._folder, ignore_errors=True)
            # Not an exception, which would leave an actor without a process behind: Ray is to start both again.
            os._exit(1)
