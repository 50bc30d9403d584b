"""Training runs of TRL on the model of tinymath, and what their samples must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from examples.tinymath import tokenizer
from examples.tinymath.tasks import PRACTICE, load_problem, make_problems
from paceline import Sample
from services.contracts.seeds import sample_seed
from services.generation.engine.types import EngineRequest, Sampling
from tests.support.oracle import Oracle

MODEL = Path(__file__).parents[2] / "examples/tinymath/model"
SEED = 5
LENGTH, TEMPERATURE = 40, 0.8
# Two forwards in float32 agree to about 1e-5 here; scores closer than this are a tie.
TIE = 1e-3


def variety(completions: Sequence[str], **_: Any) -> list[float]:
    """A reward that differs among completions that are too short for an answer."""
    return [len(set(text)) / LENGTH for text in completions]


def score(completions: Sequence[str], problem: Sequence[str], **_: Any) -> list[float]:
    return [load_problem(name).reward(text) for name, text in zip(problem, completions, strict=True)]


def data(count: int) -> Any:
    problems = make_problems(0, count, PRACTICE)
    rows = [{"prompt": tokenizer.BOS + each.question, "problem": each.id} for each in problems]
    return import_module("datasets").Dataset.from_list(rows)


def policy(folder: Path = MODEL) -> Any:
    transformers = import_module("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=import_module("torch").float32)


def arguments(trl: Any, folder: Path, **changed: Any) -> Any:
    """Of two steps on the data of two prompts."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": LENGTH,
        "temperature": TEMPERATURE,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    return trl.GRPOConfig(**settings | changed)


def words() -> Any:
    return import_module("transformers").AutoTokenizer.from_pretrained(MODEL, padding_side="left")


def metric(trainer: Any, name: str) -> list[float]:
    """Of each step, as TRL logs it."""
    return [each[name] for each in trainer.state.log_history if name in each]


def check_spans(
    given: Iterable[tuple[int, Sample]], folders: Mapping[int, Path], prompts: Mapping[str, list[int]]
) -> None:
    """Every token is that of transformers with the weights of its version, and the seeds of prompt and slot."""
    sampling = Sampling(
        max_tokens=LENGTH, temperature=TEMPERATURE, stop_token_ids=(2,), processed_logprobs=True
    )
    oracles = {version: Oracle(folder, [2]) for version, folder in folders.items()}
    for step, sample in given:
        seed = sample_seed(SEED, step, sample.prompt_id, sample.slot)
        request = EngineRequest("", tuple(prompts[sample.prompt_id]), (), sampling, seed)
        assert (sample.version_spans[0].begin, sample.version_spans[-1].end) == (0, len(sample.token_ids))
        for span in sample.version_spans:
            judged = oracles[span.policy_version].judge(request, sample.token_ids.tolist())
            assert max(judged.gap[span.begin : span.end]) < TIE, (step, sample.key, span)
            own = judged.processed[span.begin : span.end]
            assert sample.logprobs[span.begin : span.end] == pytest.approx(own, abs=TIE)
