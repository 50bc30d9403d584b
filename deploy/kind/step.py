"""Generate one step twice, and fail unless both have the same tokens.

`python step.py HOST:PORT`, with the token in PACELINE_TOKEN. It prints "begun" when the first sample of the second
step arrives, so that a script can remove an instance in the middle of that step.
"""

from __future__ import annotations

import hashlib
import os
import sys

from paceline import Client, Group, SamplingParams

PROMPTS, SAMPLES, TOKENS = 32, 8, 512


def step(client: Client, name: str, *, announce: bool) -> str:
    """Return a checksum of all tokens of a step, in the order of prompts and slots."""
    groups = [Group(f"p{i}", [3 + i % 10, 4, 5 + i % 7], samples=SAMPLES) for i in range(PROMPTS)]
    tokens: dict[tuple[str, int], list[int]] = {}
    with client.run(name, seed=7) as run:
        for sample in run.rollout(0, groups, SamplingParams(max_tokens=TOKENS, ignore_eos=True)):
            if announce and not tokens:
                print("begun", flush=True)
            tokens[sample.prompt_id, sample.slot] = list(map(int, sample.token_ids))
    assert len(tokens) == PROMPTS * SAMPLES, f"{len(tokens)} samples arrived"
    assert all(len(each) == TOKENS for each in tokens.values())
    return hashlib.sha256(repr(sorted(tokens.items())).encode()).hexdigest()


def main(address: str) -> None:
    """Compare an undisturbed step with one that may be disturbed."""
    with Client(address, token=os.environ["PACELINE_TOKEN"], insecure=True) as client:
        quiet = step(client, "quiet", announce=False)
        disturbed = step(client, "disturbed", announce=True)
    assert quiet == disturbed, "the tokens differ"
    print(f"same: {PROMPTS * SAMPLES} samples of {TOKENS} tokens, {quiet}")


if __name__ == "__main__":
    main(sys.argv[1])
