"""Choose the kernels of a worker: Triton's if they give the references' results, and the fastest attention."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.distributed.parallel_state import get_world_group

from kernels.backend import Backend, choose, in_use, use
from kernels.selfcheck import check_kernels
from kernels.short_query_attention.race import AttentionName, AttentionShape, Timing, backends, fastest, race
from kernels.tuning import about, device_name, path_for

_log = logging.getLogger(__name__)
SAMPLER, ATTENTION = "sampler", "attention"
"""Kinds of kernels that a failed check disables: the kernels that every engine uses, and attention."""
# Longest context at which attention is timed.
_USUAL_CONTEXT = 4096


class KernelReport(NamedTuple):
    """Kernels of a worker: its attention, and the kinds of kernels that failed their check.

    `graphs` are the numbers of tokens for which it captured CUDA graphs, ascending. `refusal` says why it does not
    verify the form of drafts that is wanted; "" otherwise. `kinds` and `hidden_states` are as in `EngineTraits`.
    """

    attention: str
    failed: tuple[str, ...]
    graphs: tuple[int, ...]
    refusal: str = ""
    kinds: frozenset[str] = frozenset()
    hidden_states: bool = False


_failed: dict[str, None] = {}


def failed() -> tuple[str, ...]:
    """Return the kinds of kernels that failed their check in this process and are not used."""
    return tuple(_failed)


def leave_out(kind: str, error: Exception) -> None:
    """Record and log that a kind of kernels failed its check. Serving continues without them."""
    _failed[kind] = None
    _log.error("kernels_left_out: %s: %s: %s", kind, type(error).__name__, error)


def use_kernels(wanted: str, device: torch.device) -> Backend:
    """Set the backend of all kernels in this process, and return it.

    With `auto`, kernels that do not compile here, or do not give the references' results, are replaced by the
    references, which copy all logits to the host: see `failed`. With `triton` the kernels' own error is raised
    instead, or BackendUnavailable if they cannot run here.
    """
    _failed.clear()
    use(wanted)
    if choose(device) is Backend.TRITON:
        try:
            check_kernels(device)
        except Exception as error:  # A compiler's errors are of many kinds.
            if in_use() is Backend.TRITON:
                raise
            leave_out(SAMPLER, error)
            use(Backend.REFERENCE)
    return in_use()


def cache_folder() -> Path:
    """Return the folder of the measured timings."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline/attention"


def measured_choice(config: Any, device: torch.device, *, ours: bool) -> AttentionName:
    """Return the fastest attention for a model on this device, the same on all ranks of its instance.

    Attention is timed for a second at the first start on a kind of device. The result is kept in the cache folder
    (XDG_CACHE_HOME) by the name of the device, for the model's heads, its lengths and the installed versions. All
    ranks use the result of the first one, because KV must have the same layout. Any failure leaves attention to
    vLLM.

    Args:
        config: vLLM's configuration.
        device: device of this rank.
        ours: True if our kernel passed its check here.
    """
    group = get_world_group()
    first = group.rank_in_group == 0
    found = group.broadcast_object(_first_ranks_choice(config, device, ours) if first else None, src=0)
    return AttentionName(found)


def shape_of(config: Any) -> AttentionShape:
    """Return the heads of a model on one rank, and the lengths and the batch that its instance serves."""
    model, parallel = config.model_config, config.parallel_config
    most = int(model.max_model_len)
    return AttentionShape(
        heads=model.get_num_attention_heads(parallel),
        kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        context=max(1, min(most // 2, _USUAL_CONTEXT)),
        long=most,
        requests=int(config.scheduler_config.max_num_seqs),
    )


def _first_ranks_choice(config: Any, device: torch.device, ours: bool) -> str:
    if config.model_config.dtype is not torch.bfloat16:
        return AttentionName.VLLM
    try:
        shape = shape_of(config)
        key = json.dumps({**asdict(shape), **about(device), "ours": ours}, sort_keys=True)
        path = path_for(device_name(device), cache_folder())
        timings = recall(path, key)
        if timings is None:
            timings = list(race(device, shape, backends(ours=ours)))
            torch.cuda.empty_cache()
            keep(path, key, timings)
    except Exception as error:  # The choice affects speed only.
        _log.warning("attention was not timed, and stays vLLM's: %s: %s", type(error).__name__, error)
        return AttentionName.VLLM
    chosen = fastest(timings)
    _log.info("attention is %s's, of %s", chosen, [asdict(timing) for timing in timings])
    return chosen


def recall(path: Path, key: str) -> list[Timing] | None:
    """Return the timings stored under a key; None if there are none, or if the file is not valid."""
    try:
        known = json.loads(path.read_text())[key]
        return [Timing(**{**each, "backend": AttentionName(each["backend"])}) for each in known]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def keep(path: Path, key: str, timings: Sequence[Timing]) -> None:
    """Add timings to a file, which other processes may read or replace meanwhile."""
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({**known, key: [asdict(timing) for timing in timings]}, indent=1))
        new.replace(path)
    except OSError as error:
        _log.info("the timings of attention are not kept: %s", error)
