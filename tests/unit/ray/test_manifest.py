"""The manifest for KubeRay fits the launcher and Kubernetes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.ray.config import RayConfig, actors

FILE = Path(__file__).parents[3] / "deploy" / "ray" / "raycluster.yaml"


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(FILE.read_text())}


@pytest.fixture
def settings(manifests: dict[str, Any]) -> dict[str, Any]:
    return yaml.safe_load(manifests["ConfigMap"]["data"]["platform.yaml"])


def pods(manifests: dict[str, Any]) -> dict[str, Any]:
    spec = manifests["RayCluster"]["spec"]
    workers = {each["groupName"]: each["template"]["spec"] for each in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"]["spec"], **workers}


def test_what_kubernetes_knows_is_valid(manifests: dict[str, Any]) -> None:
    for kind in ("ConfigMap", "Service", "NetworkPolicy"):
        kubernetes_validate.validate(manifests[kind], "1.32", strict=True)
    for name, spec in pods(manifests).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        kubernetes_validate.validate(pod, "1.32", strict=True)


def test_the_launcher_understands_the_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    given = copy.deepcopy(settings)
    for place, name in (
        (given, "token_file"),
        (given, "tokens_file"),
        *((given["tls"], name) for name in ("cert_file", "key_file", "ca_file")),
    ):
        file = tmp_path / name
        file.write_text("x")
        place[name] = file
    config = RayConfig(**given)
    assert config.tls is not None
    assert config.tls.client_auth
    assert len(actors(config)) == 7


def test_every_file_that_is_named_is_mounted(manifests: dict[str, Any], settings: dict[str, Any]) -> None:
    paths = [settings["token_file"], settings["tokens_file"], settings["model"]]
    paths += [path for name, path in settings["tls"].items() if name.endswith("_file")]
    for spec in pods(manifests).values():
        (container,) = spec["containers"]
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert set(mounts.values()) == {each["name"] for each in spec["volumes"]}
        assert all(any(path.startswith(f"{mount}/") for mount in mounts) for path in paths)


def test_the_gateway_is_where_its_service_looks(manifests: dict[str, Any], settings: dict[str, Any]) -> None:
    cluster, service = manifests["RayCluster"], manifests["Service"]
    name = cluster["metadata"]["name"]
    assert service["spec"]["selector"] == {"ray.io/cluster": name, "ray.io/node-type": "head"}
    assert [port["targetPort"] for port in service["spec"]["ports"]] == [settings["port"]]
    start = cluster["spec"]["headGroupSpec"]["rayStartParams"]
    assert settings["gateway_resource"] in json.loads(start["resources"].strip('"').replace('\\"', '"'))
    policy = manifests["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == {"ray.io/cluster": name}
    assert [port["port"] for rule in policy["ingress"] for port in rule.get("ports", [])] == [
        settings["port"]
    ]


def test_there_is_a_gpu_for_each_instance(manifests: dict[str, Any], settings: dict[str, Any]) -> None:
    (group,) = manifests["RayCluster"]["spec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert group["replicas"] * int(limits["nvidia.com/gpu"]) >= settings["instances"] * settings["gpus"]
