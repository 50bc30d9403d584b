"""How long a draft step of a drafter with a model of its own takes: the target's machine, and another architecture.

The 4-bit twin is the target's model with fewer bytes to move. EfficientRollout, section 4.2: target and twin
compute the same and differ in the weights that they read; what the kernels lose against that (its factor for
on-the-fly dequantisation) is left to the correction by measured steps. An EAGLE-3 head is one layer and an output
head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from services.policy.correction import CorrectedStepTime, Correction
from services.policy.models import VALUE_BYTES
from services.policy.step_time import Architecture, StepTime

# How far measured draft steps may correct the model: nothing of it was measured before.
_LIMIT = 64.0
_HALF_BYTE = 0.5

TargetOf = Callable[[], CorrectedStepTime | None]
"""The step time of an engine; None: there is no model of it."""


def w4_architecture(
    target: Architecture, config: Mapping[str, Any], value_bytes: int, group: int
) -> Architecture:
    """What a draft step moves and computes: all weights but the output head are 4 bits and a scale for each group.

    Args:
        target: the target's.
        config: of the model, as Hugging Face has it.
        value_bytes: of a weight that is not rounded, and of a scale.
        group: weights that share a scale.
    """
    head = float(config["hidden_size"] * config["vocab_size"] * value_bytes)
    rounded = (target.weight_bytes - head) / value_bytes
    return target.model_copy(update={"weight_bytes": head + rounded * (_HALF_BYTE + value_bytes / group)})


def self_w4_time(model: Path, dtype: str, group: int, target_of: TargetOf) -> DrafterTime | None:
    """The time of draft steps of the twin of a model folder's model; None where the target's is not known."""
    target = target_of()
    if target is None:
        return None
    config = json.loads((model / "config.json").read_text())
    architecture = w4_architecture(target.model.architecture, config, VALUE_BYTES[dtype], group)
    return DrafterTime(target_of, architecture)


def eagle3_architecture(config: Mapping[str, Any], value_bytes: int) -> Architecture:
    """What a draft step of an EAGLE-3 head moves and computes.

    Its layer reads embedding and hidden state side by side. `fc` is counted in every step, though only the first
    of a draft runs it: a step more or less than that is within what the correction learns.

    Args:
        config: of the head, as its checkpoint has it.
        value_bytes: of a weight.
    """
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = 2 * hidden * width * (heads + 2 * kv_heads) + heads * width * hidden
    layer = attention + 3 * hidden * config["intermediate_size"]
    features = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    weights = layer + features * hidden * hidden + hidden * config["draft_vocab_size"]
    return Architecture(
        weight_bytes=weights * value_bytes,
        kv_bytes=2 * kv_heads * width * value_bytes,
        dense_flops=2 * weights,
        attention_flops=4 * heads * width,
    )


def eagle3_time(head: Path, dtype: str, target_of: TargetOf) -> DrafterTime | None:
    """The time of draft steps of the head in a folder; None where the target's is not known."""
    if target_of() is None:
        return None
    config = json.loads((head / "config.json").read_text())
    return DrafterTime(target_of, eagle3_architecture(config, VALUE_BYTES[dtype]))


class DrafterTime:
    """The time of draft steps, predicted, and corrected once some were measured.

    Before that the target's own correction stands in: what it says of the machine holds for the twin too.
    """

    def __init__(self, target_of: TargetOf, architecture: Architecture) -> None:
        """
        Args:
            target_of: the step time of the engine, as it is known at the moment.
            architecture: of a draft step.
        """
        self._target_of = target_of
        self._architecture = architecture
        self._correction: Correction | None = None
        # The target's model that `_own` was made from, and the drafter's.
        self._made_from: StepTime | None = None
        self._own: StepTime | None = None

    def seconds(self, requests: ArrayLike, rows: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
        """Predicted seconds of a draft step of `requests` samples, one row each; the arguments broadcast.

        Raises:
            ValueError: the target's step time is not known any more.
        """
        target = self._target_of()
        if target is None:
            raise ValueError("the target's step time is not known any more")
        correction = target.correction if self._correction is None else self._correction
        return correction.apply(self._model(target).seconds(requests, rows, context))

    def observe(self, requests: int, context: int, seconds: float) -> None:
        """A draft step was measured."""
        target = self._target_of()
        if target is None:
            return
        if self._correction is None:
            self._correction = Correction(_LIMIT)
        self._correction.observe(float(self._model(target).seconds(requests, requests, context)), seconds)

    def _model(self, target: CorrectedStepTime) -> StepTime:
        if self._own is None or self._made_from is not target.model:
            self._made_from = target.model
            # What is left over of the target's steps is of its own kernels.
            changed = {"architecture": self._architecture, "residual": None}
            self._own = target.model.model_copy(update=changed)
        return self._own
