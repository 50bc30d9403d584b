"""Orders to a process that has the device alone: the environment, and kernels by themselves."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bench.engine_cuda.kinds import CudaSizes
from kernels.short_query_attention.choice import AttentionName, fastest
from kernels.tune import cases, measure
from kernels.tune.race import RaceShape, backends, race

_QUERY = "name,driver_version,power.limit,clocks.max.sm,clocks.max.mem,memory.total,pcie.link.gen.max"


class DeviceOrders:
    """The device, and the heads and the vocabulary of a model."""

    def __init__(self, model: Path, sizes: CudaSizes) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = json.loads((model / "config.json").read_text())
        self._config = config.get("text_config", config)
        self._sizes = sizes

    def environment(self) -> dict[str, Any]:
        """Return the machine, the device and the software."""
        found: dict[str, Any] = {
            **measure.about(self._device),
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
            "cores": len(os.sched_getaffinity(0)),
            "model": {
                name: self._config.get(name)
                for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
            },
        }
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            properties = torch.cuda.get_device_properties(self._device)
            found |= {
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory": total,
                "free": free,
                "nvidia_smi": _nvidia_smi(),
            }
        return found

    def attention(self) -> dict[str, Any]:
        """Time the attention backends for the model's heads, and say which one an engine would take."""
        heads = int(self._config["num_attention_heads"])
        kv_heads = int(self._config.get("num_key_value_heads") or heads)
        size = int(self._config.get("head_dim") or self._config["hidden_size"] // heads)
        context = max(self._sizes.contexts)
        shape = RaceShape(heads, kv_heads, size, context, 4 * context, max(self._sizes.rows))
        makers = backends(ours=True)
        if self._device.type != "cuda":
            # One that interprets no kernel: what is timed elsewhere is PyTorch's own way over the same cache.
            makers = {AttentionName.OURS: _plain_attention}
        timings = list(race(self._device, shape, makers))
        return {"timings": [asdict(each) for each in timings], "fastest": fastest(timings)}

    def sampling(self) -> dict[str, Any]:
        """Time sampling by itself, at the model's vocabulary, for the largest batch and for one row."""
        sizes = replace(cases.Sizes(), rows=max(self._sizes.rows), vocabulary=int(self._config["vocab_size"]))
        timed = measure.timer(self._device, 100)
        rows = []
        for case in cases.sampler(self._device, sizes):
            # On a CPU only the interpreter could run ours.
            makers = case.makers if self._device.type == "cuda" else {"torch": case.makers["torch"]}
            for name, maker in makers.items():
                row: dict[str, Any] = {"setting": case.setting, "by": name}
                try:
                    row["ms"] = 1000 * timed(maker())
                except Exception as error:  # Libraries that may be absent, or of another version.
                    row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
                rows.append(row)
        return {"rows": rows}


def _plain_attention(step: Any) -> Any:
    from kernels.short_query_attention import attend

    return lambda: attend(step, backend="reference")


def _nvidia_smi() -> dict[str, str] | str:
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    return dict(zip(_QUERY.split(","), map(str.strip, said.splitlines()[0].split(",")), strict=False))
