"""Samples move between instances in mid-step, whatever dies meanwhile, and nobody can tell by the result."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import pytest

import paceline
from paceline import Client, Group, RetryPolicy, Rollout, Sample, SamplingParams
from services.local import Platform, PlatformConfig
from tests.e2e.conftest import UNDER_TLS, VOCAB, certificates, scrape
from tests.support.zygote import launch

LENGTH = 400
LONG = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
PATIENT = RetryPolicy(seconds=60, initial=0.1, maximum=1.0)
SEED, SAMPLES = 31, 17
Key = paceline.SampleKey


@pytest.fixture(scope="module")
def platform(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Without speculation, so that a step lasts; and whatever makes it a little more even is moved."""
    config = PlatformConfig(
        model=model,
        instances=2,
        folder=tmp_path_factory.mktemp("platform"),
        pin=False,  # the kernel shares the cores out among the workers
        instance_options=(
            "--dtype=float32",
            "--max-num-seqs=32",
            "--kv-cache-memory-bytes=268435456",
            "--speculation=off",
            "--no-drafts",
            # However slow the machine is, all can be moved away.
            "--evacuation-seconds=40",
        ),
        draft_stores=0,
        bubbles=False,
        policy=False,
        stop_timeout=60.0,
        reallocator_options=(
            "--decision-steps=16",
            "--poll-seconds=0.02",
            "--least-gain=0",
            "--least-balance-gain=0",
            "--payback=0",
            "--no-count-costs",
            # That no prefix is read again is part of what is tested.
            "--by=kv",
            "--lease-seconds=0.5",
            # A machine that is slow moves all that was decided on, only later.
            "--stale-seconds=20",
        ),
        tls=certificates(tmp_path_factory.mktemp("certificates")) if UNDER_TLS else None,
        token="the token of the tests" if UNDER_TLS else None,
    )
    with Platform(config, launch=launch) as platform:
        yield platform


@pytest.fixture
def client(platform: Platform) -> Iterator[Client]:
    with platform.client(retry=PATIENT) as client:
        yield client


@pytest.fixture(autouse=True)
def whole_fleet(platform: Platform) -> None:
    """Every test begins with two serving instances."""
    for child in platform.instances:
        if not child.alive:
            platform.restart(child.spec.name)


@pytest.fixture(scope="module")
def truth(platform: Platform) -> dict[Key, list[int]]:
    """The step's tokens when nobody moves anything."""
    platform.kill("reallocator")
    with platform.client() as client:
        samples = list(client.run("still", seed=SEED).rollout(0, uneven(), LONG))
    platform.restart("reallocator")
    assert all(len(places(sample)) == 1 for sample in samples)
    counts = Counter(places(sample)[0] for sample in samples)
    assert sorted(counts.values()) == [1, SAMPLES - 1], "the load is uneven"
    return tokens(samples)


