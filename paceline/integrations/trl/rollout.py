"""A `rollout_func` for TRL's GRPOTrainer.

The main process of the trainer submits and pushes for all processes. After a push the fleet's log-probabilities are
compared with the log-probabilities of the trainer's live model.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from paceline import types as t
from paceline.errors import PacelineError, UnimplementedError
from paceline.integrations import RolloutFailedError
from paceline.integrations.trl import requests
from paceline.integrations.trl.lora import adapter_of, is_peft, weights_of
from paceline.integrations.trl.requests import (
    Lookahead,
    RepeatedPrompts,
    cadence_of,
    group_repeated,
    in_order,
    lookahead_of,
)
from paceline.policy_check import TOLERANCE, require_agreement, sample_for_check
from paceline.weights.adapters import Adapter

if TYPE_CHECKING:
    from paceline.client import Rollout, Run


T = TypeVar("T")

_log = logging.getLogger("paceline")
_EVALUATION = "eval."


class PacelineRollout:
    """Rollout function that samples a trainer's completions on Paceline; one object for one trainer.

        GRPOTrainer(model, reward, args, data, rollout_func=PacelineRollout(run))

    Prompts that TRL repeats become groups. The policy's weights are pushed before the first rollout after each
    update. With several processes the main one does both for all, and only its `run` is used.
    """

    def __init__(
        self,
        run: Run,
        *,
        logprobs_mode: t.LogprobsMode = t.LogprobsMode.PROCESSED,
        exactness: t.Exactness | None = None,
        lora: Literal["merged", "adapter"] = "merged",
        in_flight: t.InFlight = t.InFlight.REFUSE,
        hints: bool = True,
        policy_tolerance: float | None = TOLERANCE,
    ) -> None:
        """Use a run, which the caller closes after training.

        Args:
            run: a training job; its seed determines the samples.
            logprobs_mode: kind of the log-probabilities for TRL, whose own are PROCESSED.
            exactness: how samples may use earlier rollouts; default: exact.
            lora: for a model with a LoRA adapter: push the full weights with the adapter merged, or push the base
                weights once and then the adapter alone, for which the run needs a `WeightFolder`.
            in_flight: treatment of unfinished samples, of any run, when weights are pushed.
            hints: announce the next prompts if their order is known, so that idle instances pre-generate them.
            policy_tolerance: largest gap, in nats, between log-probabilities of the fleet and the trainer's model
                that counts as rounding (see `paceline.check_policy`); None: they are not compared.
        """
        self._run = run
        self._mode = logprobs_mode
        self._exactness = exactness
        self._lora = lora
        self._in_flight = in_flight
        self._hints = hints
        self._tolerance = policy_tolerance
        self._checked = False
        self._pushed_at: int | None = None
        """Global step of the weights that were pushed last."""
        self._pushes = 0
        self._compared = 0
        """Number of the last push after which the policies were compared."""
        self._last = (-1, -1, -1)
        """Global step, number after it, and index of the last rollout in training."""
        self._lookahead: Lookahead | None = None
        self._announced: list[list[int]] | None = None
        """Prompts of the last hint, tokenized."""
        self._rewarded: tuple[Rollout, RepeatedPrompts] | None = None
        """The last rollout in training, until its rewards are reported."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return the prompts' tokens, and a completion of each with its log-probabilities, in their order.

        Lists of [prompts] each: `prompt_ids` [prompt_len], `completion_ids` [completion_len] including the token
        that ended it, and `logprobs` [completion_len].

        Raises:
            UnsupportedTrainerError: the trainer or a prompt needs something that is not supported.
            RolloutFailedError: a sample could not be generated; in other processes, the main process failed.
            PolicyMismatchError: the fleet samples from another policy than the trainer's.
            PacelineError: a call was refused.
        """
        if not self._checked:
            requests.check(trainer)
            self._checked = True
        sampling = requests.sampling_of(trainer, self._mode)
        own = requests.tokenize(trainer, prompts)
        self.push(trainer)
        accelerator = trainer.accelerator
        ranks = gathered(accelerator, own)
        everyone = [ids for rank in ranks for ids in rank]
        training = bool(trainer.model.training)
        self._compare(trainer, min(everyone, key=len, default=None))
        completed = on_main(accelerator, lambda: self._complete(trainer, everyone, sampling, training))
        first = sum(len(rank) for rank in ranks[: accelerator.process_index])
        mine = completed[first : first + len(own)]
        return {
            "prompt_ids": own,
            "completion_ids": [tokens for tokens, _ in mine],
            "logprobs": [logprobs for _, logprobs in mine],
        }

    def push(self, trainer: Any) -> None:
        """Push the policy's weights if this global step's were not pushed yet; all processes call it.

        Rollouts call it themselves. After training, call it to push the last weights.

        Raises:
            UnsupportedTrainerError: an adapter cannot be merged here.
            PacelineError: the push was refused; in other processes RolloutFailedError.
        """
        step = trainer.state.global_step
        if step == self._pushed_at:
            return
        if self._lora == "adapter" and is_peft(trainer.accelerator.unwrap_model(trainer.model)):
            adapter, base = adapter_of(trainer)
            on_main(trainer.accelerator, lambda: self._push_adapter(adapter, base))
        else:
            weights = weights_of(trainer)
            on_main(trainer.accelerator, lambda: self._push_weights(weights))
        self._pushed_at = step
        self._pushes += 1

    def report_rewards(self, rewards: Sequence[float]) -> int:
        """Report the rewards of the last rollout in training; return the number of known samples.

        For the main process. `rewards` has one value for each prompt of all processes, in order of rank; values
        that are not finite are left out.

        ValueError: the number of rewards is not the number of samples.
        """
        if self._rewarded is None:
            return 0
        (rollout, repeated), self._rewarded = self._rewarded, None
        pairs = zip(repeated.keys, rewards, strict=True)
        named = [t.Reward(key.prompt_id, key.slot, reward) for key, reward in pairs if math.isfinite(reward)]
        try:
            return rollout.report_rewards(named)
        except UnimplementedError:
            return 0

    def _compare(self, trainer: Any, prompt: list[int] | None) -> None:
        """Check that the fleet samples from the trainer's policy, after the pushes 1, 2, 4, 8 and so on.

        One check is not enough: an adapter that starts at zero changes nothing at first, and little after one step.
        """
        due = self._pushes > self._compared and self._pushes & (self._pushes - 1) == 0
        if self._tolerance is None or prompt is None or not due:
            return
        self._compared, tolerance = self._pushes, self._tolerance
        accelerator = trainer.accelerator
        found = on_main(accelerator, lambda: sample_for_check(self._run, prompt))
        if found is None:
            return
        try:
            own = log_probabilities(trainer, found.prompt, found.responses)
        except Exception as error:
            # Training can continue with a model whose forward has another interface.
            _log.warning("the policy is not compared with the fleet's: %s: %s", type(error).__name__, error)
            return
        gap = on_main(accelerator, lambda: require_agreement(found, own, tolerance))
        trainer._log_metric("rollout/policy_gap", gap.median)

    def _push_adapter(self, adapter: Adapter, base: Any) -> None:
        if self._pushed_at is None:
            # An adapter builds on the last full version, which may belong to another trainer.
            self._push_weights(base)
        self._run.push_adapter(adapter, in_flight=self._in_flight)

    def _push_weights(self, weights: Any) -> None:
        self._run.push_weights(weights, in_flight=self._in_flight)

    def _complete(
        self, trainer: Any, prompt_ids: list[list[int]], sampling: t.SamplingParams, training: bool
    ) -> list[tuple[list[int], list[float]]]:
        """Return tokens and log-probabilities of each completion, in the main process."""
        repeated = group_repeated(prompt_ids, "" if training else _EVALUATION)
        step = self._next_step(trainer) if training else max(self._last[2], 0)
        rollout = self._run.rollout(step, repeated.groups, sampling, exactness=self._exactness)
        if training:
            self._rewarded = (rollout, repeated)
            self._hint(trainer, repeated, sampling, rollout.batch.policy_version)
        samples = in_order(repeated.keys, rollout)
        for name, figure in rollout.stats().items():
            # TRL averages the values that are logged between two of its log lines, as for reward functions.
            trainer._log_metric(name, figure)
        return [(sample.token_ids.tolist(), sample.logprobs.tolist()) for sample in samples]

    def _next_step(self, trainer: Any) -> int:
        """Return the index of this rollout, which is larger than the last one's."""
        now = int(trainer.state.global_step)
        before, nth, last = self._last
        nth = nth + 1 if now == before else 0
        step = max(cadence_of(trainer).step(now, nth), last + 1)
        self._last = (now, nth, step)
        return step

    def _hint(self, trainer: Any, present: RepeatedPrompts, sampling: t.SamplingParams, version: int) -> None:
        """Announce the next batch. A failure is logged and ends announcements; training continues without them."""
        if not self._hints:
            return
        try:
            coming = self._coming(trainer, present)
            cadence, step = cadence_of(trainer), self._last[2]
            updates = cadence.updates_before(step + 1)
            if coming is not None and updates < trainer.state.max_steps:
                groups = group_repeated(
                    [ids for ids in coming for _ in range(trainer.num_generations)]
                ).groups
                newer = updates > cadence.updates_before(step)
                self._run.hint(
                    step + 1, groups, sampling, policy_version=version + newer, exactness=self._exactness
                )
        except PacelineError as error:
            self._hints = False
            if not isinstance(error, UnimplementedError):
                _log.warning("the next prompts are no longer announced: %s", error)

    def _coming(self, trainer: Any, present: RepeatedPrompts) -> list[list[int]] | None:
        """Return the tokenized prompts of the next batch; None if the order is not known."""
        if self._lookahead is None:
            self._lookahead = lookahead_of(trainer)
        wanted = {group.prompt_id for group in present.groups}

        def is_present(batch: Sequence[int]) -> bool:
            ids = self._announced if self._announced is not None else requests.prompts_of(trainer, batch)
            self._announced = None
            return {group.prompt_id for group in group_repeated(ids).groups} == wanted

        batch = self._lookahead.after(is_present)
        if batch is None:
            self._hints = False
            return None
        self._announced = requests.prompts_of(trainer, batch)
        return self._announced


