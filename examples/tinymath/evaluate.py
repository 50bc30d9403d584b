"""Evaluate a model: sample at temperature 1 with vLLM, and print rewards, mixed groups and lengths.

Use:

    python -m examples.tinymath.evaluate examples/tinymath/model --problems 400 --families gcd products
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.tinymath import tokenizer
from examples.tinymath.tasks import FAMILIES, Problem, make_problems

MAX_TOKENS = 1200
"""Longest response; the longest worked solution is `tasks.MAX_TRACE` characters."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One sampled response."""

    problem: Problem
    response_ids: list[int]
    ended: bool
    """True if the model ended the response by itself."""

    @property
    def reward(self) -> float:
        """The verifier's score in [0, 1]."""
        return self.problem.reward(tokenizer.decode(self.response_ids))


def sample(folder: Path, problems: Sequence[Problem], n: int) -> list[EvaluationResult]:
    """Sample n responses to each problem, in the order of the problems."""
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=128,
        kv_cache_memory_bytes=2**30,
    )
    # Without a tokenizer the engine does not know the end token.
    params = SamplingParams(
        temperature=1.0, n=n, max_tokens=MAX_TOKENS, stop_token_ids=[tokenizer.EOS_ID], detokenize=False
    )
    prompts = [TokensPrompt(prompt_token_ids=tokenizer.prompt_ids(problem.question)) for problem in problems]
    return [
        EvaluationResult(problem, list(output.token_ids), output.finish_reason == "stop")
        for problem, result in zip(problems, engine.generate(prompts, params, use_tqdm=False), strict=True)
        for output in result.outputs
    ]


def row(name: str, outcomes: Sequence[EvaluationResult], n: int) -> str:
    """Format one line of the table, for outcomes in groups of n."""
    rewards = np.array([outcome.reward for outcome in outcomes]).reshape(-1, n)
    lengths = np.array([len(outcome.response_ids) for outcome in outcomes])
    median, p95 = np.percentile(lengths, [50, 95])
    return (
        f"{name:15} {len(outcomes):7d} {rewards.mean():7.3f} {(rewards.std(axis=1) > 1e-6).mean():6.2f} "
        f"{lengths.mean():6.0f} {median:7.0f} {p95:6.0f} {lengths.max():6d} "
        f"{np.mean([outcome.ended for outcome in outcomes]):7.4f}"
    )


def report(outcomes: Sequence[EvaluationResult], n: int) -> str:
    """Return the table: one line for each family and one for all."""
    families: dict[str, list[EvaluationResult]] = defaultdict(list)
    for outcome in outcomes:
        families[outcome.problem.family].append(outcome)
    head = (
        f"{'family':15} {'samples':>7} {'reward':>7} {'mixed':>6} {'mean':>6} {'median':>7} "
        f"{'p95':>6} {'max':>6} {'ended':>7}"
    )
    lines = [row(name, families[name], n) for name in sorted(families)]
    return "\n".join([head, *lines, row("all", outcomes, n)])


def main() -> None:
    """Read the options, sample, and print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "model")
    options.add_argument("--problems", type=int, default=400)
    options.add_argument("--n", type=int, default=8, help="samples for each problem")
    options.add_argument("--seed", type=int, default=1000, help="of the problems; training uses others")
    options.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    given = options.parse_args()
    problems = make_problems(given.seed, given.problems, given.families)
    print(report(sample(given.folder, problems, given.n), given.n))


if __name__ == "__main__":
    main()