def uneven() -> list[Group]:
    """One sample that is said to be as long as all others together: they are placed on the other instance."""
    others = [
        Group(f"p{n}", [3 + n % (VOCAB - 4), 4], 1, expected_tokens=LENGTH // SAMPLES)
        for n in range(SAMPLES - 1)
    ]
    return [Group("lone", [3, 4, 5], 1, expected_tokens=LENGTH), *others]


def places(sample: Sample) -> list[str]:
    return [span.instance_id for span in sample.provenance.instance_spans]


def tokens(samples: Sequence[Sample]) -> dict[Key, list[int]]:
    return {sample.key: sample.token_ids.tolist() for sample in samples}


def counted(platform: Platform, name: str) -> float:
    """Return a counter of the reallocator, summed over its labels; 0 while it is not there."""
    child = platform.process("reallocator")
    if child.ready is None:
        return 0.0
    lines = scrape(platform, f"127.0.0.1:{child.ready.metrics_port}").splitlines()
    name = f"paceline_reallocator_{name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def first_difference(sample: Sample, expected: list[int]) -> str | None:
    """Where a sample stops being what it should be, and where it was computed around there."""
    found = sample.token_ids.tolist()
    if found == expected:
        return None
    pairs = zip_longest(found, expected)
    position = next(n for n, (ours, theirs) in enumerate(pairs) if ours != theirs)
    spans = [
        (each.begin_token, each.end_token, each.instance_id) for each in sample.provenance.instance_spans
    ]
    return (
        f"{sample.key} from position {position} on: {found[position : position + 4]} instead of "
        f"{expected[position : position + 4]}; computed as {spans}, "
        f"{sample.provenance.resubmissions} resubmissions"
    )


def finished(samples: Sequence[Sample], truth: dict[Key, list[int]]) -> None:
    """Every sample is there once, and as if nothing had happened."""
    assert Counter(sample.key for sample in samples) == Counter(truth.keys())
    ends = {(sample.status, sample.error) for sample in samples}
    assert ends == {(paceline.SampleStatus.TRUNCATED, "")}
    assert [found for each in samples if (found := first_difference(each, truth[each.key]))] == []


def test_an_uneven_step_is_evened_out(
    platform: Platform, client: Client, truth: dict[Key, list[int]]
) -> None:
    # Where a reallocator that was stalled came too late for a step, another one is tried.
    for attempt in range(10):
        before = counted(platform, "moves_total")
        samples = list(client.run(f"uneven-{attempt}", seed=SEED).rollout(0, uneven(), LONG))
        finished(samples, truth)
        moved = [sample for sample in samples if len(places(sample)) > 1]
        if len(moved) >= SAMPLES // 3:
            break
    else:
        pytest.fail("no step was evened out")
    assert sum(sample.provenance.resubmissions for sample in samples) == 0, "no prefix was read again"
    assert all(sample.provenance.migrations for sample in moved)
    # A move is counted when its donor has told of it, which may be after the sample's end.
    until(lambda: counted(platform, "moves_total") - before >= len(moved))
    steps = {sample.provenance.decode_steps for sample in moved}
    assert steps == {LENGTH}, "each token took one step, somewhere"


@pytest.mark.parametrize("victim", ["receiver", "donor"])
def test_one_that_is_killed_in_the_middle_of_moves_costs_time_only(
    platform: Platform, client: Client, truth: dict[Key, list[int]], victim: str
) -> None:
    # Another step is tried where one was over before.
    for attempt in range(5):
        rollout = moving(platform, client, f"killed-{victim}-{attempt}")
        crowded, lone = sorted(range(2), key=lambda n: -samples_on(platform, n))
        name = f"instance-{lone if victim == 'receiver' else crowded}"
        platform.kill(name)
        samples = list(rollout)
        finished(samples, truth)
        if any(sample.provenance.resubmissions for sample in samples):
            break
        platform.restart(name)
    else:
        pytest.fail("each step was over before")


def moving(platform: Platform, client: Client, name: str) -> Rollout:
    """Return a step of which a sample has moved: another one where the reallocator came too late for it."""
    before = counted(platform, "moves_total")
    for attempt in range(10):
        run = f"{name}.{attempt}"
        rollout = client.run(run, seed=SEED).rollout(0, uneven(), LONG)

        def over(run: str = run, batch: str = rollout.batch.batch_id) -> bool:
            status = client.batch(run, batch)
            return status.finished == status.total

        until(lambda over=over: counted(platform, "moves_total") > before or over())
        if counted(platform, "moves_total") > before:
            return rollout
    pytest.fail("no sample of any step was moved")


def samples_on(platform: Platform, index: int) -> float:
    """Return the samples that an instance has now."""
    ready = platform.instances[index].ready
    assert ready is not None
    lines = scrape(platform, f"127.0.0.1:{ready.metrics_port}").splitlines()
    names = ("paceline_generation_running_samples ", "paceline_generation_waiting_samples ")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


def test_an_instance_that_is_stopped_in_mid_step_is_emptied_by_moves(
    platform: Platform, client: Client, truth: dict[Key, list[int]]
) -> None:
    for attempt in range(5):
        rollout = moving(platform, client, f"stopped-{attempt}")
        platform.remove("instance-1")
        assert platform.instances[1].returncode == 0
        samples = list(rollout)
        finished(samples, truth)
        assert sum(sample.provenance.resubmissions for sample in samples) == 0, "all of them were moved"
        if any(places(sample)[-2:] == ["instance-1", "instance-0"] for sample in samples):
            break
        platform.restart("instance-1")
    else:
        pytest.fail("each step was over before")
