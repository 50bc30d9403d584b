"""What the tests of the quantized copy do beside a real engine; run over there by a `RemoteEngine`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from services.contracts.knobs import Knobs
from services.generation.drafters.draft_model import DraftModelDrafter
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.engine.types import QUANTIZED, EngineRequest, Finish
from services.generation.speculation.drafter import DraftContext
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.planner import KnobDrivenPlanner
from services.generation.speculation.speculation import Speculation
from services.step_time.estimator import StepTimeEstimator

_serials = itertools.count()


@dataclass(slots=True)
class Rolled:
    """Results of a run, by sample id.

    `blocks` are free blocks before and after. `proposals`: every one that was made, with the number of
    response tokens at that time.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    finishes: dict[str, Finish] = field(default_factory=dict)
    proposals: dict[str, list[tuple[int, list[int], list[float]]]] = field(default_factory=dict)
    # By sample, the drafter of each verified draft, its tokens and how many of them were kept.
    sources: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    steps: int = 0
    # Pairs of a step and a sample that it gave tokens to.
    outputs: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    blocks: tuple[int, int] = (0, 0)
    # Fully computed blocks that a proposal changed, and steps in which it changed any other.
    harmed: int = 0
    written: int = 0
    # By sample, proposals before the drafter got other weights.
    before_swap: dict[str, int] = field(default_factory=dict)
    # By sample, tokens before the policy got other weights.
    before_renewal: dict[str, int] = field(default_factory=dict)
    # Tokens that the drafter read beside those that it drafted, in each step.
    caught_up: list[int] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """Share of the verified draft tokens that were kept."""
        return self.accepted / max(self.drafted, 1)


@dataclass(frozen=True, slots=True)
class Rolling:
    """How samples are rolled out.

    `depth`: tokens that `drafter` drafts for each sample in each step; 0: none. Where `truth` is given, the drafts
    are thrown away, and random beginnings of the true tokens are verified in their place. `watch` compares the KV
    before and after each proposal. Request i arrives before step `arrivals[i]`. Nothing is drafted from the first
    of the `paused` steps up to the second. Before a step, `swap` gives the drafter other weights, and `renew` the
    policy, under which the samples go on.
    """

    depth: int = 0
    truth: Mapping[str, Sequence[int]] | None = None
    cold: bool = True
    watch: bool = False
    arrivals: tuple[int, ...] = ()
    drafter: str = QUANTIZED
    paused: tuple[int, int] = (0, 0)
    swap: tuple[int, Mapping[str, torch.Tensor]] | None = None
    renew: tuple[int, Mapping[str, torch.Tensor]] | None = None


def roll(engine: Any, requests: Sequence[EngineRequest], how: Rolling = Rolling()) -> Rolled:
    """Generate samples."""
    prefix, random, found = f"{next(_serials)}/", Random(0), Rolled()
    if how.cold:
        engine.forget_kv()
    pool = engine._scheduler.kv_cache_manager.block_pool
    before = pool.get_num_free_blocks()
    waiting = list(zip(how.arrivals or (0,) * len(requests), requests, strict=True))
    preempted: dict[str, int] = {}
    while waiting or engine.has_work:
        while waiting and (waiting[0][0] <= found.steps or not engine.has_work):
            _add(engine, waiting.pop(0)[1], prefix, found)
        if how.swap is not None and how.swap[0] == found.steps:
            engine.swap_drafter(how.drafter, how.swap[1])
            found.before_swap = {key: len(made) for key, made in found.proposals.items()}
        if how.renew is not None and how.renew[0] == found.steps:
            _renew(engine, how.renew[1])
            found.before_renewal = {key: len(tokens) for key, tokens in found.tokens.items()}
        pausing = how.paused[0] <= found.steps < how.paused[1]
        drafts = _propose(engine, how, prefix, found) if how.depth and not pausing else {}
        if how.truth is not None:
            drafts = _beginnings(engine, how.truth, prefix, random)
        engine.put_drafts(drafts)
        preempted |= {key: each.num_preemptions for key, each in engine._scheduler.requests.items()}
        _step(engine, prefix, found)
    found.preemptions = sum(preempted.values())
    # Frees what the last step ended.
    found.blocks = (before, pool.get_num_free_blocks())
    return found


