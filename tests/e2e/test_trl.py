"""TRL's GRPOTrainer on a real platform: its completions are what the policy of each step decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest

from examples.tinymath import tokenizer
from examples.tinymath.tasks import PRACTICE, load_problem, make_problems
from paceline import Client, Group, WeightFolder
from paceline.integrations.trl import PacelineRollout
from paceline.integrations.trl.grouping import group_repeated
from services.contracts.seeds import sample_seed
from services.generation.engine.types import EngineRequest, Sampling
from tests.support.oracle import Oracle
from tests.support.trl_alone import import_trl

MODEL = Path(__file__).parents[2] / "examples/tinymath/model"
SEED = 5
LENGTH, TEMPERATURE = 40, 0.8
# Two forwards in float32 agree to about 1e-5 here; scores closer than this are a tie.
TIE = 1e-3


@pytest.fixture(scope="module")
def trl() -> Any:
    return import_trl()


@pytest.fixture(scope="module")
def model(trl: Any) -> Path:
    """The trained model with its tokenizer, for the platform of this file. Without TRL none is started."""
    return MODEL


@pytest.fixture
def run(client: Client, request: pytest.FixtureRequest) -> Iterator[Any]:
    with client.run(request.node.name, seed=SEED) as run:
        yield run


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


class Recorded:
    """A `rollout_func` that keeps what another one gave, and the weights that it was asked with."""

    def __init__(self, rollout: Callable[[list[Any], Any], dict[str, Any]], folder: Path) -> None:
        self._rollout = rollout
        self._folder = folder
        self.given: list[tuple[Path, Mapping[str, Any]]] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        folder = self._folder / f"step-{len(self.given)}"
        trainer.model.save_pretrained(folder)
        found = self._rollout(prompts, trainer)
        self.given.append((folder, found))
        return found


def check_by_plain_decoding(recorded: Recorded) -> None:
    """Every completion is that of transformers with the step's weights and the seeds of its prompt and slot."""
    sampling = Sampling(
        max_tokens=LENGTH, temperature=TEMPERATURE, stop_token_ids=(2,), processed_logprobs=True
    )
    for step, (folder, found) in enumerate(recorded.given):
        oracle = Oracle(folder, [2])
        keys = group_repeated(found["prompt_ids"]).keys
        assert len(set(keys)) == len(found["completion_ids"]) == 8
        for key, prompt, response, logprobs in zip(
            keys, found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True
        ):
            seed = sample_seed(SEED, step, key.prompt_id, key.slot)
            judged = oracle.judge(EngineRequest("", tuple(prompt), (), sampling, seed), response)
            assert max(judged.gap) < TIE, (step, key)
            assert logprobs == pytest.approx(judged.processed, abs=TIE)
            assert len(response) == LENGTH or response[-1] == 2


def test_an_unmodified_trainer_learns_from_what_its_policy_decodes(
    trl: Any, run: Any, client: Client, tmp_path: Path
) -> None:
    recorded = Recorded(PacelineRollout(run), tmp_path)
    before = client.versions().policy_version
    trainer = trl.GRPOTrainer(
        policy(), variety, arguments(trl, tmp_path), data(2), processing_class=words(), rollout_func=recorded
    )
    trainer.train()
    assert len(recorded.given) == 2
    assert client.versions().policy_version == before + 2
    check_by_plain_decoding(recorded)
    assert metric(trainer, "rollout/samples") == [8, 8]
    means = [sum(map(len, found["completion_ids"])) / 8 for _, found in recorded.given]
    assert metric(trainer, "rollout/response_length/mean") == pytest.approx(means)
    assert metric(trainer, "rollout/version_last") == [before + 1, before + 2]
    torch = import_module("torch")
    first, second = (policy(folder).state_dict() for folder, _ in recorded.given)
    assert any(not torch.equal(first[name], second[name]) for name in first), "the policy has learned"


def test_the_trainer_of_ours_corrects_and_reports_rewards(trl: Any, run: Any, tmp_path: Path) -> None:
    from paceline.integrations.trl import PacelineGRPOTrainer

    class Reporting(PacelineRollout):
        known: ClassVar[list[int]] = []

        def report_rewards(self, rewards: Sequence[float]) -> int:
            self.known.append(super().report_rewards(rewards))
            return self.known[-1]

    rollout = Reporting(run)
    trainer = PacelineGRPOTrainer(
        policy(), variety, arguments(trl, tmp_path), data(2), processing_class=words(), rollout=rollout
    )
    trainer.train()
    assert rollout.known == [8, 8]
    # The temperature is not 1, so these are near each other only where the right kind is compared.
    assert max(metric(trainer, "sampling/sampling_logp_difference/max")) < TIE
    ratios = metric(trainer, "sampling/importance_sampling_ratio/mean")
    assert ratios == pytest.approx([1.0, 1.0], abs=TIE)
    assert len(metric(trainer, "reward")) == 2


def test_an_adapter_gives_the_completions_of_the_merged_weights(
    trl: Any, client: Client, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed (extra trl)")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    found = {}
    for way in ("merged", "adapter"):
        weights = WeightFolder(tmp_path / "weights", MODEL) if way == "adapter" else None
        with client.run(f"lora-{way}", seed=SEED, weights=weights) as run:
            recorded = Recorded(PacelineRollout(run, lora=way), tmp_path / way)
            trainer = trl.GRPOTrainer(
                policy(),
                variety,
                arguments(trl, tmp_path),
                data(2),
                processing_class=words(),
                peft_config=config,
                rollout_func=recorded,
            )
            base = {name: p.clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
            trainer.train()
            for name, parameter in trainer.model.named_parameters():
                assert name not in base or parameter.equal(base[name]), "the base is as it was"
            found[way] = [given["completion_ids"] for _, given in recorded.given]
    assert found["merged"] == found["adapter"]
    assert found["merged"][0] != found["merged"][1]


def test_the_coming_prompts_are_announced_over_two_epochs(
    trl: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced, announce = [], run.hint

    def hint(step: int, groups: Sequence[Group], *sampling: Any, policy_version: int, **options: Any) -> int:
        allowed: int = announce(step, groups, *sampling, policy_version=policy_version, **options)
        announced.append((step, policy_version, {(each.prompt_id, each.samples) for each in groups}))
        return allowed

    monkeypatch.setattr(run, "hint", hint)
    recorded = Recorded(PacelineRollout(run), tmp_path)
    trainer = trl.GRPOTrainer(
        policy(),
        variety,
        arguments(trl, tmp_path, max_steps=4, max_completion_length=8),
        data(4),
        processing_class=words(),
        rollout_func=recorded,
    )
    trainer.train()
    version = run.client.versions().policy_version
    asked = [group_repeated(found["prompt_ids"]).groups for _, found in recorded.given]
    wanted = [{(each.prompt_id, each.samples) for each in groups} for groups in asked]
    assert wanted[0] != wanted[1], "an epoch has two batches"
    assert announced == [(step, version - 3 + step, wanted[step]) for step in (1, 2, 3)]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_reward_rises(trl: Any, run: Any, tmp_path: Path) -> None:
    settings = arguments(
        trl,
        tmp_path,
        max_steps=20,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=200,
        temperature=1.0,
        learning_rate=5e-4,
    )
    trainer = trl.GRPOTrainer(
        policy(), score, settings, data(8), processing_class=words(), rollout_func=PacelineRollout(run)
    )
    trainer.train()
    rewards = metric(trainer, "reward")
    print("reward of each step", [round(each, 3) for each in rewards])
    assert len(rewards) == 20
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
