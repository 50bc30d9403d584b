"""Fixtures of all tests: a real Redis server, and a namespace of one's own on it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.platform.embedded_redis import EmbeddedRedis

MARKED_FOLDERS = ("integration", "e2e", "chaos", "gpu")


def pytest_configure(config: pytest.Config) -> None:
    """Makes the folders known as markers."""
    for name in MARKED_FOLDERS:
        config.addinivalue_line("markers", f"{name}: lies in a folder tests/**/{name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test with the folder it lies in."""
    for item in items:
        parts = item.path.relative_to(Path(__file__).parent).parts
        for name in MARKED_FOLDERS:
            if name in parts[:-1]:
                item.add_marker(name)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Redis server that all tests of the session share; use a `namespace` of your own."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def namespace() -> str:
    """A prefix of keys that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"
