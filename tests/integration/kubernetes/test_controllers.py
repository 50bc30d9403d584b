"""What the controllers of Kubernetes make of a wrong image, a rollback, and the orphan step of the runbook.

No kubelet runs: pods are made and deleted, and the test says which are ready.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.integration.kubernetes.release import ROOT, Space
from tests.integration.kubernetes.test_examples import EXAMPLES
from tests.support.kubernetes_server import has_controllers
from tests.support.waiting import until

RUNBOOK = (ROOT / "docs/runbook.md").read_text()
REDIS = ("StatefulSet", "paceline-redis")
COMPONENT = "app.kubernetes.io/component"


@pytest.fixture(autouse=True)
def controllers() -> None:
    """Skip where there are none."""
    if not has_controllers():
        pytest.skip("no kube-controller-manager in KUBEBUILDER_ASSETS")


def _pods(space: Space, component: str) -> dict[str, dict[str, Any]]:
    """Return the pods of a component that are to stay, by name."""
    return {
        each["metadata"]["name"]: each
        for each in space.all("pods", "v1")
        if each["metadata"]["labels"].get(COMPONENT) == component
        and "deletionTimestamp" not in each["metadata"]
    }


def _images(space: Space, component: str) -> list[str]:
    found = _pods(space, component).values()
    return sorted(each["spec"]["containers"][0]["image"].rpartition(":")[2] for each in found)


async def _all_ready(space: Space, component: str, count: int) -> None:
    """Wait for the pods of a component, and say that they are ready, as a kubelet does."""
    await until(lambda: len(_pods(space, component)) == count, f"{component} has {count} pods")
    for name in _pods(space, component):
        status = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}
        space.kubectl(
            "patch", "pod", name, "--subresource=status", f"--patch={json.dumps({'status': status})}"
        )


def _command(section: str, mark: str) -> str:
    """Return a command of a section of the runbook."""
    text = RUNBOOK.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    (found,) = [line for line in text.splitlines() if line.startswith("kubectl ") and mark in line]
    return found


async def test_a_wrong_image_leaves_a_pod_at_work_and_a_rollback_repairs_the_rest(space: Space) -> None:
    space.install(EXAMPLES["cpu"])
    counts = {"gateway": 1, "policy": 1, "generation": 2}
    for component, count in counts.items():
        await _all_ready(space, component, count)
    before = _pods(space, "gateway").keys()
    space.upgrade(None, "--set", "image.tag=wrong")
    for component, count in counts.items():
        await until(lambda component=component: "wrong" in _images(space, component), "the image is tried")
        assert _images(space, component).count("wrong") == 1
        # Gateways work until the next one is ready; a pool and the policy service replace one pod.
        assert len(_pods(space, component)) == count + (component == "gateway")
    space.rollback()
    for component, count in counts.items():
        await until(
            lambda component=component, count=count: (
                "wrong" not in (found := _images(space, component)) and len(found) == count
            ),
            "the image is away",
        )
    assert _pods(space, "gateway").keys() == before


async def test_redis_recovers_by_a_rollback(space: Space) -> None:
    space.install(EXAMPLES["cpu"])
    await _all_ready(space, "redis", 1)
    right = _images(space, "redis")
    space.upgrade(None, "--set", "image.redis.tag=wrong")
    await until(lambda: _images(space, "redis") == ["wrong"], "the image is tried")
    space.rollback()
    await until(lambda: _images(space, "redis") == right, "the image is away")


async def test_a_larger_volume_takes_the_pod_of_redis_over(space: Space) -> None:
    space.install(EXAMPLES["cpu"])
    await _all_ready(space, "redis", 1)
    (before,) = _pods(space, "redis").values()
    larger = ("--set", "redis.embedded.size=40Gi")
    again = ("upgrade", "paceline", str(ROOT / "helm/paceline"), "--values", "values.yaml", *larger)
    assert "updates to statefulset spec" in space.helm(*again, fails=True)
    space.script(_command("A volume is full", "--cascade=orphan"))
    space.upgrade(None, *larger)

    def owner() -> str:
        (pod,) = _pods(space, "redis").values()
        return next((each["uid"] for each in pod["metadata"].get("ownerReferences", [])), "")

    now = space.one("statefulsets", "paceline-redis")["metadata"]["uid"]
    await until(lambda: owner() == now, "the pod belongs to the new StatefulSet")
    (after,) = _pods(space, "redis").values()
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    claims = space.one("statefulsets", "paceline-redis")["spec"]["volumeClaimTemplates"]
    assert claims[0]["spec"]["resources"]["requests"]["storage"] == "40Gi"


async def test_a_redis_of_an_older_chart_becomes_parallel_by_the_orphan_step(space: Space) -> None:
    space.install(EXAMPLES["cpu"])
    manifests = yaml.safe_load_all(space.helm("get", "manifest", "paceline"))
    (older,) = [each for each in manifests if (each["kind"], each["metadata"]["name"]) == REDIS]
    older["spec"]["podManagementPolicy"] = "OrderedReady"
    space.kubectl("delete", "statefulset", "paceline-redis")
    how = {3: ["create"], 4: ["apply", "--server-side"]}[space.helm_version]
    space.kubectl(*how, "--field-manager=helm", "--filename=-", given=json.dumps(older))
    space.upgrade()
    policy = _command("A wrong image", "podManagementPolicy")
    assert space.script(policy) == "OrderedReady"
    space.script(_command("A wrong image", "--cascade=orphan"))
    space.upgrade()
    assert space.script(policy) == "Parallel"
