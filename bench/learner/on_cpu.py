"""Decoding on this machine with a head that followed the run, with the frozen one and without, on one core.

The samples are those of the run's last step, in float32 and with their seeds, so all ways give the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from bench.learner.recording import LearnerSubject
from bench.model_drafting import DraftedSamples, in_own_process, requests_of, roll, same_as_recorded
from bench.report import console
from services.contracts import drafter_checkpoint
from services.generation.engine.types import EAGLE3, Eagle3Options, EngineOptions

_DEPTHS = (1, 2, 3, 5)
_KV_BYTES = 1 << 29


def measure(subject: LearnerSubject, heads: Mapping[str, Path], rounds: int) -> dict[str, Any]:
    """Return tokens a second of processor time by way, in a process of its own."""
    return in_own_process(_run, subject, dict(heads), rounds)


def _run(subject: LearnerSubject, heads: dict[str, Path], rounds: int) -> dict[str, Any]:
    from services.generation.engine.core import Engine

    step = subject.trajectory.steps[-1]
    requests = requests_of(step, subject.trajectory.options.max_tokens)
    engine = Engine(
        EngineOptions(
            model=str(step.weights),
            dtype="float32",
            max_num_seqs=len(requests),
            kv_cache_memory_bytes=_KV_BYTES,
            eagle3=Eagle3Options(str(subject.drafter), max(_DEPTHS)),
        )
    )
    roll(engine, requests)
    found: dict[tuple[str, int], list[DraftedSamples]] = {}
    for turn in range(rounds):
        found.setdefault(("none", 0), []).append(roll(engine, requests))
        for name, path in heads.items():
            engine.swap_drafter(EAGLE3, drafter_checkpoint.load(path, "")[1])
            for depth in _DEPTHS:
                found.setdefault((name, depth), []).append(roll(engine, requests, EAGLE3, depth))
        console().print(f"learner: round {turn + 1} of {rounds} on this machine", highlight=False)
    plain = found["none", 0]
    rows = {}
    for (name, depth), rolls in found.items():
        ratios = [each.rate / other.rate for each, other in zip(rolls, plain, strict=True)]
        rows[f"{name} {depth}" if depth else name] = {
            "rate": median(each.rate for each in rolls),
            "vs_none": median(ratios),
            "block_efficiency": rolls[0].block_efficiency,
            "by_place": rolls[0].by_place,
            "steps": rolls[0].steps,
            "step_ms": 1e3 * median(rolls[0].step_seconds),
            "pass_ms": 1e3 * median(rolls[0].draft_seconds) if depth else None,
            "same_tokens": same_as_recorded(step, rolls[0].tokens),
        }
    return rows
