"""Every example of values is installed, scaled by others, upgraded, and rolled back, with both Helms."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.integration.kubernetes.release import CHART, ROOT, Space

REGISTRY = {"registry": "registry.example.com/ml"}
OPERATIONS = (ROOT / "docs/operations.md").read_text()


def _of_operations() -> dict[str, Any]:
    (text,) = re.findall(r"```yaml\n(# values\.yaml\n.*?)```", OPERATIONS, re.DOTALL)
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def examples() -> dict[str, dict[str, Any]]:
    """Return the values of each example, with a registry where it names none and needs one."""
    files = sorted((CHART / "ci").glob("*-values.yaml"))
    found = {file.name.removesuffix("-values.yaml"): yaml.safe_load(file.read_text()) for file in files}
    found["kind"] = yaml.safe_load((ROOT / "deploy/kind/values.yaml").read_text())
    found["operations"] = _of_operations()
    return {name: {**each, "image": {**REGISTRY, **each.get("image", {})}} for name, each in found.items()}


EXAMPLES = examples()


def block(*marks: str) -> str:
    """Return the block of commands of docs/operations.md that has all of the marks."""
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", OPERATIONS, re.DOTALL | re.MULTILINE)
    (found,) = [text for text in blocks if all(mark in text for mark in marks)]
    return str(found)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_installed_scaled_upgraded_and_rolled_back(example: str, space: Space) -> None:
    space.install(EXAMPLES[example])
    refused = {name: said for name, each in space.templates() if (said := space.try_pod(each))}
    assert refused == {}

    first, *others = space.pools()
    space.kubectl("scale", "statefulset", first, "--replicas=3")
    for pool in others:
        space.scale(pool, 5)
    wanted = {first: 3, **dict.fromkeys(others, 5)}
    if "paceline-token" in space.secrets():
        # As docs/operations.md has it.
        space.script(block("patch secret paceline-token"), AFTER="pl_other")
        assert space.secrets()["paceline-token"] == {"token": "pl_other"}
    secrets = space.secrets()
    space.upgrade()
    assert (space.pools(), space.secrets()) == (wanted, secrets)
    space.scale(first, 4)
    # To the upgrade: that to the installation differs between the two Helms (test_scaling.py).
    space.rollback(2)
    assert space.secrets() == secrets
    # With Helm 3 the number is that of the revision, made before the last scaling, if its manifest had one.
    kept = space.helm_version == 4 or example == "autoscale"
    assert space.pools() == {**wanted, first: 4 if kept else 3}
