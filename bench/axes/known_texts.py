"""Decode known texts with an instance's own drafters, index and planner, without an engine.

A draft is accepted up to the first token that differs from the text, as under coupled sampling. A device table
gives the time of each step. Planning and indexing take no time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from bench.worker import UncountedDrafts
from services.contracts.knobs import Knobs
from services.contracts.rollout import RolloutKind, StoredRollout
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.drafters.suffix import SuffixDrafter
from services.generation.engine.types import EngineSampleState, SampleStep
from services.generation.speculation.drafter import DraftContext, NewRollouts, Samples
from services.generation.speculation.plan import StepShape
from services.generation.speculation.planner import KnobDrivenPlanner
from services.generation.speculation.speculation import Speculation
from services.simulator.device_tables import DeviceTable, swept
from services.step_time.estimator import StepTimeEstimator

WINDOW = 16
RUN = "run"
_MAX_SAMPLES = 256
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KnownText:
    """A sample whose response is known before it is decoded, and its reference."""

    prompt_id: str
    seed: int
    response: Tokens
    reference: Tokens | None = None
    """Response of the previous policy to the same noise, possibly only its beginning."""
    prompt: tuple[int, ...] = (0,)
    begun: int = 0
    """Response tokens that already exist."""
    forks: tuple[Tokens, ...] = ()
    """Other responses of the previous policy, for the case that the sample leaves the reference where they do."""
    version: int = 1
    """Version of the policy that writes the response."""


@dataclass(slots=True)
class DecodingCounts:
    """Tokens, decode steps of samples, and drafts of an instance so far."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


class TextStep(NamedTuple):
    """An engine step: its seconds, and the samples that finished in it."""

    seconds: float
    ended: Sequence[str]


class TextDrafting(Protocol):
    """Source of an instance's drafts: `Speculation`, or the method of another engine."""

    def begin(self, context: DraftContext) -> None: ...
    def add_rollouts(self, arrival: NewRollouts) -> None: ...
    def idle_work(self) -> bool: ...
    def drafts(self, samples: Samples, rows: int) -> Mapping[str, Sequence[int]]: ...
    def shape(self, samples: Samples, drafts: Mapping[str, Sequence[int]]) -> StepShape | None: ...
    def stepped(self, shape: StepShape, seconds: float) -> None: ...
    def learn(self, steps: Iterable[SampleStep]) -> object: ...
    def end(self, sample_id: str, response: Sequence[int]) -> None: ...


@dataclass(slots=True)
class _Live:
    text: KnownText
    state: EngineSampleState

    @property
    def left(self) -> int:
        return len(self.text.response) - len(self.state.response)


