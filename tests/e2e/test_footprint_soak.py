"""A thousand steps and restarts leave nothing behind in any kind of process.

make soak SOAK_ARGS="tests/e2e/test_footprint_soak.py --soak-steps=1000"
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from services.local import Platform, PlatformConfig
from tests.e2e.footprint_steps import Trainer, observe
from tests.support.footprint import Footprint, Limits, Record, footprints
from tests.support.soak import Progress, record
from tests.support.zygote import launch

STEPS = 1000
LIMITS = Limits(memory=32 << 10, files=0.01, threads=0.01, keys=0.05)
"""1 KiB a sample: a leak of 4 KiB a sample, or of 100 KiB a step, is three times as much."""
KEPT_SECONDS = 5
"""For which Redis keeps batches."""
RESTARTS = 3


@pytest.fixture
def whole_platform(model: Path, tmp_path: Path) -> Iterator[Platform]:
    """Every kind of process, two gateways; KV, index and cache so small that steps have soon filled them."""
    config = PlatformConfig(
        model=model,
        instances=2,
        gateways=2,
        learner=True,
        folder=tmp_path / "platform",
        pin=False,
        http_port=0,
        instance_options=(
            "--dtype=float32",
            "--max-num-seqs=32",
            "--kv-cache-memory-bytes=16777216",
            # By default 4 million tokens and 256 MiB, which take thousands of these steps to fill.
            "--draft-index-tokens=50000",
            "--draft-cache-bytes=4194304",
        ),
        gateway_options=(f"--acknowledged-seconds={KEPT_SECONDS}", "--lease-seconds=1"),
        environment={"OMP_NUM_THREADS": "1"},
        start_timeout=900.0,
        stop_timeout=60.0,
    )
    with Platform(config, launch=launch) as platform:
        yield platform


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_thousand_steps_and_restarts_leave_nothing_behind(
    whole_platform: Platform, request: pytest.FixtureRequest
) -> None:
    platform = whole_platform
    steps = request.config.getoption("soak_steps") or STEPS
    progress, began = Progress("footprint", steps, "step"), time.monotonic()

    def tell(found: Record) -> None:
        if len(found.keys) % 20 == 0:
            held = {name: f"{each[-1].memory / 2**20:.0f}" for name, each in found.processes.items()}
            progress.tell(len(found.keys), f"MiB: {held}, keys: {found.keys[-1]:.0f}")

    with Trainer(platform, prompts=64, tokens=48) as trainer:
        found = observe(trainer, platform, steps, tell)
        rounds = [after_restarts(trainer, platform) for _ in range(RESTARTS)]

    figures = {
        "steps": steps,
        "seconds": round(time.monotonic() - began, 1),
        "limits": asdict(LIMITS),
        "growth": found.growth(),
        "held": {name: [asdict(each) for each in held] for name, held in found.processes.items()},
        "keys": found.keys,
        "restarts": [{name: asdict(each) for name, each in held.items()} for held in rounds],
    }
    record("footprint", figures)
    assert found.above(LIMITS) == {}
    assert more_than(rounds[0], rounds[-1]) == {}


def after_restarts(trainer: Trainer, platform: Platform) -> dict[str, Footprint]:
    """Kill an instance and the gateway that leads; return what is held once steps go on."""
    platform.restart("instance-0", kill=True)
    trainer.step()
    for gateway in ("gateway", "gateway-1"):
        # The other one leads meanwhile, and from then on.
        platform.restart(gateway, kill=True)
        trainer.step()
    return settled(platform)


def settled(platform: Platform) -> dict[str, Footprint]:
    """Return what is held once that stays the same: connections to the dead are given up one by one."""
    deadline, held = time.monotonic() + 60, footprints(platform)
    while time.monotonic() < deadline:
        time.sleep(5)
        before, held = held, footprints(platform)
        if {name: (each.files, each.threads) for name, each in before.items()} == {
            name: (each.files, each.threads) for name, each in held.items()
        }:
            break
    return held


def more_than(
    before: dict[str, Footprint], after: dict[str, Footprint]
) -> dict[str, tuple[Footprint, Footprint]]:
    """Return the processes that hold more files or threads than before, beyond what comes and goes."""
    return {
        name: (before[name], held)
        for name, held in after.items()
        if held.files > before[name].files + 4 or held.threads > before[name].threads + 4
    }
