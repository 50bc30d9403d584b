"""Samples that the worker of a V2 engine knows."""

from __future__ import annotations

from typing import Any


def known_samples(engine: Any) -> tuple[int, int]:
    """Return the slots that are taken in the worker, and the samples of which it keeps anything else."""
    (found,) = engine._core.collective_rpc(_known)
    taken, kept = found
    return int(taken), int(kept)


def _known(worker: Any) -> tuple[int, int]:
    runner = worker.model_runner
    states = runner.req_states
    assert len(states.free_indices) + len(states.req_id_to_index) == runner.max_num_reqs
    kept = (runner._settings, runner._grammars, runner._followed, runner.prompt_logprobs_worker.readings)
    return len(states.req_id_to_index), sum(map(len, kept))
