"""Decode a recorded run on stock vLLM engines by a device's step times: plainly, or with vLLM's own drafts.

The drafts come from the code that vLLM calls: arctic-inference's suffix cache, and vLLM's look-up of n-grams. vLLM
verifies every draft that its method finds, for every sample of a step, whatever the step costs. A draft token is
accepted if it is the recorded one. That happens with the policy's probability of the token, as in vLLM's rejection
sampler for methods that report no probabilities.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.axes.known_texts import TextInstance
from bench.device_clock.cluster import known_text
from bench.device_clock.recording import ClockedStep, RecordedTexts, Tokens
from services.generation.engine.types import SampleStep
from services.generation.speculation.drafter import DraftContext, NewRollouts, Samples
from services.generation.speculation.plan import StepShape
from services.simulator.device_tables import DeviceTable

TREE_DEPTH, CACHED_REQUESTS, SPEC_FACTOR, TOKEN_PROBABILITY = 24, 10_000, 1.0, 0.1
"""vLLM's defaults of suffix decoding. Its default of `num_speculative_tokens` is the tree depth."""
LOOKUP = (5, 5)
"""Least and longest n-gram of the look-up, by vLLM's defaults."""
_MAX_MODEL_LEN = 1 << 20
"""Larger than any text, so that no draft is cut for lack of room."""

NgramLookup = Callable[[Tokens, int, int, int, int], Tokens]
"""vLLM's function: from a text, the least and the longest n-gram, the model's length, and the most draft tokens."""


class DraftMethod(Protocol):
    """A drafter as vLLM calls it: with every new token of every sample."""

    def begin(self, sample_id: str, prompt: Tokens) -> None: ...
    def extend(self, sample_id: str, tokens: Sequence[int]) -> None: ...
    def propose(self, sample_id: str, prompt: Sequence[int], response: Sequence[int]) -> Sequence[int]: ...
    def end(self, sample_id: str) -> None: ...


class SuffixMethod:
    """Suffix decoding of an engine. Its cache has the texts of earlier steps and of running samples."""

    def __init__(self, most: int, packages: Path) -> None:
        """Begin with an empty cache. ImportError if arctic-inference is not under `packages` (`scripts/arctic`)."""
        folder = str(packages.absolute())
        if folder not in sys.path:
            sys.path.insert(0, folder)
        cache = importlib.import_module("arctic_inference.suffix_decoding").SuffixDecodingCache
        self._most = most
        self._cache: Any = cache(max_tree_depth=TREE_DEPTH, max_cached_requests=CACHED_REQUESTS)

    def begin(self, sample_id: str, prompt: Tokens) -> None:
        """Open a sample."""
        self._cache.start_request(sample_id, prompt)

    def extend(self, sample_id: str, tokens: Sequence[int]) -> None:
        """Append tokens to a sample."""
        self._cache.add_active_response(sample_id, list(tokens))

    def propose(self, sample_id: str, prompt: Sequence[int], response: Sequence[int]) -> Sequence[int]:
        """Return the draft of a sample."""
        last = response[-TREE_DEPTH:]
        missing = TREE_DEPTH - len(last)
        context = [*(prompt[-missing:] if missing else ()), *last]
        draft = self._cache.speculate(
            sample_id,
            np.array(context, np.int32),
            max_spec_tokens=self._most,
            max_spec_factor=SPEC_FACTOR,
            min_token_prob=TOKEN_PROBABILITY,
        )
        return list(draft.token_ids)

    def end(self, sample_id: str) -> None:
        """Close a sample; the cache keeps its text."""
        self._cache.stop_request(sample_id)


class NgramMethod:
    """Look-up of the last n-gram in the prompt and the response of the same sample."""

    def __init__(self, most: int, lookup: tuple[int, int], find: NgramLookup) -> None:
        self._most, self._lookup, self._find = most, lookup, find

    def begin(self, sample_id: str, prompt: Tokens) -> None:
        """Open a sample."""

    def extend(self, sample_id: str, tokens: Sequence[int]) -> None:
        """Append tokens to a sample."""

    def propose(self, sample_id: str, prompt: Sequence[int], response: Sequence[int]) -> Sequence[int]:
        """Return the draft of a sample."""
        text = np.array([*prompt, *response], np.int32)
        found: list[int] = self._find(text, *self._lookup, _MAX_MODEL_LEN, self._most).tolist()
        return found

    def end(self, sample_id: str) -> None:
        """Close a sample."""


def ngram_lookup() -> NgramLookup:
    """Return vLLM's function. Imports vLLM, which must come before numba."""
    module = importlib.import_module("vllm.v1.spec_decode.ngram_proposer")
    found: NgramLookup = module._find_longest_matched_ngram_and_propose_tokens
    return found


