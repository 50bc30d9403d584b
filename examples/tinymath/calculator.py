"""Let the policy use a calculator: sessions on a running platform.

paceline up --model examples/tinymath/model
python -m examples.tinymath.calculator

The model normally writes `248-154=` and then its own result. Here `=` is a tool call: the calculator writes the
result, and the policy continues after it. This needs no training. The policy still decides what to compute; only
its arithmetic slips disappear. The same problems are sampled without the calculator for comparison.
"""

import argparse
import re
from math import prod

from examples.tinymath.tasks import PRACTICE, Problem, make_problems
from examples.tinymath.tokenizer import decode, encode, prompt_ids
from paceline import Client, Group, Run, Sample, SamplingParams, ToolUse

SAMPLES = 4
TOOLS = ToolUse(call_token_ids=tuple(encode("=")), max_calls=100)
SAMPLING = SamplingParams(max_tokens=600)
_CALL = re.compile(r"(\d+(?:[-+*]\d+)*)=$")
_TERM = re.compile(r"([-+]?)(\d+(?:\*\d+)*)")


def calculate(text: str) -> str:
    """Return the result of the expression before the final `=` of a text; "?" if there is none."""
    called = _CALL.search(text)
    if called is None:
        return "?"
    terms = _TERM.findall(called[1])
    return str(sum((-1 if sign == "-" else 1) * prod(map(int, term.split("*"))) for sign, term in terms))


def with_calculator(run: Run, groups: list[Group]) -> list[Sample]:
    """Return the samples of sessions in which the calculator answers."""
    with run.sessions(0, TOOLS, SAMPLING) as sessions:
        begun = [session for group in groups for session in sessions.begin(group)]
        for session, turn in sessions.turns():
            if not turn.done:
                session.answer(encode(calculate(decode(session.token_ids))))
    return [session.sample for session in begun if session.sample is not None]


def mean_reward(problems: dict[str, Problem], samples: list[Sample]) -> float:
    """Return the mean of the verifiers' scores."""
    scores = [problems[sample.prompt_id].reward(decode(sample.token_ids)) for sample in samples]
    return sum(scores) / len(scores)


def compare(address: str, count: int, run_id: str = "calculator") -> tuple[float, float]:
    """Return the mean rewards of `count` problems without and with the calculator, and print them."""
    problems = {problem.id: problem for problem in make_problems(seed=1, n=count, families=PRACTICE)}
    groups = [Group(name, prompt_ids(problem.question), SAMPLES) for name, problem in problems.items()]
    with Client(address) as client, client.run(run_id, seed=1) as run:
        plain = list(run.rollout(0, groups, SAMPLING))
        helped = with_calculator(run, groups)
    calls = sum(len(sample.calls) for sample in helped)
    own = sum(int(sample.policy_mask.sum()) for sample in helped)
    tokens = sum(len(sample.token_ids) for sample in helped)
    shown = max(helped, key=lambda sample: len(sample.calls) if len(sample.calls) < 8 else 0)
    print(f"{problems[shown.prompt_id].question.strip()}: {decode(shown.token_ids)}")
    print(f"{calls} calls in {len(helped)} sessions; {own} of {tokens} tokens are the policy's")
    without, having = mean_reward(problems, plain), mean_reward(problems, helped)
    print(f"mean reward {without:.3f} without the calculator, {having:.3f} with it")
    return without, having


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", default="127.0.0.1:7400")
    parser.add_argument("--problems", type=int, default=16)
    options = parser.parse_args()
    compare(options.address, options.problems)
