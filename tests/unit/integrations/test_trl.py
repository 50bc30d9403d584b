"""What the integration with TRL decides by itself: groups, order, steps, the coming batch, requests."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from paceline import (
    Exactness,
    FinishReason,
    LogprobsMode,
    Provenance,
    Reward,
    Sample,
    SampleKey,
    SampleStatus,
    UnavailableError,
)
from paceline.integrations.trl import PacelineRollout, RolloutFailedError, UnsupportedTrainerError
from paceline.integrations.trl.requests import (
    Cadence,
    Lookahead,
    check,
    group_repeated,
    in_order,
    sampling_of,
    tokenize,
)
from paceline.prompts import prompt_id_of
from tests.support.trl_alone import import_trl

A, B, C = [1, 2], [3], [4, 5, 6]


def sample(key: SampleKey, tokens: Sequence[int], status: SampleStatus = SampleStatus.COMPLETED) -> Sample:
    return Sample(
        prompt_id=key.prompt_id,
        slot=key.slot,
        token_ids=np.asarray(tokens, dtype=np.int64),
        logprobs=-np.asarray(tokens, dtype=np.float32) / 8,
        finish_reason=FinishReason.STOP,
        status=status,
        version_spans=(),
        provenance=Provenance(),
        seed=0,
    )


def test_repeated_prompts_become_one_group_wherever_they_stand() -> None:
    repeated = group_repeated([A, A, B, C, A, B])
    assert [(list(group.prompt_token_ids), group.samples) for group in repeated.groups] == [
        (A, 3),
        (B, 2),
        (C, 1),
    ]
    assert [key.slot for key in repeated.keys] == [0, 1, 0, 0, 2, 1]
    assert len(set(repeated.keys)) == 6
    assert [key.prompt_id for key in repeated.keys] == [prompt_id_of(ids) for ids in (A, A, B, C, A, B)]
    assert {group.prompt_id for group in group_repeated([A], "eval.").groups} == {f"eval.{prompt_id_of(A)}"}


def test_prompt_ids_are_those_of_the_tokens() -> None:
    assert prompt_id_of(A) == prompt_id_of(np.asarray(A)) == prompt_id_of(tuple(A))
    assert len({prompt_id_of(ids) for ids in (A, B, C, [2, 1], [12])}) == 5


def test_samples_come_back_in_the_order_of_the_prompts() -> None:
    keys = group_repeated([A, B, A, C]).keys
    samples = [sample(key, [place + 7]) for place, key in enumerate(keys)]
    assert [each.token_ids.tolist() for each in in_order(keys, reversed(samples))] == [[7], [8], [9], [10]]


@pytest.mark.parametrize(
    ("tokens", "status", "told"),
    [
        ([7], SampleStatus.FAILED, "failed"),
        ([7], SampleStatus.ABORTED, "cancelled"),
        ([], SampleStatus.COMPLETED, "no tokens"),
    ],
)
def test_a_sample_that_cannot_be_learned_from_is_an_error(
    tokens: list[int], status: SampleStatus, told: str
) -> None:
    (key,) = group_repeated([A]).keys
    with pytest.raises(RolloutFailedError, match=told):
        in_order([key], [sample(key, tokens, status)])
    with pytest.raises(RolloutFailedError, match="1 of 1 samples are missing"):
        in_order([key], [])


@pytest.mark.parametrize("update_every", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rollout_every", [1, 2, 3, 4, 8])
def test_steps_count_rollouts_and_survive_a_restart_at_any_update(
    rollout_every: int, update_every: int
) -> None:
    """Against a count of all micro-batches."""
    cadence = Cadence(rollout_every, update_every)
    seen: list[tuple[int, int]] = []
    for micro in range(0, 8 * update_every * rollout_every, rollout_every):
        now = micro // update_every
        nth = sum(1 for before, _ in seen if before == now)
        step = cadence.step(now, nth)
        assert step == micro // rollout_every
        assert cadence.updates_before(step) == now
        seen.append((now, step))


def batches(*lists: Sequence[int]) -> Iterator[Sequence[int]]:
    yield from lists


def test_the_coming_batch_follows_the_present_one() -> None:
    lookahead = Lookahead(batches([0], [1], [2], [3]), window=3)
    assert lookahead.after(lambda batch: batch == [0]) == [1]
    # A trainer that went on from a checkpoint has left out some.
    assert lookahead.after(lambda batch: batch == [2]) == [3]
    assert lookahead.after(lambda batch: batch == [3]) is None


def test_nothing_is_announced_once_the_order_is_another() -> None:
    lookahead = Lookahead(batches([0], [1], [2], [3]), window=2)
    assert lookahead.after(lambda batch: batch == [9]) is None
    assert lookahead.after(lambda batch: batch == [2]) is None


def trainer(**changed: Any) -> Any:
    """A trainer with the attributes of TRL's that are read, in one process, on prompts that are tokens."""
    args = SimpleNamespace(
        use_vllm=False,
        generation_kwargs=None,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        generation_batch_size=4,
        seed=3,
    )
    made = SimpleNamespace(
        args=args,
        processing_class=object(),
        tools=[],
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=None,
        repetition_penalty=1.0,
        max_completion_length=16,
        eos_token_ids=[2],
        num_iterations=1,
        num_generations=2,
        model=SimpleNamespace(training=True),
        model_wrapped=None,
        state=SimpleNamespace(global_step=0, max_steps=9),
        train_dataset=None,
        shuffle_dataset=True,
    )
    made.accelerator = SimpleNamespace(
        num_processes=1,
        process_index=0,
        is_main_process=True,
        unwrap_model=lambda model: model,
        get_state_dict=lambda _: {"step": made.state.global_step},
    )
    made._tokenize_prompts = lambda prompts: (prompts, None, {})
    made.logged = []
    made._log_metric = lambda name, value: made.logged.append((name, value))
    for name, value in changed.items():
        setattr(args if hasattr(args, name) else made, name, value)
    return made


