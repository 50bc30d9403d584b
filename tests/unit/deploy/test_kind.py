"""The installation on kind, as far as it can be looked at without one: what it names is there and valid."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from typing import Any

import yaml

from tests.unit.deploy.containerfile import FOLDER, ROOT, read_stages
from tests.unit.helm.release import chart, container, render

SCRIPT = (ROOT / "scripts/kind").read_text()
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "deploy/kind/values.yaml").read_text())
WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/images.yml").read_text())


def test_the_values_are_taken_and_their_names_are_those_of_the_script() -> None:
    chart().validate_schema(VALUES)
    release = render(VALUES)
    for kind, name in re.findall(r"(statefulset|pod)[ /](?:--namespace \S+ )?(paceline-[\w-]+)", SCRIPT):
        made = release.names("StatefulSet")
        assert (name if kind == "statefulset" else name.rpartition("-")[0]) in made
    assert release.named("StatefulSet", "-generation-cpu")["spec"]["replicas"] == 2
    service = release.named("Service", "-gateway")
    assert f"paceline-gateway:{service['spec']['ports'][0]['port']}" in SCRIPT
    # The images are those that are loaded into the cluster, which pulls none.
    (loaded,) = re.findall(r"for image in (.*); do", SCRIPT)
    ours = [container(each) for each in (*release.workloads(), *release.all("Job"))]
    used = {each["image"].rpartition(":")[0] for each in ours if "valkey" not in each["image"]}
    assert used == set(loaded.split())


def test_the_server_of_redis_is_pulled_though_ours_are_not() -> None:
    redis = container(render(VALUES).named("StatefulSet", "-redis"))
    assert redis["imagePullPolicy"] != "Never"


def test_the_model_is_mounted_into_the_node_from_where_the_job_reads_it() -> None:
    (node,) = yaml.safe_load((ROOT / "deploy/kind/cluster.yaml").read_text())["nodes"]
    (mount,) = node["extraMounts"]
    assert (ROOT / mount["hostPath"] / "config.json").is_file()
    volume, claim = yaml.safe_load_all((ROOT / "deploy/kind/models.yaml").read_text())
    name = claim["metadata"]["name"]
    assert volume["spec"]["claimRef"] == {"name": name, "namespace": claim["metadata"]["namespace"]}
    assert volume["metadata"]["name"] == claim["spec"]["volumeName"]
    (job,) = render(VALUES).all("Job")
    volumes = {each["name"]: each for each in job["spec"]["template"]["spec"]["volumes"]}
    assert volumes["source"]["persistentVolumeClaim"]["claimName"] == name
    mounts = {each["name"]: each["mountPath"] for each in container(job)["volumeMounts"]}
    source = mount["containerPath"].replace(volume["spec"]["hostPath"]["path"], mounts["source"])
    assert f"--source=file://{source}" in container(job)["args"]


def test_every_pod_is_admitted_to_a_restricted_namespace() -> None:
    assert "pod-security.kubernetes.io/enforce=restricted" in SCRIPT
    pods = dict(render(VALUES).pods())
    (overrides,) = re.findall(r"--overrides '(\{.*?^\})'", SCRIPT, re.DOTALL | re.MULTILINE)
    pods["step"] = json.loads(overrides.replace("'\"$tag\"'", "tag"))["spec"]
    for name, pod in pods.items():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not [each for each in pod.get("volumes", []) if "hostPath" in each], name
        for each in (*pod["containers"], *pod.get("initContainers", [])):
            assert each["securityContext"]["allowPrivilegeEscalation"] is False, name
            assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name


def test_the_token_of_the_step_is_one_that_is_granted() -> None:
    (token,) = re.findall(r'"PACELINE_TOKEN", "value": "(\w+)"', SCRIPT)
    (grant,) = VALUES["tokens"]["grants"]
    assert grant["sha256"] == hashlib.sha256(token.encode()).hexdigest()


def test_the_script_is_valid_and_what_the_workflow_runs() -> None:
    subprocess.run(["bash", "-n", ROOT / "scripts/kind"], check=True)
    steps = WORKFLOW["jobs"]["kind"]["steps"]
    program = steps[-1]["run"].split()[0]
    assert os.access(ROOT / program, os.X_OK)


def test_the_workflow_builds_targets_of_the_container_file() -> None:
    _, stages = read_stages((FOLDER / "Dockerfile").read_text())
    jobs = WORKFLOW["jobs"]
    built = {*jobs["gpu"]["strategy"]["matrix"]["target"]}
    built |= {step["with"]["target"] for step in jobs["kind"]["steps"] if "target" in step.get("with", {})}
    assert built == {"control", "generation-cpu", "generation-cuda", "generation-cuda-ray"}
    assert built <= stages.keys()
    assert {*jobs["publish"]["strategy"]["matrix"]["target"]} == built
    # `on` is a truth value in YAML 1.1.
    for event in ("push", "pull_request"):
        for path in WORKFLOW[True][event]["paths"]:
            assert (ROOT / path.removesuffix("/**")).exists(), path
