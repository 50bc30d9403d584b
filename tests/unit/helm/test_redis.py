"""Redis of one's own, by hosts and secrets, and the exporter beside the embedded one."""

from __future__ import annotations

from typing import Any

import helm_python as helm
import pytest

from services.platform.config.store_url import parse_store_url
from tests.unit.helm.release import Release, container, environment, render, value_set

ELSEWHERE = {"redis": {"embedded": {"enabled": False}}}


def _external(**values: Any) -> dict[str, Any]:
    return {"redis": {"embedded": {"enabled": False}, "external": values}}


def _addresses(release: Release) -> set[str]:
    return {environment(container(each))["PACELINE_REDIS_URL"] for _, each in release.services()}


def test_the_primary_behind_sentinels_is_found_by_their_hosts_and_name() -> None:
    (address,) = _addresses(value_set("sentinel"))
    parsed = parse_store_url(address)
    assert parsed.hosts == (
        ("redis-node-0.redis-headless.redis", 26379),
        ("redis-node-1.redis-headless.redis", 26379),
    )
    assert (parsed.service, parsed.options["db"]) == ("mymaster", 0)
    assert (parsed.options["password"], parsed.sentinel_options["password"]) == ("secret", "secret")
    assert "ssl" not in parsed.options


def test_a_cluster_is_reached_by_tls_with_the_authority_that_the_values_name() -> None:
    release = value_set("managed-redis")
    (address,) = _addresses(release)
    parsed = parse_store_url(address)
    assert (parsed.hosts, parsed.service) == ((("redis.example.com", 6379),), "")
    assert (parsed.options["username"], parsed.options["password"]) == ("paceline", "secret")
    assert parsed.options["ssl"] is True
    file = parsed.options["ssl_ca_certs"]
    for _, each in release.services():
        mounts = {mount["mountPath"]: mount["name"] for mount in container(each)["volumeMounts"]}
        volume = mounts[file.rpartition("/")[0]]
        (secret,) = [
            found["secret"]["secretName"]
            for found in each["spec"]["template"]["spec"]["volumes"]
            if found["name"] == volume
        ]
        assert secret == "platform-redis-ca"


def test_one_server_has_a_database_and_no_more_than_it_is_given() -> None:
    assert _addresses(render(_external(hosts=["redis.example.com"], database=3))) == {
        "redis://redis.example.com/3"
    }
    # The system's authorities are trusted where none is named.
    managed = _external(hosts=["a:6380"], tls={"enabled": True}, password={"existingSecret": "platform-r"})
    assert _addresses(render(managed)) == {"rediss://:secret@a:6380/0"}


def test_no_password_is_in_a_manifest() -> None:
    for name in ("sentinel", "managed-redis"):
        for _, each in value_set(name).services():
            for variable in container(each)["env"]:
                if variable["name"].startswith("REDIS_"):
                    assert variable["valueFrom"]["secretKeyRef"]["name"] == "platform-redis"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hosts": ["a", "b"]}, "one host, unless kind"),
        ({"hosts": ["a"], "kind": "sentinel"}, "primaryName is needed"),
        ({"hosts": ["a"], "kind": "cluster", "database": 1}, "a cluster has database 0 only"),
    ],
)
def test_hosts_that_make_no_address_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        render(_external(**values))


def test_without_any_address_nothing_is_rendered() -> None:
    with pytest.raises(helm.HelmError, match=r"/redis/external|redis\.external\.hosts"):
        render(ELSEWHERE)


def test_the_exporter_asks_the_server_beside_it_and_prometheus_scrapes_it_as_the_rest() -> None:
    release = value_set("front-door")
    redis = release.named("StatefulSet", "-redis")
    server, exporter = redis["spec"]["template"]["spec"]["containers"]
    told = environment(exporter)
    assert told["REDIS_ADDR"] == "rediss://localhost:6379"
    assert told["REDIS_PASSWORD"] == environment(server)["REDIS_PASSWORD"]
    folders = {mount["mountPath"] for mount in exporter["volumeMounts"]}
    files = [value for name, value in told.items() if name.endswith("_FILE")]
    # Its own certificate, as client and as server, and the authority of those who scrape it.
    assert len(files) == 5
    assert {file.rpartition("/")[0] for file in files} == folders
    (endpoint,) = release.named("PodMonitor", "-redis")["spec"]["podMetricsEndpoints"]
    (port,) = exporter["ports"]
    assert (endpoint["port"], endpoint["scheme"]) == (port["name"], "https")
    assert "authorization" not in endpoint
    (policy,) = [
        each for each in release.all("NetworkPolicy") if each["metadata"]["name"] == "paceline-redis"
    ]
    assert [{"protocol": "TCP", "port": port["containerPort"]}] in [
        rule["ports"] for rule in policy["spec"]["ingress"]
    ]


def test_without_tls_the_exporter_speaks_none_and_by_default_there_is_none() -> None:
    values = {"tls": {"mode": "none"}, "redis": {"embedded": {"exporter": {"enabled": True}}}}
    exporter = render(values).named("StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"][1]
    assert environment(exporter).keys() == {"REDIS_ADDR", "REDIS_PASSWORD"}
    release = render({"monitoring": {"podMonitors": {"enabled": True}}})
    assert "paceline-redis" not in release.names("PodMonitor")
    assert len(release.named("StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"]) == 1
