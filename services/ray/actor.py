"""Ray actor that starts one process of the platform on its node, and lives as long as that process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray

from services.platform.lifeline import tied
from services.platform.ready_file import ProcessEndpoint, read_ready_file


class ServiceActor:
    """One process and its actor; Ray starts both again when either dies.

    The process keeps its name, so that it takes the next epoch; the registry announces its new address.
    """

    def __init__(self, module: str, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `python -m module`; its output is the actor's."""
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-ray-"))
        self._ready_file = self._folder / "ready.json"
        self._stopping = False
        settings = dict(environment)
        if settings.get("PACELINE_HOST") in ("0.0.0.0", "::"):
            settings["PACELINE_ADVERTISE_HOST"] = ray.util.get_node_ip_address()
        # For an engine that joins the cluster itself.
        settings["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-m", module, *flags, f"--ready-file={self._ready_file}"]
        # It dies with the thread that starts it: this one, which ends with the actor.
        self._process = subprocess.Popen(
            tied(command), stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONUNBUFFERED": "1", **settings}
        )
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def ready(self) -> ProcessEndpoint | None:
        """Return the endpoint of the process; None before it is ready.

        Never waits, since other calls queue behind.
        """
        return read_ready_file(self._ready_file)

    def stop(self, seconds: float) -> int:
        """Terminate the process as Kubernetes would, kill it after `seconds`, and return its exit status."""
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
        self._process.wait()
        if not self._stopping:
            shutil.rmtree(self._folder, ignore_errors=True)
            # Not an exception, which would leave an actor without a process behind: Ray is to start both again.
            os._exit(1)
