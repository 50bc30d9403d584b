"""A whole instance of two ranks behind a gateway: it samples, and takes weights, as one of one rank does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest
from safetensors.torch import load_file

import paceline
from paceline import Client, Group, InFlight, Sample, SamplingParams, WeightFolder, WeightStream
from services.contracts.sampling import Sampling
from services.contracts.seeds import sample_seed
from services.generation.engine.types import EngineRequest
from services.local import Platform, PlatformConfig
from services.local.child import Process, ProcessSpec, spawned
from tests.integration.exactness.conftest import TIE
from tests.support.models import END_TOKEN, tiny_model
from tests.support.oracle import Oracle
from tests.support.refusing_rank import REFUSES
from tests.support.zygote import launch

pytestmark = [
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two ranks"),
    # Each rank is a process that imports vLLM by itself.
    pytest.mark.timeout(1500),
    pytest.mark.soak,
]

SEED = 5
SAMPLING = SamplingParams(max_tokens=48)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
ATTEMPTS = 10
WAIT = 60.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """A platform of one instance, the policies that it may serve, and the file at which a rank refuses one."""

    platform: Platform
    instance: Process
    model: Path
    other: Path
    refuses: Path


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("tensor-parallel")
    model, other = tiny_model(folder / "first"), tiny_model(folder / "second", seed=1)
    refuses = folder / "refuses"
    config = PlatformConfig(
        model=model,
        instances=1,
        folder=folder / "platform",
        pin=False,
        bubbles=False,
        policy=False,
        reallocator=False,
        draft_stores=0,
        instance_options=("--tensor-parallel-size=2", "--dtype=float32", "--kv-cache-memory-bytes=33554432"),
        environment={REFUSES: str(refuses)},
        start_timeout=900.0,
        stop_timeout=60.0,
    )
    instances = []

    def launched(spec: ProcessSpec, log: BinaryIO) -> Process:
        if spec.name != "instance-0":
            return launch(spec, log)
        argv = [
            "tests.support.refusing_rank" if each == "services.generation" else each for each in spec.argv
        ]
        instances.append(spawned(replace(spec, argv=argv), log))
        return instances[0]

    with Platform(config, launch=launched) as platform:
        shared = shared_memory(instances[0].pid)
        yield Fleet(platform, instances[0], model, other, refuses)
    # Ranks that are killed leave it behind.
    for file in shared:
        file.unlink(missing_ok=True)


def shared_memory(instance: int) -> set[Path]:
    """Return the files by which the ranks of an instance talk to each other."""
    ranks = psutil.Process(instance).children(recursive=True)
    paths = {Path(each.path) for rank in ranks for each in rank.memory_maps()}
    return {path for path in paths if path.name.startswith("vllm_dist_")}


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Client]:
    with fleet.platform.client() as client:
        yield client


def groups(count: int = 6, samples: int = 2) -> list[Group]:
    return [Group(f"p{n}", [3 + n, *range(20, 24 + n)], samples) for n in range(count)]


def sampled(client: Client, name: str) -> list[Sample]:
    """Return a step with the weights that are served."""
    return list(client.run(name, seed=SEED).rollout(0, groups(), SAMPLING))


def tokens(samples: Iterable[Sample]) -> dict[paceline.SampleKey, list[int]]:
    return {sample.key: sample.token_ids.tolist() for sample in samples}


def check(oracles: Sequence[Path], samples: Iterable[Sample], asked: SamplingParams = SAMPLING) -> None:
    """Check each span of versions against the policy that it should be of: no token is wrong by more than a tie.

    That is what is promised of tensor parallelism: its sums have an order of their own (docs/exactness.md).
    """
    judges = [Oracle(model, [END_TOKEN]) for model in oracles]
    prompts = {group.prompt_id: group.prompt_token_ids for group in groups()}
    sampling = Sampling(max_tokens=asked.max_tokens, ignore_eos=asked.ignore_eos)
    for sample in samples:
        seed = sample_seed(SEED, 0, sample.prompt_id, sample.slot)
        request = EngineRequest("s", tuple(prompts[sample.prompt_id]), (), sampling, seed)
        response = sample.token_ids.tolist()
        for judge, span in zip(judges[-len(sample.version_spans) :], sample.version_spans, strict=True):
            judged = judge.judge(request, response)
            assert max(judged.gap[span.begin : span.end], default=0) < TIE
            said = sample.logprobs.tolist()[span.begin : span.end]
            assert said == pytest.approx(judged.raw[span.begin : span.end], abs=1e-4)


def test_two_ranks_take_weights_by_every_way(fleet: Fleet, client: Client, tmp_path: Path) -> None:
    first, other = (load_file(each / "model.safetensors") for each in (fleet.model, fleet.other))
    before = sampled(client, "before")
    check([fleet.model], before)
    pushed = client.run("stream", weights=WeightStream()).push_weights(other)
    assert [each.applied for each in pushed.instances] == [True]
    after = sampled(client, "after")
    check([fleet.other], after)
    assert tokens(after) != tokens(before)
    by_folder = client.run("folder", weights=WeightFolder(tmp_path / "weights", fleet.model))
    by_folder.push_weights(first)
    assert tokens(sampled(client, "back")) == tokens(before)
    by_folder.push_weights(other)
    assert tokens(sampled(client, "again")) == tokens(after)
    by_folder.push_weights(first)


def test_samples_go_on_under_weights_that_both_ranks_take(fleet: Fleet, client: Client) -> None:
    first, other = (load_file(each / "model.safetensors") for each in (fleet.model, fleet.other))
    for attempt in range(ATTEMPTS):
        run = client.run(f"goes-on-{attempt}", seed=SEED, weights=WeightStream())
        quick = Group("quick", [3, 4], 1, SAMPLING)
        rollout = iter(run.rollout(0, [*groups(), quick], LONG))
        next(rollout)
        finished = run.push_weights(other, in_flight=InFlight.CONTINUE)
        samples = [sample for sample in rollout if sample.prompt_id != "quick"]
        run.push_weights(first)
        if finished.continued_samples:
            break
    else:
        pytest.fail("each step was over before the weights were there")
    both = [sample for sample in samples if len(sample.version_spans) == 2]
    assert both
    assert all(len(sample.token_ids) == LONG.max_tokens for sample in samples)
    check([fleet.model, fleet.other], both, LONG)


def test_a_rank_that_refuses_weights_ends_the_instance_and_leaves_the_version(
    fleet: Fleet, client: Client
) -> None:
    """The last test: the instance is over afterwards."""
    version = client.versions().policy_version
    ranks = psutil.Process(fleet.instance.pid).children(recursive=True)
    assert len(ranks) >= 2
    fleet.refuses.touch()
    other = load_file(fleet.other / "model.safetensors")
    with pytest.raises(paceline.FailedPreconditionError, match=f"{version} stays the published one"):
        client.run("refused", weights=WeightStream()).push_weights(other)
    assert client.versions().policy_version == version
    assert fleet.instance.wait(WAIT) == 1
    _, alive = psutil.wait_procs(ranks, timeout=WAIT)
    assert not alive
    assert "no memory for model.norm.weight" in fleet.platform.process("instance-0").spec.log.read_text()
