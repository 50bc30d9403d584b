"""What the integration with TRL's AsyncGRPOTrainer decides by itself: rows, rewards, versions, refusals."""

from __future__ import annotations

import inspect
import math
import queue
import threading
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import Sample, SampleStatus
from paceline.errors import UnavailableError
from paceline.integrations.trl import PacelineWeightTransfer, RolloutFailedError, UnsupportedTrainerError
from paceline.integrations.trl.async_grpo import score
from tests.support.open_batches import WAIT, RunInMemory, sample
from tests.support.trl_alone import import_trl

NAN = float("nan")


rewards = st.lists(st.none() | st.floats(-10, 10), min_size=4, max_size=4)


@given(rewards, rewards)
def test_advantages_are_those_of_the_samples_with_rewards(one: list[Any], other: list[Any]) -> None:
    found = score({"one": one, "other": other}, 4)
    pairs = [[r for r in pair if r is not None] for pair in zip(one, other, strict=True)]
    sums = np.array([sum(pair) if pair else NAN for pair in pairs])
    np.testing.assert_allclose(found.rewards, sums, atol=1e-9)
    known = sums[~np.isnan(sums)]
    for reward, advantage in zip(sums, found.advantages, strict=True):
        wanted = 0.0 if math.isnan(reward) else (reward - known.mean()) / (known.std() + 1e-8)
        assert advantage == pytest.approx(wanted, abs=1e-6)
    assert [each["rewards/one"] for each in found.metrics] == pytest.approx(
        [NAN if r is None else r for r in one], nan_ok=True
    )


def test_a_function_with_rewards_for_others_is_named() -> None:
    with pytest.raises(ValueError, match="brevity gave 1 rewards for 2"):
        score({"brevity": [1.0]}, 2)


class Words:
    """A tokenizer of numbers."""

    eos_token_id = 2

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
        assert options == {"return_dict": False, "add_generation_prompt": True, "thinking": False}
        return [1, *self(messages[-1]["content"])["input_ids"]]

    def batch_decode(self, ids: Any, skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, each[:-1])) for each in ids]


class PushingRun:
    """A run that counts versions in threes."""

    def __init__(self) -> None:
        self.version = 1

    def push_weights(self, weights: Iterator[Any], *, in_flight: object) -> Any:
        next(weights)
        if self.version > 5:
            raise UnavailableError(grpc.StatusCode.UNAVAILABLE, "gone")
        self.version += 3
        return SimpleNamespace(policy_version=self.version)


def test_versions_of_samples_are_numbers_of_pushes() -> None:
    weights = PacelineWeightTransfer(PushingRun())  # type: ignore[arg-type]
    assert weights.push_of(1) == 0
    for _ in range(2):
        weights.send_weights(iter([("a", 1), ("b", 2)]))
    assert [weights.push_of(version) for version in (3, 4, 6, 7, 8)] == [0, 1, 1, 2, 3]
    rest = iter([("a", 1), ("b", 2)])
    with pytest.raises(UnavailableError):
        weights.send_weights(rest)
    assert list(rest) == [], "other processes wait for each tensor that is not read"
    assert weights.pushes == 2


def worker(data: Any, *functions: Any, run: Any = None, **changed: Any) -> Any:
    import_trl()
    made = import_module("paceline.integrations.trl").PacelineRolloutWorker
    args = SimpleNamespace(
        queue_maxsize=0,
        max_inflight_tasks=4,
        num_generations=2,
        max_staleness=3,
        temperature=0.5,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        max_completion_length=9,
        chat_template_kwargs={"thinking": False},
    )
    vars(args).update(changed)
    weights = PacelineWeightTransfer(PushingRun())  # type: ignore[arg-type]
    for _ in range(2):
        weights.send_weights(iter([("a", 1)]))
    found = made(run or RunInMemory(), weights, args, data, list(functions), Words())
    found.update_model_version(12)
    return found


def rows(found: Any, number: int) -> list[Any]:
    found.start()
    try:
        return [found.rollout_buffer.get(timeout=WAIT) for _ in range(number)]
    finally:
        found.stop()


def length(completions: Any, **_: Any) -> list[float]:
    return [float(len(each)) for each in completions]


async def answer(completions: Any, wanted: list[int], **_: Any) -> list[float | None]:
    return [None if slot else float(n) for slot, n in enumerate(wanted)]