@dataclass(slots=True)
class TextInstance:
    """Decode texts step by step.

    `capacity` is the size of the index in tokens; 0 disables the instance's own drafters. `drafting` replaces them;
    its drafts have at most `window` tokens.
    """

    device: DeviceTable
    vocabulary: int
    capacity: int
    drafting: TextDrafting | None = None
    window: int = WINDOW
    counts: DecodingCounts = field(default_factory=DecodingCounts)
    _live: dict[str, _Live] = field(init=False, default_factory=dict)
    _prefill: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.drafting is not None or not self.capacity:
            return
        estimator = StepTimeEstimator(swept(self.device, _MAX_SAMPLES, noise=0.0))
        planner = KnobDrivenPlanner(
            Knobs(draft_cap=WINDOW), estimator, lambda _: None, graphs=self.device.graphs
        )
        drafters = [ReferenceDrafter(), SuffixDrafter(capacity=self.capacity, clock=_no_time)]
        self.drafting = Speculation(drafters, planner, self.vocabulary, UncountedDrafts(), clock=_no_time)

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._live

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """Ids of the running samples."""
        return tuple(self._live)

    @property
    def context(self) -> int:
        """Total tokens of all prompts and responses."""
        return sum(each.state.length for each in self._live.values())

    def know(self, rollouts: Sequence[StoredRollout]) -> None:
        """Index earlier rollouts."""
        if self.drafting is not None:
            self.drafting.add_rollouts(NewRollouts(list(rollouts)))
            while self.drafting.idle_work():
                pass

    def prefill(self, tokens: int) -> None:
        """Add `tokens` tokens of prefill to the next step."""
        self._prefill += tokens

    def begin(self, sample_id: str, text: KnownText) -> None:
        """Add a sample. Its prompt takes no time unless `prefill` adds it."""
        if self.drafting is not None:
            reference = () if text.reference is None else text.reference.tolist()
            self.drafting.begin(
                DraftContext(
                    sample_id,
                    list(text.prompt),
                    reference,
                    prompt_id=text.prompt_id,
                    run_id=RUN,
                    seed=text.seed,
                    version=text.version,
                    source="pregenerated",
                    forks=text.forks,
                )
            )
        response = text.response[: text.begun].tolist()
        state = EngineSampleState(
            sample_id, list(text.prompt), response, self.window, len(text.prompt) + text.begun
        )
        self._live[sample_id] = _Live(text, state)

    def generated(self, sample_id: str) -> int:
        """Return the number of response tokens of a running sample. KeyError if it does not run here."""
        return len(self._live[sample_id].state.response)

    def leave(self, sample_id: str) -> int:
        """Remove an unfinished sample and return its response tokens. KeyError if it does not run here."""
        live = self._live.pop(sample_id)
        if self.drafting is not None:
            self.drafting.end(sample_id, live.state.response)
        return len(live.state.response)

    def step(self) -> TextStep:
        """Run one engine step of all samples. At least one sample must run."""
        live = list(self._live.values())
        states = [each.state for each in live]
        for each in live:
            each.state.room = max(0, min(self.window, each.left - 1))
        drafting, shape = self.drafting, None
        drafts: Mapping[str, Sequence[int]] = {}
        if drafting is not None:
            drafts = drafting.drafts(states, self.device.most_rows)
            shape = drafting.shape(states, drafts)
        rows = len(live) + sum(map(len, drafts.values())) + self._prefill
        context = sum(state.length for state in states)
        seconds = self.device.seconds(len(live), rows, context, verifies=any(drafts.values()))
        ended = [each.state.sample_id for each in live if self._advance(each, drafts)]
        if drafting is not None and shape is not None and not self._prefill:
            drafting.stepped(shape, seconds)
        self._prefill = 0
        return TextStep(seconds, ended)

    def _advance(self, live: _Live, drafts: Mapping[str, Sequence[int]]) -> bool:
        """Append the tokens that one step decodes; return True at the end of the text."""
        state, known = live.state, live.text.response
        draft = drafts.get(state.sample_id, [])
        coming = known[len(state.response) : len(state.response) + len(draft)]
        held = int(np.cumprod(coming == np.asarray(draft[: len(coming)], np.int32)).sum())
        tokens = known[len(state.response) : len(state.response) + held + 1].tolist()
        state.response += tokens
        state.length += len(tokens)
        self.counts.tokens += len(tokens)
        self.counts.steps += 1
        self.counts.drafted += len(draft)
        self.counts.accepted += held
        if self.drafting is not None:
            self.drafting.learn([SampleStep(state.sample_id, tokens, [], drafted=len(draft), accepted=held)])
        if live.left:
            return False
        self.leave(state.sample_id)
        return True


def vocabulary_of(model: Path) -> int:
    """Return the vocabulary size of the model in a folder."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def stored(prompt_id: str, slot: int, seed: int, tokens: Tokens, version: int) -> StoredRollout:
    """Return a finished sample of an earlier step."""
    return StoredRollout(
        run_id=RUN,
        prompt_id=prompt_id,
        slot=slot,
        version=version,
        kind=RolloutKind.HISTORY,
        step=version,
        seed=seed,
        tokens=tokens.astype(np.uint32),
        logprobs=np.zeros(len(tokens), np.float32),
        finished=True,
    )


def _no_time() -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """Counts of a decoded batch, and its seconds by the device table."""

    counts: DecodingCounts
    seconds: float

    @property
    def tokens_per_step(self) -> float:
        """Return the mean tokens of a sample in a decode step."""
        return self.counts.tokens / self.counts.steps


def decode(
    texts: Sequence[KnownText], rollouts: Sequence[StoredRollout], device: DeviceTable, vocabulary: int
) -> DecodedBatch:
    """Decode a batch with drafts from references and from the given earlier rollouts."""
    instance = TextInstance(device, vocabulary, _capacity(texts, rollouts))
    for place, text in enumerate(texts):
        instance.begin(str(place), text)
    instance.know(rollouts)
    seconds = 0.0
    while len(instance):
        seconds += instance.step().seconds
    return DecodedBatch(instance.counts, seconds)


def plain_seconds(texts: Sequence[KnownText], device: DeviceTable) -> float:
    """Return the time to decode a batch one token at a time."""
    lengths = np.sort([len(text.response) for text in texts])
    seconds = 0.0
    for position in range(int(lengths[-1])):
        n = int((lengths > position).sum())
        seconds += device.seconds(n, n, n * (position + 1))
    return seconds


def _capacity(texts: Sequence[KnownText], rollouts: Sequence[StoredRollout]) -> int:
    return (
        4 * sum(len(each.response) for each in texts) + 4 * sum(len(each.tokens) for each in rollouts) + 4096
    )
