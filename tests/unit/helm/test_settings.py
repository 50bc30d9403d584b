"""Settings in the manifests are valid for the services: their own configuration classes read them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from services.platform.config import (
    ConfigError,
    ServiceConfig,
    listening_problems,
    parse_store_url,
    read_config,
)
from services.platform.observability.http_ports import ANSWER_SECONDS
from services.platform.security.guard import find_grant, grant_files, read_grants
from tests.unit.helm.release import (
    ELSEWHERE,
    VALUE_SETS,
    Release,
    container,
    environment,
    render,
    secret_text,
    value_set,
)

CLASSES = {
    "gateway": "GatewayConfig",
    "generation": "GenerationConfig",
    "reallocator": "ReallocatorConfig",
    "bubbles": "BubblesConfig",
    "drafts": "DraftsConfig",
    "drafter": "DrafterConfig",
    "policy": "PolicyConfig",
    "facade": "FacadeConfig",
}


@pytest.fixture(params=VALUE_SETS, scope="module")
def release(request: pytest.FixtureRequest) -> Release:
    return value_set(request.param)


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    """Create the files of a pod's secrets."""
    for folder, names in {
        "tls": ("tls.crt", "tls.key", "ca.crt"),
        "token": ("token", "services"),
        "grants": ("tokens.yaml",),
    }.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text("x")
    return tmp_path


