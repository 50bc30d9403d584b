"""A real server process: its data over restarts, its folder, its end with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from redis import Redis

from services.platform.redis.embedded import LONGEST_SOCKET_PATH, EmbeddedRedis

ROOT = Path(__file__).parents[3]

PARENT = """
import sys, time
from services.platform.redis.embedded import EmbeddedRedis
server = EmbeddedRedis(sys.argv[1])
print(server.start(), server.pid, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_data_survives_a_restart_at_the_same_address(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    url = server.start()
    with Redis.from_url(url) as client:
        client.set("key", "value")
    first = server.pid
    server.stop()
    assert server.pid is None
    assert server.start() == url
    assert server.pid != first
    with Redis.from_url(url) as client:
        assert client.get("key") == b"value"
    server.stop()


def test_data_survives_a_crash(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    with Redis.from_url(server.start()) as client:
        client.set("key", "value")
    server.kill()
    with server, Redis.from_url(server.url) as client:
        assert client.get("key") == b"value"


def test_a_folder_belongs_to_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedRedis(tmp_path) as first, Redis.from_url(first.url) as client:
        client.set("key", "value")
        monkeypatch.setattr("services.platform.redis.embedded.START_TIMEOUT", 0.1)
        with pytest.raises(RuntimeError, match="another Redis"):
            EmbeddedRedis(tmp_path).start()
        assert client.get("key") == b"value"


def test_a_long_folder_name_still_has_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 150)
    with EmbeddedRedis(folder) as server, Redis.from_url(server.url) as client:
        assert len(server.url) < LONGEST_SOCKET_PATH + len("unix://")
        assert client.ping()


def test_only_this_user_can_reach_it(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        assert os.stat(server.url.removeprefix("unix://")).st_mode & 0o077 == 0


def test_no_orphan_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout is not None
    url, pid = parent.stdout.readline().split()
    with Redis.from_url(url) as client:
        client.set("key", "value")
    assert not gone(int(pid))
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 60
    while not gone(int(pid)):
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.02)
    with EmbeddedRedis(tmp_path) as again:
        assert again.url == url


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path):
        pass
    (folder,) = tmp_path.glob("appendonlydir")
    (manifest,) = folder.glob("*.manifest")
    manifest.write_text("nonsense")
    with pytest.raises(RuntimeError, match="manifest"):
        EmbeddedRedis(tmp_path).start()