def speculate(engine: Any, requests: Sequence[EngineRequest], window: int) -> Rolled:
    """Generate samples with all drafters under the plan of fixed length: given, suffix and the quantized copy."""
    # Imports numba, which vLLM must come before.
    from services.generation.drafters.suffix import SuffixDrafter

    class Uncounted:
        def verified(self, drafter: str, drafted: int, accepted: int, count: int) -> None: ...
        def fault(self, drafter: str) -> None:
            raise AssertionError(f"{drafter} is at fault")

    terms = KnobDrivenPlanner(Knobs(mode="fixed"), StepTimeEstimator(), lambda _: None)
    own = [DraftModelDrafter(drafts, terms.draft_lengths) for drafts in engine.model_drafts.values()]
    drafters = [*own, ReferenceDrafter(), SuffixDrafter()]
    speculation = Speculation(drafters, FixedLengthPlanner(window), engine.limits.vocab_size, Uncounted())
    prefix, found = f"{next(_serials)}/", Rolled()
    engine.forget_kv()
    for request in requests:
        _add(engine, request, prefix, found)
        speculation.begin(DraftContext(prefix + request.sample_id, request.prompt, request.given))
    while engine.has_work:
        engine.put_drafts(speculation.drafts(engine.decoding(), engine.row_capacity))
        for step in engine.step():
            sample_id = step.sample_id.removeprefix(prefix)
            [source] = speculation.learn([step])
            if step.drafted:
                found.sources.setdefault(sample_id, []).append((source, step.drafted, step.accepted))
            found.tokens[sample_id] += step.token_ids
            found.drafted += step.drafted
            found.accepted += step.accepted
            if step.finish is not None:
                found.finishes[sample_id] = step.finish
                speculation.end(step.sample_id, found.tokens[sample_id])
        found.steps += 1
    return found


def _add(engine: Any, request: EngineRequest, prefix: str, found: Rolled) -> None:
    own = {name: getattr(request, name) for name in EngineRequest.__slots__}
    engine.add(EngineRequest(**own | {"sample_id": prefix + request.sample_id}))
    found.tokens[request.sample_id] = []
    found.logprobs[request.sample_id] = []
    found.proposals[request.sample_id] = []


def _step(engine: Any, prefix: str, found: Rolled) -> None:
    for step in engine.step():
        sample_id = step.sample_id.removeprefix(prefix)
        found.outputs += 1
        found.tokens[sample_id] += step.token_ids
        found.logprobs[sample_id] += step.logprobs
        found.drafted += step.drafted
        found.accepted += step.accepted
        if step.finish is not None:
            found.finishes[sample_id] = step.finish
    found.steps += 1


def _propose(engine: Any, how: Rolling, prefix: str, found: Rolled) -> dict[str, list[int]]:
    states = {state.sample_id: state for state in engine.decoding()}
    wanted = {key: min(how.depth, state.room) for key, state in states.items() if state.room > 0}
    before = _kv(engine) if how.watch else []
    drafted = engine.model_drafts[how.drafter].propose(wanted)
    made = drafted.proposals
    found.caught_up.append(drafted.caught_up)
    if how.watch:
        _compare_kv(engine, before, found)
    for key, proposal in made.items():
        entry = (len(states[key].response), proposal.tokens, proposal.logprobs)
        found.proposals[key.removeprefix(prefix)].append(entry)
    return {key: proposal.tokens for key, proposal in made.items()}


def _beginnings(
    engine: Any, truth: Mapping[str, Sequence[int]], prefix: str, random: Random
) -> dict[str, list[int]]:
    drafts = {}
    for state in engine.decoding():
        there, length = len(state.response), random.randrange(6)
        own = list(
            truth[state.sample_id.removeprefix(prefix)][there : there + min(length, max(state.room, 0))]
        )
        if own:
            drafts[state.sample_id] = own
    return drafts


def _layers(worker: Any) -> list[torch.Tensor]:
    return list(worker.model_runner.kv_caches)


def _kv(engine: Any) -> list[torch.Tensor]:
    """Return a copy of the first and of the last layer's KV."""
    layers = engine._core.collective_rpc(_layers)[0]
    return [layers[0].clone(), layers[-1].clone()]


