"""Whose number of instances counts: the values', the controller's, or that of `kubectl scale`, with both Helms."""

from __future__ import annotations

from typing import Any

from tests.integration.kubernetes.release import CHART, Space

POOL = "paceline-generation-cpu"


def _values(replicas: int, *, scaled: bool) -> dict[str, Any]:
    pool = {"name": "cpu", "device": "cpu", "replicas": replicas, "maxReplicas": 16}
    return {
        "image": {"registry": "registry.example.com/ml"},
        "tls": {"mode": "none"},
        "generation": {"pools": [pool]},
        "autoscale": {"enabled": scaled},
    }


def test_the_number_of_the_values_counts_until_somebody_scales(space: Space) -> None:
    space.install(_values(2, scaled=False))
    space.upgrade(_values(3, scaled=False))
    assert space.pools() == {POOL: 3}
    space.kubectl("scale", "statefulset", POOL, "--replicas=5")
    space.upgrade(_values(4, scaled=False))
    assert space.pools() == {POOL: 5}


def test_autoscaling_is_switched_on_and_off_and_keeps_the_number(space: Space) -> None:
    space.install(_values(4, scaled=False))
    # Before and after the controller has scaled.
    space.upgrade(_values(4, scaled=True))
    assert space.pools() == {POOL: 4}
    space.upgrade()
    assert space.pools() == {POOL: 4}
    space.scale(POOL, 6)
    space.upgrade()
    assert space.pools() == {POOL: 6}
    space.upgrade(_values(4, scaled=False))
    assert space.pools() == {POOL: 6}
    space.scale(POOL, 7)
    space.upgrade(_values(4, scaled=True))
    assert space.pools() == {POOL: 7}


def test_a_pool_that_is_installed_with_autoscaling_keeps_its_number_in_rollbacks(space: Space) -> None:
    space.install(_values(4, scaled=True))
    assert space.pools() == {POOL: 1}
    space.scale(POOL, 6)
    space.upgrade()
    space.scale(POOL, 8)
    space.rollback(1)
    assert space.pools() == {POOL: 8}
    space.upgrade(_values(4, scaled=False))
    assert space.pools() == {POOL: 8}


def test_a_rollback_to_before_a_pool_was_scaled_is_as_documented(space: Space) -> None:
    space.install(_values(2, scaled=False))
    space.kubectl("scale", "statefulset", POOL, "--replicas=5")
    space.upgrade()
    force = []
    if space.helm_version == 4:
        assert "conflict" in space.rollback(1, fails=True)
        assert space.pools() == {POOL: 5}
        force = ["--force-conflicts"]
    space.rollback(1, *force)
    assert space.pools() == {POOL: 2}


def test_an_object_that_was_changed_by_hand_is_as_documented(space: Space) -> None:
    space.install(_values(2, scaled=False))
    space.kubectl("set", "image", "deployment/paceline-gateway", "gateway=registry.example.com/other:1")
    force = []
    if space.helm_version == 4:
        again = ("upgrade", "paceline", str(CHART), "--values", "values.yaml")
        assert "conflict" in space.helm(*again, fails=True)
        force = ["--force-conflicts"]
    space.upgrade(None, *force)
    (container,) = space.one("deployments", "paceline-gateway")["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith("registry.example.com/ml/paceline-control:")
