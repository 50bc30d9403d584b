"""Rollouts that wait for the index. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque

from services.drafts.rollout import Rollout


class Backlog:
    """Rollouts by prompt, first come, first out; beyond `capacity` tokens the prompts that came first go."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._prompts: OrderedDict[tuple[str, str], deque[Rollout]] = OrderedDict()
        self.tokens = 0

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def push(self, rollout: Rollout) -> None:
        """One more rollout."""
        self._prompts.setdefault((rollout.run_id, rollout.prompt_id), deque()).append(rollout)
        self.tokens += len(rollout.tokens)
        while self.tokens > self._capacity:
            self.pop_prompt(next(iter(self._prompts)))

    def pop(self) -> Rollout:
        """The next rollout; there must be one."""
        prompt, rollouts = next(iter(self._prompts.items()))
        rollout = rollouts.popleft()
        self.tokens -= len(rollout.tokens)
        if not rollouts:
            del self._prompts[prompt]
        return rollout

    def pop_prompt(self, prompt: tuple[str, str]) -> list[Rollout]:
        """All rollouts of a prompt."""
        rollouts = list(self._prompts.pop(prompt, ()))
        self.tokens -= sum(len(rollout.tokens) for rollout in rollouts)
        return rollouts
