"""Train a first drafter on recorded samples of the policy, for the online learner and the engines to begin with.

    python -m services.drafter.warmup --policy DIR --rollouts rollouts.jsonl --out DIR

A line of the file is an object with `prompt` and `response`, lists of token ids, and optionally the other fields of
TrainingSample (learning/data.py); with `seed` the evaluation uses the sample's own noise. Some prompts are held out
with all their samples. The drafter of the pass with the highest acceptance length on these is written.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers

from paceline.files import parse_object
from services.contracts.drafter_checkpoint import Checkpoint
from services.drafter.learning.data import (
    Evaluation,
    LearningSettings,
    TrainingSample,
    UpdateReport,
    Weighting,
    weights_of,
)
from services.drafter.learning.learner import Learner

_TOKENS = ("prompt", "response")


@dataclass(frozen=True, slots=True)
class Passed:
    """Report of one epoch over the samples, and the evaluation on held-out samples after it."""

    number: int
    report: UpdateReport
    evaluation: Evaluation
    is_best: bool


def read_rollouts(path: Path) -> list[TrainingSample]:
    """Read the samples of a file. ValueError: a line is no sample, with its number; OSError: no such file."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = parse_object(line)
            tokens = {name: tuple(int(token) for token in fields.pop(name)) for name in _TOKENS}
            named = {"run_id": "", "batch_id": "", "prompt_id": str(tokens["prompt"]), "slot": number}
            given: dict[str, Any] = {"policy_version": 0, "reward": None, **named, **fields, **tokens}
            found.append(TrainingSample(**given))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number} is no rollout: {error!r}") from error
    return found


def split(
    rollouts: Sequence[TrainingSample], share: float, seed: int
) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """Split samples by prompt into samples to learn from and held-out ones. ValueError: too few prompts."""
    prompts = sorted({rollout.prompt for rollout in rollouts})
    count = max(round(share * len(prompts)), 1)
    if count >= len(prompts):
        raise ValueError(f"{len(prompts)} prompts are too few to hold out {count} of them")
    held = set(Random(seed).sample(prompts, count))
    learned = [rollout for rollout in rollouts if rollout.prompt not in held]
    return learned, [rollout for rollout in rollouts if rollout.prompt in held]


def warm_up(
    learner: Learner,
    learned: Sequence[TrainingSample],
    held: Sequence[TrainingSample],
    weights: Sequence[float],
    passes: int,
    seconds: float,
) -> Iterator[Passed]:
    """Train for at most `passes` epochs and yield the result of each; none begins after `seconds`."""
    ends, best = time.monotonic() + seconds, 0.0
    for number in range(1, passes + 1):
        report = learner.update(learned, weights)
        found = learner.evaluate(held)
        is_best = found.acceptance_length > best
        best = max(best, found.acceptance_length)
        yield Passed(number, report, found, is_best)
        if time.monotonic() > ends:
            return


def main() -> None:
    """Train, print a line for each pass, and write the best drafter."""
    given = _arguments()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(given.threads)
    known = {each.name for each in fields(LearningSettings)}
    settings = LearningSettings(**{name: value for name, value in vars(given).items() if name in known})
    rollouts = read_rollouts(given.rollouts)
    learned, held = split(rollouts, given.held_out, given.seed)
    learner = Learner(given.policy, settings, given.checkpoint)
    weights = weights_of(learned, Weighting(given.weighting))
    written: Checkpoint | None = None
    for passed in warm_up(learner, learned, held, weights, given.passes, given.seconds):
        if passed.is_best:
            written = learner.save(given.out, given.version)
        print(
            f"pass {passed.number}  KD loss {passed.report.kd_loss:.3f}  held out {passed.evaluation.kd_loss:.3f}"
            f"  acceptance length {passed.evaluation.acceptance_length:.3f}"
            f"  {passed.report.seconds:.1f} s{'  best' if passed.is_best else ''}",
            flush=True,
        )
    if written is None:
        raise SystemExit("nothing was learned: no pass, or no rollout to draft for")
    print(json.dumps({**asdict(written), "path": str(written.path)}))


def _arguments() -> argparse.Namespace:
    defaults = LearningSettings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", type=Path, required=True, help="model folder")
    parser.add_argument("--rollouts", type=Path, required=True, help="JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets drafter-<version>")
    parser.add_argument("--version", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, help="begin with this drafter")
    parser.add_argument("--held-out", type=float, default=0.1, help="share of the prompts")
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no pass after this time")
    parser.add_argument("--weighting", choices=list(Weighting), default=Weighting.NONE)
    parser.add_argument("--depth", type=int, default=defaults.depth)
    parser.add_argument("--layers", type=int, nargs="+", help="of the policy, whose outputs are features")
    parser.add_argument("--draft-vocabulary", type=int, default=defaults.draft_vocabulary)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--batch-tokens", type=int, default=defaults.batch_tokens)
    parser.add_argument(
        "--acceptance-share", type=float, default=defaults.acceptance_share, help="of the loss, 0 to 1"
    )
    parser.add_argument("--device", default=defaults.device)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
