"""Redis of one's own, by hosts and secrets, and the exporter beside the embedded one."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from services.platform.config import parse_store_url
from tests.support.cluster.charts import rendered
from tests.unit.helm.release import (
    CHART,
    ROOT,
    Release,
    container,
    environment,
    render,
    secret_text,
    value_set,
    write_users,
)

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
    reference = {each["name"]: each.get("valueFrom", {}).get("secretKeyRef") for each in exporter["env"]}
    assert (told["REDIS_USER"], reference["REDIS_PASSWORD"]["key"]) == ("exporter", "exporter")
    assert "env" not in server
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
    assert environment(exporter).keys() == {"REDIS_ADDR", "REDIS_USER", "REDIS_PASSWORD"}
    release = render({"monitoring": {"podMonitors": {"enabled": True}}})
    assert "paceline-redis" not in release.names("PodMonitor")
    assert len(release.named("StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"]) == 1


def test_passwords_are_in_no_argument_and_each_service_has_its_own() -> None:
    release = value_set("front-door")
    server = container(release.named("StatefulSet", "-redis"))
    assert not [each for each in server["args"] if "pass" in each or "$(" in each]
    (file,) = [server["args"][at + 1] for at, each in enumerate(server["args"]) if each == "--aclfile"]
    pod = release.named("StatefulSet", "-redis")["spec"]["template"]["spec"]
    (folder,) = [each["name"] for each in server["volumeMounts"] if file.startswith(each["mountPath"] + "/")]
    # Its file has hashes. The passwords themselves are not in its container.
    assert "env" not in server
    (written,) = [each for each in pod["volumes"] if each["name"] == folder]
    assert "emptyDir" in written
    (secret,) = [
        each["name"]
        for each in pod["volumes"]
        if each.get("secret", {}).get("secretName") == "paceline-redis"
    ]
    assert secret not in {each["name"] for each in server["volumeMounts"]}
    used = {}
    for component, each in release.services():
        keys = [
            v["valueFrom"]["secretKeyRef"] for v in container(each)["env"] if v["name"] == "REDIS_PASSWORD"
        ]
        used[component] = [each["key"] for each in keys]
    assert used.pop("facade") == []
    assert used == {component: [component] for component in used}


def test_the_users_have_the_rules_of_this_version_and_the_hashes_of_their_passwords(tmp_path: Path) -> None:
    release = value_set("defaults")
    secret = release.named("Secret", "-redis")
    rules = (CHART / "files/redis-users.acl").read_text().replace("NAMESPACE", "ml.paceline").splitlines()
    written = write_users(release, tmp_path).splitlines()
    assert len(written) == len(rules)
    for rule, line in zip(rules, written, strict=True):
        user = rule.split()[1]
        password = secret_text(secret, "password" if user == "default" else user)
        assert line == rule.replace("PASSWORD", f"#{hashlib.sha256(password.encode()).hexdigest()}")


def test_other_rules_restart_the_server() -> None:
    def template(release: Release) -> dict[str, Any]:
        found: dict[str, Any] = release.named("StatefulSet", "-redis")["spec"]["template"]
        return found

    assert template(value_set("defaults")) != template(render({"redis": {"keyPrefix": "other"}}))


def test_a_secret_of_ones_own_that_lacks_a_user_is_refused() -> None:
    def upgraded(data: dict[str, str]) -> None:
        there = {"kind": "Secret", "metadata": {"name": "own"}, "data": data}
        values = {"redis": {"embedded": {"existingSecret": "own"}}}
        rendered(CHART, values, name="paceline", namespace="ml", there=[there], upgrade=True)

    with pytest.raises(helm.HelmError, match=r"own has no key \w+"):
        upgraded({"password": "eA=="})
    made = subprocess.run([ROOT / "scripts/redis-users"], capture_output=True, text=True, check=True)
    given = yaml.safe_load(made.stdout)["stringData"]
    upgraded(given)
    assert given.keys() == value_set("defaults").named("Secret", "-redis")["data"].keys()
    assert len(set(given.values())) == len(given)


def test_a_pod_that_cannot_start_is_replaced_when_its_template_is_mended() -> None:
    for workload in value_set("front-door").all("StatefulSet"):
        # With OrderedReady its controller would wait for the broken pod.
        assert workload["spec"]["podManagementPolicy"] == "Parallel", workload["metadata"]["name"]


def test_an_upgrade_does_not_change_how_the_pods_of_an_older_chart_are_managed() -> None:
    spec = {"replicas": 1, "podManagementPolicy": "OrderedReady"}
    there = {"kind": "StatefulSet", "metadata": {"name": "paceline-redis"}, "spec": spec}
    found = rendered(CHART, {}, name="paceline", namespace="ml", there=[there], upgrade=True)
    (redis,) = [
        each
        for each in found
        if each["metadata"]["name"] == "paceline-redis" and each["kind"] == "StatefulSet"
    ]
    # Kubernetes refuses to change it.
    assert redis["spec"]["podManagementPolicy"] == "OrderedReady"
