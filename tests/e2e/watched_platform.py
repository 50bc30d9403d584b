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
    """A platform that has done its work once, and who has watched it since `began` (unix seconds)."""

    platform: Platform
    client: Client
    prometheus: Prometheus
    collector: Collector
    work: Work
    began: float

    def over(self, expression: str) -> list[tuple[dict[str, str], list[list[float]]]]:
        """Return the values of an expression until now (`Prometheus.over`)."""
        return self.prometheus.over(expression, self.began, time.time())

    def works_until(self, holds: Callable[[], bool], seconds: float = 120) -> bool:
        """Repeat the work until `holds` of what was seen, for some time at most; return whether it does."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                return False
            self.work.round()
        return True


def until(holds: Callable[[], Any], what: str, seconds: float = 60) -> None:
    """Poll a condition that some process brings about."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def groups(step: int, count: int = 4, samples: int = 4) -> list[Group]:
    """Prompts that come again in every step, and a quick one."""
    return [*(Group(f"p{n}", [3 + n, 4, 5], samples) for n in range(count)), Group("quick", [3, 4], 1, QUICK)]


class Work:
    """What a platform is given to do. What panels show comes of it: soon, or on a slow machine not at once."""

    def __init__(self, client: Client, prometheus: Prometheus, model: Path, folder: Path) -> None:
        self._client, self._prometheus = client, prometheus
        self._state: dict[str, Any] = load_file(model / "model.safetensors")
        self._run = client.run("watched", seed=5, weights=WeightFolder(folder, model))
        self._moving, self._drained = client.run("moving", seed=8), client.run("drained", seed=8)
        self._steps, self._rounds = 0, 0

    def round(self) -> None:
        """Do everything once: hints, history, lenience, rewards, weights, moves, and calls that fail."""
        for last in (False, False, True):
            self._step(last)
        with pytest.raises(paceline.InvalidArgumentError):
            self._run.rollout(1_000_000, [Group("bad", [VOCAB], 1)], SAMPLING)
        # One sample is said to be as long as all others together, so the reallocator has something to even out.
        others = [Group(f"m{n}", [3 + n, 4], 1, expected_tokens=24) for n in range(12)]
        uneven = [Group("lone", [3, 4, 5], 1, expected_tokens=288), *others]
        list(self._moving.rollout(self._rounds, uneven, LONG))
        # Off an instance that is drained it moves whatever runs there.
        samples = iter(self._drained.rollout(self._rounds, groups(0, samples=2), LONG))
        next(samples)
        self._client.drain("instance-1")
        list(samples)
        self._client.resume(["instance-1"])
        serving = InstanceState.SERVING
        until(lambda: all(each.state is serving for each in self._client.instances()), "still draining")
        self._rounds += 1
        # Rates are of two scrapes, a second apart, and a rule looks a second back.
        at = time.time() + 3
        until(lambda: self._prometheus.now("min(timestamp(paceline_build_info))")[0][1] > at, "no scrape")

    def _step(self, last: bool) -> None:
        step, self._steps = self._steps, self._steps + 1
        version = self._client.versions().policy_version
        ahead = "paceline_generation_pregenerated_tokens_total"
        before = self._counted(ahead)
        # The last hint is of more than there is time for, so that the update halts it.
        hinted = (groups(step + 1, samples=16), HALTED) if last else (groups(step + 1), SAMPLING)
        self._run.hint(step + 1, *hinted, policy_version=version + 1)
        lenient = Exactness(ExactnessLevel.LENIENT, lenience=1.5) if step >= 2 else None
        rollout = self._run.rollout(step, groups(step), SAMPLING, exactness=lenient)
        rewards = [Reward(sample.prompt_id, sample.slot, 1.0) for sample in rollout]
        self._run.report_rewards(rollout.batch.batch_id, rewards, kl=1e-3, clip_fraction=0.1)
        until(lambda: self._counted(ahead) > before + 200, "nothing ahead")
        if step == 0:
            until(lambda: self._counted("paceline_drafter_candidates_total") > 0, "nothing was learned")
        self._run.push_weights({name: tensor * (1 + 1e-3 * step) for name, tensor in self._state.items()})

    def _counted(self, name: str) -> float:
        return sum(value for _, value in self._prometheus.now(f"sum({name})"))


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
        platform = Platform(config, launch=launch)
        prometheus = Prometheus(folder, scraping(platform), hastened(RULES))
        with platform, prometheus, platform.client() as client:
            began = time.time()
            work = Work(client, prometheus, model, folder / "weights")
            work.round()
            yield Watched(platform, client, prometheus, collector, work, began)


def scraping(platform: Platform) -> dict[str, Any]:
    """How Prometheus finds the platform's processes, and what it shows them."""
    config = platform.config
    job: dict[str, Any] = {
        "job_name": "paceline",
        "file_sd_configs": [{"files": [str(config.folder / "targets.json")], "refresh_interval": "1s"}],
    }
    job["authorization"] = {"credentials_file": str(platform.token_file)}
    if config.tls is not None:
        files = {name: str(getattr(config.tls, name)) for name in ("ca_file", "cert_file", "key_file")}
        job["tls_config"] = files
    return job
