"""Steps of vLLM's engine core, and the drafts that they verify."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.engine import EngineCoreOutput

from services.generation.engine.draft_forms import CoreForm
from services.generation.engine.sampling.outputs import unpack

MOST_REPLAYED = 32
"""Most tokens that a sample computes again in a step with drafts. Beyond that it computes them in a step without
drafts, after which its state is that of all its tokens."""


class CoreSteps:
    """Steps that each finish before the next is scheduled, with drafts given by the host."""

    in_flight = 0
    """Steps that are scheduled and not finished."""

    def __init__(self, core: Any, *, coupled: bool, form: CoreForm | None = None) -> None:
        """Step an engine core; `coupled`: with our runner. `form` is of drafts that are no chains, if any."""
        self._core = core
        self._scheduler: Any = core.scheduler
        self._coupled = coupled
        self._form = form
        self._drafted: list[str] = []
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        # Our workers take back the recurrent states of samples with a refused draft (recurrent_states.py). Caches
        # have such blocks for vLLM's own speculation, too.
        self._recurrent = coupled and any(
            getattr(each.kv_cache_spec, "num_speculative_blocks", 0) for each in groups
        )
        # Samples that compute accepted tokens again, because their state was taken back.
        self.rewound: frozenset[str] = frozenset()

    @property
    def has_work(self) -> bool:
        """True if a step would do anything."""
        return bool(self._scheduler.has_requests())

    def put(self, drafts: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[int]]:
        """Set the draft tokens that the next step verifies; returns the ones that are not in flight already."""
        requests = self._scheduler.requests
        if self._form is not None:
            drafts = self._form.put(drafts)
        self._drafted += drafts
        for sample_id, tokens in drafts.items():
            requests[sample_id].spec_token_ids = list(tokens)
        return drafts

    def step(self) -> list[EngineCoreOutput]:
        """Run one step."""
        before = self._computed() if self._recurrent else {}
        outputs, executed = self._core.step()
        if not self._coupled:
            self._core.post_step(executed)
        self._take_back()
        found = outputs_of(outputs)
        if self._recurrent:
            self._rewind(before, found)
        return found

    def _computed(self) -> Mapping[str, int]:
        """Return the number of computed tokens of each drafted sample."""
        requests = self._scheduler.requests
        return {sample_id: requests[sample_id].num_computed_tokens for sample_id in self._drafted}

    def _rewind(self, before: Mapping[str, int], outputs: Iterable[EngineCoreOutput]) -> None:
        """Set samples with a refused draft back to where their step began, as the workers did with their states."""
        requests, rewound = self._scheduler.requests, set(self.rewound)
        for output in outputs:
            request = requests.get(output.request_id)
            # Marks of samples without drafts need not be read.
            drafted, accepted = _verified(output) if output.request_id in before else (0, 0)
            if request is not None and accepted < drafted:
                request.num_computed_tokens = before[output.request_id]
                rewound.add(output.request_id)
            else:
                rewound.discard(output.request_id)
        self.rewound = frozenset(rewound & requests.keys())

    def settle(self) -> list[EngineCoreOutput]:
        """Finish the steps in flight without scheduling another; returns their outputs."""
        return []

    def leave_rollouts(self, sample_ids: Iterable[str]) -> None:
        """Do nothing: V1's runner itself sees which samples no longer follow their cached rollouts."""

    def _take_back(self) -> None:
        """Remove the drafts of samples that the step left out, because a later step must not verify them."""
        for sample_id in self._drafted:
            request = self._scheduler.requests.get(sample_id)
            if request is not None:
                request.spec_token_ids = []
        self._drafted.clear()


def _verified(output: EngineCoreOutput) -> tuple[int, int]:
    """Return how many drafts a step verified for a sample, and how many of them it accepted."""
    if output.new_logprobs is None:
        return 0, 0
    drafted, accepted, _ = unpack(output.new_logprobs.sampled_token_ranks.tolist())
    return drafted, accepted


def outputs_of(batches: Mapping[int, Any] | None) -> list[EngineCoreOutput]:
    """Return the output of each sample of a step; empty if no step has finished."""
    found: Iterable[Any] = () if batches is None else batches.values()
    return [output for batch in found for output in batch.outputs]
