"""On the demo's model: an update lowers the loss, and drafts for other prompts are accepted further."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import examples.tinymath
from examples.tinymath import tokenizer
from kernels.coupled_sampler.cpu import coupled_argmax
from services.drafter.learning.data import LearningSettings, TrainingSample
from services.drafter.learning.learner import Learner
from services.drafter.warmup import read_rollouts, split, warm_up
from tests.unit.drafter.learning.samples import rollout

MODEL = Path(examples.tinymath.__file__).parent / "model"
QUESTIONS = ("12+34\n", "81+15\n", "7+59\n", "46+17\n", "23+48\n", "64+29\n", "35+31\n", "gcd 12,18\n")
LENGTH = 40
# It trains, on whatever a busy machine has left.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def rollouts() -> list[TrainingSample]:
    """Six samples of each question, the beginnings of long ones."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    found = []
    for question in QUESTIONS:
        prompt = tuple(tokenizer.prompt_ids(question))
        seeds = np.arange(6, dtype=np.uint64) + np.uint64(1000 * len(found))
        tokens, cache = torch.tensor([prompt] * 6), None
        responses = np.empty((6, 0), dtype=np.int64)
        with torch.no_grad():
            for position in range(LENGTH):
                out = model(tokens, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                where, ones = np.full(6, position), np.ones(6, dtype=np.float32)
                drawn = coupled_argmax(out.logits[:, -1].numpy(), seeds, where, ones)
                responses, tokens = np.hstack([responses, drawn[:, None]]), torch.from_numpy(drawn)[:, None]
        for slot, line in enumerate(responses.tolist()):
            end = line.index(tokenizer.EOS_ID) + 1 if tokenizer.EOS_ID in line else LENGTH
            found.append(rollout(prompt, tuple(line[:end]), slot, seed=int(seeds[slot])))
    return found


def test_it_learns(rollouts: list[TrainingSample]) -> None:
    learner = Learner(MODEL, LearningSettings(depth=3, batch_tokens=300, lr=5e-3))
    learned, held = split(rollouts, 0.25, seed=1)
    before = learner.evaluate(held)
    passed = list(warm_up(learner, learned, held, [1.0] * len(learned), passes=8, seconds=float("inf")))
    after = passed[-1].evaluation
    assert passed[-1].report.kd_loss < 0.5 * passed[0].report.kd_loss
    assert after.kd_loss < 0.7 * before.kd_loss
    assert after.acceptance_length > 1.15 * before.acceptance_length


def test_nothing_is_held_out_that_is_learned(rollouts: list[TrainingSample]) -> None:
    learned, held = split(rollouts, 0.25, seed=1)
    assert not {each.prompt for each in learned} & {each.prompt for each in held}
    assert len({each.prompt for each in held}) == 2
    assert sorted(learned + held, key=repr) == sorted(rollouts, key=repr)
    with pytest.raises(ValueError, match="too few"):
        split(rollouts[:6], 0.25, seed=1)


def test_rollouts_are_read_from_lines(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    whole = {"prompt": [1, 2], "response": [3, 4], "run_id": "r", "slot": 5, "reward": 0.5, "seed": 9}
    file.write_text(json.dumps(whole) + "\n\n" + json.dumps({"prompt": [1], "response": [2, 3]}) + "\n")
    first, second = read_rollouts(file)
    assert (first.prompt, first.response, first.slot, first.reward, first.seed) == ((1, 2), (3, 4), 5, 0.5, 9)
    assert (second.prompt, second.response, second.reward, second.seed) == ((1,), (2, 3), None, None)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"prompt": [1]}',
        '{"prompt": [1], "response": ["a"]}',
        '{"prompt": 1, "response": []}',
        '{"prompt": [1], "response": [2], "colour": 3}',
    ],
)
def test_a_line_that_is_no_rollout_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_text('{"prompt": [1], "response": [2, 3]}\n' + line)
    with pytest.raises(ValueError, match="line 2 is no rollout"):
        read_rollouts(file)
