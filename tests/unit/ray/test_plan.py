"""What runs on a Ray cluster, and who knows of Ray at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.platform.config_sources import read_config
from services.ray.config import RayConfig
from services.ray.plan import ActorPlan, actors


def named(**settings: Any) -> dict[str, ActorPlan]:
    return {plan.name: plan for plan in actors(RayConfig(model="/models/policy", **settings))}


def test_the_gateway_comes_last_and_needs_nothing_of_ray() -> None:
    plans = actors(RayConfig(model="m", instances=2, draft_stores=2))
    assert [plan.name for plan in plans] == [
        "drafts-0",
        "drafts-1",
        "bubbles",
        "instance-0",
        "instance-1",
        "gateway",
    ]
    assert [plan.gpus for plan in plans] == [0, 0, 0, 1, 1, 0]
    assert [plan.spread for plan in plans] == [False] * 3 + [True] * 2 + [False]


def test_parts_can_be_left_out() -> None:
    assert set(named(instances=1, draft_stores=0, bubbles=False)) == {"instance-0", "gateway"}


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
    "name", ["services.generation.config.GenerationConfig", "services.gateway.config.GatewayConfig"]
)
def test_services_understand_what_they_are_told(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, kind = name.rpartition(".")
    config_class = getattr(__import__(module, fromlist=[kind]), kind)
    for key, value in RayConfig(model="m", token="t").environment().items():
        monkeypatch.setenv(key, value)
    plan = named(gpus=0)["instance-0" if kind == "GenerationConfig" else "gateway"]
    config = read_config(config_class, plan.flags, dict(os.environ))
    assert config.token.get_secret_value() == "t"


def test_half_a_gpu_more_is_refused() -> None:
    with pytest.raises(ValueError, match="gpus"):
        RayConfig(model="m", gpus=1.5)


def test_nobody_imports_ray_or_kubernetes_who_does_not_use_them() -> None:
    modules = ["gateway", "generation", "drafts", "bubbles", "policy"]
    imports = "; ".join(f"import services.{module}.__main__" for module in modules)
    found = "bool({'ray', 'kubernetes'} & set(sys.modules))"
    check = f"import sys; {imports}; import services.ray.plan; sys.exit({found})"
    done = subprocess.run([sys.executable, "-c", check], cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == 0
