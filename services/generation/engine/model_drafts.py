"""The engine's side of a drafter with a model of its own: its slots, its version, and the calls to the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.generation.engine.draft_rows import Ask
from services.generation.engine.types import Proposal


class ModelDrafts:
    """Asks the workers' drafter for tokens between two steps. With several workers each drafts the same.

    It numbers the target's weights, and offers nothing until the drafter is made for the latest.
    """

    def __init__(self, core: Any, most_tokens: int) -> None:
        """Args:
        core: vLLM's engine core, whose workers have a drafter.
        most_tokens: of a draft; so many slots are allocated ahead of each running sample.
        """
        self.most_tokens = most_tokens
        self._core = core
        self._version = 0
        self._ready = True
        self._building = False
        # Allocated with each step, told to the workers with it, freed with the sample's other blocks.
        core.scheduler.num_lookahead_tokens = most_tokens

    @property
    def nbytes(self) -> int:
        """Memory of the drafter on one worker, in bytes."""
        return int(self._core.collective_rpc("drafter_bytes")[0])

    @property
    def ready(self) -> bool:
        """Whether the drafter is made for the weights that are served."""
        return self._ready

    @property
    def building(self) -> bool:
        """Whether `build` has something to do."""
        return self._building

    def forget(self, *, drop: bool = False) -> None:
        """The weights are about to change, or with `drop` to leave the device: nothing is drafted until `begin`."""
        self._ready = self._building = False
        self._core.collective_rpc("forget_drafter", args=(drop,))

    def begin(self) -> None:
        """The weights are there. The drafter is made by `build`."""
        self._version += 1
        self._building = True
        self._core.collective_rpc("begin_drafter", args=(self._version,))

    def build(self, seconds: float) -> bool:
        """Go on making the drafter for about so long; whether it is ready."""
        if self._building:
            self._ready = all(self._core.collective_rpc("build_drafter", args=(seconds,)))
            self._building = not self._ready
        return self._ready

    def propose(self, lengths: Mapping[str, int]) -> dict[str, Proposal]:
        """Draft tokens for running samples, by id; at most so many for each, none where there is no place for them.

        Samples that are not decoding are passed over. Empty while the drafter is not ready.
        """
        requests = self._core.scheduler.requests
        asks = []
        for sample_id, tokens in lengths.items():
            request = requests.get(sample_id)
            if request is None or request.num_computed_tokens != request.num_tokens - 1:
                continue
            asks.append(Ask(sample_id, request.num_tokens, min(tokens, self.most_tokens)))
        if not (asks and self._ready):
            return {}
        made: dict[str, Proposal] = self._core.collective_rpc("draft_tokens", args=(self._version, asks))[0]
        return made
