"""Samples through an engine, with drafts of every length; run where the engine is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineRequest

LONGEST_DRAFT = 7


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
) -> dict[str, list[int]]:
    """Return the tokens of samples, of which the last `late` come after two steps, while the others decode.

    With the `truth`, samples are drafted for: as many tokens as differ from sample to sample and step to step, none
    now and then, and the last one is sometimes wrong.
    """
    found: dict[str, list[int]] = {request.sample_id: [] for request in requests}
    first = len(requests) - late
    for request in requests[:first]:
        engine.add(request)
    steps = 0
    while engine.has_work:
        if steps == 2:
            for request in requests[first:]:
                engine.add(request)
        if truth is not None:
            engine.put_drafts(
                {
                    state.sample_id: draft
                    for state in engine.decoding()
                    if (draft := _draft(state, truth[state.sample_id], steps, engine.limits.vocab_size))
                }
            )
        for step in engine.step():
            found[step.sample_id] += step.token_ids
        steps += 1
    engine.forget_kv()
    return found


def _draft(state: Any, truth: Sequence[int], steps: int, vocab_size: int) -> list[int]:
    number = int(state.sample_id.removeprefix("s"))
    here = len(state.response)
    draft = list(truth[here : here + min((3 * number + steps) % (LONGEST_DRAFT + 1), state.room)])
    if draft and (number + steps) % 3 == 0:
        draft[-1] = (draft[-1] + 1) % vocab_size
    return draft


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