def test_sampling_parameters_are_the_trainers() -> None:
    found = sampling_of(
        trainer(generation_kwargs={"presence_penalty": 0.5, "top_p": 0.8}), LogprobsMode.PROCESSED
    )
    assert (found.temperature, found.top_p, found.top_k, found.max_tokens) == (0.5, 0.8, 0, 16)
    assert (found.presence_penalty, found.stop_token_ids) == (0.5, (2,))
    assert found.logprobs_mode is LogprobsMode.PROCESSED
    with pytest.raises(UnsupportedTrainerError, match="guided"):
        sampling_of(trainer(generation_kwargs={"guided": 1}), LogprobsMode.PROCESSED)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"use_vllm": True}, "use_vllm"),
        ({"processing_class": None}, "tokenizer"),
        ({"tools": [print]}, "tools"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changed: dict[str, Any], told: str) -> None:
    check(trainer())
    with pytest.raises(UnsupportedTrainerError, match=told):
        check(trainer(**changed))


def test_prompts_with_images_or_without_tokens_are_refused() -> None:
    assert tokenize(trainer(), [A, B]) == [A, B]
    seeing = trainer(_tokenize_prompts=lambda prompts: (prompts, None, {"pixel_values": 1}))
    with pytest.raises(UnsupportedTrainerError, match="images"):
        tokenize(seeing, [A])
    with pytest.raises(UnsupportedTrainerError, match="no tokens"):
        tokenize(trainer(), [A, []])


class FakeRun:
    """A run that answers each sample by its prompt and slot, last one first, and remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.version = 0
        self.hint_error: Exception | None = None

    def push_weights(self, weights: Any, *, in_flight: object) -> None:
        self.version += 1
        self.calls.append(("push", weights["step"]))

    def rollout(self, step: int, groups: Any, sampling: Any, *, exactness: Exactness | None) -> Any:
        self.calls.append(("rollout", step, [(each.prompt_id, each.samples) for each in groups]))
        made = [
            sample(SampleKey(each.prompt_id, slot), [*each.prompt_token_ids, slot + 1])
            for each in groups
            for slot in range(each.samples)
        ]
        return FakeBatch(self, made[::-1])

    def hint(self, step: int, groups: Any, sampling: Any, *, policy_version: int, exactness: object) -> int:
        if self.hint_error is not None:
            raise self.hint_error
        found = {(tuple(each.prompt_token_ids), each.samples) for each in groups}
        self.calls.append(("hint", step, policy_version, found))
        return 0

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == kind]


class FakeBatch(list[Sample]):
    """The samples, as a rollout gives them."""

    def __init__(self, run: FakeRun, samples: list[Sample]) -> None:
        super().__init__(samples)
        self.run = run
        self.batch = SimpleNamespace(policy_version=run.version)

    def stats(self) -> dict[str, float]:
        return {"rollout/samples": len(self)}

    def report_rewards(self, rewards: list[Reward]) -> int:
        self.run.calls.append(("rewards", rewards))
        return len(rewards)


def test_a_rollout_answers_each_prompt_at_its_place() -> None:
    run = FakeRun()
    found = PacelineRollout(run, policy_tolerance=None)([B, A, A, B], trainer())  # type: ignore[arg-type]
    assert found["prompt_ids"] == [B, A, A, B]
    assert found["completion_ids"] == [[*B, 1], [*A, 1], [*A, 2], [*B, 2]]
    assert found["logprobs"] == [[-token / 8 for token in ids] for ids in found["completion_ids"]]


def test_the_figures_of_each_rollout_are_logged_also_in_evaluation() -> None:
    one = trainer()
    rollout = PacelineRollout(FakeRun(), policy_tolerance=None)  # type: ignore[arg-type]
    rollout([A, A, B, B], one)
    one.model.training = False
    rollout([A], one)
    assert one.logged == [("rollout/samples", 4), ("rollout/samples", 1)]


def test_weights_are_pushed_once_for_each_global_step_and_steps_ascend() -> None:
    run, one = FakeRun(), trainer(gradient_accumulation_steps=2)
    rollout = PacelineRollout(run, policy_tolerance=None)  # type: ignore[arg-type]
    for global_step in (0, 0, 1, 1, 2):
        one.state.global_step = global_step
        rollout([A, A], one)
    rollout.push(one)
    assert run.of("push") == [(0,), (1,), (2,)]
    assert [step for step, _ in run.of("rollout")] == [0, 1, 2, 3, 4]


def test_evaluation_has_prompts_of_its_own_and_no_step() -> None:
    run, one = FakeRun(), trainer()
    rollout = PacelineRollout(run, policy_tolerance=None)  # type: ignore[arg-type]
    rollout([A, A], one)
    one.model.training = False
    rollout([A], one)
    one.model.training = True
    one.state.global_step = 1
    rollout([A, A], one)
    own = prompt_id_of(A)
    assert run.of("rollout") == [(0, [(own, 2)]), (0, [(f"eval.{own}", 1)]), (1, [(own, 2)])]


@pytest.mark.parametrize("unknown", [float("nan"), float("inf"), float("-inf")])
def test_rewards_are_reported_once_by_prompt_and_slot(unknown: float) -> None:
    run = FakeRun()
    rollout = PacelineRollout(run, policy_tolerance=None)  # type: ignore[arg-type]
    rollout([B, A, B], trainer())
    assert rollout.report_rewards([0.5, unknown, 1.0]) == 2
    assert rollout.report_rewards([0.5, 0.5, 1.0]) == 0
    assert run.of("rewards") == [([Reward(prompt_id_of(B), 0, 0.5), Reward(prompt_id_of(B), 1, 1.0)],)]


DATA = [{"prompt": [n, n]} for n in range(1, 6)]


def epochs_of(one: Any, count: int) -> list[list[list[int]]]:
    """The prompts of each rollout as TRL's data loader gives them."""
    import_trl()
    sampler = import_module("trl.trainer.utils").RepeatSampler(
        one.train_dataset, mini_repeat_count=2, batch_size=2, shuffle=True, seed=one.args.seed
    )
    order = [DATA[index]["prompt"] for _ in range(count) for index in sampler]
    return [order[first : first + 4] for first in range(0, len(order), 4)]


