"""The quantized drafter: the target's current weights in 4 bits, on the target's KV cache (EfficientRollout 4.1).

It draws with the sample's own noise from the same penalised and masked distribution as the target will, so that its
token is the target's wherever the two distributions are close.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from services.generation.engine.draft_models.draft_pass import DraftPass, on
from services.generation.engine.draft_models.draft_rows import DraftRows
from services.generation.engine.draft_models.interface import FixedDrafter, StaleDrafter
from services.generation.engine.draft_models.quantized_weights import QuantizedCopy, UnsupportedQuantization
from services.generation.engine.sampling.rows import IntArray
from services.generation.engine.types import Ask, Drafted, W4Options


class QuantizedSelfDraft:
    """Quantized copy of a runner's model, and its draft loop. A `ModelDrafter`."""

    def __init__(self, runner: Any, options: W4Options) -> None:
        """Prepare a copy of the runner's model.

        Args:
            runner: vLLM's model runner, its model loaded.
            options: how to round.

        Raises:
            UnsupportedQuantization: the model cannot have one.
        """
        if runner.model_config.get_num_experts():
            raise UnsupportedQuantization("a mixture of experts has no quantized copy")
        if runner.uses_mrope:
            raise UnsupportedQuantization(
                "a model with positions of several dimensions has no quantized copy"
            )
        self._runner = runner
        self._copy = QuantizedCopy(runner.get_model(), options.group)
        self._version: int | None = None
        self._coming: tuple[int, Iterator[None]] | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the 4-bit weights, in bytes."""
        return self._copy.nbytes

    @property
    def version(self) -> int | None:
        """Version of the target's weights in the copy; None while it is incomplete."""
        return self._version

    def forget(self) -> None:
        """Give the copy up: the target's weights are about to change."""
        self._version = self._coming = None

    def drop(self) -> None:
        """Free the memory of the copy."""
        self.forget()
        self._copy.drop()

    def begin(self, version: int) -> None:
        """Start to quantize this version of the target's weights; `build` does the work."""
        self._version = None
        self._coming = (version, self._copy.rebuild())

    @torch.inference_mode()
    def build(self, seconds: float) -> bool:
        """Quantize for about `seconds`, at least one slice; returns whether the copy is complete."""
        if self._coming is None:
            return self._version is not None
        version, slices = self._coming
        until = time.perf_counter() + seconds
        for _ in slices:
            if time.perf_counter() >= until:
                return False
        self._version, self._coming = version, None
        return True

    @torch.inference_mode()
    def propose(self, version: int, asks: Sequence[Ask]) -> Drafted:
        """Draft tokens by sample; fewer than requested at a stop token, or for lack of KV slots.

        Raises:
            StaleDrafter: the copy is of other weights.
        """
        if self._version != version:
            raise StaleDrafter(f"the quantized copy is of weights {self._version}, not of {version}")
        rows = DraftRows(self._runner, asks)

        def forward(tokens: IntArray, live: IntArray, step: int) -> torch.Tensor:
            # Reads the sample's latest token, and then each that was drafted, at its own position.
            starts = rows.positions[live] + step
            read = DraftPass(self._runner, rows.places[live], starts, np.ones(len(live), np.int64))
            model: Any = self._copy.model
            with read.context(step):
                hidden = model(
                    input_ids=on(tokens, self._runner.device),
                    positions=read.positions,
                    intermediate_tensors=None,
                    inputs_embeds=None,
                )
            logits: torch.Tensor = model.compute_logits(hidden)
            return logits

        return Drafted(rows.draft(np.arange(len(rows)), forward))

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `ModelDrafter`."""
        raise FixedDrafter("the quantized copy's weights are the target's")
