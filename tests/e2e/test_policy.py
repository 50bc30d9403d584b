"""Knobs on the whole platform: every instance follows, and no sample changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline import (
    Client,
    Exactness,
    ExactnessLevel,
    Group,
    KnobSetting,
    RetryPolicy,
    Reward,
    Sample,
    SampleKey,
    SamplingParams,
    UnavailableError,
)
from paceline.cli.app import run as command
from paceline.report.facts import RunFacts, read_facts
from services.contracts.modes import MODES
from services.local import Platform
from services.local.up import leave_report
from tests.e2e.conftest import scrape

SAMPLING = SamplingParams(max_tokens=60, ignore_eos=True)
COUPLED = Exactness(ExactnessLevel.COUPLED_HISTORY)
DRAFTED = "paceline_speculation_drafted_tokens_total"


def step(client: Client, run: str, number: int) -> list[Sample]:
    """Return a step whose samples have the same noise in every step and run."""
    groups = [Group(f"p{n}", [3 + n, 4, 5], 4) for n in range(4)]
    return list(client.run(run, seed=21).rollout(number, groups, SAMPLING, exactness=COUPLED))


def tokens(samples: Sequence[Sample]) -> dict[SampleKey, list[int]]:
    return {sample.key: sample.token_ids.tolist() for sample in samples}


def drafted(samples: Sequence[Sample]) -> int:
    return sum(sample.provenance.drafted for sample in samples)


def speculated(client: Client, run: str, first: int) -> list[Sample]:
    """Steps of a run until one is drafted for: history comes back in the background."""
    deadline = time.monotonic() + 60
    number = first
    while True:
        samples = step(client, run, number)
        if drafted(samples):
            return samples
        assert time.monotonic() < deadline, "no step was drafted for"
        number += 1


def verified(platform: Platform, client: Client) -> dict[str, float]:
    """Draft tokens that each instance has verified."""
    return {
        instance.instance_id: sum(
            float(line.rsplit(" ", 1)[1])
            for line in scrape(platform, instance.metrics_address).splitlines()
            if line.startswith(DRAFTED)
        )
        for instance in client.instances()
    }


def change(client: Client, **knobs: object) -> None:
    """Set the fleet's knobs, and return when every instance works by them."""
    deadline = time.monotonic() + 60
    while (done := client.set_knobs("", KnobSetting(client.knobs().revision, knobs))).pending:
        assert time.monotonic() < deadline, done
    assert done.applied == ("instance-0", "instance-1")
    (used,) = client.knobs().effective
    assert used.instance_ids == done.applied
    assert {name: used.knobs[name] for name, value in knobs.items() if not isinstance(value, dict)} == {
        name: value for name, value in knobs.items() if not isinstance(value, dict)
    }


def test_the_kill_switch_stops_all_drafting_and_no_sample_changes(platform: Platform, client: Client) -> None:
    plain = tokens(step(client, "kill", 0))
    assert tokens(speculated(client, "kill", 1)) == plain
    # Until both instances have drafted.
    for number in range(1000, 1100):
        if all(verified(platform, client).values()):
            break
        assert tokens(step(client, "kill", number)) == plain
    change(client, speculation=False)
    before = verified(platform, client)
    assert all(before.values()), "both instances have drafted"
    for number in range(2000, 2002):
        samples = step(client, "kill", number)
        assert tokens(samples) == plain
        assert drafted(samples) == 0
    assert verified(platform, client) == before
    change(client, speculation=True, mode="toggle")
    assert tokens(speculated(client, "kill", 2200)) == plain


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_samples_and_says_what_it_did(client: Client, mode: str) -> None:
    began = time.time()
    change(client, mode=mode)
    run = f"mode-{mode}"
    first = tokens(step(client, run, 0))
    assert tokens(speculated(client, run, 1)) == first
    for decision in client.watch_decisions(run, began):
        if decision.kind == "speculation" and decision.details["drafts"]:
            break
    assert decision.run_id == run
    assert decision.details["mode"] == mode
    assert "engine steps verified drafts" in decision.reason
    assert sum(decision.details["reasons"].values()) == decision.details["engine_steps"]


