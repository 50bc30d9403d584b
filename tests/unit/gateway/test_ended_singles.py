"""Names of samples of Generate calls, of which the last ones are remembered."""

from __future__ import annotations

from paceline.v1 import rollout_pb2
from services.gateway.feeds.learner import EndedSingles
from services.gateway.state.messages import BatchBuilder

BUILDER = BatchBuilder(max_seconds=1.0, max_attempts=1)


def test_the_last_samples_are_known_by_run_step_prompt_and_slot() -> None:
    singles = EndedSingles(most=2)

    def end(slot: int) -> None:
        request = rollout_pb2.GenerateRequest(run_id="run", prompt_id="p", step=3, slot=slot)
        singles.add(BUILDER.from_generate(request, ("run", "g"), 0, accepted_at=0.0), 0)

    def known(run_id: str, step: int, prompt_id: str = "p") -> list[int]:
        rewards = [rollout_pb2.Reward(prompt_id=prompt_id, slot=slot) for slot in range(4)]
        return [reward.slot for reward in singles.known(run_id, step, rewards)]

    for slot in (0, 1, 0, 2):
        end(slot)
    assert known("run", 3) == [0, 2]
    assert known("other", 3) == known("run", 4) == known("run", 3, "q") == []
