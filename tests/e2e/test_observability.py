"""A real Prometheus and a collector of traces watch a platform at work: dashboards, rules, an alert, one trace."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import Sample
from tests.e2e.conftest import scrape
from tests.e2e.watched_platform import LONG, SAMPLING, Watched, groups, until, watching
from tests.support.metric_names import EXPORTER, GPU_EXPORTER
from tests.support.otlp_collector import Seen
from tests.support.prometheus import ROOT
from tests.support.promql import operands, selectors, substituted

# Starting a platform on a busy machine is most of it.
pytestmark = pytest.mark.timeout(600)

FILES = ROOT / "helm/paceline/files"
DASHBOARDS = sorted(FILES.glob("dashboards/*.json"))
NOT_SEEN = {
    "paceline_speculation_drafter_faults_total": "no drafter has a defect",
    "paceline_generation_halt_delay_seconds_bucket": "only where bubbles end with the step: during_update=halt",
    "paceline_policy_draft_cap": "no run climbs the ladder",
    "paceline_scaling_recommended_replicas": "nobody scales a machine",
    "paceline_scaling_wanted_replicas": "nobody scales a machine",
    "paceline_scaling_replicas": "nobody scales a machine",
    **dict.fromkeys(EXPORTER, "no exporter of Redis runs here"),
    **dict.fromkeys(GPU_EXPORTER, "there is no GPU"),
}
"""Metrics without data in this test, and why."""
NOT_ALWAYS_SEEN = {
    "paceline_reallocator_achieved_gain_bucket": "measured only where no sample comes or goes meanwhile",
    "ALERTS": "nothing is wrong",
}
NOT_FAILED = ('{code=~"INTERNAL|', '{outcome="failed"}', "kernels_left_out")
"""Series that rules read and that begin with a failure: of a call, a move, or a kernel's check."""


