"""Processes of any kind are killed and stalled at random: every sample comes once, and as without all that."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline import RetryPolicy
from services.local import Platform, PlatformConfig
from services.local.config import RestartPolicy
from tests.chaos.agent import Agent, victims
from tests.chaos.sequence import Event, sequence
from tests.chaos.trainer import Trainer, compare
from tests.chaos.witness import logs, stacks, wait_healthy, writers
from tests.support.models import tiny_model
from tests.support.soak import Progress, record
from tests.support.zygote import launch

PATIENT = RetryPolicy(maximum=1.0)
ALWAYS = RestartPolicy(limit=1_000_000, initial=0.1, maximum=0.2)
# Small enough to start and step in milliseconds; of 64 tokens one ends a sample.
SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LEASE = "--lease-seconds=1"
SEED = 7
"""Of the runs; those of the kills and stalls are others."""
SHORT = 49201
"""Seed of four seconds in which both gateways are killed, no instance is left, and Redis is killed."""
SILENT_SECONDS = 120.0
"""A trainer that gets nothing for so long hangs: a whole step takes two seconds when nothing happens."""
HEALTH_SECONDS = 120.0


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    config = PlatformConfig(
        model=tiny_model(tmp_path / "model", **SMALL),
        instances=2,
        gateways=2,
        folder=tmp_path / "platform",
        pin=False,  # the kernel shares the cores out among the workers
        instance_options=("--dtype=float32", "--max-num-seqs=32", "--kv-cache-memory-bytes=268435456"),
        gateway_options=(LEASE,),
        bubble_options=(LEASE,),
        policy_options=(LEASE,),
        reallocator_options=(LEASE,),
        restarts=ALWAYS,
    )
    with Platform(config, launch=launch) as platform:
        yield platform


@dataclass
class Watch:
    """Watch over a trainer: it neither fails nor hangs."""

    platform: Platform
    trainer: Trainer

    def wait(self, seconds: float) -> None:
        """Wait for the trainer, no longer than that; fail if its step hangs, or if it has failed."""
        self.trainer.ended.wait(seconds)
        if self.trainer.error is not None:
            print(logs(self.platform))
            raise self.trainer.error
        if not self.trainer.ended.is_set() and time.monotonic() - self.trainer.doing_since > SILENT_SECONDS:
            pytest.fail(
                f"step {len(self.trainer.steps)} hangs: {self.trainer.doing}\n{stacks(self.platform)}", False
            )

    def to_the_end(self, progress: Progress | None = None) -> None:
        """Wait until the trainer has ended; tell now and then how far it is."""
        while not self.trainer.ended.is_set():
            self.wait(10.0)
            if progress is not None:
                progress.tell(len(self.trainer.steps), f"{self.trainer.samples} samples")


@pytest.mark.timeout(0)  # every wait has a limit, after which logs and stacks are shown
@pytest.mark.parametrize(
    ("count", "seed"), [(9, SHORT), pytest.param(200, None, marks=pytest.mark.soak)], ids=["short", "soak"]
)
def test_kills_and_stalls_change_no_sample(
    platform: Platform, tmp_path: Path, request: pytest.FixtureRequest, count: int, seed: int | None
) -> None:
    option, long = request.config.getoption, request.node.get_closest_marker("soak") is not None
    count = option("chaos_events") or count
    seed = option("chaos_seed") or seed or int(time.time())
    spared = option("chaos_spare")
    processes = [each for each in victims(platform) if each not in spared]
    repeat = " ".join(
        [f"--chaos-events={count} --chaos-seed={seed}", *(f"--chaos-spare={s}" for s in spared)]
    )
    print(f"chaos: repeat with {'--soak ' if long else ''}{repeat}", flush=True)
    began, progress = time.monotonic(), Progress("chaos", count, "event")

    with platform.client(retry=PATIENT) as client:
        trainer = Trainer(client, "disturbed", SEED, platform.config.model, tmp_path / "disturbed")
        watch = Watch(platform, trainer)

        def tell(number: int, event: Event) -> None:
            progress.tell(number, f"{event}, step {len(trainer.steps)}: {trainer.doing}")

        agent = Agent(platform, watch.wait, tell)
        trainer.start()
        try:
            agent.run(sequence(seed, count, processes))
        finally:
            agent.end_stalls()
        trainer.finish()
        watch.to_the_end()
        wait_healthy(platform, HEALTH_SECONDS)

        undisturbed = Trainer(client, "undisturbed", SEED, platform.config.model, tmp_path / "undisturbed")
        undisturbed.start(len(trainer.steps))
        Watch(platform, undisturbed).to_the_end(Progress("undisturbed", len(trainer.steps), "step"))

    figures = figures_of(platform, agent, trainer, undisturbed) | {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(f"chaos: {figures}", flush=True)
    if long:
        record("chaos", figures)
    failed = {
        name: figures[name] for name in ("differing_tokens", "lost", "doubled", "failed", "wrong_version")
    }
    assert not any(failed.values()), f"{failed}; repeat with {repeat}"
    assert figures["resubmitted"] + figures["failovers"] > 0, "nothing was disturbed"
    platform.stop()
    assert not writers(platform), "processes are left over"


def figures_of(platform: Platform, agent: Agent, trainer: Trainer, undisturbed: Trainer) -> dict[str, Any]:
    """What happened, and what came of it."""
    events: dict[str, Counter[str]] = {"by_kind": Counter(), "by_process": Counter()}
    for (kind, process), times in agent.done.items():
        events["by_kind"][str(kind)] += times
        events["by_process"][process] += times
    terms = sum(child.spec.log.read_text().count('"leading"') for child in platform.gateways)
    restarts = {
        child.spec.name: child.spec.log.read_text().count('"ready"') - 1 for child in platform.processes
    }
    return {
        "events": agent.done.total(),
        **{f"events_{name}": dict(sorted(counted.items())) for name, counted in events.items()},
        "steps": len(trainer.steps),
        **asdict(compare(trainer.steps, undisturbed.steps)),
        "longest_step_seconds": round(max(step.seconds for step in trainer.steps), 1),
        "longest_undisturbed_step_seconds": round(max(step.seconds for step in undisturbed.steps), 1),
        "resubmitted": sum(s.provenance.resubmissions for step in trainer.steps for s in step.samples),
        "failovers": terms - 1,
        "restarts": restarts,
        "pushes_repeated": trainer.pushes_repeated,
    }
