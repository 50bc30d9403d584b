"""Coupled sampling and its drafters against plain vLLM and vLLM's own speculation, on the tinymath model.

Every engine is a process of its own on the same core; all stay up, and take turns round by round while the others
are idle. Figures are ratios of medians over the rounds. Writes runs/bench/coupled.json.

    python -m bench.coupled [--rounds 5] [--model DIR]

vLLM's `suffix` needs the package arctic-inference, which Paceline does not: without it that figure is null.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.engine_process import EngineProcess, EngineUnavailable, Measured, Round
from bench.report import Figures, format_value, show_rows, write
from services.generation.engine.types import EngineOptions, SampleRequest
from services.platform.sampling import Sampling

_SMALL, _LARGE = 8, 64
_GIVEN_WINDOW, _WINDOW = 16, 8
_OWN_METHODS: dict[str, dict[str, Any]] = {
    "vllm_ngram": {"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 5},
    "vllm_suffix": {"method": "suffix"},
}
_GOALS = {
    "off_step_ratio": "<= 1.02",
    "given_step_reduction": ">= 6",
    "given_speedup": ">= 3",
    "speedup_vs_vllm_ngram": ">= 1",
    "speedup_vs_vllm_suffix": ">= 1",
    "noise_share": "<= 0.1",
}
_NOTE = (
    "vllm_ngram and vllm_suffix run with a repair of vLLM 0.32 (bench/vllm_expand_fix.py): on CPU at temperature "
    "above 0 its rejection sampler otherwise reads uninitialised memory and returns garbage."
)


def main() -> None:
    """Measure, show and write."""
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
    show_rows(
        "coupled: medians of rounds, batch 8", ("run", "steps", "tokens/s", "accepted", "block eff."), rows
    )
    goals = [(name, format_value(figures.get(name)), goal) for name, goal in _GOALS.items()]
    show_rows("coupled: ratios", ("figure", "value", "goal"), goals)
    print(_NOTE, *(f"{name} is absent: {why}" for name, why in absent.items()), sep="\n")
    write("coupled", {**figures, "note": _NOTE, "absent": absent, "rounds": arguments.rounds})


def _start(options: EngineOptions) -> tuple[dict[str, EngineProcess], dict[str, str]]:
    """The engines, and why one is missing."""
    plain = replace(options, coupled=False)
    engines = {"ours": EngineProcess(options), "vllm": EngineProcess(plain)}
    for name, method in _OWN_METHODS.items():
        speculative = {**method, "num_speculative_tokens": _WINDOW}
        engines[name] = EngineProcess(replace(plain, vllm_speculation=speculative))
    absent = {}
    for name in list(engines):
        try:
            engines[name].wait()
        except EngineUnavailable as error:
            if name not in _OWN_METHODS:
                raise
            absent[name] = str(error).strip().rpartition("\n")[2]
            engines.pop(name).close()
    return engines, absent


def _measure(
    engines: dict[str, EngineProcess], rounds: int, prompts: int
) -> tuple[Figures, list[tuple[str, ...]]]:
    off = _off(engines, rounds)
    requests = _requests(prompts, Sampling(max_tokens=512))
    truth = engines["ours"].run(Round(requests, _SMALL)).responses
    given = [replace(request, given=tuple(truth[request.sample_id])) for request in requests]
    runs: dict[str, Callable[[], Measured]] = {
        "vllm": lambda: engines["vllm"].run(Round(requests, _SMALL)),
        "ours off": lambda: engines["ours"].run(Round(requests, _SMALL)),
        "ours given": lambda: engines["ours"].run(Round(given, _SMALL, "given", _GIVEN_WINDOW)),
        "ours suffix": lambda: engines["ours"].run(Round(requests, _SMALL, "suffix", _WINDOW)),
    }
    for name in _OWN_METHODS:
        if name in engines:
            runs[name] = lambda name=name: engines[name].run(Round(requests, _SMALL))  # type: ignore[misc]
    # The first round of each is not counted: shapes that an engine meets first are slow.
    found = [{name: run() for name, run in runs.items()} for _ in range(rounds + 1)][1:]
    for each in found:
        for name in ("ours off", "ours given", "ours suffix"):
            if each[name].responses != truth:
                raise RuntimeError(f"{name} gave other tokens than plain decoding")
    speed = {name: median(each[name].tokens / each[name].seconds for each in found) for name in runs}
    steps = {name: median(each[name].steps for each in found) for name in runs}

    def ratio(ours: str, theirs: str) -> float | None:
        return speed[ours] / speed[theirs] if theirs in speed else None

    figures = {
        **off,
        "given_step_reduction": steps["ours off"] / steps["ours given"],
        "given_speedup": ratio("ours given", "vllm"),
        "suffix_speedup": ratio("ours suffix", "vllm"),
        "speedup_vs_vllm_ngram": ratio("ours suffix", "vllm_ngram"),
        "speedup_vs_vllm_suffix": ratio("ours suffix", "vllm_suffix"),
        "tokens_per_second": speed,
        "steps": steps,
    }
    return figures, [_row(name, speed[name], steps[name], found[-1][name]) for name in runs]


def _row(name: str, speed: float, steps: float, last: Measured) -> tuple[str, ...]:
    responses = len(last.responses)
    if not last.drafted:
        return name, f"{steps:.0f}", f"{speed:.0f}", "-", "-"
    # A sample's last step may be cut by its end, so this is a lower bound of the papers' figure.
    efficiency = last.tokens / max(last.tokens - last.accepted - responses, 1)
    return name, f"{steps:.0f}", f"{speed:.0f}", f"{last.accepted / last.drafted:.2f}", f"{efficiency:.2f}"


def _off(engines: dict[str, EngineProcess], rounds: int) -> dict[str, float]:
    """Step time at batch 64 with nothing drafted, ours against vLLM's own runner, and the noise's share."""
    order = Round(_requests(_LARGE, Sampling(max_tokens=150, ignore_eos=True)), _LARGE)
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


def _requests(count: int, sampling: Sampling) -> Sequence[SampleRequest]:
    from examples.tinymath.tasks import make_problems
    from examples.tinymath.tokenizer import prompt_ids

    return [
        SampleRequest(f"p{i}", tuple(prompt_ids(problem.question)), (), sampling, 1000 + i)
        for i, problem in enumerate(make_problems(5, count))
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--model", type=Path, default=Path("examples/tinymath/model"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
