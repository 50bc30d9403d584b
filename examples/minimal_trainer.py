"""Train a policy on a running platform: REINFORCE with a leave-one-out baseline, in one file.

paceline up --model examples/tinymath/model
python -m examples.minimal_trainer --steps 5
"""

import argparse
from collections.abc import Iterable
from itertools import repeat
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from examples.tinymath.tasks import PRACTICE, make_problems
from examples.tinymath.tokenizer import decode, prompt_ids
from paceline import Client, Group, Sample, SampleStatus, SamplingParams

SAMPLES = 8


def train(address: str, model: Path, steps: int, run_id: str = "minimal") -> list[float]:
    """Train, with a push of the weights at the end of each step; return the mean reward of each step."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-4)
    problems = {problem.id: problem for problem in make_problems(seed=0, n=8, families=PRACTICE)}
    prompts = {problem.id: prompt_ids(problem.question) for problem in problems.values()}
    means = []
    with Client(address) as client:
        run = client.run(run_id, seed=1)
        groups = [Group(name, prompt, SAMPLES) for name, prompt in prompts.items()]
        # Each batch is announced while the previous one is generated, so that idle instances can begin with it.
        for step, rollout in enumerate(run.rollouts(repeat(groups, steps), SamplingParams(max_tokens=200))):
            samples = whole_groups(rollout.by_group())
            rewards = torch.tensor([problems[s.prompt_id].reward(decode(s.token_ids)) for s in samples])
            grouped = rewards.view(len(samples) // SAMPLES, SAMPLES)
            baseline = (grouped.sum(1, keepdim=True) - grouped) / (SAMPLES - 1)
            for sample, advantage in zip(samples, (grouped - baseline).flatten(), strict=True):
                prompt = prompts[sample.prompt_id]
                ids = torch.tensor([[*prompt, *sample.token_ids.tolist()]])
                logprobs = policy(input_ids=ids[:, :-1]).logits[0].log_softmax(-1)
                chosen = logprobs.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :]
                (-advantage * chosen.mean() / len(samples)).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.push_weights(policy.state_dict())
            means.append(float(rewards.mean()) if len(samples) else 0.0)
            print(f"step {step}: mean reward {means[-1]:.3f} of {len(samples)} samples", flush=True)
    return means


def whole_groups(groups: Iterable[list[Sample]]) -> list[Sample]:
    """Return the samples of groups without a failed one: the baseline needs all samples of a group."""
    kept = []
    for group in groups:
        lost = [each for each in group if each.status is SampleStatus.FAILED or not len(each.token_ids)]
        if lost:
            print(
                f"left out {group[0].prompt_id}: {len(lost)} of its samples failed: {lost[0].error}",
                flush=True,
            )
        else:
            kept += group
    return kept


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:7400")
    parser.add_argument("--model", type=Path, default=Path("examples/tinymath/model"))
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    train(options.address, options.model, options.steps)
