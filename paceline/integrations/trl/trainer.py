"""TRL's GRPOTrainer with importance sampling correction and reported rewards. Imports TRL."""

from __future__ import annotations

from typing import Any

from trl import GRPOConfig, GRPOTrainer

from paceline.integrations import UnsupportedTrainerError
from paceline.integrations.trl.rollout import PacelineRollout


class PacelineGRPOTrainer(GRPOTrainer):
    """A GRPOTrainer that corrects for the difference between the fleet's and its own probabilities.

    TRL weighs tokens by the ratio of the two (`vllm_importance_sampling_correction` and related settings) for
    samples of vLLM only. This trainer applies it to the samples of its rollout, with TRL's own code and metrics.
    It also reports rewards to the platform.
    """

    def __init__(self, *args: Any, rollout: PacelineRollout, **options: Any) -> None:
        """Take the arguments of GRPOTrainer, with `rollout` in place of `rollout_func`.

        Raises:
            UnsupportedTrainerError: the configuration sets `use_vllm`.
        """
        given = [each for each in (*args, *options.values()) if isinstance(each, GRPOConfig)]
        if any(config.use_vllm for config in given):
            raise UnsupportedTrainerError("use_vllm starts or calls a vLLM of TRL's own: leave it False")
        super().__init__(*args, rollout_func=rollout, **options)
        self.rollout = rollout
        # TRL's generation and loss read these at every step. `args.use_vllm` stays False: there is no vLLM of
        # TRL's.
        self.use_vllm = True
        self.vllm_mode = "server"
        self.vllm_generation = _WeightsBySync(self)
        self._last_loaded_step = -1

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Any:
        """Calculate the rewards of all processes, [samples, functions], and report their weighted sums."""
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training and self.accelerator.is_main_process:
            total = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
            total[rewards.isnan().all(dim=1)] = float("nan")
            self.rollout.report_rewards(total.tolist())
        return rewards


class _WeightsBySync:
    """Replacement for TRL's vLLM, which TRL uses only to synchronise weights, once per global step."""

    def __init__(self, trainer: PacelineGRPOTrainer) -> None:
        self._trainer = trainer

    def sync_weights(self) -> None:
        """Push the policy's weights."""
        self._trainer.rollout.push(self._trainer)
