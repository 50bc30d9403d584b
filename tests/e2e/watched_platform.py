"""A platform at work that a real Prometheus and a collector of traces watch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import paceline
from paceline import (
    Client,
    Exactness,
    ExactnessLevel,
    Group,
    InstanceState,
    Reward,
    SamplingParams,
    WeightFolder,
)
from services.local import Platform, PlatformConfig
from tests.e2e.conftest import UNDER_TLS, VOCAB, certificates
from tests.support.otlp_collector import Collector
from tests.support.prometheus import ROOT, Prometheus, tools
from tests.support.promql import hastened
from tests.support.zygote import launch

RULES = (ROOT / "helm/paceline/files/rules.yaml").read_text()
SAMPLING = SamplingParams(max_tokens=60, ignore_eos=True)
QUICK = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_tokens=300, ignore_eos=True)
HALTED = SamplingParams(max_tokens=900, ignore_eos=True)

EAGER = (
    "--decision-steps=16",
    "--poll-seconds=0.1",
    "--least-gain=0",
    "--least-balance-gain=0",
    "--payback=0",
    "--no-count-costs",
)
"""The reallocator moves whatever makes a step a little more even."""
LEARNING = (
    *("--lr=0.003", "--batch-tokens=256", "--depth=2", "--settle-seconds=0.1", "--report-seconds=0.1"),
    *("--publish-margin=0", "--publish-samples=1", "--held-out-share=0.3", "--nice=0"),
)
"""The learner begins with few samples."""


@dataclass(frozen=True)
class Watched:
    """A platform that has done some steps, and who has watched it from `began` to `ended` (unix seconds)."""

    platform: Platform
    client: Client
    prometheus: Prometheus
    collector: Collector
    began: float
    ended: float


def until(holds: Callable[[], Any], what: str, seconds: float = 60) -> None:
    """Poll a condition that some process brings about."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def groups(step: int, count: int = 4, samples: int = 4) -> list[Group]:
    """Prompts that come again in every step, and a quick one."""
    return [*(Group(f"p{n}", [3 + n, 4, 5], samples) for n in range(count)), Group("quick", [3, 4], 1, QUICK)]


def work(client: Client, model: Path, folder: Path, counted: Callable[[str], float]) -> None:
    """Steps with everything that panels show: hints, history, lenience, rewards, weights, and calls that fail."""
    state: dict[str, Any] = load_file(model / "model.safetensors")
    run = client.run("watched", seed=5, weights=WeightFolder(folder, model))
    lenient = Exactness(ExactnessLevel.LENIENT, lenience=1.5)
    for step in range(3):
        version = client.versions().policy_version
        before = counted("paceline_generation_pregenerated_tokens_total")
        # The last hint is of more than there is time for, so that the update halts it.
        ahead = (groups(step + 1), SAMPLING) if step < 2 else (groups(step + 1, samples=16), HALTED)
        run.hint(step + 1, *ahead, policy_version=version + 1)
        rollout = run.rollout(step, groups(step), SAMPLING, exactness=lenient if step >= 2 else None)
        samples = list(rollout)
        rewards = [Reward(sample.prompt_id, sample.slot, 1.0) for sample in samples]
        run.report_rewards(rollout.batch.batch_id, rewards, kl=1e-3, clip_fraction=0.1)
        wanted = before + 200
        until(lambda: counted("paceline_generation_pregenerated_tokens_total") > wanted, "nothing ahead")  # noqa: B023
        if step == 0:
            until(lambda: counted("paceline_drafter_candidates_total") > 0, "nothing was learned")
        run.push_weights({name: tensor * (1 + 1e-3 * step) for name, tensor in state.items()})
    with pytest.raises(paceline.InvalidArgumentError):
        run.rollout(9, [Group("bad", [VOCAB], 1)], SAMPLING)
    # One sample is said to be as long as all others together, so the reallocator has something to even out.
    others = [Group(f"m{n}", [3 + n, 4], 1, expected_tokens=24) for n in range(12)]
    uneven = [Group("lone", [3, 4, 5], 1, expected_tokens=288), *others]
    list(client.run("moving", seed=8).rollout(0, uneven, SamplingParams(max_tokens=300, ignore_eos=True)))
    # How soon it does so depends on the machine. Off an instance that is drained it moves whatever runs there.
    samples = iter(client.run("drained", seed=8).rollout(0, groups(0, samples=2), LONG))
    next(samples)
    client.drain("instance-1")
    list(samples)
    client.resume(["instance-1"])
    until(lambda: all(each.state is InstanceState.SERVING for each in client.instances()), "still draining")


@contextmanager
def watching(model: Path, folder: Path) -> Iterator[Watched]:
    """Start a platform, its Prometheus and a collector of traces, and have it do its work."""
    tools()
    with Collector() as collector:
        engine = ("--dtype=float32", "--max-num-seqs=32", "--kv-cache-memory-bytes=67108864")
        config = PlatformConfig(
            model=model,
            folder=folder / "platform",
            pin=False,  # the kernel shares the cores out among the workers
            # A killed instance has reported what it did of short samples, too.
            instance_options=(*engine, "--checkpoint-seconds=0.2"),
            reallocator_options=EAGER,
            learner=True,
            learner_options=LEARNING,
            environment={"PACELINE_TRACING_ENDPOINT": collector.address},
            tls=certificates(folder) if UNDER_TLS else None,
            token="the token of the tests" if UNDER_TLS else None,
        )
        prometheus = Prometheus(folder, scraping(config), hastened(RULES))
        with Platform(config, launch=launch) as platform, prometheus, platform.client() as client:
            began = time.time()

            def counted(name: str) -> float:
                return sum(value for _, value in prometheus.now(f"sum({name})"))

            work(client, model, folder / "weights", counted)
            # Rates are of two scrapes, a second apart, and a rule looks a second back.
            at = time.time() + 3
            until(lambda: prometheus.now("min(timestamp(paceline_build_info))")[0][1] > at, "no scrape")
            yield Watched(platform, client, prometheus, collector, began, time.time())


def scraping(config: PlatformConfig) -> dict[str, Any]:
    """How Prometheus finds the platform's processes, and what it shows them."""
    job: dict[str, Any] = {
        "job_name": "paceline",
        "file_sd_configs": [{"files": [str(config.folder / "targets.json")], "refresh_interval": "1s"}],
    }
    if config.token is not None:
        job["authorization"] = {"credentials": config.token}
    if config.tls is not None:
        files = {name: str(getattr(config.tls, name)) for name in ("ca_file", "cert_file", "key_file")}
        job["tls_config"] = files
    return job