@pytest.fixture(scope="module")
def watched(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watching(model, tmp_path_factory.mktemp("watched")) as watched:
        yield watched


def finite(series: list[tuple[dict[str, str], list[list[float]]]]) -> bool:
    return any(math.isfinite(value) for _, values in series for _, value in values)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_shows_something(watched: Watched, path: Path) -> None:
    panels = json.loads(path.read_text())["panels"]

    def empty() -> list[str]:
        return [
            f"{panel['title']}: {target['expr']}"
            for panel in panels
            for target in panel.get("targets", ())
            if not as_expected(substituted(target["expr"]))
        ]

    def as_expected(expression: str) -> bool:
        read = selectors(expression)
        if read & NOT_ALWAYS_SEEN.keys():
            return True
        return finite(watched.over(expression)) != bool(read & NOT_SEEN.keys())

    assert watched.works_until(lambda: not empty()), "\n".join(empty())


def test_every_rule_has_something_to_judge_by(watched: Watched) -> None:
    groups_ = watched.prometheus.get("rules")["groups"]
    rules = [rule for group in groups_ for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, [rule for rule in rules if rule["health"] != "ok"]

    def empty() -> list[str]:
        found = []
        for rule in rules:
            parts = [rule["name"]] if rule["type"] == "recording" else operands(rule["query"])
            # No exporter of Redis runs here; promtool tests the rules that read it.
            parts = [part for part in parts if not any(other in part for other in (*NOT_FAILED, *EXPORTER))]
            found += [f"{rule['name']}: {part}" for part in parts if not finite(watched.over(part))]
        return found

    assert watched.works_until(lambda: not empty()), "\n".join(empty())


def test_a_platform_at_work_sets_off_no_alarm(watched: Watched) -> None:
    def urgent() -> list[str]:
        return [each["alertname"] for each in watched.prometheus.firing() if each["severity"] == "critical"]

    # Windows are a second long here: one that a busy machine has set off is over soon.
    until(lambda: not urgent(), "an alarm goes on")


def test_every_metric_is_documented(watched: Watched) -> None:
    documented = (ROOT / "docs/metrics.md").read_text()
    names = {name for name in watched.prometheus.get("label/__name__/values") if name.startswith("paceline_")}
    families = {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in names}
    missing = {
        name
        for name in families
        if not re.search(rf"`{name}[`{{]", documented) and not name.endswith(("_created", "_info"))
    }
    assert len(families) > 80
    assert not missing


def children(spans: list[Seen], parent: Seen) -> list[Seen]:
    return [span for span in spans if span.parent == parent.id]


def test_a_sample_that_moved_is_one_trace_on_both_instances(watched: Watched) -> None:
    service = "paceline.internal.v1.MigrationService"
    calls = {f"{service}/Reserve", f"{service}/Commit"}

    def moves(spans: list[Seen]) -> list[tuple[Seen, list[Seen]]]:
        """Those of which all spans are there, as far as the instances send them; processes do when they please."""
        ids = {span.id for span in spans}
        found = [s for s in spans if s.name == "migrate" and s.attributes["outcome"] == "moved"]
        parts = [(move, children(spans, move)) for move in found if move.parent in ids]
        return [(move, made) for move, made in parts if {"generate", *calls} <= {span.name for span in made}]

    def whole(spans: list[Seen]) -> bool:
        by_id = {span.id: span for span in spans}
        placed = [by_id.get(by_id[move.parent].parent) for move, _ in moves(spans)]
        return any(span is not None and span.name == "sample" and span.parent in by_id for span in placed)

    assert watched.works_until(lambda: whole(watched.collector.spans())), "no sample moved"
    spans = watched.collector.spans()
    by_id = {span.id: span for span in spans}
    checked = 0
    for move, made in moves(spans):
        arrived = [span for span in made if span.name == "generate"]
        left = by_id[move.parent]
        assert (left.name, left.process) == ("generate", move.process)
        assert arrived[0].process == move.attributes["receiver_id"] != move.process
        assert arrived[0].attributes["slot"] == left.attributes["slot"]
        sample = by_id.get(left.parent)
        if sample is not None and sample.name == "sample" and sample.parent in by_id:
            checked += 1
            assert by_id[sample.parent].attributes["run_id"] == left.attributes["run_id"]
            assert (sample.attributes["verdict"], sample.attributes["to"]) == ("moved", arrived[0].process)
    assert checked, "no sample moved from where it had been placed"


def test_one_trace_goes_from_the_submission_to_the_engines(watched: Watched) -> None:
    watched.platform.kill("reallocator")
    rollout = watched.client.run("traced", seed=6).rollout(0, groups(0), SAMPLING)
    keys = {(sample.prompt_id, sample.slot) for sample in rollout}

    def mine(spans: list[Seen]) -> list[Seen]:
        traces = {span.trace for span in spans if span.attributes.get("run_id") == "traced"}
        return [span for span in spans if span.trace in traces]

    def whole(spans: list[Seen]) -> bool:
        found = mine(spans)
        samples = [span for span in found if span.name == "sample"]
        # Processes send their spans when they please.
        arrived = {span.name for span in found if not span.parent or span.name == "batch"}
        return (
            len(arrived) == 2
            and len(samples) == len(keys)
            and all(children(spans, sample) for sample in samples)
        )

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


def test_a_killed_instance_sets_off_its_alarm_and_stays_in_the_trace(watched: Watched) -> None:
    # Moves would be attempts as well.
    watched.platform.kill("reallocator")
    run, resumed = lost_by_a_kill(watched)
    spans = watched.collector.until(
        lambda spans: all(
            len(attempts(spans, run, sample)) == 2 and children(spans, attempts(spans, run, sample)[1])
            for sample in resumed
        )
    )
    prefixes = []
    for sample in resumed:
        lost, again = attempts(spans, run, sample)
        assert (lost.attributes["instance_id"], lost.attributes["cause"]) == ("instance-0", "lost")
        assert again.attributes["instance_id"] == "instance-1"
        prefixes.append(again.attributes["prefix_tokens"])
        (engine,) = children(spans, again)
        assert engine.process == "instance-1"
    assert max(prefixes) > 0


def lost_by_a_kill(watched: Watched) -> tuple[str, list[Sample]]:
    """Kill instance-0 in the middle of a step, wait for the alarms; the run, and its samples that were resumed.

    A step that was over before is followed by another one.
    """
    platform = watched.platform
    wanted = {("PacelineInstanceDown", "instance_id"), ("PacelineTargetDown", "instance")}

    def alarmed() -> bool:
        firing = watched.prometheus.firing()
        return all(
            any(f["alertname"] == a and f.get(label) == "instance-0" for f in firing) for a, label in wanted
        )

    def reported() -> float:
        """Return the tokens that instance-0 has told the gateway of."""
        ready = platform.gateways[0].ready
        assert ready is not None
        lines = scrape(platform, f"127.0.0.1:{ready.metrics_port}").splitlines()
        name = 'paceline_gateway_tokens_total{instance_id="instance-0"} '
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    for attempt in range(5):
        run, before = f"killed-{attempt}", reported()
        rollout = watched.client.run(run, seed=7).rollout(0, groups(0, count=2, samples=2), LONG)
        # More than the quick sample has.
        until(lambda: reported() > before + 8, "nothing was reported")  # noqa: B023
        platform.kill("instance-0")
        until(alarmed, "no alarm")
        names = {each["alertname"] for each in watched.prometheus.firing()}
        assert "PacelineRedisUnreachable" not in names
        assert "PacelineNoLeader" not in names
        if resumed := [sample for sample in rollout if sample.provenance.resubmissions]:
            return run, resumed
        platform.restart("instance-0")
    pytest.fail("each step was over before")


def attempts(spans: list[Seen], run: str, sample: Sample) -> list[Seen]:
    """Of one sample of a run, in order."""
    key = {"prompt_id": sample.prompt_id, "slot": sample.slot}
    traces = {s.trace for s in spans if s.name == "batch" and s.attributes["run_id"] == run}
    ours = [s for s in spans if s.trace in traces and s.name == "sample"]
    return sorted((s for s in ours if key.items() <= s.attributes.items()), key=lambda s: s.begin)