@pytest.mark.parametrize("resumed_at", [0, 3])
def test_the_coming_prompts_are_announced_over_epochs_and_after_a_restart(resumed_at: int) -> None:
    run, one = FakeRun(), trainer(train_dataset=DATA)
    steps = epochs_of(one, 4)[:8]
    assert len({str(step) for step in steps}) > 4, "epochs have orders of their own"
    one.state.max_steps = 8
    rollout = PacelineRollout(run, policy_tolerance=None)  # type: ignore[arg-type]
    for step in range(resumed_at, 8):
        one.state.global_step = step
        rollout(steps[step], one)
    announced = run.of("hint")
    assert [step for step, *_ in announced] == list(range(resumed_at + 1, 8))
    assert [version for _, version, _ in announced] == list(range(2, 9 - resumed_at))
    for step, _, found in announced:
        assert found == {(tuple(ids), 2) for ids in steps[step]}


def test_training_goes_on_when_hints_are_refused() -> None:
    run, one = FakeRun(), trainer(train_dataset=DATA)
    steps = epochs_of(one, 1)
    run.hint_error = UnavailableError(grpc.StatusCode.UNAVAILABLE, "no gateway")
    rollout = PacelineRollout(run, policy_tolerance=None)  # type: ignore[arg-type]
    assert len(rollout(steps[0], one)["completion_ids"]) == 4
    run.hint_error = None
    one.state.global_step = 1
    assert len(rollout(steps[1], one)["completion_ids"]) == 4
    assert not run.of("hint")


def test_importing_the_integration_imports_neither_trl_nor_torch() -> None:
    code = (
        "import sys, paceline.integrations.trl; found = {'trl', 'torch', 'accelerate', 'peft'} & set(sys.modules); "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_installed_trl_has_what_the_integration_leans_on() -> None:
    trl = import_trl()
    assert trl.__version__.startswith("1.16.")
    source = inspect.getsource(trl.GRPOTrainer)
    assert "output = self.rollout_func(prompts, self)" in source
    assert 'required_keys = {"prompt_ids", "completion_ids", "logprobs"}' in source
    generating = inspect.getsource(trl.GRPOTrainer._generate)
    assert re.findall(r"self\.vllm_generation\.(\w+)", generating) == ["sync_weights"]
    assert "prompt_ids, images, multimodal_fields = self._tokenize_prompts(prompts)" in source
    assert list(inspect.signature(trl.GRPOTrainer._calculate_rewards).parameters) == [
        "self",
        "inputs",
        "prompts",
        "completions",
        "completion_ids_list",
    ]
    for name in ("num_generations", "num_iterations", "eos_token_ids", "max_completion_length", "min_p"):
        assert f"self.{name} = " in source
