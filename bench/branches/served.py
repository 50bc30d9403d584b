"""Rollout time with branches by the services' own index and planner, against the recorded samples.

Everything is an instance's but the engine and the clock: the drafters propose, the planner chooses by a table of
step times, and the recorded response of a sample says which path of its tree is accepted, as verification would,
which is exact. All samples of an instance decode in step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.branches.trees import DecodedBatch
from bench.mismatch.arms import Arm, known_at, sample_of
from bench.mismatch.decoding import ReplayedSample, StrictMetrics
from bench.mismatch.records import CountedRun
from bench.rollout.registry import Regime
from services.contracts.knobs import Knobs
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.drafters.suffix.drafter import SuffixDrafter
from services.generation.engine.draft_tree import ROOT, depths_of
from services.generation.engine.types import EngineSampleState, SampleStep
from services.generation.rollouts.origin import NOWHERE
from services.generation.speculation.drafter import NewRollouts, TokenDrafter
from services.generation.speculation.knob_driven_planner import KnobDrivenPlanner
from services.generation.speculation.plan import context_of
from services.generation.speculation.speculation import Speculation
from services.step_time.estimator import StepTimeEstimator

MOST = 4
"""Branches of a sample that are tried."""
FLOORS = (0.1, 0.02)
"""Survival below which nothing is proposed: an instance's default, and a lower one."""
_WINDOW = 16


@dataclass(frozen=True, slots=True)
class Device:
    """Step times of a device, the numbers of verified tokens for which it has graphs, and the floor of drafts."""

    step_time: StepTimeEstimator
    graphs: Sequence[int] = ()
    floor: float = FLOORS[0]


def decode_run(
    counted: CountedRun, arm: Arm, regime: Regime, device: Device, branches: int, first: int
) -> DecodedBatch:
    """Decode the steps of a run from `first` on, each by an index that knows what came before."""
    batches = [
        decode_step(counted, arm, regime, device, branches, place)
        for place in range(first, len(counted.trajectory.steps))
    ]
    seconds = sum(each.seconds for each in batches)
    return DecodedBatch(seconds, sum(each.steps for each in batches), sum(each.verified for each in batches))


def decode_step(
    counted: CountedRun, arm: Arm, regime: Regime, device: Device, branches: int, place: int
) -> DecodedBatch:
    """Decode a step's samples, with up to so many branches beside each chain."""
    from kernels.suffix_index import SuffixIndex

    suffix = SuffixDrafter(SuffixIndex(max_tokens=1_000_000, floor=device.floor), branches=branches)
    drafters: list[TokenDrafter] = [suffix] if arm.back is None else [ReferenceDrafter(), suffix]
    planner = KnobDrivenPlanner(
        Knobs(mode="planner", draft_cap=_WINDOW), device.step_time, lambda _: NOWHERE, graphs=device.graphs
    )
    # Time passes in the table alone.
    speculation = Speculation(drafters, planner, 1 << 20, StrictMetrics(), clock=lambda: 0.0)
    keys = [key for key in counted.trajectory.steps[place].samples if key.slot < regime.samples]
    longest = regime.max_tokens or counted.trajectory.options.max_tokens
    samples = [
        replace(each, response=each.response[:longest])
        for each in (sample_of(counted, arm, place, key) for key in keys)
    ]
    for sample in samples:
        speculation.begin(sample.context)
    speculation.add_rollouts(NewRollouts(known_at(counted, arm, place)))
    while speculation.idle_work():
        pass
    return replayed(speculation, samples, longest, device.step_time)


def replayed(
    speculation: Speculation, samples: Sequence[ReplayedSample], longest: int, step_time: StepTimeEstimator
) -> DecodedBatch:
    """Decode samples in step, all from the token that their prefill sampled. They are begun already."""
    live = {each.context.sample_id: each for each in samples if len(each.response) > 1}
    states = {}
    for sample_id, sample in live.items():
        prompt = list(sample.context.prompt)
        first = list(sample.response[:1])
        states[sample_id] = EngineSampleState(sample_id, prompt, first, longest - 2, len(prompt) + 1)
    seconds, steps, verified = 0.0, 0, 0
    while live:
        decoding = [states[sample_id] for sample_id in live]
        drafts, parents = speculation.drafts(decoding), speculation.parents
        rows = len(live) + sum(map(len, drafts.values()))
        seconds += float(step_time.predict(len(live), (rows,), context_of(decoding))[0])
        steps, verified = steps + 1, verified + rows - len(live)
        for sample_id, sample in list(live.items()):
            state = states[sample_id]
            verify(speculation, sample.response, state, drafts, parents)
            if len(state.response) == len(sample.response):
                del live[sample_id]
                speculation.end(sample_id, sample.response)
    return DecodedBatch(seconds, steps, verified)


def verify(
    speculation: Speculation,
    response: Sequence[int],
    state: EngineSampleState,
    drafts: Mapping[str, Sequence[int]],
    parents: Mapping[str, Sequence[int]],
) -> None:
    """Let a sample emit the path of its draft that is its own, and the token after it."""
    tokens, at = drafts.get(state.sample_id, ()), len(state.response)
    own = parents.get(state.sample_id, range(-1, len(tokens) - 1))
    depths, reached, accepted = depths_of(own), ROOT, 0
    for place, (token, parent) in enumerate(zip(tokens, own, strict=True)):
        here = at + depths[place] - 1
        if parent == reached and here < len(response) and response[here] == token:
            reached, accepted = place, depths[place]
    emitted = list(response[at : at + accepted + 1])
    speculation.learn(SampleStep(state.sample_id, emitted, [], drafted=len(tokens), accepted=accepted))
    state.response += emitted
    state.length += len(emitted)
    state.room -= len(emitted)
