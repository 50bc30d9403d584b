"""What dies in the middle of a step costs time, and nothing else."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import paceline
from paceline import Client, Group, RetryPolicy, SamplingParams, WeightFolder
from services.local import Platform
from tests.e2e.conftest import VOCAB, scrape
from tests.e2e.watched_platform import until

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
QUICK = SamplingParams(max_tokens=3, ignore_eos=True)
PATIENT = RetryPolicy(seconds=60, initial=0.1, maximum=1.0)


@pytest.fixture
def client(platform: Platform) -> Iterator[Client]:
    with platform.client(retry=PATIENT) as client:
        yield client


@pytest.fixture(autouse=True)
def whole_fleet(platform: Platform) -> Iterator[None]:
    """Every test leaves two serving instances behind."""
    yield
    for child in platform.instances:
        if not child.alive:
            platform.restart(child.spec.name)
    platform.wait_serving(2, time.monotonic() + 120)


def groups(count: int = 4, samples: int = 2) -> list[Group]:
    """Long samples, and a quick one that tells by its arrival that the long ones have begun."""
    long = [Group(f"p{n}", [3 + n % (VOCAB - 4), 4, 5], samples) for n in range(count)]
    return [*long, Group("quick", [3, 4], 1, QUICK)]


class Step:
    """A step in the middle of which something happens."""

    def __init__(self, client: Client, name: str, seed: int) -> None:
        """Return when the first sample is there: the others are being generated."""
        self._samples = iter(client.run(name, seed=seed).rollout(0, groups(), LONG))
        self._first = next(self._samples)
        assert self._first.prompt_id == "quick"

    def rest(self) -> list[paceline.Sample]:
        """All samples, from the stream that was opened before."""
        return [self._first, *self._samples]


def interrupted(
    client: Client,
    name: str,
    seed: int,
    interrupt: Callable[[], object],
    mend: Callable[[], object] = lambda: None,
) -> list[paceline.Sample]:
    """Return a step during which something ended; mends that and tries again where the step was over before."""
    for attempt in range(5):
        step = Step(client, f"{name}-{attempt}", seed)
        interrupt()
        samples = step.rest()
        if any(sample.provenance.resubmissions for sample in samples):
            return samples
        mend()
    pytest.fail("each step was over before it was interrupted")


def undisturbed(client: Client, seed: int) -> list[paceline.Sample]:
    """Return the same step with nothing happening. Run it after the other: known rollouts make a step short."""
    return list(client.run(f"undisturbed-{seed}", seed=seed).rollout(0, groups(), LONG))


def by_key(samples: list[paceline.Sample]) -> dict[paceline.SampleKey, list[int]]:
    return {sample.key: sample.token_ids.tolist() for sample in samples}


def test_a_killed_instance_costs_no_sample(platform: Platform, client: Client) -> None:
    samples = interrupted(
        client, "killed", 1, lambda: platform.kill("instance-0"), lambda: platform.restart("instance-0")
    )
    expected = undisturbed(client, seed=1)
    assert Counter(sample.key for sample in samples) == Counter(sample.key for sample in expected)
    assert by_key(samples) == by_key(expected), "resumed samples go on with the same noise"
    assert {sample.status for sample in samples} == {paceline.SampleStatus.TRUNCATED}
    for sample in [sample for sample in samples if sample.provenance.resubmissions]:
        assert sample.provenance.instance_spans[-1].instance_id == "instance-1"


def test_a_killed_instance_serves_again_only_with_the_current_weights(
    platform: Platform, client: Client, model: Path, tmp_path: Path
) -> None:
    platform.kill("instance-0")
    state: dict[str, Any] = load_file(model / "model.safetensors")
    run = client.run("weights", seed=1, weights=WeightFolder(tmp_path / "weights", model))
    version = run.push_weights({name: tensor * 1.5 for name, tensor in state.items()}).policy_version
    # The trainer's copy is not needed any more, not even by an instance that joins.
    shutil.rmtree(tmp_path / "weights")
    seen: list[tuple[paceline.InstanceState, int]] = []
    watching = threading.Event()

    def watch() -> None:
        with platform.client(retry=PATIENT) as watcher:
            for fleet in watcher.watch_fleet():
                watching.set()
                found = [i for i in fleet if i.instance_id == "instance-0"]
                seen.extend((i.state, i.policy_version) for i in found)
                if seen and seen[-1] == (paceline.InstanceState.SERVING, version):
                    return

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert watching.wait(60)
    platform.restart("instance-0")
    watcher.join(120)
    assert not watcher.is_alive()
    assert {v for state_, v in seen if state_ is paceline.InstanceState.SERVING} == {version}
    assert seen[0][0] is not paceline.InstanceState.SERVING
    samples = list(run.rollout(0, groups(), SamplingParams(max_tokens=60)))
    places = {span.instance_id for s in samples for span in s.provenance.instance_spans}
    assert places == {"instance-0", "instance-1"}
    assert {span.policy_version for s in samples for span in s.version_spans} == {version}


@pytest.mark.parametrize(("kill", "seed"), [(False, 2), (True, 3)], ids=["SIGTERM", "SIGKILL"])
def test_a_gateway_restart_in_the_middle_is_invisible(
    platform: Platform, client: Client, kill: bool, seed: int
) -> None:
    samples = interrupted(client, f"restarted-{seed}", seed, lambda: platform.restart("gateway", kill=kill))
    expected = undisturbed(client, seed)
    assert Counter(s.key for s in samples) == Counter(s.key for s in expected)
    assert by_key(samples) == by_key(expected)


def test_a_removed_instance_hands_its_samples_over(platform: Platform, client: Client) -> None:
    step = Step(client, "removed", seed=4)
    platform.remove("instance-1")
    assert by_key(step.rest()) == by_key(undisturbed(client, seed=4))
    assert platform.instances[1].returncode == 0
    # An alert goes off for each instance that is down, and this one was told to go.
    ready = platform.gateways[0].ready
    assert ready is not None

    def up() -> list[str]:
        lines = scrape(platform, f"127.0.0.1:{ready.metrics_port}").splitlines()
        return [line for line in lines if line.startswith("paceline_gateway_instance_up{")]

    until(lambda: up() == ['paceline_gateway_instance_up{instance_id="instance-0"} 1.0'], "one has left")


def test_a_paused_fleet_goes_on_where_it_was(client: Client) -> None:
    step = Step(client, "paused", seed=5)
    assert sorted(client.pause()) == ["instance-0", "instance-1"]
    states = {instance.state for instance in client.instances()}
    assert states == {paceline.InstanceState.PAUSED}
    client.resume()
    assert by_key(step.rest()) == by_key(undisturbed(client, seed=5))


def spans_of(sample: paceline.Sample) -> list[tuple[int, int, int]]:
    return [(span.begin, span.end, span.policy_version) for span in sample.version_spans]


def went_on(
    platform: Platform, client: Client, run: paceline.Run, new: dict[str, Any], old: dict[str, Any]
) -> list[paceline.Sample]:
    """Return a step that went on under new weights, and one of whose instances was killed then."""
    for attempt in range(5):
        step = Step(client, f"went-on-{attempt}", seed=6)
        finished = run.push_weights(new, in_flight=paceline.InFlight.CONTINUE)
        platform.kill("instance-0")
        samples = step.rest()
        both = [sample for sample in samples if len(sample.version_spans) == 2]
        if any(sample.provenance.resubmissions for sample in both):
            assert finished.continued_samples >= len(both)
            return samples
        platform.restart("instance-0")
        run.push_weights(old)
    pytest.fail("each step was over before the weights were there")


def test_samples_go_on_under_new_weights_and_a_killed_instance_costs_none(
    platform: Platform, client: Client, model: Path, tmp_path: Path
) -> None:
    old: dict[str, Any] = load_file(model / "model.safetensors")
    new = {name: tensor * 1.5 for name, tensor in old.items()}
    run = client.run("updates", seed=6, weights=WeightFolder(tmp_path / "weights", model))
    run.push_weights(old)
    samples = went_on(platform, client, run, new, old)
    version = client.versions().policy_version
    prompts = {group.prompt_id: group.prompt_token_ids for group in groups()}
    checked = [sample for sample in samples if len(sample.version_spans) == 2][:2]
    for sample in checked:
        cut = sample.version_spans[0].end
        assert spans_of(sample) == [(0, cut, version - 1), (cut, LONG.max_tokens, version)]
        request = paceline.SampleRequest(
            "reference",
            sample.prompt_id,
            prompts[sample.prompt_id],
            slot=sample.slot,
            prefix_token_ids=sample.token_ids[:cut],
            sampling=LONG,
            run_seed=6,
        )
        *_, reference = client.generate(request)
        assert isinstance(reference, paceline.Sample)
        assert reference.token_ids.tolist() == sample.token_ids[cut:].tolist()
    # Back to the old weights, and what is unfinished then ends.
    step = Step(client, "aborted", seed=7)
    aborted = run.push_weights(old, in_flight=paceline.InFlight.ABORT).aborted_samples
    partial = [sample for sample in step.rest() if sample.status is paceline.SampleStatus.ABORTED]
    assert len(partial) == aborted
    assert all(spans_of(sample) in ([], [(0, len(sample.token_ids), version)]) for sample in partial)
    expected = by_key(undisturbed(client, seed=6))
    for sample in samples:
        end = sample.version_spans[0].end if sample.version_spans[0].policy_version < version else 0
        assert sample.token_ids[:end].tolist() == expected[sample.key][:end]
    assert Counter(sample.key for sample in samples) == Counter(expected.keys())
