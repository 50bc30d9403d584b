"""Actors of a Ray cluster, and the modules that import Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.platform.config import read_config
from services.ray.config import ActorPlan, RayConfig, actors

LEARNER = {"learner": True, "drafter": "/weights/first", "drafters": "/weights/drafters"}


def named(**settings: Any) -> dict[str, ActorPlan]:
    return {plan.name: plan for plan in actors(RayConfig(model="/models/policy", **settings))}


def test_the_gateway_comes_last_and_needs_nothing_of_ray() -> None:
    plans = actors(RayConfig(model="m", instances=2, draft_stores=2))
    assert [plan.name for plan in plans] == [
        "drafts-0",
        "drafts-1",
        "bubbles",
        "policy",
        "reallocator",
        "instance-0",
        "instance-1",
        "gateway",
    ]
    assert [plan.gpus for plan in plans] == [0, 0, 0, 0, 0, 1, 1, 0]
    assert [plan.spread for plan in plans] == [False] * 5 + [True] * 2 + [False]


def test_parts_can_be_left_out() -> None:
    parts = named(instances=1, draft_stores=0, bubbles=False, policy=False, reallocator=False)
    assert set(parts) == {"instance-0", "gateway"}


def test_a_learner_trains_what_the_instances_draft_with() -> None:
    plans = named(**LEARNER, learner_gpus=1, learner_flags=["--interval=2"])
    learner = plans["drafter"]
    assert (learner.module, learner.gpus, learner.spread) == ("services.drafter", 1, False)
    assert {"--checkpoint=/weights/first", "--folder=/weights/drafters", "--device=cuda"} <= set(
        learner.flags
    )
    assert learner.flags[-1] == "--interval=2"
    assert "--eagle3=/weights/first" in plans["instance-0"].flags
    assert "--device=cpu" in named(**LEARNER)["drafter"].flags
    assert "drafter" not in named()


@pytest.mark.parametrize("missing", ["drafter", "drafters"])
def test_a_learner_without_what_it_needs_is_refused(missing: str) -> None:
    with pytest.raises(ValueError, match=f"learner: needs {missing}"):
        named(**LEARNER | {missing: ""})


def test_an_instance_holds_its_gpus_unless_vllm_asks_for_them() -> None:
    local, spanning = named(gpus=2)["instance-0"], named(gpus=16, executor="ray")["instance-0"]
    assert (local.gpus, spanning.gpus) == (2, 0)
    assert "--tensor-parallel-size=2" in local.flags
    assert "--executor=ray" not in local.flags
    assert {"--tensor-parallel-size=16", "--executor=ray"} <= set(spanning.flags)


def test_given_flags_come_last() -> None:
    flags = named(gpus=2, instance_flags=["--tensor-parallel-size=4"])["instance-0"].flags
    assert flags[-1] == "--tensor-parallel-size=4"


def test_the_gateway_can_be_put_on_a_node_of_its_kind() -> None:
    assert named()["gateway"].resources == {}
    assert named(gateway_resource="front", port=7401)["gateway"].resources == {"front": 0.001}
    assert "--port=7401" in named(port=7401)["gateway"].flags


def test_every_process_is_told_the_same(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    config = RayConfig(model="m", token_file=tmp_path / "token", redis_url="redis://r:1", insecure=True)
    environment = config.environment()
    assert environment["PACELINE_REDIS_URL"] == "redis://r:1"
    assert environment["PACELINE_INSECURE"] == "true"
    assert environment["PACELINE_TOKEN_FILE"] == str(tmp_path / "token")
    assert "secret" not in environment.values(), "where there is a file the token is in nobody's arguments"


@pytest.mark.parametrize(
    ("actor", "name"),
    [
        ("instance-0", "services.generation.config.GenerationConfig"),
        ("gateway", "services.gateway.config.GatewayConfig"),
        ("policy", "services.policy.config.PolicyConfig"),
        ("reallocator", "services.reallocator.config.ReallocatorConfig"),
        ("drafter", "services.drafter.config.DrafterConfig"),
    ],
)
def test_services_understand_what_they_are_told(
    actor: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, kind = name.rpartition(".")
    config_class = getattr(__import__(module, fromlist=[kind]), kind)
    for key, value in RayConfig(model="m", token="t").environment().items():
        monkeypatch.setenv(key, value)
    plan = named(gpus=0, **LEARNER)[actor]
    config = read_config(config_class, plan.flags, dict(os.environ))
    assert config.token.get_secret_value() == "t"


def test_half_a_gpu_more_is_refused() -> None:
    with pytest.raises(ValueError, match="gpus"):
        RayConfig(model="m", gpus=1.5)


def test_nobody_imports_ray_or_kubernetes_who_does_not_use_them() -> None:
    modules = ["gateway", "generation", "drafts", "bubbles", "policy"]
    imports = "; ".join(f"import services.{module}.__main__" for module in modules)
    found = "bool({'ray', 'kubernetes'} & set(sys.modules))"
    check = f"import sys; {imports}; import services.ray.config; sys.exit({found})"
    done = subprocess.run([sys.executable, "-c", check], cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == 0
