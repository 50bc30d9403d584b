#!/usr/bin/env bash
# AReaL on Paceline: its GSM8K example, with overrides that replace its SGLang servers by a facade. Run it in a checkout
# of AReaL.
#
#   paceline up --model Qwen/Qwen2.5-1.5B-Instruct
#   python -m paceline_server services.facade --port 8000 --model DIR --token-file runs/local/token \
#     --anonymous-scopes rollouts,weights
#   bash areal.sh
#
# DIR is the folder of the model, with its tokenizer. AReaL sends no token, so it needs this second facade, on the
# trainer's own machine. AReaL's launcher would start servers and set the two variables below; here torchrun starts the
# trainer alone.
# Option names: AReaL 1.0.4 (commit 4aef98d). Not run: AReaL itself, which needs GPUs. Run: the rollout, pause,
# update from disk and resumed requests of its RemoteSGLangEngine, replayed against a facade.
set -euo pipefail

GPUS=4

# Paceline: the facade's address, and a trainer that reads it.
export AREAL_LLM_SERVER_ADDRS=127.0.0.1:8000
export AREAL_SPMD_MODE=1

# Paceline: weights go by folders below cluster.fileroot, at the same path for trainer and instances. `sglang` names
# the dialect; its number of GPUs is not used, since nothing is started.
PACELINE_ARGS=(
  rollout.backend=sglang:d1p1t1
  actor.weight_update_mode=disk
  cluster.fileroot=/shared/areal
)

torchrun --nnodes 1 --nproc-per-node "$GPUS" examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo.yaml \
  actor.backend="fsdp:d${GPUS}p1t1" cluster.n_gpus_per_node="$GPUS" "${PACELINE_ARGS[@]}"
