"""A thousand steps of GRPO, with restarts and moves: samples stay those of the policy, and nothing is left behind.

make soak SOAK_ARGS="tests/e2e/test_thousand_steps.py --soak-steps=1000"

In the first half a process is killed or replaced in the middle of every sixteenth step. The second half tells what
each step leaves behind. The short forms are test_footprint.py and tests/chaos.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Self, cast

import pytest

from examples.tinymath.options import MODEL, Options
from examples.tinymath.records import StepRecord
from examples.tinymath.train import new_learner, train
from paceline import Group, RetryPolicy, Rollout, Run, Sample, SamplingParams, WeightStream
from services.contracts.seeds import sample_seed
from services.generation.engine.types import EngineRequest, Sampling
from services.local import Platform, PlatformConfig
from tests.e2e.conftest import http_client
from tests.e2e.footprint_steps import observe
from tests.support.footprint import Footprint, Limits, Record, footprints
from tests.support.oracle import Oracle
from tests.support.soak import Progress, record
from tests.support.zygote import launch

STEPS = 1000
LIMITS = Limits(memory=32 << 10, files=0.01, threads=0.01, keys=0.05)
"""1 KiB a sample: a leak of 4 KiB a sample, or of 100 KiB a step, is three times as much."""
KEPT_SECONDS = 5
"""For which Redis keeps batches."""
BETWEEN = 16
"""Steps from one disturbance to the next."""
RESTARTS = 3
SEED = 11
OPTIONS = Options(prompts=8, samples=4, pool=64, max_tokens=120, lr=1e-5, seed=SEED)
"""A learning rate at which the policy writes answers of usual length to the end."""
LONG = 600
"""Tokens of the samples of a step in which an instance ends, so that they are still running when it is noticed."""
JUDGED = 0.1
"""Share of the steps whose samples are judged."""
TIE = 1e-3
"""Scores closer than this are a tie: two forward passes in float32 agree to about 1e-5 here."""
PATIENT = RetryPolicy(seconds=300.0, maximum=1.0)


@pytest.fixture
def whole_platform(tmp_path: Path) -> Iterator[Platform]:
    """Every kind of process, two gateways; index and cache so small that steps have soon filled them."""
    config = PlatformConfig(
        model=MODEL,
        instances=2,
        gateways=2,
        learner=True,
        folder=tmp_path / "platform",
        pin=False,
        http_port=0,
        instance_options=(
            "--dtype=float32",
            "--max-num-seqs=32",
            "--kv-cache-memory-bytes=67108864",
            # By default 4 million tokens and 256 MiB, which take thousands of these steps to fill.
            "--draft-index-tokens=50000",
            "--draft-cache-bytes=4194304",
        ),
        gateway_options=(f"--acknowledged-seconds={KEPT_SECONDS}", "--lease-seconds=1"),
        # Whatever makes a step a little more even is moved.
        reallocator_options=(
            "--decision-steps=16",
            "--least-gain=0",
            "--least-balance-gain=0",
            "--payback=0",
        ),
        environment={"OMP_NUM_THREADS": "1"},
        start_timeout=900.0,
        stop_timeout=60.0,
    )
    with Platform(config, launch=launch) as platform:
        yield platform


@dataclass
class Seen:
    """What was seen of the samples."""

    samples: int = 0
    moved: int = 0
    resubmitted: int = 0
    rewards: list[float] = field(default_factory=list)
    judged: int = 0
    """Tokens that were compared with the policy's own."""
    ties: int = 0
    """Judged tokens for which another one has a score within `TIE`."""
    wrong: list[str] = field(default_factory=list)
    """Samples with a token that is not the policy's."""
    strikes: dict[str, int] = field(default_factory=dict)

    def add(self, found: StepRecord) -> None:
        """Add a finished step."""
        self.samples += len(found.lengths)
        self.moved += found.migrations
        self.resubmitted += found.resubmissions
        self.rewards.append(found.reward)