def method_of(speculation: Mapping[str, Any], packages: Path, find: NgramLookup) -> DraftMethod:
    """Return the drafter of a new engine by vLLM's speculative_config, whose other settings have their defaults."""
    most = int(speculation["num_speculative_tokens"])
    if speculation["method"] == "suffix":
        return SuffixMethod(most, packages)
    least, longest = LOOKUP
    lookup = (
        int(speculation.get("prompt_lookup_min", least)),
        int(speculation.get("prompt_lookup_max", longest)),
    )
    return NgramMethod(most, lookup, find)


class StockDrafting:
    """Drafts of a stock engine: whatever its method finds, from a sample's first token on."""

    def __init__(self, method: DraftMethod) -> None:
        self._method = method
        self._taken: dict[str, int] = {}

    def begin(self, context: DraftContext) -> None:
        """Open a sample."""
        self._method.begin(context.sample_id, np.array(context.prompt, np.int32))
        self._taken[context.sample_id] = 0

    def drafts(self, samples: Samples, rows: int) -> dict[str, list[int]]:
        """Return the drafts of the next step by sample id. `rows` limits no stock engine of so few samples."""
        found = {}
        for each in samples:
            if not each.response:
                continue
            self._extend(each.sample_id, each.response)
            draft = self._method.propose(each.sample_id, each.prompt, each.response)[: each.room]
            if draft:
                found[each.sample_id] = list(draft)
        return found

    def end(self, sample_id: str, response: Sequence[int]) -> None:
        """Close a sample with its last tokens."""
        self._extend(sample_id, response)
        del self._taken[sample_id]
        self._method.end(sample_id)

    def _extend(self, sample_id: str, response: Sequence[int]) -> None:
        if new := response[self._taken[sample_id] :]:
            self._method.extend(sample_id, new)
            self._taken[sample_id] = len(response)

    # A stock engine plans nothing and gets no rollouts of others.

    def add_rollouts(self, arrival: NewRollouts) -> None:
        """Ignore rollouts."""

    def idle_work(self) -> bool:
        """Return False, because nothing is deferred."""
        return False

    def shape(self, samples: Samples, drafts: Mapping[str, Sequence[int]]) -> StepShape | None:
        """Return None, because no step is measured."""
        return None

    def stepped(self, shape: StepShape, seconds: float) -> None:
        """Ignore the time of a step."""

    def learn(self, steps: Iterable[SampleStep]) -> None:
        """Ignore what was accepted."""


@dataclass(slots=True)
class StockFleet:
    """Stock engines that share the prompts of a step, without a gateway.

    New prompts are dealt to the engines in turn. A prompt that returns goes to the engine that has its texts.
    """

    engines: Sequence[TextInstance]
    _homes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        device: DeviceTable,
        vocabulary: int,
        engines: int,
        method: Callable[[], DraftMethod] | None = None,
        window: int = 0,
    ) -> StockFleet:
        """Return engines that decode plainly, or with drafts of at most `window` tokens by a method for each."""
        return cls(
            [
                TextInstance(
                    device, vocabulary, 0, None if method is None else StockDrafting(method()), window
                )
                for _ in range(engines)
            ]
        )

    def rolled_out(self, texts: RecordedTexts) -> ClockedStep:
        """Decode a step of the run to its end."""
        for cell, response in texts.responses.items():
            prompt, slot = cell
            home = self._homes.setdefault(texts.prompt_ids[prompt], len(self._homes) % len(self.engines))
            if not slot:
                # Samples of a prompt share its prefix.
                self.engines[home].prefill(len(texts.prompts[prompt]))
            text = known_text(texts, cell, response, texts.step)
            self.engines[home].begin(f"{texts.step}/{prompt}/{slot}", text)
        before = [(each.counts.drafted, each.counts.accepted) for each in self.engines]
        steps, seconds = dict[str, int](), [0.0] * len(self.engines)
        for place, engine in enumerate(self.engines):
            while running := engine.sample_ids:
                for name in running:
                    steps[name] = steps.get(name, 0) + 1
                seconds[place] += engine.step().seconds
        return ClockedStep(
            step=texts.step,
            seconds=max(seconds),
            tokens=sum(map(len, texts.responses.values())),
            decode_steps=sum(steps.values()),
            most_decode_steps=max(steps.values()),
            drafted=sum(e.counts.drafted - d for e, (d, _) in zip(self.engines, before, strict=True)),
            accepted=sum(e.counts.accepted - a for e, (_, a) in zip(self.engines, before, strict=True)),
            covered=None,
        )
