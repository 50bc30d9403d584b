"""The engine's side of a drafter with a model of its own: its slots, its version, and the calls to the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from services.generation.engine.types import Ask, Drafted

_NOTHING = Drafted({})


class ModelDrafts:
    """Asks the workers' drafter of a name for tokens between two steps. With several workers each drafts the same.

    It numbers the target's weights, and offers nothing until the drafter is ready for the latest.
    """

    def __init__(self, core: Any, name: str, most_tokens: int) -> None:
        """Args:
        core: vLLM's engine core, whose workers have the drafter.
        name: of the drafter.
        most_tokens: of a draft; so many slots are allocated ahead of each running sample.
        """
        self.name = name
        self.most_tokens = most_tokens
        self._core = core
        self._version = 0
        self._ready = True
        self._building = False
        self._broken = False
        scheduler = core.scheduler
        # Allocated with each step, told to the workers with it, freed with the sample's other blocks.
        scheduler.num_lookahead_tokens = max(scheduler.num_lookahead_tokens, most_tokens)

    @property
    def nbytes(self) -> int:
        """Memory of the drafter's weights on one worker, in bytes."""
        return int(self._call("drafter_bytes")[0])

    @property
    def ready(self) -> bool:
        """Whether the drafter can draft for the weights that are served."""
        return self._ready

    @property
    def building(self) -> bool:
        """Whether `build` has something to do."""
        return self._building

    def forget(self, *, drop: bool = False) -> None:
        """The weights are about to change, or with `drop` to leave the device: nothing is drafted until `begin`."""
        self._ready = self._building = False
        self._call("forget_drafter", drop)

    def begin(self) -> None:
        """The weights are there. The drafter gets ready by `build`."""
        self._version += 1
        self._building = not self._broken
        self._call("begin_drafter", self._version)

    def build(self, seconds: float) -> bool:
        """Go on getting the drafter ready for about so long; whether it is."""
        if self._building:
            self._ready = all(self._call("build_drafter", seconds))
            self._building = not self._ready
        return self._ready

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Draft with these weights, which were checked, from now on; running samples go on.

        A load that fails leaves no drafter: nothing is drafted any more, and the error is raised.
        """
        try:
            self._call("swap_drafter", dict(tensors))
        except Exception:
            self._broken, self._ready, self._building = True, False, False
            raise

    def propose(self, lengths: Mapping[str, int]) -> Drafted:
        """Draft tokens for running samples, by id; at most so many for each, none where there is no place for them.

        Samples that are not decoding are passed over. Nothing while the drafter is not ready.
        """
        requests = self._core.scheduler.requests
        asks = []
        for sample_id, tokens in lengths.items():
            request = requests.get(sample_id)
            if request is None or request.num_computed_tokens != request.num_tokens - 1:
                continue
            wanted = min(tokens, self.most_tokens)
            asks.append(Ask(sample_id, request.num_tokens, wanted, request.num_preemptions))
        if not (asks and self._ready):
            return _NOTHING
        made: Drafted = self._call("draft_tokens", self._version, asks)[0]
        return made

    def _call(self, method: str, *args: Any) -> list[Any]:
        """What each worker answers."""
        answers: list[Any] = self._core.collective_rpc(method, args=(self.name, *args))
        return answers
