"""docs/operations.md: its manifests, values, commands and code are of this chart and this program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from paceline.cli.app import app
from tests.support.documents import commands as commands_of
from tests.unit.helm.release import CHART, ROOT, Release, chart, container, environment, render

TEXT = (ROOT / "docs/operations.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", TEXT, re.DOTALL | re.MULTILINE)
    assert found
    return found


def commands() -> Iterator[list[str]]:
    """Return all simple commands, as words."""
    return (words for block in blocks("sh") for words in commands_of(block) if words)


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    (text,) = [block for block in blocks("yaml") if block.startswith("# values.yaml")]
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.fixture(scope="module")
def release(values: dict[str, Any]) -> Release:
    return render(values)


def test_the_values_of_the_first_installation_are_taken(values: dict[str, Any]) -> None:
    chart().validate_schema(values)


def test_the_trainers_pod_is_valid_restricted_and_has_the_certificate_of_the_release(
    release: Release,
) -> None:
    (text,) = [block for block in blocks("yaml") if not block.startswith("# ")]
    pod = yaml.safe_load(text)
    kubernetes_validate.validate(pod, "1.36", strict=True)
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    (volume,) = pod["spec"]["volumes"]
    certificates = {each["spec"]["secretName"] for each in release.all("Certificate")}
    assert volume["secret"]["secretName"] in certificates


def test_the_model_is_downloaded_to_where_instances_read_it(release: Release, values: dict[str, Any]) -> None:
    (job,) = release.all("Job")
    folder = f"--folder={values['model']['path']}"
    assert folder in container(job)["args"]
    told = environment(container(release.named("StatefulSet", "-generation-h100")))
    assert told["PACELINE_MODEL"] == values["model"]["path"]


def test_values_for_openshift_leave_users_to_the_cluster(values: dict[str, Any]) -> None:
    (text,) = [block for block in blocks("yaml") if block.startswith("# openshift.yaml")]
    for _, pod in render({**values, **yaml.safe_load(text)}).pods():
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & pod["securityContext"].keys()


def test_options_that_are_set_on_the_command_line_are_values_of_the_chart(values: dict[str, Any]) -> None:
    seen = 0
    for words in commands():
        if words[0] == "helm":
            for option, given in pairwise(words):
                if option == "--set":
                    path, _, text = given.partition("=")
                    nested: Any = yaml.safe_load(text) if path != "image.tag" else text
                    for name in reversed(path.split(".")):
                        nested = {name: nested}
                    chart().validate_schema({**values, **nested})
                    seen += 1
    assert seen >= 2


def test_commands_of_paceline_have_these_options() -> None:
    known = {name: command for name, command in get_command(app).commands.items()}  # type: ignore[attr-defined]
    seen = 0
    for words in commands():
        if words[0] == "paceline":
            options = {option for each in known[words[1]].params for option in each.opts}
            assert {word for word in words[2:] if word.startswith("--")} <= options, words
            seen += 1
    assert seen >= 3


def test_objects_that_are_named_are_made(release: Release) -> None:
    made = {each["kind"].lower(): release.names(each["kind"]) for each in release.manifests}
    made["secret"] |= {each["spec"]["secretName"] for each in release.all("Certificate")}
    seen = set()
    for kind, name in re.findall(r"\b(statefulset|service|secret|deployment)[/ ](paceline[\w-]*)", TEXT):
        assert name in made[kind], f"{kind} {name}"
        seen.add(kind)
    assert seen >= {"statefulset", "service", "secret"}
    for name in re.findall(r"secrets? `(paceline[\w-]*)`", TEXT):
        assert name in made["secret"], name


def test_a_secret_of_the_chart_is_changed_by_a_patch(release: Release) -> None:
    # `kubectl apply` warns of an object that it has not made, and `replace` takes the labels and annotations off.
    patched = set()
    for words in commands():
        if words[:3] == ["kubectl", "create", "secret"]:
            assert words[4] not in release.names("Secret"), words
        elif words[:3] == ["kubectl", "patch", "secret"]:
            patched.add(words[3])
    assert patched == {"paceline-token"}


def test_images_that_are_built_are_the_targets_of_the_container_file() -> None:
    published, tried = (loop.split() for loop in re.findall(r"for target in (.*); do", TEXT))
    targets = re.findall(
        r"^FROM base AS (\S+)", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE
    )
    assert published == ["control", "generation-cuda", "generation-cpu"]
    assert set(published) <= set(targets)
    loaded = re.findall(r"for image in (.*); do", (ROOT / "scripts/kind").read_text())[0].split()
    assert [f"paceline-{each}" for each in tried] == loaded
    images = yaml.safe_load((CHART / "values.yaml").read_text())["image"]
    inspected = re.findall(r"imagetools inspect (\S+)", TEXT)
    assert inspected == [
        f"{each['repository']}:{each['tag']}" for each in (images["redis"], images["redisExporter"])
    ]


def test_the_first_step_is_code_that_connects_to_this_gateway(release: Release) -> None:
    (code,) = blocks("python")
    compile(code, "first_step.py", "exec")
    (host, port), *_ = re.findall(r'address = "([\w.-]+):(\d+)"', code)
    service = release.named("Service", "-gateway")
    assert host == f"{service['metadata']['name']}.ml.svc.cluster.local"
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert host in release.named("Certificate", "-gateway")["spec"]["dnsNames"]
