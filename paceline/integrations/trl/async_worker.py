"""The rollout worker of TRL's AsyncGRPOTrainer. Imports TRL."""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.trainer.utils import get_callable_name, is_async_callable

from paceline import types as t
from paceline.batches.rollout import StepStats
from paceline.integrations import RolloutFailedError, UnsupportedTrainerError
from paceline.integrations.trl.async_grpo import (
    ContinuousGroups,
    GroupRequest,
    GroupScores,
    PacelineWeightTransfer,
    Prompt,
    score,
)

if TYPE_CHECKING:
    from paceline.client import Run

_log = logging.getLogger("paceline")

RewardFunction = Callable[..., Any]
# The limit of TRL for its own worker.
_STOP_SECONDS = 15.0
_MOST_METRICS = 4096


class PacelineRolloutWorker:
    """The `rollout_worker` of an AsyncGRPOTrainer: it samples on Paceline and scores while the trainer trains.

        weights = PacelineWeightTransfer(run)
        worker = PacelineRolloutWorker(run, weights, args, data, reward, tokenizer)
        AsyncGRPOTrainer(model, args=args, train_dataset=data, rollout_worker=worker, weight_transfer=weights)

    It reads the data set in order, repeatedly. Reward functions are called in threads of this process, one group
    at a time.
    """

    def __init__(
        self,
        run: Run,
        weights: PacelineWeightTransfer,
        args: Any,
        train_dataset: Iterable[dict[str, Any]],
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        processing_class: Any,
        *,
        exactness: t.Exactness | None = None,
        first_group: int = 0,
    ) -> None:
        """Take the arguments of the trainer, and a run that the caller closes after training.

        Args:
            run: a training job; its seed determines the samples.
            weights: the trainer's `weight_transfer`, which maps versions to pushes.
            args: the trainer's AsyncGRPOConfig object itself, because the trainer completes it.
            train_dataset: rows with a `prompt`, text or messages; reward functions get the other columns.
            reward_funcs: reward functions as for TRL, but they need not be picklable.
            processing_class: the trainer's tokenizer.
            exactness: how samples may use earlier rollouts; default: exact.
            first_group: number of prompts to skip: the groups that were trained before the checkpoint from which
                training resumes.
        """
        self._run = run
        self._weights = weights
        self._args = args
        self._data = train_dataset
        self._functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        self._tokenizer = processing_class
        self._exactness = exactness
        self._first = first_group
        self._ahead = 0
        """Model version of the trainer minus the number of pushes."""
        self._groups: ContinuousGroups | None = None
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue(_MOST_METRICS)

    def start(self) -> None:
        """Start generating. UnsupportedTrainerError: there is no reward function."""
        if not self._functions:
            raise UnsupportedTrainerError("the rollout worker has no reward function: give it reward_funcs")
        self._groups = ContinuousGroups(self._run, self._prompts(), self._request(), self._take)
        self._groups.start()

    def stop(self) -> None:
        """Cancel all samples, and end the threads."""
        if self._groups is not None and not self._groups.stop(_STOP_SECONDS):
            _log.warning("the rollout worker has not ended after %g s", _STOP_SECONDS)

    def update_model_version(self, model_version: int) -> None:
        """Set the trainer's number of the last pushed version."""
        self._ahead = model_version - self._weights.pushes

    def check_health(self, stale_after_s: float) -> None:
        """Raise if the worker has ended, or if no sample has ended for `stale_after_s` seconds.

        Raises:
            RolloutFailedError: its cause is the error that ended the worker.
        """
        if self._groups is None:
            raise RolloutFailedError("the rollout worker was not started")
        if self._groups.error is not None:
            raise RolloutFailedError(
                f"the rollout worker has failed: {self._groups.error}"
            ) from self._groups.error
        silent = time.monotonic() - self._groups.last_activity
        if silent > stale_after_s:
            raise RolloutFailedError(
                f"no sample has ended for {silent:.0f} s; if samples take that long, raise "
                f"heartbeat_stale_after_s={stale_after_s:g}"
            )

    def _request(self) -> GroupRequest:
        args = self._args
        most = args.max_inflight_tasks
        if most < 0:
            raise UnsupportedTrainerError(
                "max_inflight_tasks is not set: give the rollout worker the args object that the trainer completes"
            )
        sampling = t.SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=max(args.top_k or 0, 0),
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            max_tokens=args.max_completion_length,
            # The engine takes its end of sequence from the model folder, which may differ from the tokenizer.
            stop_token_ids=(self._tokenizer.eos_token_id,),
            logprobs_mode=t.LogprobsMode.PROCESSED,
        )
        groups = max(1, most // args.num_generations)
        return GroupRequest(sampling, args.num_generations, groups, args.max_staleness, self._exactness)

    def _prompts(self) -> Iterator[Prompt]:
        """Read the data set repeatedly."""
        rows = (row for _ in count() for row in self._rows())
        for number, row in enumerate(islice(rows, self._first, None)):
            yield Prompt(number, self._tokens(row["prompt"]), row)

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Read the data set once. UnsupportedTrainerError: it is empty, so reading it again would not help."""
        found = False
        for row in self._data:
            found = True
            yield row
        if not found:
            raise UnsupportedTrainerError("the data set has no rows")

    def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            tokens = self._tokenizer(prompt)["input_ids"]
        else:
            tokens = self._tokenizer.apply_chat_template(
                prompt,
                return_dict=False,
                add_generation_prompt=True,
                **(self._args.chat_template_kwargs or {}),
            )
        if not tokens:
            raise UnsupportedTrainerError("a prompt has no tokens")
        return [int(token) for token in tokens]

    def _take(self, prompt: Prompt, samples: list[t.Sample]) -> Sequence[float]:
        """Score a group and queue it for the trainer, waiting while the queue is full; return the rewards."""
        failed = next((each for each in samples if each.status is t.SampleStatus.FAILED), None)
        if failed is not None:
            raise RolloutFailedError(f"sample {failed.prompt_id}/{failed.slot} failed: {failed.error}")
        if any(each.status is t.SampleStatus.ABORTED for each in samples):
            # Another client cancelled the running samples, for example by a push with ABORT.
            _log.warning("group %d was cancelled by another client and is left out", prompt.number)
            self._put_metrics({"rollout/cancelled_groups_total": 1.0})
            return [float("nan")] * len(samples)
        scores, completions = self._score(prompt, samples)
        figures = StepStats()
        for each in samples:
            figures.add(each)
        self._put_metrics(figures.figures())
        for nth, sample in enumerate(samples):
            self._put(self._row(prompt, sample, scores, nth, completions[nth]))
        return scores.rewards.tolist()

    def _score(self, prompt: Prompt, samples: list[t.Sample]) -> tuple[GroupScores, list[Any]]:
        ids = [sample.token_ids.tolist() for sample in samples]
        completions: list[Any] = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        if not isinstance(prompt.row["prompt"], str):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        columns = {name: [value] * len(ids) for name, value in prompt.row.items() if name != "prompt"}
        prompts = [prompt.row["prompt"]] * len(ids)
        given = columns | {"prompts": prompts, "completions": completions, "completion_ids": ids}
        rewards = {get_callable_name(each): _rewards(each, given) for each in self._functions}
        return score(rewards, len(samples)), completions

    def _row(
        self, prompt: Prompt, sample: t.Sample, scores: GroupScores, nth: int, completion: Any
    ) -> RolloutSample:
        known, new = len(prompt.token_ids), len(sample.token_ids)
        return RolloutSample(
            prompt=prompt.row["prompt"],
            completion=completion,
            input_ids=np.concatenate([np.asarray(prompt.token_ids, np.int64), sample.token_ids]),
            completion_mask=np.repeat(np.array([0, 1], np.int64), [known, new]),
            old_log_probs=np.concatenate([np.zeros(known, np.float32), sample.logprobs]),
            advantage=float(scores.advantages[nth]),
            # The version of the first token decides, for the trainer and the fleet, whether a sample is stale.
            model_version=self._ahead + self._weights.push_of(sample.version_spans[0].policy_version),
            group_id=prompt.number,
            metrics=scores.metrics[nth],
        )

    def _put(self, row: RolloutSample) -> None:
        assert self._groups is not None
        while not self._groups.stopped.is_set():
            row.enqueued_at = time.time()
            try:
                self.rollout_buffer.put(row, timeout=0.1)
                return
            except queue.Full:
                # A full queue must not count as a silent fleet.
                self._groups.last_activity = time.monotonic()

    def _put_metrics(self, figures: dict[str, float]) -> None:
        try:
            self.metrics_queue.put_nowait(figures)
        except queue.Full:
            _log.debug("the metrics queue of the rollout worker is full")


def _rewards(function: RewardFunction, given: dict[str, Any]) -> list[float | None]:
    if is_async_callable(function):
        return asyncio.run(function(**given))
    return list(function(**given))
