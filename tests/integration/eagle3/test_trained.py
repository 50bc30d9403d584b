"""A head that was trained accepts in the engine what it was found to accept when it was trained.

This is where a feature that is off by one, of the wrong layer, or rotated otherwise would show without any error:
the engine would go on as exact as ever, and accept less.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from services.drafter.learning.data import LearningSettings, TrainingSample
from services.drafter.learning.learner import Learner
from services.generation.engine.types import EngineRequest
from tests.integration.eagle3.conftest import DEPTH, DRAFT_VOCABULARY, DRAFTING, Bench, same, wishes
from tests.support import eagle3_runs
from tests.support.quantized_runs import Rolled, roll

pytestmark = pytest.mark.timeout(400)
_UPDATES = 24


def _acceptance_length(found: Rolled) -> float:
    """Tokens of a verification; the first token of each sample comes with its prompt."""
    samples = len(found.tokens)
    return (sum(map(len, found.tokens.values())) - samples) / (found.outputs - samples)


def _rollouts(requests: tuple[EngineRequest, ...], found: Rolled) -> list[TrainingSample]:
    return [
        TrainingSample(
            "run",
            "batch",
            each.sample_id,
            0,
            0,
            each.prompt,
            tuple(found.tokens[each.sample_id]),
            1.0,
            each.seed,
        )
        for each in requests
    ]


def test_the_engine_accepts_what_the_learner_says_it_would(bench: Bench, tmp_path: Path) -> None:
    requests = wishes(count=8)
    plain = bench.engine.run(roll, requests)
    rollouts = _rollouts(requests, plain)
    settings = LearningSettings(
        depth=DEPTH, draft_vocabulary=DRAFT_VOCABULARY, batch_tokens=160, warmup_steps=3
    )
    learner = Learner(bench.model, settings)
    lengths = []
    try:
        for updates in (1, _UPDATES):
            for _ in range(updates):
                learner.update(rollouts, [1.0] * len(rollouts))
            learner.save(tmp_path, len(lengths) + 1)
            said = learner.evaluate(rollouts).acceptance_length
            bench.engine.run(eagle3_runs.swap, learner.head.tensors())
            found = bench.engine.run(roll, requests, DRAFTING)
            same(found, plain)
            assert _acceptance_length(found) == pytest.approx(said, rel=0.01)
            bench.check(requests, found, head=learner.head)
            lengths.append(said)
    finally:
        bench.engine.run(eagle3_runs.swap, bench.head.tensors())
    untrained = _acceptance_length(bench.engine.run(roll, requests, DRAFTING))
    assert untrained + 0.5 < lengths[0] < lengths[1] - 0.3
