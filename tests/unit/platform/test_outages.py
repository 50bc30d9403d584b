"""Which replies of Redis are an outage, and which addresses the store can have."""

from __future__ import annotations

import pytest
from redis.exceptions import (
    ClusterDownError,
    ConnectionError,
    OutOfMemoryError,
    RedisClusterException,
    ResponseError,
    TryAgainError,
)

from services.platform.config import ServiceConfig, parse_store_url
from services.platform.redis.connection import OUTAGES, Refused, reason_of, translated

SCRIPT_OF_6_2 = (
    "Error running script (call to f_1b): @user_script:2: @user_script: 2: -OOM command not allowed when used "
    "memory > 'maxmemory'."
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OutOfMemoryError("command not allowed", status_code="OOM"), "full"),
        (ResponseError(SCRIPT_OF_6_2), "full"),
        (ResponseError("MISCONF Valkey is configured to save RDB snapshots"), "snapshot_failed"),
        (
            ResponseError("Command # 2 (SET a 1) of pipeline caused error: NOREPLICAS Not enough"),
            "no_replicas",
        ),
        (ResponseError("UNBLOCKED force unblock from blocking operation"), "read_only"),
        (ResponseError("BUSY Valkey is busy running a script"), "script_runs"),
        (ClusterDownError("The cluster is down", status_code="CLUSTERDOWN"), "cluster_down"),
        (TryAgainError("Multiple keys request", status_code="TRYAGAIN"), "resharding"),
        (RedisClusterException("Redis Cluster cannot be connected. Please provide a node"), "unreachable"),
        (ConnectionError("refused"), "unreachable"),
    ],
)
def test_a_redis_that_takes_no_writes_now_is_an_outage(error: Exception, reason: str) -> None:
    found = translated(error)
    assert isinstance(found, OUTAGES)
    assert reason_of(found) == reason


@pytest.mark.parametrize(
    "error",
    [
        ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
        ResponseError("unknown command 'OOM'"),
        ResponseError("FENCED the lease belongs to OOM"),
        ResponseError("Command # 1 (SET a MISCONF ) of pipeline caused error: WRONGTYPE Operation"),
        RedisClusterException("MGET - all keys must map to the same key slot"),
        ValueError("OOM"),
    ],
)
def test_a_mistake_is_no_outage(error: Exception) -> None:
    assert translated(error) is error
    assert not isinstance(error, OUTAGES)


def test_a_refusal_keeps_what_redis_said() -> None:
    error = translated(OutOfMemoryError("command not allowed", status_code="OOM"))
    assert isinstance(error, Refused)
    assert str(error) == "OOM command not allowed"


def test_an_address_of_sentinels_names_them_the_primary_and_both_passwords() -> None:
    address = parse_store_url(
        "rediss+sentinel://user:p%40@a:1,[::1]/main/3?ssl_ca_certs=/ca&sentinel_password=s"
    )
    assert address.hosts == (("a", 1), ("::1", 26379))
    assert address.service == "main"
    assert address.options == {
        "username": "user",
        "password": "p@",
        "db": 3,
        "ssl": True,
        "ssl_ca_certs": "/ca",
    }
    assert address.sentinel_options == {"password": "s", "ssl": True, "ssl_ca_certs": "/ca"}


def test_an_address_of_a_cluster_names_its_nodes() -> None:
    address = parse_store_url("redis+cluster://:p@a:7000,b")
    assert (address.hosts, address.service) == ((("a", 7000), ("b", 6379)), "")
    assert address.options == {"password": "p"}


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("http://a:1", "must start with one of redis://"),
        ("redis+sentinel://a:1,b:2", "must name the primary"),
        ("redis+cluster://a:1/2", "database 0 only"),
        ("redis+cluster://:secret@a:1,,b:2", "'' is no host:port"),
        ("redis+sentinel://a:x/main", "Port"),
        ("redis://a:x/0", "Port"),
        ("redis://a:1/0?socket_timeout=soon", "socket_timeout"),
    ],
)
def test_an_address_that_is_none_is_refused_at_start(url: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as raised:
        ServiceConfig(redis_url=url)
    assert "secret" not in str(raised.value.errors()[0]["msg"])  # type: ignore[attr-defined]
