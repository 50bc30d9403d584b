#!/usr/bin/env bash
# slime on Paceline: GRPO of Qwen3-4B, sampled by a facade instead of SGLang engines. Run it in a checkout of slime, with
# the paths of your model and data.
#
#   paceline up --model /root/Qwen3-4B
#   python -m paceline_server services.facade --port 8000 --model /root/Qwen3-4B --token-file runs/local/token \
#     --anonymous-scopes rollouts,weights
#   bash slime.sh
#
# slime sends no token, so it needs this second facade, on the trainer's own machine.
# Option names: slime 0.3.1 (commit 624b824). Not run: slime itself, which needs GPUs. Run: its rollout and abort loop
# and its update from disk, replayed against a facade, the former through sglang-router 0.3.2.
set -euo pipefail

source scripts/models/qwen3-4B.sh

# Paceline: the facade is one external engine. slime starts its own router in front of it.
PACELINE_ARGS=(
  --rollout-external-engine-addrs 127.0.0.1:8000
  --update-weight-mode full
  --update-weight-transport disk
  # A folder at the same path for trainer and instances.
  --update-weight-disk-dir /shared/slime-updates
)

ROLLOUT_ARGS=(
  --hf-checkpoint /root/Qwen3-4B
  --ref-load /root/Qwen3-4B_torch_dist
  --prompt-data /root/dapo-math-17k/dapo-math-17k.jsonl
  --input-key prompt
  --label-key label
  --apply-chat-template
  --rm-type deepscaler
  --num-rollout 3000
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --rollout-max-response-len 8192
  --rollout-temperature 1
  --global-batch-size 256
)

TRAIN_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 8
  --tensor-model-parallel-size 2
  --sequence-parallel
  --use-dynamic-batch-size
  --max-tokens-per-gpu 9216
  --advantage-estimator grpo
  --eps-clip 0.2
  --eps-clip-high 0.28
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
)

python3 train.py "${MODEL_ARGS[@]}" "${PACELINE_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${TRAIN_ARGS[@]}"
