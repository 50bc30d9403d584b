"""A real Prometheus for tests, which watches a local platform."""

from __future__ import annotations

import functools
import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import yaml

from services.platform.launching import tied
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]


@functools.cache
def _found() -> tuple[Path | None, str]:
    answer = subprocess.run(
        [ROOT / "scripts/prometheus"], capture_output=True, text=True, timeout=120, check=False
    )
    if answer.returncode:
        return None, answer.stderr.strip()
    return Path(answer.stdout.strip()), ""


def tools() -> Path:
    """Return the folder of prometheus and promtool; skips the test where they cannot be had."""
    folder, reason = _found()
    if folder is None:
        pytest.skip(reason)
    return folder


class Prometheus:
    """One server. `scrape` is its scrape configuration, `rules` the contents of its rule file."""

    def __init__(self, folder: Path, scrape: Mapping[str, Any], rules: Mapping[str, Any]) -> None:
        self._folder = folder
        self._address = f"127.0.0.1:{free_port()}"
        (folder / "rules.yml").write_text(yaml.safe_dump(dict(rules)))
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [dict(scrape)],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [
            str(tools() / "prometheus"),
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={self._address}",
            "--log.level=warn",
        ]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(tied(command), stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 60
        while not self._is_ready():
            log_so_far = (self._folder / "log").read_text()
            assert self._process.poll() is None, log_so_far
            assert time.monotonic() < deadline, log_so_far
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)

    def get(self, path: str, **parameters: Any) -> Any:
        """Return the data of one API call; AssertionError with Prometheus's words when it refuses."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def now(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Series and their latest values."""
        result = self.get("query", query=expression)
        if result["resultType"] == "scalar":
            return [({}, float(result["result"][1]))]
        return [(each["metric"], float(each["value"][1])) for each in result["result"]]

    def over(
        self, expression: str, begin: float, end: float
    ) -> list[tuple[dict[str, str], list[list[float]]]]:
        """Series and their values, second by second, as [unix time, value]."""
        result = self.get("query_range", query=expression, start=begin, end=end, step=1)["result"]
        return [
            (each["metric"], [[float(at), float(value)] for at, value in each["values"]]) for each in result
        ]

    def firing(self) -> list[dict[str, str]]:
        """Return the labels of the alerts that fire."""
        return [each["labels"] for each in self.get("alerts")["alerts"] if each["state"] == "firing"]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=60):
                return True
        except OSError:
            return False