def configured(
    component: str, workload: Mapping[str, Any], mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> ServiceConfig:
    """Return the configuration that the service reads from its pod's flags and variables, or raise ConfigError."""
    holder = container(workload)
    module, *flags = holder["args"]
    assert module == f"services.{component}"
    assert find_spec(f"{module}.__main__") is not None
    variables = environment(holder, f"{workload['metadata']['name']}-0")
    for name, value in variables.items():
        variables[name] = value.replace("/etc/paceline", str(mounts))
    for name in [name for name in os.environ if name.startswith("PACELINE_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cls = getattr(importlib.import_module(f"{module}.config"), CLASSES[component])
    return read_config(cls, flags, variables)


def test_every_service_takes_what_it_is_told(
    release: Release, mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    components = set()
    for component, workload in release.services():
        with monkeypatch.context() as patch:
            config = configured(component, workload, mounts, patch)
        assert not listening_problems(config)
        assert config.host == "0.0.0.0"
        assert config.token is not None
        ports = {each["name"]: each["containerPort"] for each in container(workload)["ports"]}
        served = {"http" if component == "facade" else "grpc": config.port, "metrics": config.metrics_port}
        served["probes"] = config.probe_port
        if component == "generation":
            served["kv"] = config.model_dump()["migration_port"]
        assert ports == served
        assert len(set(ports.values())) == len(ports)
        components.add(component)
    deployed = release.names("Deployment")
    optional = {each for each in ("drafter", "facade") if f"paceline-{each}" not in deployed}
    assert components == set(CLASSES) - optional


def test_weights_come_from_their_volume_only_unless_a_setting_says_otherwise() -> None:
    def roots(**values: Any) -> set[str | None]:
        services = dict(render(values).services())
        both = (services["gateway"], services["generation"])
        return {environment(container(each), "pod-0").get("PACELINE_WEIGHTS_ROOT") for each in both}

    own = {"config": {"weights_root": "/"}}
    assert roots(weights={"mountPath": "/volume"}) == {"/volume"}
    assert roots(weights={"mountPath": "/volume"}, gateway=own, generation={"defaults": own}) == {"/"}
    assert roots(weights={"enabled": False}) == {None}


@pytest.mark.parametrize(
    ("values", "alone"),
    [
        ({}, True),
        ({"replicas": 2}, False),
        ({"replicas": 2, "config": {"alone": True}}, True),
        ({"config": {"alone": False}}, False),
    ],
)
def test_a_facade_with_replicas_knows_that_it_is_not_alone(
    values: dict[str, Any], alone: bool, mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = render({"facade": {"enabled": True, **values}}).named("Deployment", "-facade")
    assert configured("facade", workload, mounts, monkeypatch).model_dump()["alone"] is alone


def test_a_setting_that_a_service_does_not_have_would_be_noticed(
    mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"gateway": {"extraEnv": [{"name": "PACELINE_MAX_QUEUE", "value": "1"}]}}
    workload = render(extra).named("Deployment", "-gateway")
    with pytest.raises(ConfigError, match="PACELINE_MAX_QUEUE"):
        configured("gateway", workload, mounts, monkeypatch)


def test_settings_of_every_type_arrive_as_they_were_given(
    mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "pregenerate": False,
        "drafters": ["suffix"],
        "kv_cache_memory_bytes": 137438953472,
        "draft_margin": 0.05,
        "speculation": "fixed",
    }
    values = {"generation": {"defaults": {"config": config}, "pools": [{"name": "one"}]}}
    workload = render(values).named("StatefulSet", "-generation-one")
    found = configured("generation", workload, mounts, monkeypatch).model_dump()
    assert {name: found[name] for name in config} == {**config, "drafters": ("suffix",)}


def test_a_pool_has_the_settings_of_all_and_its_own_above_them(
    mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for pool in ("h200", "l40s"):
        with monkeypatch.context() as patch:
            workload = value_set("gpu").named("StatefulSet", f"-generation-{pool}")
            found[pool] = configured("generation", workload, mounts, patch).model_dump()
    assert (found["h200"]["max_num_seqs"], found["l40s"]["max_num_seqs"]) == (256, 64)
    assert found["h200"]["gpu_memory_utilization"] == found["l40s"]["gpu_memory_utilization"] == 0.92
    assert (found["h200"]["tensor_parallel_size"], found["l40s"]["tensor_parallel_size"]) == (1, 2)
    assert found["l40s"]["instance_id"] == "paceline-generation-l40s-0"


def test_the_policy_controller_only_recommends_unless_scaling_is_enabled(
    mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        workload = value_set("defaults").named("Deployment", "-policy")
        off = configured("policy", workload, mounts, patch).model_dump()["scaling"]
    assert not off["apply"]
    assert [each["name"] for each in off["pools"]] == ["paceline-generation-default"]
    workload = value_set("autoscale").named("Deployment", "-policy")
    on = configured("policy", workload, mounts, monkeypatch).model_dump()["scaling"]
    assert on["apply"]
    # The other pool always stands.
    assert on["pools"] == [{"name": "paceline-generation-burst", "minimum": 0, "maximum": 16}]
    assert (on["queue_seconds"], on["down_seconds"]) == (60, 600)
    assert on["gateway"] == "paceline-gateway.ml.svc.cluster.local:7400"
    assert {each["name"] for each in on["pools"]} <= value_set("autoscale").names("StatefulSet")


def test_without_tls_the_services_are_told_that_this_is_meant(
    mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = value_set("cpu").named("Deployment", "-gateway")
    plain = configured("gateway", workload, mounts, monkeypatch)
    assert plain.insecure
    assert plain.tls is None
    for name in set(VALUE_SETS) - {"cpu"}:
        told = environment(container(value_set(name).named("Deployment", "-gateway")))
        assert "PACELINE_INSECURE" not in told
        assert told["PACELINE_TLS__CLIENT_AUTH"] == "true"


def test_kubelet_asks_every_service_at_its_port_of_probes(release: Release) -> None:
    for component, workload in release.services():
        holder = container(workload)
        asked = {name: probe["httpGet"] for name, probe in holder.items() if name.endswith("Probe")}
        assert asked == {
            "startupProbe": {"port": "probes", "path": "/livez"},
            "livenessProbe": {"port": "probes", "path": "/livez"},
            "readinessProbe": {"port": "probes", "path": "/readyz"},
        }, component


def test_no_probe_starts_a_process_and_no_busy_node_ends_one(release: Release) -> None:
    for name, pod in release.pods():
        for holder in pod["containers"]:
            probes = [probe for kind, probe in holder.items() if kind.endswith("Probe")]
            assert all({"httpGet", "tcpSocket"} & probe.keys() for probe in probes), name
            assert not [probe for probe in probes if "exec" in probe], name
            if "livenessProbe" in holder:
                live = holder["livenessProbe"]
                assert live["periodSeconds"] * live["failureThreshold"] >= 120, name
                # The process says by itself that its event loop hangs, before kubelet stops waiting.
                assert live["timeoutSeconds"] > ANSWER_SECONDS, name


def test_only_a_node_reaches_the_ports_of_probes_of_its_pods(release: Release) -> None:
    port = 7481
    for each in release.all("Service"):
        assert port not in [each["targetPort"] for each in each["spec"]["ports"]]
        assert "probes" not in [each["targetPort"] for each in each["spec"]["ports"]]
    for policy in release.all("NetworkPolicy"):
        for rule in policy["spec"].get("ingress", ()):
            opened = [range(each["port"], each.get("endPort", each["port"]) + 1) for each in rule["ports"]]
            assert not any(port in each for each in opened), policy


def test_a_facade_knows_the_names_that_lead_to_it(mounts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names(**facade: Any) -> set[str]:
        workload = render({"facade": {"enabled": True, **facade}}).named("Deployment", "-facade")
        with monkeypatch.context() as patch:
            return set(configured("facade", workload, mounts, patch).model_dump()["allowed_hosts"])

    service = {"paceline-facade", "paceline-facade.ml", "paceline-facade.ml.svc"}
    service.add("paceline-facade.ml.svc.cluster.local")
    assert names() == service
    assert names(ingress={"enabled": True, "hosts": ["a.example"]}) == {*service, "a.example"}
    route = {"enabled": True, "hostnames": ["b.example"], "parentRefs": [{"name": "front"}]}
    assert names(route=route) == {*service, "b.example"}
    assert names(config={"allowed_hosts": ["c.example"]}) == {"c.example"}


def test_certificates_have_the_names_that_are_dialled() -> None:
    release = value_set("defaults")
    names = {
        each["spec"]["secretName"]: each["spec"]["dnsNames"]
        for each in release.all("Certificate")
        if "dnsNames" in each["spec"]
    }
    for component, workload in release.services():
        holder = container(workload)
        (secret,) = [
            each["secret"]["secretName"]
            for each in workload["spec"]["template"]["spec"]["volumes"]
            if each["name"] == "tls"
        ]
        host = environment(holder)["PACELINE_ADVERTISE_HOST"]
        assert any(_covers(name, host) for name in names[secret]), component
    redis = environment(container(release.named("Deployment", "-gateway")))["PACELINE_REDIS_URL"]
    host = redis.partition("@")[2].partition(":")[0]
    assert any(_covers(name, host) for name in names["paceline-redis-tls"])


def test_the_store_is_where_the_services_look_for_it(release: Release) -> None:
    told = {name: environment(container(each)) for name, each in release.services()}
    assert "PACELINE_REDIS_URL" not in told.pop("facade", {})
    addresses = {name: each["PACELINE_REDIS_URL"] for name, each in told.items()}
    if not release.names("StatefulSet") & {"paceline-redis"}:
        # What hosts and secrets make is looked at in test_redis.
        (address,) = set(addresses.values())
        assert address == ELSEWHERE or parse_store_url(address).hosts
        return
    (port,) = release.named("Service", "-redis")["spec"]["ports"]
    for name, address in addresses.items():
        settings = Redis.from_url(address).connection_pool.connection_kwargs
        assert settings["host"] == "paceline-redis.ml.svc.cluster.local"
        assert (settings["username"], settings["password"]) == (name, "secret")
        assert settings["port"] == port["port"]


def test_the_store_is_reached_by_tls_wherever_there_is_any() -> None:
    def settings(name: str) -> dict[str, Any]:
        told = environment(container(value_set(name).named("Deployment", "-gateway")))
        return dict(Redis.from_url(told["PACELINE_REDIS_URL"]).connection_pool.connection_kwargs)

    assert "ssl_ca_certs" not in settings("cpu")
    assert settings("defaults")["ssl_ca_certs"] == "/etc/paceline/tls/ca.crt"
    assert settings("defaults")["ssl_certfile"] == "/etc/paceline/tls/tls.crt"
    assert settings("defaults").get("ssl_check_hostname", True)
    # Given certificates have one name for all, which the Redis client cannot be told.
    assert settings("mtls")["ssl_check_hostname"] is False


def test_releases_that_share_a_redis_have_keys_of_their_own() -> None:
    def prefix(name: str) -> str:
        workload = render(VALUE_SETS["external-redis"], name).all("Deployment")[0]
        return environment(container(workload))["PACELINE_NAMESPACE"]

    assert prefix("paceline") != prefix("paceline-two")


def test_no_token_is_in_plain_text_where_services_look_for_those_of_callers(tmp_path: Path) -> None:
    release = value_set("gpu")
    gateway = release.named("Deployment", "-gateway")
    volumes = {each["name"]: each for each in gateway["spec"]["template"]["spec"]["volumes"]}
    folder = environment(container(gateway))["PACELINE_TOKENS_FILE"]
    for mount in container(gateway)["volumeMounts"]:
        if mount["mountPath"].startswith(f"{folder}/"):
            source = volumes[mount["name"]]["secret"]
            (secret,) = [
                each for each in release.all("Secret") if each["metadata"]["name"] == source["secretName"]
            ]
            place = tmp_path / mount["mountPath"].removeprefix(f"{folder}/")
            place.mkdir()
            for key in [each["key"] for each in source.get("items", [])] or secret["data"]:
                (place / key).write_text(secret_text(secret, key))
    files = grant_files(tmp_path)
    grants = read_grants(*files)
    assert {each.name: set(each.scopes) for each in grants} == {
        "trainer": {"rollouts", "weights"},
        "prometheus": {"metrics"},
    }
    shown = secret_text(release.named("Secret", "-metrics-token"), "token")
    grant = find_grant(shown, grants)
    assert grant is not None
    assert grant.name == "prometheus"
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and shown in file.read_text()]


def test_services_have_a_token_of_their_own_that_is_long_enough() -> None:
    tokens = [secret_text(render().named("Secret", "-token"), "token") for _ in range(2)]
    assert all(token.startswith("pl_") and len(token) > 40 for token in tokens)
    assert tokens[0] != tokens[1]


def _covers(name: str, host: str) -> bool:
    # A wildcard stands for one label.
    return name.count(".") == host.count(".") and fnmatchcase(host, name)
