"""vLLM's engine core, replaced by one that knows the texts: it schedules every sample and decodes without a model.

Requests, outputs and the marks of our runner are the real ones. Samples have no KV, and never end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

from services.contracts.sampling import ModelLimits
from services.generation.engine.core import Engine
from services.generation.engine.core_steps import CoreSteps
from services.generation.engine.migration import EngineMigration
from services.generation.engine.model_support import ModelSupport
from services.generation.engine.sampling.outputs import pack
from services.generation.engine.text import StopStrings
from services.generation.engine.vllm_requests import PrefixHits, VllmRequests

Tokens = NDArray[np.int32]
StepSeconds = Callable[[int, int, int], float]
"""Returns the seconds of a step by its samples, verified tokens, and context in tokens."""


class KnownTextCore:
    """Core that verifies drafts against the known text of each sample. `seconds` is its clock."""

    def __init__(self, texts: Mapping[str, Tokens], step_seconds: StepSeconds, most_rows: int) -> None:
        """Decode `texts`, by sample, in steps of at most `most_rows` verified tokens."""
        self._texts = texts
        self._step_seconds = step_seconds
        self.seconds = 0.0
        self.requests: dict[str, Any] = {}
        self.scheduler: Any = SimpleNamespace(
            requests=self.requests,
            running=[],
            waiting=[],
            max_num_running_reqs=len(texts),
            max_num_scheduled_tokens=most_rows,
            has_requests=lambda: bool(self.requests),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[]),
            kv_cache_manager=SimpleNamespace(usage=0.5, get_computed_blocks=None, block_pool=None),
        )

    def add_request(self, request: Any) -> None:
        """Add a sample whose prompt is computed already."""
        request.num_computed_tokens = request.num_tokens - 1
        self.requests[request.request_id] = request
        self.scheduler.running.append(request)

    def step(self) -> tuple[dict[int, Any], bool]:
        """Decode every sample; the clock moves by the time of the step."""
        running = self.scheduler.running
        found = [self._decoded(request) for request in running]
        drafted = np.array([each for each, _ in found])
        accepted = np.array([len(tokens) - 1 for _, tokens in found])
        width = int(drafted.max()) + 1
        shape = (len(found) * width, 1)
        whole = LogprobsLists(
            np.zeros(shape, np.int32),
            np.full(shape, -0.5, np.float32),
            pack(drafted, accepted, np.zeros_like(drafted), width),
        )
        outputs = []
        for place, (request, (_, tokens)) in enumerate(zip(running, found, strict=True)):
            request.append_output_token_ids(tokens)
            request.num_computed_tokens += len(tokens)
            request.spec_token_ids = []
            logprobs = whole.slice_request(place * width, len(tokens))
            outputs.append(EngineCoreOutput(request.request_id, tokens, new_logprobs=logprobs))
        context = sum(request.num_tokens for request in running)
        self.seconds += self._step_seconds(len(found), len(found) + int(drafted.sum()), context)
        return {0: SimpleNamespace(outputs=outputs)}, True

    def _decoded(self, request: Any) -> tuple[int, list[int]]:
        """Return the number of draft tokens of a sample, and the tokens that it emits."""
        draft: Sequence[int] = request.spec_token_ids
        begin = request.num_output_tokens
        coming: list[int] = self._texts[request.request_id][begin : begin + len(draft) + 1].tolist()
        if len(coming) <= len(draft):
            raise ValueError(f"the text of {request.request_id} has ended")
        kept = next((i for i, token in enumerate(draft) if token != coming[i]), len(draft))
        return len(draft), coming[: kept + 1]


class KnownTextEngine(Engine):
    """Engine over a `KnownTextCore`; all that happens between two calls of the core is the real code."""

    def __init__(self, core: KnownTextCore, limits: ModelLimits) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self.support = ModelSupport()
        self.trees = False
        self.asleep = False
        self.limits = limits
        self.graph_sizes = ()
        self.model_drafts = {}
        self._steps = CoreSteps(core, coupled=True, trees=False)
        self._stops = StopStrings(None)
        self._hits = PrefixHits(core.scheduler)
        self._requests = VllmRequests(limits, None, self._stops, self._hits, coupled=True)
        self.migration = EngineMigration(core, self._requests.request, self._stops, True)
