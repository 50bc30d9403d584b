#!/usr/bin/env bash
# verl on Paceline: GRPO with a fleet as its rollout. It needs the package `paceline` in verl's environment, and no vLLM.
#
#   paceline up --model Qwen/Qwen2.5-0.5B-Instruct
#   pip install '.[verl]'                      # in a checkout of Paceline
#   bash verl.sh
#
# Option names: verl 0.9.1. Not run: a training, which needs a GPU per process. Run: verl's servers, clients, agent loops
# and checkpoint manager with these settings on Ray and real instances (tests/e2e/test_verl.py).
set -euo pipefail

# The token of `paceline up`, for Ray's workers on this machine too.
export PACELINE_TOKEN=${PACELINE_TOKEN:-$(cat runs/local/token)}

# Paceline: the rollout, the gateway's address, and the engine that pushes weights.
PACELINE_ARGS=(
  actor_rollout_ref.rollout.name=paceline
  +actor_rollout_ref.rollout.engine_kwargs.paceline.address=127.0.0.1:7400
  +actor_rollout_ref.rollout.engine_kwargs.paceline.run_id=verl-gsm8k
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.nnodes=1
  actor_rollout_ref.rollout.n_gpus_per_node=1
  actor_rollout_ref.rollout.checkpoint_engine.backend=paceline
  '+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.paceline=${actor_rollout_ref.rollout.engine_kwargs.paceline}'
)

python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$HOME/data/gsm8k/train.parquet" \
  data.val_files="$HOME/data/gsm8k/test.parquet" \
  data.train_batch_size=256 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.calculate_log_probs=True \
  trainer.n_gpus_per_node=1 \
  trainer.nnodes=1 \
  "${PACELINE_ARGS[@]}"
