"""TRL's GRPOTrainer on a real platform: its completions are what the policy of each step decodes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest

from paceline import Client, Group, PolicyMismatchError, SampleStatus, WeightFolder
from paceline.integrations.trl import PacelineRollout
from paceline.integrations.trl.requests import group_repeated
from services.contracts.seeds import sample_seed
from services.generation.engine.types import EngineRequest, Sampling
from services.local import Platform
from tests.e2e.conftest import plain_config
from tests.support.documents import read
from tests.support.oracle import Oracle
from tests.support.trl_alone import import_trl
from tests.support.trl_async import RecordedWeights, samples_read, without_gpu
from tests.support.trl_runs import (
    LENGTH,
    MODEL,
    SEED,
    TEMPERATURE,
    TIE,
    arguments,
    check_spans,
    data,
    metric,
    policy,
    score,
    variety,
    words,
)
from tests.support.zygote import launch

TUTORIAL = Path(__file__).parents[2] / "docs/tutorials/1-trl.md"


@pytest.fixture(scope="module")
def trl() -> Any:
    return import_trl()


@pytest.fixture(scope="module")
def model(trl: Any) -> Path:
    """The trained model with its tokenizer, for the platform of this file. Without TRL none is started."""
    return MODEL


@pytest.fixture(scope="module")
def platform(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Two samples at a time, so that an asynchronous trainer that is slow has samples in flight at every push."""
    plain = plain_config(model, tmp_path_factory.mktemp("trl"))
    config = replace(plain, http_port=None, instance_options=(*plain.instance_options, "--max-num-seqs=2"))
    with Platform(config, launch=launch) as platform:
        yield platform


@pytest.fixture
def run(client: Client, request: pytest.FixtureRequest) -> Iterator[Any]:
    with client.run(request.node.name, seed=SEED) as run:
        yield run


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
    # Both in float32: the policy is checked after either push.
    gaps = metric(trainer, "rollout/policy_gap")
    assert len(gaps) == 2
    assert max(gaps) < TIE
    means = [sum(map(len, found["completion_ids"])) / 8 for _, found in recorded.given]
    assert metric(trainer, "rollout/response_length/mean") == pytest.approx(means)
    assert metric(trainer, "rollout/version_last") == [before + 1, before + 2]
    torch = import_module("torch")
    first, second = (policy(folder).state_dict() for folder, _ in recorded.given)
    assert any(not torch.equal(first[name], second[name]) for name in first), "the policy has learned"


def test_the_program_of_the_tutorial_trains(
    trl: Any, platform: Platform, client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (program,) = [block for block in read(TUTORIAL.read_text()) if block.file == "train.py"]
    changes = {
        '"127.0.0.1:7400"': repr(platform.gateway_address),
        '"runs/trl"': repr(str(tmp_path)),
        "max_steps=10": "max_steps=1",
        "max_completion_length=200": "max_completion_length=16",
    }
    text = program.text
    for documented, here in changes.items():
        assert documented in text
        text = text.replace(documented, here)
    monkeypatch.chdir(TUTORIAL.parents[2])
    before = client.versions().policy_version
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "train.py", "exec"), names)
    assert client.versions().policy_version > before
    assert metric(names["trainer"], "rollout/samples") == [16]


