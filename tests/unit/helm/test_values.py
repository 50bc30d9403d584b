"""Values that the chart accepts and refuses, and its notes about them."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from helm.generate import PODS, documented, generate
from tests.unit.helm.release import CHART, ROOT, VALUE_SETS, chart, render, value_set

HASH = "0" * 64


def test_the_defaults_and_every_set_of_values_are_taken() -> None:
    for values in VALUE_SETS.values():
        chart().validate_schema(values)


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"gatewayy": {}}, "gatewayy"),
        ({"gateway": {"replica": 2}}, "/gateway"),
        ({"gateway": {"replicas": "two"}}, "/gateway/replicas"),
        ({"gateway": {"config": {"max_queued_sampels": 1}}}, "/gateway/config"),
        ({"gateway": {"config": {"max_attempts": 0}}}, "/gateway/config/max_attempts"),
        ({"gateway": {"config": {"insecure": True}}}, "/gateway/config"),
        ({"gateway": {"service": {"type": "NodePort"}}}, "/gateway/service/type"),
        ({"bubbles": {"config": {"during_update": "rest"}}}, "/bubbles/config/during_update"),
        ({"generation": {"pools": []}}, "/generation/pools"),
        ({"generation": {"pools": [{"replicas": 2}]}}, "/generation/pools/0"),
        ({"generation": {"pools": [{"name": "A_pool"}]}}, "/generation/pools/0/name"),
        ({"generation": {"pools": [{"name": "a" * 17}]}}, "/generation/pools/0/name"),
        ({"generation": {"pools": [{"name": "a", "gpu": 2}]}}, "/generation/pools/0"),
        ({"generation": {"pools": [{"name": "a", "device": "tpu"}]}}, "/generation/pools/0/device"),
        (
            {"generation": {"pools": [{"name": "a", "config": {"drafters": ["EAGLE-3"]}}]}},
            "/generation/pools/0/config/drafters/0",
        ),
        ({"generation": {"defaults": {"cacheSize": "20 GB"}}}, "/generation/defaults/cacheSize"),
        ({"generation": {"defaults": {"adoptedSize": "much"}}}, "/generation/defaults/adoptedSize"),
        ({"generation": {"defaults": {"adoptedMedium": "tape"}}}, "/generation/defaults/adoptedMedium"),
        ({"generation": {"defaults": {"adoptedHostPath": "ssd"}}}, "/generation/defaults/adoptedHostPath"),
        ({"tls": {"mode": "off"}}, "/tls/mode"),
        ({"tls": {"certManager": {"duration": "90 days"}}}, "/tls/certManager/duration"),
        ({"tokens": {"grants": [{"name": "a", "sha256": HASH, "scopes": []}]}}, "/tokens/grants/0/scopes"),
        (
            {"tokens": {"grants": [{"name": "a", "sha256": HASH, "scopes": ["admin"]}]}},
            "/tokens/grants/0/scopes/0",
        ),
        (
            {"tokens": {"grants": [{"name": "a", "sha256": "pl_secret", "scopes": ["fleet"]}]}},
            "/tokens/grants/0/sha256",
        ),
        ({"redis": {"embedded": {"enabled": False}}}, "/redis/external"),
        ({"redis": {"external": {"url": "redis://:password@host"}}}, "/redis/external/url"),
        ({"image": {"control": {"digest": "latest"}}}, "/image/control/digest"),
        ({"autoscale": {"by": "hand"}}, "/autoscale/by"),
        ({"autoscale": {"config": {"bubble_share": 1}}}, "/autoscale/config/bubble_share"),
        ({"pods": {"podSecurityContext": {"runAsUser": 0}}}, "/pods/podSecurityContext/runAsUser"),
        ({"gateway": {"podSecurityContext": {"runAsUser": 0}}}, "/gateway/podSecurityContext/runAsUser"),
        ({"pods": {"priorityClass": "high"}}, "/pods"),
        ({"drafts": {"topologySpreadConstraints": [{"maxSkew": 0}]}}, "/drafts/topologySpreadConstraints/0"),
        ({"model": {"download": {"source": "Qwen/Qwen3-8B"}}}, "/model/download/source"),
        ({"gateway": {"route": {"kind": "HTTPRoute"}}}, "/gateway/route/kind"),
        ({"redis": {"external": {"hosts": ["redis://a"]}}}, "/redis/external/hosts/0"),
        ({"redis": {"external": {"kind": "replicas"}}}, "/redis/external/kind"),
        ({"fullnameOverride": "a" * 25}, "/fullnameOverride"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(values: dict[str, Any], path: str) -> None:
    with pytest.raises(helm.HelmError) as refused:
        chart().validate_schema(values)
    assert path in str(refused.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tls": {"mode": "secrets"}}, r"tls\.secretName or tls\.secretNames\.\w+ is needed"),
        ({"generation": {"pools": [{"name": "twin"}, {"name": "twin"}]}}, "two are called twin"),
        (
            {"generation": {"pools": [{"name": "a", "minReplicas": 9}]}},
            "minReplicas of a is above maxReplicas",
        ),
        ({"autoscale": {"enabled": True}, "policy": {"enabled": False}}, r"needs policy\.enabled"),
        (
            {"tokens": {"existingSecret": "grants"}, "monitoring": {"podMonitors": {"enabled": True}}},
            r"tokens\.metrics\.existingSecret: is needed",
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(values: dict[str, Any], said: str) -> None:
    chart().validate_schema(values)
    with pytest.raises(helm.HelmError, match=said):
        render(values)


def test_every_value_is_documented() -> None:
    text = (CHART / "values.yaml").read_text()
    explained = {each.path for each in documented(text)}
    missing = {
        path
        for path in _leaves(yaml.safe_load(text))
        if not any(path == each or path.startswith(f"{each}.") for each in explained)
    }
    assert not missing
    assert all(each.text.endswith(".") for each in documented(text))


def test_what_is_documented_is_what_the_schema_allows() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    allowed = {path for path in _allowed(schema) if not path.startswith(("generation.pools.", "global"))}
    explained = {each.path for each in documented((CHART / "values.yaml").read_text())}
    assert explained <= allowed
    # The values of `pods` are those of every component, too.
    for where in PODS:
        explained |= {
            f"{where}.{each.removeprefix('pods.')}" for each in explained if each.startswith("pods.")
        }
    parents = {path.rpartition(".")[0] for path in allowed}
    assert {path for path in allowed - explained - parents if path not in PARTS} == set()


USERS = ("runAsUser", "runAsGroup", "fsGroup")
PARTS = {
    # Documented as one.
    *(f"pods.updateStrategy.{name}" for name in ("type", "rollingUpdate")),
    *(f"pods.{name}.{field}" for name in ("podSecurityContext", "securityContext") for field in USERS),
    *(f"tls.certManager.issuerRef.{name}" for name in ("name", "kind", "group")),
    *(
        f"tls.secretNames.{name}"
        for name in (
            *("gateway", "generation", "reallocator", "bubbles", "drafts", "drafter", "policy", "facade"),
            *("redis", "metrics"),
        )
    ),
    *(
        f"networkPolicy.egress.extra.{name}"
        for name in (
            *("gateway", "generation", "reallocator", "bubbles", "drafts", "drafter", "policy", "facade"),
            *("redis", "model", "test"),
        )
    ),
}


def test_what_follows_from_elsewhere_is_up_to_date(tmp_path: Path) -> None:
    copy = tmp_path / "paceline"
    shutil.copytree(CHART, copy)
    generate(copy)
    for name in ("README.md", "values.schema.json"):
        assert (copy / name).read_text() == (CHART / name).read_text(), f"{name}: run scripts/chart"


@pytest.mark.parametrize("name", VALUE_SETS)
def test_helm_finds_nothing_wrong_with_the_chart(name: str) -> None:
    assert helm.lint(str(CHART), copy.deepcopy(VALUE_SETS[name]), strict=True)["errors"] == []


def test_the_chart_has_the_version_of_the_package() -> None:
    project = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None
    assert chart().metadata["appVersion"] == project[1]


def test_the_notes_tell_a_trainer_how_to_connect() -> None:
    notes = value_set("defaults").notes
    assert 'Client("paceline-gateway.ml.svc.cluster.local:7400", token=TOKEN, tls=tls)' in notes
    assert "paceline-trainer-tls" in notes
    assert "no token for trainers yet" in notes
    assert "plain text" not in notes
    plain = value_set("cpu").notes
    assert "plain text" in plain
    assert "tls=" not in plain
    given = value_set("mtls").notes
    assert 'server_name="paceline.internal.example.com"' in given
    assert "kubectl get service paceline-gateway" in given
    assert "Tokens that are accepted: trainer." in value_set("gpu").notes


def test_the_notes_say_that_images_have_to_be_built_unless_a_registry_is_named() -> None:
    notes = value_set("defaults").notes
    assert "There are no public images" in notes
    assert "paceline-control:0.1.0" in notes
    assert "paceline-generation-cuda:0.1.0" in notes
    assert "paceline-generation-cpu:0.1.0" in value_set("cpu").notes
    assert "no public images" not in value_set("gpu").notes
    # Nor is the SDK published.
    assert "pip install paceline" not in notes


def test_the_notes_say_where_the_model_comes_from() -> None:
    assert "model.download.source has it downloaded there" in value_set("defaults").notes
    followed = value_set("front-door").notes
    assert "A Job downloads hf://Qwen/Qwen3-8B@main to /weights/qwen3-8b" in followed
    assert "app.kubernetes.io/component=model" in followed
    assert "paceline-generation-default-0 --container model" in value_set("sentinel").notes


def test_the_code_in_the_notes_is_code() -> None:
    for name in VALUE_SETS:
        lines = [line[2:] for line in value_set(name).notes.splitlines() if line.startswith("  ")]
        begin = next(i for i, line in enumerate(lines) if line.startswith("from pathlib"))
        end = next(i for i, line in enumerate(lines) if line.startswith("client ="))
        scope: dict[str, Any] = {"TOKEN": "pl_x"}
        # Paths are only read when the connection is made.
        code = "\n".join(lines[begin:end])
        exec(code, scope)
        assert lines[end].startswith("client = Client(")


def _leaves(values: Any, path: str = "") -> Iterator[str]:
    if isinstance(values, Mapping) and values:
        for name, each in values.items():
            yield from _leaves(each, f"{path}.{name}" if path else name)
    elif path:
        yield path


def _allowed(node: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, each in node.get("properties", {}).items():
        inner = f"{path}.{name}" if path else name
        yield inner
        yield from _allowed(each, inner)