def _compare_kv(engine: Any, before: list[torch.Tensor], found: Rolled) -> None:
    """Which blocks changed: of tokens that the target has computed, none may."""
    scheduler = engine._scheduler
    full: set[int] = set()
    for request in scheduler.running:
        blocks = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        full |= set(blocks[: request.num_computed_tokens // scheduler.block_size])
    changed: set[int] = set()
    for old, new in zip(before, _kv(engine), strict=True):
        changed |= set((old != new).flatten(1).any(1).nonzero().flatten().tolist())
    found.harmed += len(changed & full)
    found.written += bool(changed - full)


def update(engine: Any, tensors: dict[str, torch.Tensor]) -> tuple[bool, bool, int, bool]:
    """Apply weights. (ready at once, ready after some slices, how many that took, proposals made before it was)."""
    engine.apply_weights(tensors.items())
    at_once = engine.model_drafts[QUANTIZED].ready
    slices = 0
    while engine.model_drafts[QUANTIZED].building and slices < 10_000:
        engine.model_drafts[QUANTIZED].build(0.0)
        slices += 1
    return at_once, engine.model_drafts[QUANTIZED].ready, slices, engine.model_drafts[QUANTIZED].building


def _renew(engine: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Apply weights while samples run, and prepare the draft models for them."""
    engine.apply_weights(tensors.items(), preempt=True)
    for drafts in engine.model_drafts.values():
        while drafts.building:
            drafts.build(1.0)


def go_on(engine: Any, requests: Sequence[EngineRequest], found: Rolled) -> tuple[Rolled, Rolled]:
    """Generate plainly, from the tokens of before, what `found` got after other weights; return both."""
    cuts = {each.sample_id: found.before_renewal.get(each.sample_id, 0) for each in requests}
    left = [each for each in requests if cuts[each.sample_id] < len(found.tokens[each.sample_id])]
    begun = [
        replace(each, prefix=tuple(found.tokens[each.sample_id][: cuts[each.sample_id]])) for each in left
    ]
    rest = Rolled(
        {each.sample_id: found.tokens[each.sample_id][cuts[each.sample_id] :] for each in left},
        {each.sample_id: found.logprobs[each.sample_id][cuts[each.sample_id] :] for each in left},
        {each.sample_id: found.finishes[each.sample_id] for each in left},
    )
    return roll(engine, begun), rest


def apply_only(engine: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Apply weights, and leave the quantized copy as it is."""
    engine.apply_weights(tensors.items())


def ask_for_version(engine: Any, version: int) -> None:
    """Ask the worker for drafts as if these weights were served."""
    engine._core.collective_rpc("draft_tokens", args=(QUANTIZED, version, []))


@torch.inference_mode()
def _spoil(worker: Any) -> None:
    for _, _, method in worker.drafters[QUANTIZED]._copy._leaves:
        method._weight.scales.mul_(-20.0)


def spoil_quantized(engine: Any) -> None:
    """Make the quantized copy's weights useless: what it writes into the KV cache is far from the target's."""
    engine._core.collective_rpc(_spoil)


def rebuild_quantized(engine: Any) -> None:
    """Make the quantized copy anew from the weights that are served."""
    engine.model_drafts[QUANTIZED].forget()
    engine.model_drafts[QUANTIZED].begin()
    while not engine.model_drafts[QUANTIZED].build(1.0):
        pass


def _leaves(worker: Any) -> dict[str, Any]:
    return {leaf.prefix: method for _, leaf, method in worker.drafters[QUANTIZED]._copy._leaves}


def packed_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return the 4-bit weights of the quantized copy, by layer."""
    leaves = engine._core.collective_rpc(_leaves)[0]
    return {name: method._weight.packed.clone() for name, method in leaves.items()}


def kernels(engine: Any) -> set[str]:
    """Names of vLLM's kernels that the quantized copy's layers use; "" for our own."""
    leaves = engine._core.collective_rpc(_leaves)[0]
    return {"" if method._kernel is None else type(method._kernel).__name__ for method in leaves.values()}


def has_wna16(engine: Any) -> bool:
    """Whether vLLM's build for this processor contains the operator of CPUWNA16LinearKernel."""
    return hasattr(torch.ops._C, "cpu_gemm_wna16")


def quantized_bytes(engine: Any) -> int:
    """Memory of the quantized copy."""
    nbytes: int = engine.model_drafts[QUANTIZED].nbytes
    return nbytes


def _quantized_copy_of_group(worker: Any, group: int) -> None:
    from services.generation.engine.experiments.quantized import QuantizedCopy

    QuantizedCopy(worker.model_runner.get_model(), group)


def make_quantized(engine: Any, group: int) -> None:
    """Make another quantized copy, with groups of this many columns."""
    engine._core.collective_rpc(_quantized_copy_of_group, args=(group,))
