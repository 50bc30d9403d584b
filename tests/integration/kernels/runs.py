"""Samples through an engine, with drafts of every length; run where the engine is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from services.contracts.sampling import Sampling
from services.generation.engine.experiments.trees.tree import DraftTree
from services.generation.engine.types import EngineRequest

LONGEST_DRAFT = 7


class Generated(NamedTuple):
    """Tokens and their log-probabilities by sample, and the number of accepted draft tokens."""

    tokens: dict[str, list[int]]
    logprobs: dict[str, list[float]]
    accepted: int


def requests_of(vocab_size: int, lengths: Sequence[int], max_tokens: int) -> tuple[EngineRequest, ...]:
    """Samples whose prompts have these lengths."""
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return tuple(
        EngineRequest(
            f"s{i}",
            tuple((7 * i + 13 * j) % (vocab_size - 2) + 2 for j in range(length)),
            (),
            sampling,
            100 + i,
        )
        for i, length in enumerate(lengths)
    )


def generate(
    engine: Any,
    requests: Sequence[EngineRequest],
    truth: Mapping[str, Sequence[int]] | None = None,
    late: int = 0,
) -> Generated:
    """Run samples, of which the last `late` come after two steps, while the others decode.

    With the `truth`, samples are drafted for: as many tokens as differ from sample to sample and step to step, none
    now and then, and the last one is sometimes wrong.
    """

    def put(steps: int) -> None:
        if truth is not None:
            engine.put_drafts(
                {
                    state.sample_id: draft
                    for state in engine.decoding()
                    if (draft := _draft(state, truth[state.sample_id], steps, engine.limits.vocab_size))
                }
            )

    return _generate(engine, requests, put, late)


def generate_trees(
    engine: Any, requests: Sequence[EngineRequest], truth: Mapping[str, Sequence[int]], late: int = 0
) -> Generated:
    """Run samples that are drafted for in trees.

    What is right is mostly on a branch. Trees differ from sample to sample and step to step; some are chains.
    """

    def put(steps: int) -> None:
        drafts, parents = dict[str, list[int]](), dict[str, list[int]]()
        for state in engine.decoding():
            number, name = int(state.sample_id.removeprefix("s")), state.sample_id
            right = list(truth[name][len(state.response) :])
            drafts[name], parents[name] = _tree(right, (number + steps) % 4, engine.limits.vocab_size)
            # Of a tree the first tokens are a tree again.
            drafts[name], parents[name] = drafts[name][: state.room], parents[name][: state.room]
        engine.put_drafts({name: DraftTree(draft, parents[name]) for name, draft in drafts.items() if draft})

    return _generate(engine, requests, put, late)


def _generate(
    engine: Any, requests: Sequence[EngineRequest], put: Callable[[int], None], late: int
) -> Generated:
    """Run samples; `put` gives the drafts of a step."""
    tokens: dict[str, list[int]] = {request.sample_id: [] for request in requests}
    logprobs: dict[str, list[float]] = {request.sample_id: [] for request in requests}
    first = len(requests) - late
    for request in requests[:first]:
        engine.add(request)
    steps = accepted = 0
    while engine.has_work:
        if steps == 2:
            for request in requests[first:]:
                engine.add(request)
        put(steps)
        for step in engine.step():
            tokens[step.sample_id] += step.token_ids
            logprobs[step.sample_id] += step.logprobs
            accepted += step.accepted
        steps += 1
    engine.forget_kv()
    return Generated(tokens, logprobs, accepted)


def _tree(right: list[int], kind: int, vocab_size: int) -> tuple[list[int], list[int]]:
    """Return a draft, and its parents, of which the tokens in `right`, at least one, are those that come."""
    wrong = [(token + 1) % vocab_size for token in right]
    if len(right) < 4 or kind == 3:
        return right[:2], [-1, 0][: len(right)]
    if kind == 0:
        # A wrong chain, and a branch from the root.
        return [wrong[0], 7, *right[:3]], [-1, 0, -1, 2, 3]
    if kind == 1:
        # A chain that goes wrong, and a branch from where it does.
        return [right[0], wrong[1], *right[1:4]], [-1, 0, 0, 2, 3]
    # A branch that goes wrong, and a branch from where it does.
    return [wrong[0], right[0], wrong[1], 7, *right[1:3]], [-1, -1, 1, 2, 1, 4]


def _draft(state: Any, truth: Sequence[int], steps: int, vocab_size: int) -> list[int]:
    number = int(state.sample_id.removeprefix("s"))
    here = len(state.response)
    draft = list(truth[here : here + min((3 * number + steps) % (LONGEST_DRAFT + 1), state.room)])
    if draft and (number + steps) % 3 == 0:
        draft[-1] = (draft[-1] + 1) % vocab_size
    return draft


def takes_trees(engine: Any) -> bool:
    """Return whether the engine verifies draft trees."""
    return engine.form is not None


def watch(engine: Any) -> dict[str, Any]:
    """Which attention the layers have, and how many CUDA graphs there are; from here on launches are counted."""
    from vllm.compilation.counter import compilation_counter

    from kernels.short_query_attention import triton_attend

    real, launched = triton_attend.attend_triton, _launched
    launched.clear()

    def attend(step: Any, *args: Any, **kwargs: Any) -> Any:
        # A single request may be the one that kernels are compiled with beforehand.
        if len(step.lengths) > 1:
            launched.append(step.longest_query)
        return real(step, *args, **kwargs)

    triton_attend.attend_triton = attend
    layers = engine._core.collective_rpc(_attention_layers)[0]
    return {"layers": layers, "graphs": compilation_counter.num_cudagraph_captured}


def launched(_: Any) -> list[int]:
    """Longest query of each launch that Python made since `watch`; replays of graphs are not included."""
    return list(_launched)


_launched: list[int] = []


def _attention_layers(worker: Any) -> list[str]:
    layers = worker.model_runner.compilation_config.static_forward_context.values()
    return sorted({type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")})
