"""What earlier epochs bring is told of the steps after the first, and of all processes of a kind together."""

from __future__ import annotations

from dataclasses import replace

from bench.earlier_epochs import ARMS, ArmRun, figures_of, means
from bench.scrape import Metrics
from bench.trajectory import Trajectory
from examples.tinymath.train import MODEL, Options
from tests.unit.bench.steps import sample, step

_OPTIONS = Options(steps=2, prompts=1, samples=1, pool=1)


def test_figures_are_of_the_steps_after_the_first_epoch() -> None:
    counted = {
        "drafts-0": Metrics({"paceline_drafts_tokens_fetched_total": 30.0}),
        "gateway": Metrics({'paceline_gateway_history_rollouts_total{outcome="stored"}': 1.0}),
        "instance-0": Metrics({'paceline_drafts_index_tokens_total{phase="insert"}': 5.0}),
    }
    first = step(sample(0, [1] * 100, decode_steps=99))
    second = step(sample(0, [1] * 10, decode_steps=4), step=1, metrics=counted)
    ends = [{"gateway": 1.0, "instance": 7.0}, {"gateway": 1.5, "instance": 9.0}]
    coupled = next(arm for arm in ARMS if arm.exactness != ARMS[0].exactness)
    trajectory = Trajectory(_OPTIONS, (), MODEL)
    found = figures_of(coupled, trajectory, ArmRun([first, second], ends))
    assert (found["decode_steps_mean"], found["kept_share"]) == (4, 1)
    assert (found["fetched_share"], found["indexed_share"]) == (3, 0.5)
    assert (found["gateway_milliseconds"], found["instance_milliseconds"]) == (500, 2000)
    assert found["compared"] == 0, "its noise is not that of the recorded run"


def test_the_mean_over_rounds_is_told_of_what_all_rounds_have() -> None:
    rounds = [{"a": 1.0, "b": 2.0, "c": None, "d": "word"}, {"a": 3.0, "b": None, "c": None, "d": "word"}]
    assert means(rounds) == {"a": 2.0, "b": None, "c": None}


def test_arms_differ_in_pregeneration_history_and_level_alone() -> None:
    everything, *others = ARMS
    assert len({(arm.ahead, arm.history, arm.exactness) for arm in ARMS}) == len(ARMS)
    for arm in others:
        system = arm.system
        same = replace(everything.system, bubbles=system.bubbles, exactness=system.exactness)
        assert replace(system, gateway_options=same.gateway_options) == same
        assert ("--no-history" in system.gateway_options) is not arm.history
