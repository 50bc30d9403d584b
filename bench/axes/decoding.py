"""Decodes known texts with the drafters, index and planner of an instance, on a device of known step times.

A draft is accepted up to the first token that differs from the text, as under coupled sampling. Deciding and
indexing take no time; steps take what the device's table says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.contracts.knobs import Knobs
from services.contracts.rollout import RolloutKind, StoredRollout
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.drafters.suffix.drafter import SuffixDrafter
from services.generation.engine.types import EngineSampleState, SampleStep
from services.generation.speculation.drafter import DraftContext, NewRollouts
from services.generation.speculation.knob_driven_planner import KnobDrivenPlanner
from services.generation.speculation.speculation import Speculation
from services.simulator.device_tables import DeviceTable
from services.simulator.simulated_sweep import swept
from services.step_time.estimator import StepTimeEstimator

WINDOW = 16
_RUN = "axes"
_MAX_SAMPLES = 256
Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class KnownText:
    """A sample whose response is known before it is decoded, and its reference."""

    prompt_id: str
    seed: int
    response: Tokens
    reference: Tokens | None = None
    """The response of the policy before, to the same noise."""


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """A batch as it was decoded."""

    tokens: int
    steps: int
    """Decode steps of all samples together."""
    drafted: int
    accepted: int
    seconds: float
    """By the device's table."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a decode step of a sample."""
        return self.tokens / self.steps


class _Uncounted:
    """Ignores counts. A fault of a drafter is an error."""

    def verified(self, drafter: str, drafted: int, accepted: int) -> None: ...

    def fault(self, drafter: str) -> None:
        raise RuntimeError(f"{drafter} failed")


@dataclass(slots=True)
class _Live:
    text: KnownText
    state: EngineSampleState

    @property
    def left(self) -> int:
        return len(self.text.response) - len(self.state.response)


def decode(
    texts: Sequence[KnownText], rollouts: Sequence[StoredRollout], device: DeviceTable, vocabulary: int
) -> DecodedBatch:
    """Decode a batch, with drafts from references and from these earlier rollouts."""
    knobs = Knobs(draft_cap=WINDOW)
    planner = KnobDrivenPlanner(
        knobs, StepTimeEstimator(swept(device, _MAX_SAMPLES, noise=0.0)), lambda _: None, graphs=device.graphs
    )
    drafters = [ReferenceDrafter(), SuffixDrafter(capacity=_capacity(texts, rollouts), clock=_no_time)]
    speculation = Speculation(drafters, planner, vocabulary, _Uncounted(), clock=_no_time)
    live = [_begin(speculation, text, str(place)) for place, text in enumerate(texts)]
    speculation.add_rollouts(NewRollouts(list(rollouts)))
    while speculation.idle_work():
        pass
    steps = drafted = accepted = 0
    seconds = 0.0
    while live:
        states = [each.state for each in live]
        for each in live:
            each.state.room = max(0, min(WINDOW, each.left - 1))
        drafts = speculation.drafts(states, device.most_rows)
        shape = speculation.shape(states, drafts)
        rows = len(live) + sum(map(len, drafts.values()))
        took = device.seconds(len(live), rows, sum(state.length for state in states))
        for each in live:
            draft = drafts.get(each.state.sample_id, [])
            held = _advance(each, draft)
            steps, drafted, accepted = steps + 1, drafted + len(draft), accepted + held
            tokens = each.state.response[-held - 1 :]
            speculation.learn(SampleStep(each.state.sample_id, tokens, [], drafted=len(draft), accepted=held))
            if not each.left:
                speculation.end(each.state.sample_id, each.state.response)
        if shape is not None:
            speculation.stepped(shape, took)
        seconds += took
        live = [each for each in live if each.left]
    return DecodedBatch(sum(len(text.response) for text in texts), steps, drafted, accepted, seconds)


def plain_seconds(texts: Sequence[KnownText], device: DeviceTable) -> float:
    """Return the time of decoding a batch one token at a time."""
    lengths = np.sort([len(text.response) for text in texts])
    seconds = 0.0
    for position in range(int(lengths[-1])):
        n = int((lengths > position).sum())
        seconds += device.seconds(n, n, n * (position + 1))
    return seconds


def stored(prompt_id: str, slot: int, seed: int, tokens: Tokens, version: int) -> StoredRollout:
    """Return a finished sample of an earlier step."""
    return StoredRollout(
        run_id=_RUN,
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


def _begin(speculation: Speculation, text: KnownText, sample_id: str) -> _Live:
    reference = () if text.reference is None else text.reference.tolist()
    context = DraftContext(
        sample_id,
        [0],
        reference,
        prompt_id=text.prompt_id,
        run_id=_RUN,
        seed=text.seed,
        version=1,
        source="pregenerated",
    )
    speculation.begin(context)
    return _Live(text, EngineSampleState(sample_id, [0], [], WINDOW, 1))


def _advance(live: _Live, draft: Sequence[int]) -> int:
    """Append what a step decodes of a text; return how many draft tokens it took."""
    at, known = len(live.state.response), live.text.response
    coming = known[at : at + len(draft)]
    held = int(np.cumprod(coming == np.asarray(draft[: len(coming)], np.int32)).sum())
    live.state.response += known[at : at + held + 1].tolist()
    live.state.length += held + 1
    return held


def _capacity(texts: Sequence[KnownText], rollouts: Sequence[StoredRollout]) -> int:
    return (
        4 * sum(len(each.response) for each in texts) + 4 * sum(len(each.tokens) for each in rollouts) + 4096
    )


def _no_time() -> float:
    return 0.0
