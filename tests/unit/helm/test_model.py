"""Delivery of the model: by a Job, by each instance, by an image; pods wait until it is there."""

from __future__ import annotations

from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest

from services.models.__main__ import app
from tests.unit.helm.release import COMPONENT, Release, container, environment, render, value_set

HUB = "hf://Qwen/Qwen3-8B@main"


def _options(holder: dict[str, Any]) -> dict[str, str]:
    module, *options = holder["args"]
    assert module == "services.models"
    return {name: value for name, _, value in (each.partition("=") for each in options)}


def _first(release: Release, name: str, kind: str = "Deployment") -> dict[str, Any] | None:
    pod = release.named(kind, name)["spec"]["template"]["spec"]
    return next(iter(pod.get("initContainers", [])), None)


def test_a_job_downloads_to_the_volume_and_all_that_read_it_wait_for_that() -> None:
    release = value_set("front-door")
    (job,) = release.all("Job")
    holder = container(job)
    assert _options(holder) == {"--source": HUB, "--folder": "/weights/qwen3-8b"}
    token = next(each for each in holder["env"] if each["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "platform-hub-token", "key": "token"}
    assert {"name": "weights", "mountPath": "/weights"} in holder["volumeMounts"]
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "OnFailure"
    assert pod["nodeSelector"] == {"pool": "downloads"}
    (claim,) = [each["persistentVolumeClaim"] for each in pod["volumes"] if each["name"] == "weights"]
    assert claim == {"claimName": "paceline-weights"}
    waiting = {name for name, pod in release.pods() if _waits(pod)}
    assert waiting == {
        *("paceline-generation-reserved", "paceline-generation-spot", "paceline-reallocator"),
        *("paceline-policy", "paceline-facade"),
    }
    waiter = _first(release, "-policy")
    assert waiter is not None
    assert _options(waiter) == {"--source": HUB, "--folder": "/weights/qwen3-8b", "--wait": ""}
    assert {"name": "weights", "mountPath": "/weights", "readOnly": True} in waiter["volumeMounts"]
    assert "env" not in waiter


def test_the_learner_waits_too_and_may_still_write_its_drafters() -> None:
    values = {
        "drafter": {"enabled": True, "checkpoint": "/weights/first/drafter-000001"},
        "model": {"path": "/weights/m", "download": {"source": HUB}},
    }
    release = render(values)
    assert _waits(release.named("Deployment", "-drafter")["spec"]["template"]["spec"])


def test_without_a_shared_volume_each_instance_downloads_its_own() -> None:
    release = value_set("sentinel")
    assert not release.all("Job")
    pool = release.named("StatefulSet", "-generation-default")
    first = _first(release, "-generation-default", "StatefulSet")
    assert first is not None
    assert _options(first) == {
        "--source": "s3://models/qwen3-8b",
        "--folder": "/model",
        "--checksums": "https://example.com/qwen3-8b/SHA256SUMS",
    }
    assert environment(first) == {"AWS_REGION": "eu-central-1"}
    assert {"name": "model", "mountPath": "/model"} in first["volumeMounts"]
    assert {"name": "model", "mountPath": "/model", "readOnly": True} in container(pool)["volumeMounts"]
    assert {"name": "model", "emptyDir": {"sizeLimit": "40Gi"}} in pool["spec"]["template"]["spec"]["volumes"]
    assert not [name for name, pod in release.pods() if "-policy" in name and pod.get("initContainers")]


@pytest.mark.parametrize("shared", [True, False])
def test_volumes_of_the_download_are_there_once_where_it_downloads_and_nowhere_else(shared: bool) -> None:
    volume, mount = {"name": "source", "emptyDir": {}}, {"name": "source", "mountPath": "/source"}
    extra = {"extraVolumes": [volume], "extraVolumeMounts": [mount]}
    download = {"source": "file:///source/m", **extra}
    for values in ({}, {"pods": extra}):
        release = render(
            {"weights": {"enabled": shared}, "model": {"path": "/weights/m", "download": download}, **values}
        )
        for name, pod in release.pods():
            names = [each["name"] for each in pod.get("volumes", [])]
            assert len(set(names)) == len(names), name
            for each in (*pod["containers"], *pod.get("initContainers", [])):
                assert {found["name"] for found in each["volumeMounts"]} <= {*names, "data", "snapshots"}, (
                    name
                )
                if "--source=file:///source/m" in each.get("args", []) and "--wait" not in each["args"]:
                    assert mount in each["volumeMounts"]


def test_an_image_is_mounted_as_the_model() -> None:
    image = {"reference": "registry.example.com/models/qwen3-8b:1"}
    release = render({"model": {"path": "/model", "image": image}})
    pool = release.named("StatefulSet", "-generation-default")
    kubernetes_validate.validate(pool, "1.36", strict=True)
    volume = {"name": "model", "image": {**image, "pullPolicy": "IfNotPresent"}}
    for each in (pool, release.named("Deployment", "-policy")):
        assert volume in each["spec"]["template"]["spec"]["volumes"]
        assert {"name": "model", "mountPath": "/model", "readOnly": True} in container(each)["volumeMounts"]
        assert "initContainers" not in each["spec"]["template"]["spec"]


def test_another_download_is_another_job_since_one_cannot_be_changed() -> None:
    def name(**download: Any) -> str:
        (job,) = render({"model": {"download": {"source": HUB, **download}}}).all("Job")
        assert job["metadata"]["labels"][COMPONENT] == "model"
        return str(job["metadata"]["name"])

    assert name() == name()
    assert len({name(), name(source="hf://Qwen/Qwen3-8B@v2"), name(nodeSelector={"a": "b"})}) == 3


def test_a_pool_with_a_model_of_its_own_does_not_wait_for_the_other() -> None:
    pools = [{"name": "own", "config": {"model": "/weights/other"}}, {"name": "usual"}]
    release = render({"model": {"download": {"source": HUB}}, "generation": {"pools": pools}})
    assert _first(release, "-generation-own", "StatefulSet") is None
    assert _first(release, "-generation-usual", "StatefulSet") is not None


def test_options_of_the_containers_are_options_of_the_program() -> None:
    known = {option for each in _parameters() for option in each.opts}
    for name in ("front-door", "sentinel"):
        for _, pod in value_set(name).pods():
            for each in (*pod["containers"], *pod.get("initContainers", [])):
                if each.get("args", [""])[0] == "services.models":
                    assert _options(each).keys() <= known


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"path": "/model", "download": {"source": HUB}}, r"model\.path: must be below weights\.mountPath"),
        ({"image": {"reference": "a:1"}}, "must not be on the volume of weights"),
        ({"image": {"reference": "a:1"}, "download": {"source": HUB}}, "exclude each other"),
    ],
)
def test_a_model_that_cannot_come_there_is_refused(model: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        render({"model": model})


def _waits(pod: dict[str, Any]) -> bool:
    return any("--wait" in each.get("args", []) for each in pod.get("initContainers", []))


def _parameters() -> list[Any]:
    from typer.main import get_command

    return list(get_command(app).params)
