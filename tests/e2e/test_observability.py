"""A real Prometheus and a collector of traces watch a platform at work: dashboards, rules, an alert, one trace."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
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
from tests.support.otlp_collector import Collector, Seen
from tests.support.prometheus import ROOT, Prometheus, tools
from tests.support.promql import hastened, operands, selectors, substituted
from tests.support.zygote import launch

# Starting a platform on a busy machine is most of it.
pytestmark = pytest.mark.timeout(300)

FILES = ROOT / "helm/paceline/files"
DASHBOARDS = sorted(FILES.glob("dashboards/*.json"))
RULES = (FILES / "rules.yaml").read_text()
SAMPLING = SamplingParams(max_tokens=80, ignore_eos=True)
QUICK = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, ignore_eos=True)

EAGER = (
    "--decision-steps=16",
    "--poll-seconds=0.02",
    "--least-gain=0",
    "--least-level-gain=0",
    "--payback=0",
    "--no-count-costs",
)
"""The reallocator moves whatever makes a step a little more even."""
LEARNING = (
    *("--lr=0.003", "--batch-tokens=256", "--depth=2", "--settle-seconds=0.1", "--report-seconds=0.1"),
    *("--publish-margin=0", "--publish-samples=1", "--held-out-share=0.3"),
)
"""The learner begins with few samples."""
NOT_SEEN = {
    "paceline_speculation_drafter_faults_total": "no drafter has a defect",
    "paceline_generation_halt_delay_seconds_bucket": "only where bubbles end with the step: during_update=halt",
    "paceline_policy_draft_cap": "no run climbs the ladder",
    "paceline_scaling_recommended_replicas": "nobody scales a machine",
    "paceline_scaling_wanted_replicas": "nobody scales a machine",
    "paceline_scaling_replicas": "nobody scales a machine",
}
"""Metrics without data in this test, and why."""
NOT_ALWAYS_SEEN = {
    "paceline_reallocator_achieved_gain_bucket": "measured only where no sample comes or goes meanwhile"
}
NOT_FAILED = ('{code=~"INTERNAL|', '{outcome="failed"}')
"""What rules look for that does not exist before it happens the first time: a failed call, a failed move."""


@dataclass(frozen=True)
class Watched:
    """A platform that has done some steps, and who has watched it from `began` to `ended` (unix seconds)."""

    platform: Platform
    client: Client
    prometheus: Prometheus
    collector: Collector
    began: float
    ended: float


def until(holds: Callable[[], Any], what: str, seconds: float = 40) -> None:
    """Polls a condition that some process brings about."""
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
    for step in range(4):
        version = client.versions().policy_version
        before = counted("paceline_generation_pregenerated_tokens_total")
        # The last hint is of more than there is time for, so that the update halts it.
        ahead = (groups(step + 1), SAMPLING) if step < 3 else (groups(step + 1, samples=16), LONG)
        run.hint(step + 1, *ahead, expected_version=version + 1)
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
    others = [Group(f"m{n}", [3 + n, 4], 1, expected_tokens=40) for n in range(12)]
    uneven = [Group("lone", [3, 4, 5], 1, expected_tokens=480), *others]
    list(client.run("moving", seed=8).rollout(0, uneven, SamplingParams(max_tokens=500, ignore_eos=True)))
    # How soon it does so depends on the machine. Off an instance that is drained it moves whatever runs there.
    samples = iter(client.run("drained", seed=8).rollout(0, groups(0), LONG))
    next(samples)
    client.drain("instance-1")
    list(samples)
    client.resume(["instance-1"])
    until(lambda: all(each.state is InstanceState.SERVING for each in client.instances()), "still draining")


@pytest.fixture(scope="module")
def watched(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    tools()
    folder = tmp_path_factory.mktemp("watched")
    with Collector() as collector:
        config = PlatformConfig(
            model=model,
            folder=folder / "platform",
            instance_options=("--dtype=float32", "--max-num-seqs=32", "--kv-cache-memory-bytes=67108864"),
            reallocator_options=EAGER,
            learner=True,
            learner_options=LEARNING,
            environment={"PACELINE_TRACING_ENDPOINT": collector.address},
            tls=certificates(tmp_path_factory.mktemp("certificates")) if UNDER_TLS else None,
            token="the token of the tests" if UNDER_TLS else None,
        )
        prometheus = Prometheus(folder, scraping(config), hastened(RULES))
        with Platform(config, launch=launch) as platform, prometheus, platform.client() as client:
            began = time.time()

            def counted(name: str) -> float:
                return sum(value for _, value in prometheus.now(f"sum({name})"))

            work(client, model, folder / "weights", counted)
            # Scraped once more after the last thing that happened.
            at = time.time()
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


def finite(series: list[tuple[dict[str, str], list[list[float]]]]) -> bool:
    return any(math.isfinite(value) for _, values in series for _, value in values)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_shows_something(watched: Watched, path: Path) -> None:
    empty = []
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel.get("targets", ()):
            series = watched.prometheus.over(substituted(target["expr"]), watched.began, watched.ended)
            read = selectors(substituted(target["expr"]))
            if finite(series) == bool(read & NOT_SEEN.keys()) and not read & NOT_ALWAYS_SEEN.keys():
                empty.append(f"{panel['title']}: {target['expr']}")
    assert not empty, "\n".join(empty)


def test_every_rule_has_something_to_judge_by(watched: Watched) -> None:
    groups_ = watched.prometheus.get("rules")["groups"]
    rules = [rule for group in groups_ for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, [rule for rule in rules if rule["health"] != "ok"]
    empty = []
    for rule in rules:
        parts = [rule["name"]] if rule["type"] == "recording" else operands(rule["query"])
        for part in parts:
            if any(failure in part for failure in NOT_FAILED):
                continue
            if not finite(watched.prometheus.over(part, watched.began, watched.ended)):
                empty.append(f"{rule['name']}: {part}")
    assert not empty, "\n".join(empty)


def test_a_platform_at_work_sets_off_no_alarm(watched: Watched) -> None:
    urgent = [each for each in watched.prometheus.firing() if each["severity"] == "critical"]
    assert not urgent


def test_every_metric_is_documented(watched: Watched) -> None:
    documented = (ROOT / "docs/metrics.md").read_text()
    names = {name for name in watched.prometheus.get("label/__name__/values") if name.startswith("paceline_")}
    families = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in names}
    missing = {
        name
        for name in families
        if f"`{name}`" not in documented and not name.endswith(("_created", "_info"))
    }
    assert len(families) > 80
    assert not missing


def children(spans: list[Seen], parent: Seen) -> list[Seen]:
    return [span for span in spans if span.parent == parent.id]


def test_one_trace_goes_from_the_submission_to_the_engines(watched: Watched) -> None:
    watched.platform.kill_reallocator()
    rollout = watched.client.run("traced", seed=6).rollout(0, groups(0), SAMPLING)
    keys = {(sample.prompt_id, sample.slot) for sample in rollout}

    def mine(spans: list[Seen]) -> list[Seen]:
        traces = {span.trace for span in spans if span.attributes.get("run_id") == "traced"}
        return [span for span in spans if span.trace in traces]

    def whole(spans: list[Seen]) -> bool:
        batches = [span for span in mine(spans) if span.name == "batch"]
        # Instances send their spans when they please.
        return bool(batches) and all(children(spans, sample) for sample in children(spans, batches[0]))

    spans = mine(watched.collector.until(whole))
    (root,) = [span for span in spans if not span.parent]
    assert root.name == "paceline.v1.RolloutService/SubmitRollouts"
    assert root.service == "paceline-gateway"
    (batch,) = [span for span in children(spans, root) if span.name == "batch"]
    assert batch.end > root.end, "the batch goes on after its submission was answered"
    samples = children(spans, batch)
    assert {(s.attributes["prompt_id"], s.attributes["slot"]) for s in samples} == keys
    generated = [span for sample in samples for span in children(spans, sample)]
    assert {span.name for span in generated} == {"generate"}
    assert {span.process for span in generated} == {"instance-0", "instance-1"}
    for sample in samples:
        (engine,) = children(spans, sample)
        assert engine.process == sample.attributes["instance_id"]
        assert engine.attributes["slot"] == sample.attributes["slot"]
        assert engine.attributes["tokens"] == sample.attributes["tokens"] > 0
        assert sample.attributes["verdict"] == "ended"
        assert engine.events == ("first_step",)
    assert {span.trace for span in spans} == {root.trace}


def test_a_sample_that_moved_is_one_trace_on_both_instances(watched: Watched) -> None:
    def moves(spans: list[Seen]) -> list[Seen]:
        return [s for s in spans if s.name == "migrate" and s.attributes["outcome"] == "moved"]

    def whole(spans: list[Seen]) -> bool:
        return any(child.name == "generate" for move in moves(spans) for child in children(spans, move))

    spans = watched.collector.until(whole)
    by_id = {span.id: span for span in spans}
    checked = 0
    for move in moves(spans):
        arrived = [child for child in children(spans, move) if child.name == "generate"]
        if not arrived:
            continue
        left = by_id[move.parent]
        assert (left.name, left.process) == ("generate", move.process)
        assert arrived[0].process == move.attributes["receiver_id"] != move.process
        assert arrived[0].attributes["slot"] == left.attributes["slot"]
        asked = {child.name for child in children(spans, move)} - {"generate"}
        service = "paceline.internal.v1.MigrationService"
        assert asked >= {f"{service}/Reserve", f"{service}/Commit"}
        sample = by_id.get(left.parent)
        if sample is not None and sample.name == "sample":
            checked += 1
            assert by_id[sample.parent].attributes["run_id"] == left.attributes["run_id"]
            assert (sample.attributes["verdict"], sample.attributes["to"]) == ("moved", arrived[0].process)
    assert checked, "no sample moved from where it had been placed"


def test_a_killed_instance_sets_off_its_alarm_and_stays_in_the_trace(watched: Watched) -> None:
    rollout = watched.client.run("killed", seed=7).rollout(0, groups(0, count=2, samples=2), LONG)
    first = next(iter(rollout))
    assert first.prompt_id == "quick"
    watched.platform.kill(0)
    wanted = {("PacelineInstanceDown", "instance_id"), ("PacelineTargetDown", "instance")}

    def alarmed() -> bool:
        firing = watched.prometheus.firing()
        return all(
            any(f["alertname"] == a and f.get(label) == "instance-0" for f in firing) for a, label in wanted
        )

    until(alarmed, "no alarm")
    names = {each["alertname"] for each in watched.prometheus.firing()}
    assert "PacelineRedisUnreachable" not in names
    assert "PacelineNoLeader" not in names

    samples = list(rollout)
    resumed = [sample for sample in samples if sample.provenance.resubmissions]
    assert resumed, "nothing ran on the killed instance"

    key = {"prompt_id": resumed[0].prompt_id, "slot": resumed[0].slot}

    def attempts(spans: list[Seen]) -> list[Seen]:
        """Of one resumed sample, in order."""
        traces = {s.trace for s in spans if s.name == "batch" and s.attributes["run_id"] == "killed"}
        ours = [s for s in spans if s.trace in traces and s.name == "sample"]
        return sorted((s for s in ours if key.items() <= s.attributes.items()), key=lambda s: s.begin)

    spans = watched.collector.until(
        lambda all_: len(attempts(all_)) == 2 and bool(children(all_, attempts(all_)[1]))
    )
    lost, again = attempts(spans)
    assert (lost.attributes["instance_id"], lost.attributes["cause"]) == ("instance-0", "lost")
    assert again.attributes["instance_id"] == "instance-1"
    assert again.attributes["prefix_tokens"] > 0
    (engine,) = children(spans, again)
    assert engine.process == "instance-1"
