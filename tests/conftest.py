"""Fixtures of all tests: a real Redis server, and a namespace of one's own on it."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from services.platform.embedded_redis import EmbeddedRedis

MARKED_FOLDERS = ("integration", "e2e", "chaos", "gpu")
FIRST_FOLDERS = ("e2e", "integration")


def pytest_configure(config: pytest.Config) -> None:
    """Makes the folders known as markers, and the workers quick."""
    _keep_bytecode(config.rootpath / ".pytest_cache" / "bytecode")
    _log_plainly()
    # There is a worker for each core: threads of torch would wait for each other, and keep the core while they do.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # How long an example takes says how busy the machine is.
    settings.register_profile("no deadline", parent=settings(), deadline=None)
    settings.load_profile("no deadline")
    # Files are given to the workers in the order of `pytest_collection_modifyitems`, not those of most tests first.
    config.option.loadscopereorder = False
    for name in MARKED_FOLDERS:
        config.addinivalue_line("markers", f"{name}: lies in a folder tests/**/{name}")


def _keep_bytecode(folder: Path) -> None:
    """Where no bytecode is to lie beside the sources, as in many containers, it goes into a folder of its own.

    The tests start hundreds of processes. Without bytecode each compiles all that it imports, which takes three
    times as long as importing it.
    """
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(folder))
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"]
        sys.dont_write_bytecode = False


def _log_plainly() -> None:
    """Tracebacks in logs without colours and variables: to draw those takes a thread up to a second."""
    *others, _ = structlog.get_config()["processors"]
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*others, renderer])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test with the folder it lies in.

    Files that start platforms and engines come first: workers that end with quick ones end together.
    """
    items.sort(key=_folder_order)
    for item in items:
        parts = item.path.relative_to(Path(__file__).parent).parts
        for name in MARKED_FOLDERS:
            if name in parts[:-1]:
                item.add_marker(name)


def _folder_order(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return FIRST_FOLDERS.index(folder) if folder in FIRST_FOLDERS else len(FIRST_FOLDERS)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Redis server that all tests of the session share; use a `namespace` of your own."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def namespace() -> str:
    """A prefix of keys that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"
