"""Write the drafts that could be made ahead: the previous policy's responses to a step's noise, and their forks.

An engine with the weights of the previous step decodes each step's prompts and seeds again. At the nearest ties of
each response it also continues with the runner-up in place of the token. Idle time decides how much of these texts
exists when the step begins; it does not change their contents. The texts are kept next to the recorded run, in one
file for each step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.device_clock.recording import MOST_FORKS, ForkedText, OldText, OldTexts
from bench.report import keep
from bench.rollout.record import RecordedRun
from bench.rollout.stock_engine import load_weights
from bench.rollout.training import TrainedStep
from examples.tinymath.options import Options
from paceline import SampleKey

if TYPE_CHECKING:
    from services.generation.engine.core import Engine
    from services.generation.engine.types import EngineRequest

_FOLDER = "before"
_MAX_SEQS = 128


def load_or_write(
    run: RecordedRun, folder: Path, model: Path, kv_bytes: int, watch: Callable[[int], None]
) -> list[OldTexts]:
    """Write the missing texts and return the texts of each step; the first step has none.

    `watch` is called with each step that is written now. The engine runs in this process, which must have no other.
    """
    steps = run.trajectory.steps
    missing = [place for place in range(1, len(steps)) if not _file(folder, run, place).is_file()]
    if missing:
        from services.generation.engine.core import Engine
        from services.generation.engine.types import EngineOptions

        options = EngineOptions(
            str(model), dtype="float32", max_num_seqs=_MAX_SEQS, kv_cache_memory_bytes=kv_bytes
        )
        engine = Engine(options)
        for place in missing:
            load_weights(engine, steps[place - 1].weights)
            _write(_file(folder, run, place), written(engine, steps[place], run.trajectory.options))
            watch(steps[place].step)
    return [{}, *(_read(_file(folder, run, place)) for place in range(1, len(steps)))]


def written(engine: Engine, step: TrainedStep, options: Options) -> OldTexts:
    """Return the engine's responses to the prompts and the noise of a step."""
    from services.contracts.sampling import Sampling
    from services.generation.engine.types import EngineRequest

    prompts = {group.prompt_id: tuple(map(int, group.prompt_token_ids)) for group in step.groups}
    sampling = Sampling(max_tokens=options.max_tokens, temperature=options.temperature)

    def request(key: SampleKey, prefix: Sequence[int] = ()) -> EngineRequest:
        return EngineRequest(
            f"{step.step}/{key.prompt_id}/{key.slot}/{len(prefix)}",
            prompts[key.prompt_id],
            tuple(prefix),
            sampling,
            step.samples[key].seed,
            near_ties=not prefix,
        )

    def nearest(found: _Decoded) -> list[tuple[float, int, int]]:
        ties = sorted(zip(found.margins, range(len(found.tokens)), found.runners_up, strict=True))
        return [tie for tie in ties[:MOST_FORKS] if tie[1] + 1 < options.max_tokens]

    own = dict(zip(step.samples, _decoded(engine, [request(key) for key in step.samples]), strict=True))
    ties = [(key, tie) for key in own for tie in nearest(own[key])]
    forks = _decoded(engine, [request(key, [*own[key].tokens[:at], token]) for key, (_, at, token) in ties])
    found = {key: list[ForkedText]() for key in own}
    for (key, (margin, at, _)), fork in zip(ties, forks, strict=True):
        found[key].append(ForkedText(at, margin, np.array(fork.tokens, np.int32)))
    return {key: OldText(np.array(own[key].tokens, np.int32), tuple(found[key])) for key in own}


@dataclass(slots=True)
class _Decoded:
    tokens: list[int]
    runners_up: list[int]
    margins: list[float]


def _decoded(engine: Engine, requests: Sequence[EngineRequest]) -> list[_Decoded]:
    """Return the responses to requests, prefixes included, with the runners-up of the decoded tokens."""
    found = {request.sample_id: _Decoded(list(request.prefix), [], []) for request in requests}
    for request in requests:
        if engine.finished_by_prefix(request) is None:
            engine.add(request)
    while engine.has_work:
        for step in engine.step():
            own = found[step.sample_id]
            own.tokens += step.token_ids
            own.runners_up += step.top_token_ids
            own.margins += step.top_logprobs
    return [found[request.sample_id] for request in requests]


def _file(folder: Path, run: RecordedRun, place: int) -> Path:
    return folder / _FOLDER / f"{run.hash[:16]}-{place:04d}.json"


def _write(path: Path, texts: OldTexts) -> None:
    data = [
        [
            *(key.prompt_id, key.slot, text.response.tolist()),
            [[fork.at, fork.margin, fork.response[fork.at :].tolist()] for fork in text.forks],
        ]
        for key, text in texts.items()
    ]
    keep(path, data)


def _read(path: Path) -> OldTexts:
    found = {}
    for prompt_id, slot, tokens, forks in json.loads(path.read_text()):
        response = np.array(tokens, np.int32)
        found[SampleKey(prompt_id, slot)] = OldText(
            response,
            tuple(
                ForkedText(at, margin, np.concatenate([response[:at], np.array(rest, np.int32)]))
                for at, margin, rest in forks
            ),
        )
    return found