def test_another_policy_on_the_fleet_ends_the_training(
    trl: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of one layer are not pushed as the trainer has them."""
    push = run.push_weights

    def push_another(weights: Mapping[str, Any], **options: Any) -> Any:
        name = "model.layers.0.self_attn.o_proj.weight"
        return push({**weights, name: weights[name] * 0}, **options)

    monkeypatch.setattr(run, "push_weights", push_another)
    rollout = PacelineRollout(run)
    trainer = trl.GRPOTrainer(
        policy(), variety, arguments(trl, tmp_path), data(2), processing_class=words(), rollout_func=rollout
    )
    with pytest.raises(PolicyMismatchError, match="the fleet does not sample the trainer's policy"):
        trainer.train()


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


def test_an_asynchronous_trainer_trains_on_what_was_sampled_meanwhile(
    trl: Any, run: Any, client: Client, platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one: it leaves one instance."""
    grpo = import_module("trl.experimental.async_grpo")
    worker_of = import_module("paceline.integrations.trl").PacelineRolloutWorker

    class Kill(import_module("transformers").TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Let no other step begin before a sample has gone on elsewhere, and end once one has two versions.

            At times nothing is in flight when the weights change, so how many steps that takes is not known.
            """
            if state.global_step == 1:
                assert any(lost_samples() for _ in range(5)), "no sample was on the instance that was killed"
            if state.global_step >= 3 and any(len(each.version_spans) > 1 for _, each, _ in Recorded.rows):
                control.should_training_stop = True

    def lost_samples() -> bool:
        """Kill an instance; return whether a sample was there, which goes on elsewhere. Else start it again."""
        platform.kill("instance-0")
        if came(lambda sample: sample.provenance.resubmissions > 0, 20):
            return True
        platform.restart("instance-0")
        return False

    def came(holds: Callable[[Any], bool], seconds: float) -> bool:
        """Wait for a sample, which is generated while the trainer waits."""
        deadline = time.monotonic() + seconds
        while not any(holds(sample) for _, sample, _ in Recorded.rows):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    class Recorded(worker_of):  # type: ignore[misc]
        rows: ClassVar[list[tuple[Any, Any, Any]]] = []

        def _row(self, prompt: Any, sample: Any, *others: Any) -> Any:
            self.rows.append((prompt, sample, super()._row(prompt, sample, *others)))
            return self.rows[-1][-1]

    without_gpu(monkeypatch)
    read = samples_read(monkeypatch)
    common = vars(arguments(trl, tmp_path))
    names = ("per_device_train_batch_size", "num_generations", "max_completion_length", "temperature")
    args = grpo.AsyncGRPOConfig(
        **{name: common[name] for name in (*names, "output_dir", "learning_rate", "logging_steps")},
        max_steps=20,
        max_staleness=2,
        # Of what is sampled until a slow machine has taken all steps. Nothing is in flight while it is full.
        queue_maxsize=10_000,
        # A step takes as many samples as fill it, of which a dozen do.
        token_budget=512,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    weights = RecordedWeights(run, client, MODEL, tmp_path)
    worker = Recorded(run, weights, args, data(6), variety, words())
    trainer = grpo.AsyncGRPOTrainer(
        str(MODEL),
        args=args,
        train_dataset=data(6),
        processing_class=words(),
        callbacks=[Kill()],
        rollout_worker=worker,
        weight_transfer=weights,
    )
    trainer.train()
    assert not [each for each in threading.enumerate() if each.name.startswith("paceline-groups")]
    assert not [each for each in client.batches(run.run_id) if each.open or each.finished < each.total]
    assert max(Counter((step, sample.key) for step, sample in read).values()) == 1
    assert sum(each.status is SampleStatus.ABORTED for _, each in read) <= args.max_inflight_tasks
    steps = trainer.state.global_step
    assert len(weights.folders) == steps + 1
    assert len(Recorded.rows) >= 8 * steps
    prompts = {}
    for prompt, sample, row in Recorded.rows:
        prompts[sample.prompt_id] = prompt.token_ids
        assert row.input_ids.tolist() == [*prompt.token_ids, *sample.token_ids]
        assert row.old_log_probs[row.completion_mask == 1].tolist() == sample.logprobs.tolist()
        assert list(weights.folders)[row.model_version - 1] == sample.version_spans[0].policy_version
    rows = {(sample.seed, sample.prompt_id) for _, sample, _ in Recorded.rows}
    taken = [(step, each) for step, each in read if (each.seed, each.prompt_id) in rows]
    resumed = [each for each in taken if each[1].provenance.resubmissions]
    mixed = [each for each in taken if len(each[1].version_spans) > 1]
    assert resumed, "some were on the instance that was killed"
    assert mixed, "some went on under new weights"
    check_spans([*taken[:24], *resumed[:12], *mixed[:12]], weights.folders, prompts)
    # At the first step the policy is the one that sampled, so its own forward gives the same log-probabilities.
    assert metric(trainer, "ratio")[0] == pytest.approx(1.0, abs=TIE)
    assert max(metric(trainer, "sample/staleness_max")) <= 2
    assert len(metric(trainer, "reward")) == steps
