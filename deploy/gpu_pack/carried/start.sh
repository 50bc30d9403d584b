# Source this on the GPU machine, in the folder that holds .pack: . .pack/start.sh
#
# Unpacks the packages once and sets what vLLM and the services need. Packages and caches go to PACK_HOME, by default
# a folder in the system's temporary one. Bytecode stays next to the sources: Python would not find that of the
# machine's torch elsewhere, and compile it again. The code is that of the current folder where it is a checkout of
# Paceline, so that an edit needs no new pack; else it is the pack's own.
if [ ! -f .pack/unpack.py ]; then
    echo "start.sh: there is no .pack in $PWD" >&2
    return 1
fi
export PACK_HOME="${PACK_HOME:-${TMPDIR:-/tmp}/paceline-pack}"
if [ -d kernels ] && [ -d services ] && [ -d paceline ]; then
    _pack_code=$PWD
else
    _pack_code=$(python3 .pack/unpack.py code "$PACK_HOME") || return 1
fi
_pack_site=$(python3 .pack/unpack.py site "$PACK_HOME") || return 1
# Before the machine's own packages: where both have one, the pack's version is the tested one.
export PYTHONPATH="$_pack_code:$_pack_site${PYTHONPATH:+:$PYTHONPATH}"
unset _pack_code _pack_site

# FlashInfer is not in the pack: it would compile for minutes. vLLM's sampler imports it unless it is told not to.
export VLLM_USE_FLASHINFER_SAMPLER=0
# Neither is DeepGEMM.
export VLLM_DEEP_GEMM_WARMUP=skip
# There is no network to ask or to report to.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# What one process compiles serves the others of this run.
export VLLM_CACHE_ROOT="$PACK_HOME/vllm" TRITON_CACHE_DIR="$PACK_HOME/triton" NUMBA_CACHE_DIR="$PACK_HOME/numba"
export TORCHINDUCTOR_CACHE_DIR="$PACK_HOME/inductor" XDG_CACHE_HOME="$PACK_HOME/cache"
# A run that is ended at its limit has printed what it knew.
export PYTHONUNBUFFERED=1
