"""TRL on Paceline: GRPOTrainer samples from a fleet, and pushes weights to it.

    paceline up --model Qwen/Qwen2.5-0.5B-Instruct
    python grpo_trl.py Qwen/Qwen2.5-0.5B-Instruct

It needs Paceline's extra `trl`, in the trainer's environment. Names: TRL 1.16. Not run: this file. Run: GRPOTrainer
with PacelineRollout on real instances, in the tests (tests/e2e/test_trl.py) and for twenty steps in the soak.
"""

import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from paceline import Client
from paceline.integrations.trl import PacelineRollout

ADDRESS = "127.0.0.1:7400"
ARGUMENTS = {
    "output_dir": "runs/trl",
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "max_completion_length": 64,
    "learning_rate": 1e-5,
    "max_steps": 20,
}


def short(completions: list[str], **_: object) -> list[float]:
    """Return a reward for each completion: the shorter, the better."""
    return [-len(completion) / 100 for completion in completions]


def main(model: str) -> None:
    """Train a model that `paceline up` serves."""
    data = Dataset.from_list([{"prompt": f"Name the number after {number}."} for number in range(64)])
    with Client(ADDRESS) as client, client.run("trl", seed=7) as run:
        # Paceline: the rollout, which also pushes the weights before each step.
        trainer = GRPOTrainer(model, short, GRPOConfig(**ARGUMENTS), data, rollout_func=PacelineRollout(run))
        trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
