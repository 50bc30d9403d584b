"""Race of the attention backends: a second of timing at the first start on a kind of device.

The result is kept in the cache folder (XDG_CACHE_HOME) by the name of the device, for the model's heads, its
lengths and the installed versions. All ranks of an instance take what the first one found, since KV must be laid
out alike. Whatever goes wrong leaves attention to vLLM.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.parallel_state import get_world_group

from kernels.short_query_attention.choice import AttentionName, Timing, fastest
from kernels.short_query_attention.race import RaceShape, backends, race
from kernels.timing import about
from kernels.tuning import device_name, path_for

_log = logging.getLogger(__name__)
_USUAL_CONTEXT = 4096


def cache_folder() -> Path:
    """Return the folder of what was measured."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline/attention"


def measured_choice(config: Any, device: torch.device, *, ours: bool) -> AttentionName:
    """Return the fastest backend for a model on this device, the same on all ranks of its instance.

    Args:
        config: vLLM's configuration.
        device: of this rank.
        ours: our kernel is right here.
    """
    group = get_world_group()
    first = group.rank_in_group == 0
    found = group.broadcast_object(_first_ranks_choice(config, device, ours) if first else None, src=0)
    return AttentionName(found)


def shape_of(config: Any) -> RaceShape:
    """Return the heads of a model on one rank, and the lengths and the batch that its instance serves."""
    model, parallel = config.model_config, config.parallel_config
    most = int(model.max_model_len)
    return RaceShape(
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
    except Exception as error:  # It is for speed only.
        _log.warning("attention was not timed, and stays vLLM's: %s: %s", type(error).__name__, error)
        return AttentionName.VLLM
    chosen = fastest(timings)
    _log.info("attention is %s's, of %s", chosen, [asdict(timing) for timing in timings])
    return chosen


def recall(path: Path, key: str) -> list[Timing] | None:
    """Return what was measured under a key; None if nothing was, or the file is not ours."""
    try:
        known = json.loads(path.read_text())[key]
        return [Timing(**{**each, "backend": AttentionName(each["backend"])}) for each in known]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def keep(path: Path, key: str, timings: Sequence[Timing]) -> None:
    """Add what was measured to a file, which other processes may read or replace meanwhile."""
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
        _log.info("what was measured is not kept: %s", error)
