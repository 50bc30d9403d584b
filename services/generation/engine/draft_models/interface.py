"""Interface of a draft model, in the worker and in the engine.

In a worker, `ModelDrafter` shares the engine with the target and is called between two steps only. It can draft
for one version of the target's weights, and refuses to draft for others. In the engine, `ModelDrafts` holds the
KV slots and the version, and calls the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from services.generation.engine.types import Ask, Drafted


class StaleDrafter(RuntimeError):
    """A draft model was queried for weights that it is not ready for."""


class UnsupportedDrafter(ValueError):
    """The target cannot have this draft model; the message says why."""


class FixedDrafter(RuntimeError):
    """Weights were given to a draft model that derives its own from the target's."""


class ModelDrafter(Protocol):
    """Draft model in a worker. Versions number the target's weights, as the caller counts them."""

    @property
    def nbytes(self) -> int:
        """Memory of its weights beside the target's, in bytes."""

    def forget(self) -> None:
        """Discard what depends on the target's weights, which are about to change."""

    def drop(self) -> None:
        """Free what can be rebuilt, before the engine sleeps."""

    def begin(self, version: int) -> None:
        """Prepare for this version of the target's weights, which are loaded now."""

    def build(self, seconds: float) -> bool:
        """Prepare for about `seconds`, at least one slice of work; returns whether it is ready."""

    def propose(self, version: int, asks: Sequence[Ask]) -> Drafted:
        """Draft tokens by sample; none for a sample without free KV slots.

        Raises:
            StaleDrafter: it is not ready for these weights.
        """

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights by checked ones. A load that fails leaves the draft model unusable.

        Raises:
            FixedDrafter: it has none that could be given.
        """


_NOTHING = Drafted({})


class ModelDrafts:
    """Draft model of one name on all workers, called between two steps. Every worker drafts the same tokens.

    It numbers the target's weights, and proposes nothing until the draft model is ready for the latest.
    """

    def __init__(self, core: Any, name: str, most_tokens: int) -> None:
        """Connect to the workers.

        Args:
            core: vLLM's engine core, whose workers have the draft model.
            name: name of the drafter.
            most_tokens: longest draft; as many KV slots are allocated ahead of each running sample.
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
        """True if the draft model can draft for the weights that are served."""
        return self._ready

    @property
    def building(self) -> bool:
        """True if `build` has work to do."""
        return self._building

    def forget(self, *, drop: bool = False) -> None:
        """Draft nothing until `begin`: the weights are about to change, or (`drop`) to leave the device."""
        self._ready = self._building = False
        self._call("forget_drafter", drop)

    def begin(self) -> None:
        """Start to prepare for the present weights; `build` does the work."""
        self._version += 1
        self._building = not self._broken
        self._call("begin_drafter", self._version)

    def build(self, seconds: float) -> bool:
        """Prepare the draft model for about `seconds`; returns whether it is ready."""
        if self._building:
            self._ready = all(self._call("build_drafter", seconds))
            self._building = not self._ready
        return self._ready

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights by checked ones, while samples run.

        After a load that fails nothing is drafted any more; the error is raised.
        """
        try:
            self._call("swap_drafter", dict(tensors))
        except Exception:
            self._broken, self._ready, self._building = True, False, False
            raise

    def propose(self, lengths: Mapping[str, int]) -> Drafted:
        """Draft at most `lengths[id]` tokens for each running sample; none if its KV slots do not suffice.

        Samples that are not decoding are skipped. Nothing is drafted while the draft model is not ready.
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
        """Call a method of every worker; returns the answers by rank."""
        answers: list[Any] = self._core.collective_rpc(method, args=(self.name, *args))
        return answers
