"""Compare coupled sampling and its drafters with plain vLLM and vLLM's own speculation, on the tinymath model.

Every engine is a separate process on the same core. All engines stay up and take turns round by round, while the
others are idle. Figures are medians over the rounds. Writes runs/bench/coupled.json.

    python -m bench.coupled [--rounds 5] [--model DIR]

vLLM's `suffix` method needs the package arctic-inference, which Paceline does not need. Without the package that
figure is null.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.coupled.engine_process import EngineMeasurement, EngineProcess, EngineRound
from bench.report import Figures, format_value, option_parser, show_rows, write
from bench.worker import WorkerFailed
from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineOptions, EngineRequest

_SMALL, _LARGE = 8, 64
_GIVEN_WINDOW, _WINDOW = 16, 8
_OWN_METHODS: dict[str, dict[str, Any]] = {
    "vllm_ngram": {"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 5},
    "vllm_suffix": {"method": "suffix"},
    # Without the index over finished requests it has the same input as our suffix drafter: prompt and own response.
    "vllm_suffix_own": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
}
_GOALS = {
    "off_step_ratio": "<= 1.02",
    "given_step_reduction": ">= 6",
    "given_speedup": ">= 3",
    "speedup_vs_vllm_ngram": ">= 1",
    "speedup_vs_vllm_suffix": ">= 1",
    "speedup_vs_vllm_suffix_own": "",
    "noise_share": "<= 0.1",
}
_NOTE = (
    "vllm_ngram and vllm_suffix run with a repair of vLLM 0.32 (bench/rollout/told_tokens.py): on CPU at "
    "temperature above 0 its rejection sampler otherwise reads uninitialised memory and returns garbage."
)


def main() -> None:
    """Measure the engines, then show and write the figures."""
    arguments = _arguments()
    options = EngineOptions(
        str(arguments.model),
        dtype="float32",
        max_num_seqs=_LARGE,
        max_model_len=1024,
        kv_cache_memory_bytes=768 << 20,
    )
    engines, absent = _start(options)
    try:
        figures, rows = _measure(engines, arguments.rounds, arguments.prompts)
    finally:
        for engine in engines.values():
            engine.close()
    runs = show_rows(
        "coupled: medians of rounds, batch 8", ("run", "steps", "tokens/step", "tokens/s", "accepted"), rows
    )
    goals = [(name, format_value(figures.get(name)), goal) for name, goal in _GOALS.items()]
    show_rows("coupled: ratios", ("figure", "value", "goal"), goals)
    print(_NOTE, *(f"{name} is absent: {why}" for name, why in absent.items()), sep="\n")
    about = {"goals": _GOALS, "tables": {"runs": runs}, "note": _NOTE, "absent": absent}
    write("coupled", {**figures, **about, "rounds": arguments.rounds})


def _start(options: EngineOptions) -> tuple[dict[str, EngineProcess], dict[str, str]]:
    """Return the engines, and the reason why each missing one is missing."""
    plain = replace(options, coupled=False)
    engines = {"ours": EngineProcess(options), "vllm": EngineProcess(plain)}
    for name, method in _OWN_METHODS.items():
        speculative = {**method, "num_speculative_tokens": _WINDOW}
        engines[name] = EngineProcess(replace(plain, vllm_speculation=speculative))
    absent = {}
    for name in list(engines):
        try:
            engines[name].wait()
        except WorkerFailed as error:
            if name not in _OWN_METHODS:
                raise
            absent[name] = str(error).strip().rpartition("\n")[2]
            engines.pop(name).close()
    return engines, absent


def _measure(
    engines: dict[str, EngineProcess], rounds: int, prompts: int
) -> tuple[Figures, list[tuple[str, ...]]]:
    off = _off(engines, rounds)
    # Every round has new prompts, so that no drafter has seen their responses. The first round does not count,
    # because engines meet new shapes in it.
    requests = _requests(prompts * (rounds + 1), Sampling(max_tokens=512))
    found = [_small(engines, requests[i * prompts : (i + 1) * prompts]) for i in range(rounds + 1)][1:]

    def middle(figure: Callable[[dict[str, EngineMeasurement]], float]) -> float:
        return median(figure(each) for each in found)

    def faster(ours: str, theirs: str) -> float | None:
        if theirs not in found[0]:
            return None
        return middle(lambda each: _speed(each[ours]) / _speed(each[theirs]))

    figures = {
        **off,
        "given_step_reduction": middle(lambda each: each["ours off"].steps / each["ours given"].steps),
        "given_speedup": faster("ours given", "vllm"),
        "given_speedup_vs_own_off": faster("ours given", "ours off"),
        "suffix_speedup_vs_own_off": faster("ours suffix", "ours off"),
        **{f"speedup_vs_{name}": faster("ours suffix", name) for name in _OWN_METHODS},
    }
    return figures, [_row(name, [each[name] for each in found]) for name in found[0]]


def _small(
    engines: dict[str, EngineProcess], requests: Sequence[EngineRequest]
) -> dict[str, EngineMeasurement]:
    """Run one round at batch 8: every engine and drafter on the same prompts, in turn."""
    order = EngineRound(requests, _SMALL)
    found = {"vllm": engines["vllm"].run(order), "ours off": engines["ours"].run(order)}
    truth = found["ours off"].responses
    given = [replace(request, given=tuple(truth[request.sample_id])) for request in requests]
    found["ours given"] = engines["ours"].run(EngineRound(given, _SMALL, "reference", _GIVEN_WINDOW))
    found["ours suffix"] = engines["ours"].run(EngineRound(requests, _SMALL, "suffix", _WINDOW))
    for name in ("ours given", "ours suffix"):
        if found[name].responses != truth:
            raise RuntimeError(f"{name} gave other tokens than plain decoding")
    return found | {name: engines[name].run(order) for name in _OWN_METHODS if name in engines}


def _speed(measured: EngineMeasurement) -> float:
    return measured.tokens / measured.seconds


def _row(name: str, rounds: Sequence[EngineMeasurement]) -> tuple[str, ...]:
    steps = median(each.steps for each in rounds)
    per_step = median(each.tokens / each.steps for each in rounds)
    speed = median(_speed(each) for each in rounds)
    drafted, accepted = sum(each.drafted for each in rounds), sum(each.accepted for each in rounds)
    # vLLM's own methods do not report acceptance.
    rate = f"{accepted / drafted:.2f}" if drafted else "-"
    return name, f"{steps:.0f}", f"{per_step:.2f}", f"{speed:.0f}", rate


def _off(engines: dict[str, EngineProcess], rounds: int) -> dict[str, float]:
    """Return step times at batch 64 without drafts, ours and vLLM's own runner's, and the share of the noise."""
    order = EngineRound(_requests(_LARGE, Sampling(max_tokens=150, ignore_eos=True)), _LARGE)
    times: dict[str, list[float]] = {"ours": [], "vllm": []}
    pairs: list[float] = []
    for i in range(2 * rounds + 1):
        names = ("ours", "vllm") if i % 2 else ("vllm", "ours")
        round_times = {name: median(engines[name].run(order).step_seconds) for name in names}
        if i:
            pairs.append(round_times["ours"] / round_times["vllm"])
            for name in names:
                times[name].append(round_times[name])
    noisy = engines["ours"].run(replace(order, time_noise=True))
    return {
        "off_step_ratio": median(times["ours"]) / median(times["vllm"]),
        "off_step_ratio_of_pairs": median(pairs),
        "off_step_milliseconds": 1e3 * median(times["ours"]),
        "vllm_step_milliseconds": 1e3 * median(times["vllm"]),
        "noise_share": noisy.noise_seconds / noisy.all_steps_seconds,
    }


def _requests(count: int, sampling: Sampling) -> Sequence[EngineRequest]:
    from examples.tinymath.tasks import make_problems
    from examples.tinymath.tokenizer import prompt_ids

    return [
        EngineRequest(f"p{i}", tuple(prompt_ids(problem.question)), (), sampling, 1000 + i)
        for i, problem in enumerate(make_problems(5, count))
    ]


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--model", type=Path, default=Path("examples/tinymath/model"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
