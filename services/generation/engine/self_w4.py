"""The self_w4 drafter: the target's current weights in 4 bits, on the target's KV cache (EfficientRollout 4.1).

It draws with the sample's own noise from the same penalised and masked distribution as the target will, so that its
token is the target's wherever the two distributions are close.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from services.generation.engine.draft_pass import DraftPass, on
from services.generation.engine.draft_rows import DraftRows
from services.generation.engine.model_drafter import FixedDrafter, StaleDrafter
from services.generation.engine.rows import IntArray
from services.generation.engine.twin import Twin, UnsupportedTwin
from services.generation.engine.types import Ask, Drafted, W4Options


class SelfW4:
    """The 4-bit twin of a runner's model and its draft loop. A `ModelDrafter`."""

    def __init__(self, runner: Any, options: W4Options) -> None:
        """Args:
            runner: vLLM's model runner, its model loaded.
            options: how to round.

        Raises:
            UnsupportedTwin: the model cannot have one.
        """
        if runner.model_config.get_num_experts():
            raise UnsupportedTwin("a mixture of experts has no 4-bit twin")
        if runner.uses_mrope:
            raise UnsupportedTwin("a model with positions of several dimensions has no 4-bit twin")
        self._runner = runner
        self._twin = Twin(runner.get_model(), options.group)
        self._version: int | None = None
        self._coming: tuple[int, Iterator[None]] | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the 4-bit weights, in bytes."""
        return self._twin.nbytes

    @property
    def version(self) -> int | None:
        """The target's weights that the twin was made from; None while it is not whole."""
        return self._version

    def forget(self) -> None:
        """The target's weights are about to change."""
        self._version = self._coming = None

    def drop(self) -> None:
        """Give the memory of the twin back."""
        self.forget()
        self._twin.drop()

    def begin(self, version: int) -> None:
        """The target's weights have changed to these: make the twin anew, with the next `build`."""
        self._version = None
        self._coming = (version, self._twin.rebuild())

    @torch.inference_mode()
    def build(self, seconds: float) -> bool:
        """Round weights for about so long, at least a slice of them; whether the twin is whole."""
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
        """Draft tokens, by sample; fewer than asked for where a stop token ends them or slots do.

        Raises:
            StaleDrafter: the twin was not made from these weights.
        """
        if self._version != version:
            raise StaleDrafter(f"the twin is of weights {self._version}, not of {version}")
        rows = DraftRows(self._runner, asks)

        def forward(tokens: IntArray, live: IntArray, step: int) -> torch.Tensor:
            # Reads the sample's latest token, and then each that was drafted, at its own position.
            starts = rows.positions[live] + step
            read = DraftPass(self._runner, rows.places[live], starts, np.ones(len(live), np.int64))
            model: Any = self._twin.model
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
        raise FixedDrafter("the twin's weights are the target's")
