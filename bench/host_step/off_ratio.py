"""Compare a step of the coupled engine without drafts with a step of vLLM's own, by processor time.

Two processes with a model of their own share a core and take turns, so that one waits while the other works.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

from bench.report import cores
from bench.worker import PipedWorker
from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineOptions, EngineRequest

_MODEL, _SAMPLES, _STEPS = "examples/tinymath/model", 64, 120


def off_ratio(rounds: int) -> dict[str, float]:
    """Return the ratio of the medians, of as many rounds of 120 steps of 64 samples, and the medians."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with PipedWorker(_serve, True) as ours, PipedWorker(_serve, False) as plain:
        engines = {True: ours, False: plain}
        for turn in range(rounds + 1):
            for coupled in (bool(turn % 2), not turn % 2):
                found = float(engines[coupled].ask(turn))
                # Engines meet new shapes in the first round.
                if turn:
                    seconds[coupled].append(found)
    pairs = [mine / theirs for mine, theirs in zip(seconds[True], seconds[False], strict=True)]
    return {
        "off_step_ratio": median(pairs),
        "off_step_milliseconds": 1e3 * median(seconds[True]),
        "vllm_step_milliseconds": 1e3 * median(seconds[False]),
    }


def _serve(coupled: bool) -> Callable[[int], float]:
    """Build an engine; return the function that measures a round and returns the median seconds of its steps."""
    core = str(cores()[-1])
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": core, "HF_HUB_OFFLINE": "1"}
    os.environ["NUMBA_NUM_THREADS"] = "1"
    from services.generation.engine.core import Engine
    from services.generation.engine.startup import warm_up

    engine = Engine(
        EngineOptions(
            _MODEL,
            dtype="float32",
            max_num_seqs=_SAMPLES,
            max_model_len=512,
            kv_cache_memory_bytes=256 << 20,
            coupled=coupled,
        )
    )
    if coupled:
        warm_up(engine)

    def measured(turn: int) -> float:
        sampling = Sampling(max_tokens=_STEPS + 1, ignore_eos=True)
        for place in range(_SAMPLES):
            prompt = tuple(3 + (place + k) % 50 for k in range(16))
            engine.add(EngineRequest(f"{turn}/{place}", prompt, (), sampling, 1000 * turn + place))
        times = []
        while engine.has_work:
            began = time.process_time()
            steps = engine.step()
            if len(steps) == _SAMPLES:
                times.append(time.process_time() - began)
        return median(times)

    return measured
