"""Report whether vLLM and an engine support a model, before its weights are loaded.

    python -m services.generation.engine.outlook MODEL [DTYPE]

prints an `Outlook` as JSON. It has vLLM resolve its configuration, and build the model on torch's meta device,
which has shapes but no memory. On CPU it also asks vLLM's kernels whether they compute layers of these sizes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.generation.engine.environment import set_variables

set_variables()

from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from services.generation.engine.arguments import engine_config
from services.generation.engine.model_support import model_support
from services.generation.engine.traits import engine_traits, kinds_of
from services.generation.engine.types import EngineOptions


@dataclass(frozen=True, slots=True)
class Outlook:
    """Expected support of a model: vLLM's `refusal`, "" if there is none, and the features that we refuse."""

    refusal: str = ""
    unknown: str = ""
    """Error of vLLM when it was asked for the layers; "" if there was none."""
    dtype: str = ""
    kinds: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)


def outlook(model: str, dtype: str = "auto") -> Outlook:
    """Return the expected support of a model. Call it once in a process that builds no engine."""
    try:
        config = engine_config(EngineOptions(model, dtype=dtype))
    except Exception as error:  # pydantic's, transformers' or vLLM's.
        return Outlook(refusal=_text(error))
    name = str(config.model_config.dtype).removeprefix("torch.")
    try:
        layers = _layers(config)
        specs = [layer.get_kv_cache_spec(config) for layer in layers]
    except Exception as error:
        support = model_support(engine_traits(config, v2=False))
        return Outlook("", _text(error), name, (), support.by_name())
    kinds = kinds_of(each for each in specs if each is not None)
    support = model_support(engine_traits(config, v2=False, kinds=kinds))
    refusal = next(_kernel_refusals(layers, config), "") if current_platform.is_cpu() else ""
    return Outlook(refusal, "", name, tuple(sorted(kinds)), support.by_name())


def _layers(config: VllmConfig) -> list[Any]:
    """Build the model on the meta device; returns its layers with KV or a state."""
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "gloo")
        initialize_model_parallel(1)
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(config)
        return list(get_layers_from_vllm_config(config, AttentionLayerBase).values())  # type: ignore[type-abstract]


def _kernel_refusals(layers: Iterable[Any], config: VllmConfig) -> Iterator[str]:
    """Yield the reasons why vLLM's kernels for CPU do not compute layers."""
    from services.generation.engine.cpu_kernels import layer_refusal

    yield from filter(None, (layer_refusal(layer, config) for layer in layers))


def _text(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    # pydantic adds a headline before its message, and a link after it.
    message = [line for line in lines if "validation error" not in line and "errors.pydantic.dev" not in line]
    return " ".join(message)[:400] or type(error).__name__


if __name__ == "__main__":
    found = outlook(str(Path(sys.argv[1]).absolute()), *sys.argv[2:3])
    print(json.dumps(asdict(found)), flush=True)