class Training:
    """A GRPO run on tinymath, step by step, with a few samples over HTTP after each.

    It is the `Run` of the trainer, whose `rollout` is disturbed.
    """

    def __init__(self, platform: Platform, steps: int, seed: int, folder: Path) -> None:
        self.seen = Seen()
        self._platform = platform
        self._folder = folder
        chance = Random(seed)
        self._judged = set(chance.sample(range(steps), round(JUDGED * steps)))
        instances, all_processes = (
            [each.spec.name for each in these] for these in (platform.instances, platform.processes)
        )
        # In turn a kill of any process, and the end of an instance, which moves its samples away first.
        self._kills = {step: chance.choice(all_processes) for step in range(BETWEEN, steps // 2, 2 * BETWEEN)}
        self._ends = {step: chance.choice(instances) for step in range(2 * BETWEEN, steps // 2, 2 * BETWEEN)}
        self._learner = new_learner(MODEL, OPTIONS)
        self._client = platform.client(retry=PATIENT)
        self._run = self._client.run("thousand", seed=SEED, weights=WeightStream())
        self._http = http_client(platform)
        self._done = 0
        # Steps of the restarts at the end are trained as well.
        options = Options(**asdict(OPTIONS) | {"steps": steps + 3 * RESTARTS})
        self._records = train(cast(Run, self), self._learner, options, sampled=self._judge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._run.close()
        self._client.close()
        self._http.close()

    def step(self) -> None:
        """Train one step."""
        self.seen.add(next(self._records))
        self._done += 1
        body = {"prompt": [3, 4, 5 + self._done % 8], "n": 2, "max_tokens": 8, "ignore_eos": True}
        self._http.post("/v1/completions", json=body).raise_for_status()

    def rollout(self, step: int, groups: Sequence[Group], sampling: SamplingParams, **named: Any) -> Rollout:
        """Submit a step, and kill or replace the process whose turn it is while its samples run."""
        if step in self._ends:
            sampling = replace(sampling, max_tokens=LONG, ignore_eos=True)
        rollout = self._run.rollout(step, groups, sampling, **named)
        for names, what in ((self._kills, "killed"), (self._ends, "replaced")):
            if step in names:
                self._platform.restart(names[step], kill=what == "killed")
                strike = f"{names[step]} {what}"
                self.seen.strikes[strike] = self.seen.strikes.get(strike, 0) + 1
        return rollout

    def hint(self, step: int, *given: Any, **named: Any) -> None:
        """Announce a step, unless an instance ends in it: samples that were generated ahead end too soon."""
        if step not in self._ends:
            self._run.hint(step, *given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def _judge(self, step: int, groups: Sequence[Group], samples: Sequence[Sample], seconds: float) -> None:
        """Compare the samples of a judged step with what transformers samples with the policy's weights."""
        wanted = {(group.prompt_id, slot) for group in groups for slot in range(group.samples)}
        got = [(sample.prompt_id, sample.slot) for sample in samples]
        assert sorted(got) == sorted(wanted), f"step {step}: samples are lost or doubled"
        if step not in self._judged:
            return
        oracle, prompts = self._policy(), {group.prompt_id: group.prompt_token_ids for group in groups}
        sampling = Sampling(max_tokens=OPTIONS.max_tokens, temperature=OPTIONS.temperature)
        for sample in samples:
            seed = sample_seed(SEED, step, sample.prompt_id, sample.slot)
            request = EngineRequest("", tuple(prompts[sample.prompt_id]), (), sampling, seed)
            judged = oracle.judge(request, sample.token_ids.tolist())
            self.seen.judged += len(judged.gap)
            self.seen.ties += sum(0 < gap < TIE for gap in judged.gap)
            if max(judged.gap, default=0.0) >= TIE:
                self.seen.wrong.append(f"step {step}, {sample.prompt_id}/{sample.slot}: {judged.expected}")

    def _policy(self) -> Oracle:
        """Return the policy that the samples are of: the learner's, before it learns from them."""
        policy: Any = self._learner.model
        policy.save_pretrained(self._folder)
        return Oracle(self._folder)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_thousand_steps_give_the_policys_samples_and_leave_nothing_behind(
    whole_platform: Platform, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    platform, option = whole_platform, request.config.getoption
    steps, seed = option("soak_steps") or STEPS, option("chaos_seed") or int(time.time())
    progress, began, folder = Progress("thousand", steps, "step"), time.monotonic(), tmp_path / "policy"
    print(f"thousand: repeat with --soak-steps={steps} --chaos-seed={seed}", flush=True)
    # What a new process holds is judged once no process is new any more.
    disturbed = steps // 2

    with Training(platform, steps, seed, folder) as training:

        def tell(before: int, found: Record) -> None:
            if len(found.keys) % 20 == 0:
                held = {name: f"{each[-1].memory / 2**20:.0f}" for name, each in found.processes.items()}
                seen = training.seen
                counts = f"{seen.moved} moved, {seen.judged} tokens judged, {len(seen.wrong)} samples wrong"
                done = before + len(found.keys)
                progress.tell(done, f"{counts}, MiB: {held}, keys: {found.keys[-1]:.0f}")

        observe(training.step, platform, disturbed, lambda found: tell(0, found))
        found = observe(training.step, platform, steps - disturbed, lambda found: tell(disturbed, found))
        rounds = [after_restarts(training, platform) for _ in range(RESTARTS)]
        seen = training.seen

    figures: dict[str, Any] = {
        "steps": steps,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "seen": asdict(seen),
        "limits": asdict(LIMITS),
        "growth": found.growth(),
        "held": {name: [asdict(each) for each in held] for name, held in found.processes.items()},
        "keys": found.keys,
        "restarts": [{name: asdict(each) for name, each in held.items()} for held in rounds],
    }
    record("thousand", figures)
    assert seen.wrong == []
    assert min(seen.judged, seen.moved, seen.resubmitted) > 0, "nothing was judged, moved or disturbed"
    assert found.above(LIMITS) == {}
    assert more_than(rounds[0], rounds[-1]) == {}


def after_restarts(training: Training, platform: Platform) -> dict[str, Footprint]:
    """Kill an instance and the gateway that leads; return what is held once steps go on."""
    platform.restart("instance-0", kill=True)
    training.step()
    for gateway in ("gateway", "gateway-1"):
        # The other one leads meanwhile, and from then on.
        platform.restart(gateway, kill=True)
        training.step()
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
