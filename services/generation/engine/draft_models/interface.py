"""Interface of a draft model: `DraftModel` in a worker, and `DraftModelClient` in the engine, which calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from services.generation.engine.types import DraftRequest, DraftResult


class StaleDrafter(RuntimeError):
    """A draft model was queried for weights for which it is not ready."""


class UnsupportedDrafter(ValueError):
    """The target cannot have this draft model; the message says why."""


class FixedDrafter(RuntimeError):
    """Weights were given to a draft model that derives its weights from the target's."""


class DraftModel(Protocol):
    """Draft model in a worker, which it shares with the target. It is called only between two steps.

    It drafts for one version of the target's weights at a time, and refuses others. The caller numbers versions.
    """

    @property
    def nbytes(self) -> int:
        """Memory of its weights in addition to the target's, in bytes."""

    def forget(self) -> None:
        """Discard everything that depends on the target's weights, which are about to change."""

    def drop(self) -> None:
        """Free memory whose contents can be rebuilt, before the engine sleeps."""

    def begin(self, version: int) -> None:
        """Prepare for this version of the target's weights, which are loaded now."""

    def build(self, seconds: float) -> bool:
        """Prepare for about `seconds`, at least one slice of work; returns whether it is ready."""

    def propose(self, version: int, requests: Sequence[DraftRequest]) -> DraftResult:
        """Draft tokens by sample; none for a sample without free KV slots.

        Raises:
            StaleDrafter: it is not ready for these weights.
        """

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights with checked ones. A failed load leaves the draft model unusable.

        Raises:
            FixedDrafter: its weights are derived from the target's.
        """


_NOTHING = DraftResult({})


class DraftModelClient:
    """Engine side of a draft model: calls it on all workers, which draft the same tokens, between two steps.

    It numbers the target's weights, and proposes nothing until the draft model is ready for the latest version.
    """

    def __init__(self, core: Any, name: str, most_tokens: int) -> None:
        """Connect to the workers.

        Args:
            core: vLLM's engine core, whose workers have the draft model.
            name: name of the drafter.
            most_tokens: longest draft; this many KV slots are allocated ahead for each running sample.
        """
        self.name = name
        self.most_tokens = most_tokens
        self._core = core
        self._version = 0
        self._ready = True
        self._building = False
        self._broken = False
        scheduler = core.scheduler
        # These slots are allocated and sent to the workers with each step, and freed with the sample's other
        # blocks.
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
        """Replace the weights with checked ones, while samples run.

        After a failed load, which is raised, nothing is drafted any more.
        """
        try:
            self._call("swap_drafter", dict(tensors))
        except Exception:
            self._broken, self._ready, self._building = True, False, False
            raise

    def propose(self, lengths: Mapping[str, int]) -> DraftResult:
        """Draft at most `lengths[id]` tokens for each running sample; none if its KV slots do not suffice.

        Samples that are not decoding are skipped. Nothing is drafted while the draft model is not ready.
        """
        samples = self._core.scheduler.requests
        requests = []
        for sample_id, tokens in lengths.items():
            sample = samples.get(sample_id)
            if sample is None or sample.num_computed_tokens != sample.num_tokens - 1:
                continue
            wanted = min(tokens, self.most_tokens)
            requests.append(DraftRequest(sample_id, sample.num_tokens, wanted, sample.num_preemptions))
        if not (requests and self._ready):
            return _NOTHING
        result: DraftResult = self._call("draft_tokens", self._version, requests)[0]
        return result

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; returns the answers by rank."""
        answers: list[Any] = self._core.collective_rpc(method, args=(self.name, *args))
        return answers
