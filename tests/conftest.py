"""Fixtures of all tests: a real Redis server, and a namespace of one's own on it."""

from __future__ import annotations

import gc
import os
import sys
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from services.platform.redis.embedded import EmbeddedRedis
from tests.support.compiled import compile_once
from tests.support.failure_log import LOG, FailureLog
from tests.support.inner_pytest import INNER
from tests.support.older_processor import hide_newer_than_avx2
from tests.support.processor_time import ProcessorTime
from tests.support.stress import Stress
from tests.support.zygote import NO_ENGINES

MARKED_FOLDERS = ("integration", "e2e", "chaos", "gpu", "hostile")
FIRST_FOLDERS = ("chaos", "e2e", "hostile", "integration", "unit/kernels")
FAST_FOLDERS = (
    "hostile",
    "integration/documents",
    "integration/facade",
    "integration/platform",
    "integration/scaling",
    "integration/sdk",
    "unit",
)
"""Folders whose tests start no engine. With --fast, `tests.support.zygote` refuses to fork one."""
SLOW_FOLDER = "unit/kernels"
"""The one below them that Triton's interpreter and compiler make slow."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of long tests: `make soak` gives them, and who repeats a failure of one."""
    group = parser.getgroup("paceline")
    group.addoption("--soak", action="store_true", help="run long tests too, and others on new examples")
    group.addoption("--chaos-events", type=int, help="kills and stalls, instead of those of each test")
    group.addoption("--chaos-seed", type=int, help="seed of the kills and stalls")
    group.addoption(
        "--chaos-spare", action="append", default=[], help="process to leave alone, such as redis"
    )
    group.addoption(
        "--fuzz-seconds", type=float, help="time of random messages, instead of that of each test"
    )
    group.addoption("--fuzz-seed", type=int, help="seed of the random messages")
    group.addoption("--soak-steps", type=int, help="steps of a training, instead of those of each test")
    group.addoption("--fast", action="store_true", help="only tests that start no engine (make test-fast)")
    group.addoption(
        "--stress", action="store_true", help="stall processes, threads and event loops, under load"
    )
    group.addoption("--stress-seed", type=int, help="seed of the stalls")
    group.addoption("--processor", choices=["avx2"], help="hide what newer processors have; needs -n")


def pytest_configure(config: pytest.Config) -> None:
    """Make the folders known as markers, and the workers quick."""
    _keep_bytecode(config.rootpath / ".pytest_cache" / "bytecode")
    # Tokens of the platforms of tests, apart from those of other platforms of this user.
    os.environ["XDG_STATE_HOME"] = str(config.rootpath / ".pytest_cache" / "state")
    for name in ("PACELINE_TOKEN", "PACELINE_TOKEN_FILE"):
        os.environ.pop(name, None)
    _log_plainly()
    # There is a worker for each core: threads of torch would wait for each other, and keep the core while they do.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ray waits for its own server for 30 s, which a machine under load needs.
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")
    # How long an example takes says how busy the machine is. Examples are the same in every run, but with --soak.
    settings.register_profile(
        "paceline",
        parent=settings(),
        deadline=None,
        derandomize=not config.getoption("soak"),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("paceline")
    # Files are given to the workers in the order of `pytest_collection_modifyitems`, not those of most tests first.
    config.option.loadscopereorder = False
    if config.getoption("processor") and not hasattr(config, "workerinput"):
        hide_newer_than_avx2()
    if getattr(config.option, "numprocesses", None):
        compile_once(config.rootpath)
    for name in MARKED_FOLDERS:
        config.addinivalue_line("markers", f"{name}: lies in a folder tests/**/{name}")
    if INNER not in os.environ:
        config.pluginmanager.register(ProcessorTime(config), "processor-time")
    if INNER not in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailureLog(config.rootpath / LOG), "failure-log")
    if config.getoption("stress"):
        config.pluginmanager.register(Stress(config), "stress")
    config.addinivalue_line("markers", "soak: takes minutes; skipped without --soak (make soak)")


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


class Folder(pytest.Package):
    """Folder of tests. What its fixtures of scope "package" have started ends with the last test in it.

    Pytest knows folders with an `__init__.py` only; those fixtures would keep their engines until the run ends.
    """

    def setup(self) -> None:
        """Import no `__init__.py`."""


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector:
    """Collect every folder as one whose fixtures may end with it."""
    return Folder.from_parent(parent, path=path)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting imports stays: no collection of garbage looks through it, neither then nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What is left of a file stays, as what was imported does: late in a run a collection would take seconds."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with the folder it lies in, and skip the long ones unless they are asked for.

    Long files come first, those that start platforms and engines or run Triton's interpreter: workers that end with
    quick ones end together.
    """
    items.sort(key=_folder_order)
    if config.getoption("fast"):
        os.environ[NO_ENGINES] = "1"
        _select(config, items, _is_fast)
    for item in items:
        parts = item.path.relative_to(Path(__file__).parent).parts
        for name in MARKED_FOLDERS:
            if name in parts[:-1]:
                item.add_marker(name)
        if item.get_closest_marker("soak") and not config.getoption("soak"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: make soak"))


def _select(config: pytest.Config, items: list[pytest.Item], chosen: Callable[[pytest.Item], bool]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not chosen(item)])
    items[:] = [item for item in items if chosen(item)]


def _is_fast(item: pytest.Item) -> bool:
    path = _in(item)
    return path.startswith(tuple(f"{each}/" for each in FAST_FOLDERS)) and not path.startswith(SLOW_FOLDER)


def _in(item: pytest.Item) -> str:
    """Return the path of a test's file below this folder."""
    return item.path.relative_to(Path(__file__).parent).as_posix()


def _folder_order(item: pytest.Item) -> int:
    path = _in(item)
    ranks = (rank for rank, folder in enumerate(FIRST_FOLDERS) if path.startswith(f"{folder}/"))
    return next(ranks, len(FIRST_FOLDERS))


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Redis server that all tests of the session share; use a `namespace` of your own."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def namespace() -> str:
    """A prefix of keys that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"