def reported(client: Client, run: str, steps: int) -> RunFacts:
    """Return the facts of a run once the decision log has every step of it with its reward and its plan."""
    deadline = time.monotonic() + 60
    while True:
        facts = read_facts(list(client.watch_decisions(run, kept=True)), run)
        known = [each for each in facts.steps if each.rewards and each.engine_steps]
        if len(known) == steps:
            return facts
        assert time.monotonic() < deadline, facts
        time.sleep(0.1)


def test_the_report_of_a_run_has_its_instances_and_where_the_time_of_its_last_samples_went(
    platform: Platform, client: Client, tmp_path: Path
) -> None:
    change(client, mode="planner")
    groups = [Group(f"p{n}", [3 + n, 4, 5], 4) for n in range(4)]
    samples: list[list[Sample]] = []
    with client.run("reported", seed=21) as run:
        for number in range(2):
            rollout = run.rollout(number, groups, SAMPLING, exactness=COUPLED)
            samples.append(list(rollout))
            rewards = (Reward(each.prompt_id, each.slot, each.slot / 3) for each in samples[-1])
            assert rollout.report_rewards(rewards) == 16
    facts = reported(client, "reported", 2)
    assert facts.unread == 0
    for step, own in zip(facts.steps, samples, strict=True):
        assert (step.samples, step.tokens) == (16, sum(len(each.token_ids) for each in own))
        assert [row.instance_id for row in step.rows] == ["instance-0", "instance-1"]
        # A sample that was moved counts on both.
        assert sum(row.samples for row in step.rows) >= 16
        assert step.reward == pytest.approx(0.5)
        path, ends = step.last[0], {each.key: each.provenance.instance_spans[-1].end for each in own}
        (last,) = (each for each in own if (each.prompt_id, each.slot) == (path.prompt_id, path.slot))
        assert path.ended_at == pytest.approx(max(ends.values()), abs=1e-3)
        assert ends[last.key] == max(ends.values())
        whole = last.provenance.queue_seconds + last.provenance.generation_seconds
        assert path.seconds == pytest.approx(whole, abs=1e-3)
        assert sum(path.parts.values()) == pytest.approx(whole, abs=1e-3)
        assert path.parts["prefill"] > 0
        # An engine step of the sample was plain or verified a draft of it, and took its time.
        assert (path.parts["verified"] > 0) == (path.verify_steps > 0)
        assert path.parts["verified"] + path.parts["plain"] > 0
    config, page, saved = platform.config, tmp_path / "report.html", tmp_path / "entries.jsonl"
    secrets = [f"--token={config.token}"] if config.token else []
    if config.tls is not None:
        secrets += [f"--ca-file={config.tls.ca_file}", f"--cert-file={config.tls.cert_file}"]
        secrets.append(f"--key-file={config.tls.key_file}")
    options = [f"--address={platform.gateway_address}", "--run=reported", *secrets]
    assert command(["report", *options, f"--output={page}", f"--save={saved}"]) == 0
    text = page.read_text()
    assert ">instance-0</text>" in text
    assert "Mean reward 0.500 in step 0, 0.500 in step 1." in text
    again = tmp_path / "again.html"
    assert command(["report", f"--entries={saved}", "--run=reported", f"--output={again}"]) == 0
    assert again.read_text() == text
    left = leave_report(platform)
    assert left == config.folder / "report.html"
    assert ">instance-0</text>" in left.read_text()
    assert saved.read_text().splitlines()[-1] in left.with_suffix(".jsonl").read_text().splitlines()


def test_without_the_policy_service_the_knobs_stay_in_force(platform: Platform, client: Client) -> None:
    change(client, speculation=False)
    plain = tokens(step(client, "alone", 0))
    known = client.knobs()
    platform.kill("policy")
    try:
        with platform.client(retry=RetryPolicy(seconds=0)) as impatient, pytest.raises(UnavailableError):
            impatient.set_knobs("", KnobSetting(known.revision, {}))
        for number in range(1, 3):
            samples = step(client, "alone", number)
            assert tokens(samples) == plain
            assert drafted(samples) == 0
    finally:
        platform.restart("policy")
    assert client.knobs() == known
    change(client, speculation=True)
    assert tokens(speculated(client, "alone", 3)) == plain