def gathered(accelerator: Any, own: Sequence[Any]) -> list[list[Any]]:
    """Gather a list of each process, by rank."""
    if accelerator.num_processes == 1:
        return [list(own)]
    from accelerate.utils import gather_object

    return [list(each) for each in gather_object([list(own)])]


def on_main(accelerator: Any, work: Callable[[], T]) -> T:
    """Do work in the main process, and return its result, or raise its error, in all processes.

    Raises:
        RolloutFailedError: in other processes, with the text of the main process's error.
    """
    if accelerator.num_processes == 1:
        return work()
    from accelerate.utils import broadcast_object_list

    outcome: list[Any] = [None, None]
    raised: Exception | None = None
    if accelerator.is_main_process:
        try:
            outcome[0] = work()
        except Exception as error:
            raised, outcome[1] = error, f"{type(error).__name__}: {error}"
    broadcast_object_list(outcome, from_process=0)
    if raised is not None:
        raise raised
    if outcome[1] is not None:
        raise RolloutFailedError(f"the main process failed: {outcome[1]}")
    result: T = outcome[0]
    return result


def log_probabilities(
    trainer: Any, prompt: Sequence[int], responses: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the natural log-probabilities of responses of equal length, [samples][tokens].

    It runs one forward pass at temperature 1, without dropout or gradients. All processes call it with the same
    tokens: if the weights are sharded over them, each layer is gathered as in training.
    """
    import torch

    model, accelerator = trainer.model, trainer.accelerator
    length = len(responses[0])
    ids = torch.tensor([[*prompt, *response] for response in responses], device=accelerator.device)
    options: dict[str, Any] = {"use_cache": False}
    bare = accelerator.unwrap_model(model)
    bare = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
    if "logits_to_keep" in inspect.signature(bare.forward).parameters:
        # The logits of a long prompt would take more memory than everything else.
        options["logits_to_keep"] = length + 1
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), accelerator.autocast():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **options).logits
    finally:
        model.train(training)
    chosen = ids[:, -length:, None]
    logprobs = logits[:, -length - 1 : -1].float().log_softmax(dim=-1).gather(-1, chosen)
    found: list[list[float]] = logprobs[..., 0].tolist()
    return found