@pytest.mark.parametrize("chat", [False, True])
def test_rows_are_what_the_trainer_reads(chat: bool) -> None:
    text: list[Any] = ["5 6", "7"]
    asked = [[{"role": "user", "content": each}] for each in text] if chat else text
    data = [{"prompt": each, "wanted": n} for n, each in enumerate(asked, 8)]
    found = rows(worker(data, length, answer), 6)
    assert [row.group_id for row in found] == [0, 0, 1, 1, 2, 2]
    ids = [5, 6] if not chat else [1, 5, 6]
    first, second = found[:2]
    assert first.input_ids.tolist() == [*ids, 3, 2]
    assert first.completion_mask.tolist() == [0] * len(ids) + [1, 1]
    assert first.old_log_probs.tolist() == [0.0] * len(ids) + [-0.5, -0.25]
    assert first.prompt == asked[0]
    assert second.completion == ([{"role": "assistant", "content": "4"}] if chat else "4")
    # Its first token is of version 4, the first of two pushes; the trainer calls the second 12.
    assert {row.model_version for row in found} == {11}
    assert first.metrics["rewards/answer"] == 8.0
    assert first.metrics["reward"] == 9.0
    assert first.advantage == pytest.approx(1.0, abs=1e-6)
    assert second.advantage == pytest.approx(-1.0, abs=1e-6)


def test_a_group_that_others_have_cancelled_is_left_out_and_a_failed_sample_ends_all() -> None:
    def made(prompt_id: str, slot: int, cancelled: list[str] = []) -> Sample:  # noqa: B006
        if not cancelled or cancelled == [prompt_id]:
            cancelled[:] = [prompt_id]
            return sample(prompt_id, slot, status=SampleStatus.ABORTED)
        return sample(prompt_id, slot)

    one = worker([{"prompt": "5"}, {"prompt": "6"}], length, run=RunInMemory(made))
    assert {row.group_id for row in rows(one, 4)} == {1, 3}
    assert {"rollout/cancelled_groups_total": 1.0} in [
        one.metrics_queue.get() for _ in range(one.metrics_queue.qsize())
    ]
    failing = RunInMemory(
        lambda prompt_id, slot: sample(prompt_id, slot, status=SampleStatus.FAILED, error="x")
    )
    two = worker([{"prompt": "5"}], length, run=failing)
    two.start()
    assert two._groups.stopped.wait(WAIT)
    two.stop()
    with pytest.raises(RolloutFailedError, match="failed: x"):
        two.check_health(300)


def test_a_trainer_that_has_enough_holds_up_the_worker_and_can_stop_it() -> None:
    run = RunInMemory()
    one = worker([{"prompt": str(n)} for n in range(50)], length, run=run, queue_maxsize=3)
    assert len(rows(one, 5)) == 5
    assert one.rollout_buffer.qsize() <= 3
    assert sum(len(each.groups) for each in run.batches) <= 3 + 2 + 2
    assert not [each for each in threading.enumerate() if each.name.startswith("paceline-groups")]


def test_what_cannot_work_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedTrainerError, match="reward_funcs"):
        worker([{"prompt": "5"}]).start()
    with pytest.raises(UnsupportedTrainerError, match="max_inflight_tasks"):
        worker([{"prompt": "5"}], length, max_inflight_tasks=-1).start()
    with pytest.raises(RolloutFailedError, match="not started"):
        worker([{"prompt": "5"}], length).check_health(300)
    for data, told in (([], "no rows"), ([{"prompt": ""}], "no tokens")):
        one = worker(data, length)
        one.start()
        assert one._groups.stopped.wait(WAIT)
        one.stop()
        with pytest.raises(RolloutFailedError, match=told):
            one.check_health(300)
    silent = worker([{"prompt": "5"}], length)
    rows(silent, 2)
    with pytest.raises(RolloutFailedError, match="heartbeat_stale_after_s=0"):
        silent.check_health(0)


@pytest.mark.parametrize(
    ("protocol", "own"),
    [
        ("RolloutWorkerProtocol", "PacelineRolloutWorker"),
        ("WeightTransferProtocol", "PacelineWeightTransfer"),
    ],
)
def test_protocols_are_those_of_the_installed_trl(protocol: str, own: str) -> None:
    one = worker([{"prompt": "5"}], length) if own == "PacelineRolloutWorker" else PacelineWeightTransfer
    wanted = getattr(import_module("trl.experimental.async_grpo.async_grpo_trainer"), protocol)
    methods = {name: each for name, each in inspect.getmembers(wanted, inspect.isfunction) if name[0] != "_"}
    assert methods
    for name, method in methods.items():
        has = inspect.signature(getattr(type(one) if own == "PacelineRolloutWorker" else one, name))
        assert list(has.parameters) == list(inspect.signature(method).parameters), name
    for name in inspect.get_annotations(wanted):
        assert isinstance(getattr(one, name), queue.Queue)
