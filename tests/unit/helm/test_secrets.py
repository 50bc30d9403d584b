"""Secrets that the chart makes up: in no release manifest, made once, and kept by upgrades and rollbacks."""

from __future__ import annotations

import base64
import copy
from typing import Any

import pytest
import yaml

from paceline.tokens import hash_token
from tests.support.cluster.charts import rendered
from tests.unit.helm.release import CHART, VALUE_SETS, Release, generated, render, secret_text, value_set

NAMES = {"paceline-token", "paceline-metrics-token", "paceline-redis"}


def _made() -> list[dict[str, Any]]:
    """Return what an installation has made, as a cluster has it."""
    return copy.deepcopy(generated(value_set("defaults")))


def _upgraded(there: list[dict[str, Any]]) -> Release:
    found = rendered(CHART, {}, name="paceline", namespace="ml", there=there, upgrade=True)
    return Release(tuple(found), "")


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize("name", VALUE_SETS)
def test_nothing_that_is_made_up_is_in_the_manifest_of_a_release(name: str) -> None:
    def manifest(release: Release) -> list[dict[str, Any]]:
        return [each for each in release.manifests if each not in generated(release)]

    # Nothing that follows from it either, such as a hash.
    assert manifest(value_set(name)) == manifest(render(VALUE_SETS[name]))


def test_they_are_hooks_that_neither_a_rollback_nor_an_uninstallation_touches() -> None:
    made = _made()
    assert {each["metadata"]["name"] for each in made} == NAMES
    for each in made:
        assert each["metadata"]["annotations"] == {
            "helm.sh/hook": "pre-install,pre-upgrade",
            "helm.sh/hook-delete-policy": "before-hook-creation",
            "helm.sh/resource-policy": "keep",
        }


def test_an_upgrade_makes_none_that_is_there() -> None:
    assert generated(_upgraded(_made())) == []


def test_an_upgrade_makes_those_that_were_deleted() -> None:
    there = [each for each in _made() if each["metadata"]["name"] != "paceline-redis"]
    (made,) = generated(_upgraded(there))
    assert made["metadata"]["name"] == "paceline-redis"


def test_a_token_that_was_rotated_stays() -> None:
    there = _made()
    (token,) = [each for each in there if each["metadata"]["name"] == "paceline-token"]
    token["data"]["token"] = _encoded("pl_other")
    assert generated(_upgraded(there)) == []


def test_those_of_an_older_chart_leave_its_manifest_and_are_kept() -> None:
    there = _made()
    for each in there:
        del each["metadata"]["annotations"]
    (redis,) = [each for each in there if each["metadata"]["name"] == "paceline-redis"]
    redis["data"]["users.acl"] = _encoded("what running pods have mounted")
    found = {each["metadata"]["name"]: each for each in generated(_upgraded(there))}
    # Helm deletes what leaves a manifest, unless it has this annotation in the cluster.
    assert {each["metadata"]["annotations"]["helm.sh/resource-policy"] for each in found.values()} == {"keep"}
    assert {name: each["data"] for name, each in found.items()} == {
        each["metadata"]["name"]: each["data"] for each in there
    }


def test_a_user_that_a_new_version_has_gets_a_password_and_the_others_keep_theirs() -> None:
    there = _made()
    (redis,) = [each for each in there if each["metadata"]["name"] == "paceline-redis"]
    del redis["data"]["drafter"]
    (made,) = generated(_upgraded(there))
    assert made["data"].pop("drafter")
    assert made["data"] == redis["data"]


def test_the_grant_of_prometheus_is_that_of_its_token() -> None:
    there = _made()
    (metrics,) = [each for each in there if each["metadata"]["name"] == "paceline-metrics-token"]
    metrics["data"]["token"] = _encoded("pl_other")
    (made,) = generated(_upgraded(there))
    assert secret_text(made, "token") == "pl_other"
    (grant,) = yaml.safe_load(secret_text(made, "tokens.yaml"))
    assert grant == {"name": "prometheus", "sha256": hash_token("pl_other"), "scopes": ["metrics"]}
