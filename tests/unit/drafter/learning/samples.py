"""Rollouts for tests."""

from __future__ import annotations

from random import Random

from services.drafter.learning.data import TrainingSample


def rollout(
    prompt: tuple[int, ...],
    response: tuple[int, ...],
    slot: int = 0,
    reward: float | None = 1.0,
    **more: object,
) -> TrainingSample:
    """Return a sample of one prompt."""
    given = {"run_id": "run", "batch_id": "0", "prompt_id": str(prompt), "policy_version": 0, **more}
    return TrainingSample(slot=slot, prompt=prompt, response=response, reward=reward, **given)


def random_rollouts(count: int, vocabulary: int, seed: int = 0, longest: int = 20) -> list[TrainingSample]:
    """Random tokens."""
    rng = Random(seed)
    return [
        rollout(
            tuple(rng.randrange(vocabulary) for _ in range(rng.randint(1, 6))),
            tuple(rng.randrange(vocabulary) for _ in range(rng.randint(2, longest))),
            slot,
            rng.random(),
        )
        for slot in range(count)
    ]
