"""The self_w4 drafter: the target's current weights in 4 bits, on the target's KV cache (EfficientRollout 4.1).

It draws with the sample's own noise from the same penalised and masked distribution as the target will, so that its
token is the target's wherever the two distributions are close.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from services.generation.engine.draft_rows import Ask, DraftRows
from services.generation.engine.model_drafter import StaleDrafter
from services.generation.engine.rows import Rows
from services.generation.engine.sampler import sample
from services.generation.engine.twin import Twin, UnsupportedTwin
from services.generation.engine.types import Proposal, Verifier, W4Options


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

    def propose(self, version: int, asks: Sequence[Ask]) -> dict[str, Proposal]:
        """Draft tokens, by sample; fewer than asked for where a stop token ends them or slots do.

        A sample whose drafts are verified by rejection gets none: its noise is no help to it.

        Raises:
            StaleDrafter: the twin was not made from these weights.
        """
        if self._version != version:
            raise StaleDrafter(f"the twin is of weights {self._version}, not of {version}")
        noise_of = self._runner._noise_of
        rows = DraftRows(
            self._runner,
            [
                ask
                for ask in asks
                if ask.sample_id in self._runner.requests
                and noise_of(ask.sample_id).verifier is not Verifier.REJECTION
            ],
        )
        made = {sample_id: Proposal([], []) for sample_id in rows.sample_ids}
        if len(rows):
            self._draft(rows, list(made.values()))
        return {sample_id: proposal for sample_id, proposal in made.items() if proposal.tokens}

    def _draft(self, rows: DraftRows, made: list[Proposal]) -> None:
        """Fill in the proposals, one token of each sample a step, until each has its fill."""
        live, tokens = np.arange(len(rows)), rows.latest()
        first = rows.response_positions()
        drafted = [proposal.tokens for proposal in made]
        for step in range(int(rows.limits.max())):
            logits = rows.forward(self._twin.model, tokens, live, step)
            layout = Rows(np.arange(len(live) + 1), first[live] + step, np.empty(0, np.int64))
            noise = [rows.noise[i] for i in live.tolist()]
            verified = sample(logits, layout, rows.sampling(live, drafted), noise, {})
            tokens = verified.tokens
            goes_on = np.zeros(len(live), bool)
            for j, (i, token) in enumerate(zip(live.tolist(), tokens.tolist(), strict=True)):
                if token < 0:
                    # Nothing can be drawn after this; the target finds out for itself.
                    continue
                made[i].tokens.append(token)
                made[i].logprobs.append(float(verified.logprobs[j]))
                goes_on[j] = step + 1 < rows.limits[i] and token not in rows.stops[i]
            live, tokens = live[goes_on], tokens[goes_on]
            if not len(live):
                return
