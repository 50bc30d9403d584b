"""GRPO on a real platform gives the same run by folder, stream, delta and adapter."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrize

from examples.tinymath.grpo import GrpoLearner, GrpoReport, GrpoSample, GrpoSettings
from examples.tinymath.options import MODEL, Options
from examples.tinymath.train import train
from paceline import Adapter, Client, Run, WeightFolder, WeightStream
from paceline import types as t
from services.generation.weights.adapters import merged, plan_merge
from services.local import Platform, PlatformConfig
from tests.e2e.conftest import UNDER_TLS, certificates
from tests.support.zygote import launch

State = dict[str, Tensor]

OPTIONS = Options(prompts=2, samples=4, pool=2, max_tokens=48, seed=3)
LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"]}

pytestmark = pytest.mark.skipif(
    not (MODEL / "model.safetensors").exists(), reason="the tinymath model is not there"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return tinymath in bfloat16, in which deltas are small enough to be sent."""
    folder = tmp_path_factory.mktemp("tinymath")
    transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def platform(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    # One sample at a time, without drafts and shared prefixes: no sum of a forward pass depends on what runs
    # beside it, so the trainer learns from the same log-probabilities, to the last bit, in every run.
    alone = ("--max-num-seqs=1", "--no-enable-prefix-caching", "--speculation=off", "--no-drafts")
    config = PlatformConfig(
        model=model,
        instances=2,
        folder=tmp_path_factory.mktemp("platform"),
        shared_weights=False,
        draft_stores=0,
        pin=False,
        bubbles=False,
        policy=False,
        reallocator=False,
        instance_options=("--dtype=float32", "--kv-cache-memory-bytes=67108864", "--sweep-seconds=0", *alone),
        stop_timeout=60.0,
        tls=certificates(tmp_path_factory.mktemp("certificates")) if UNDER_TLS else None,
        token="the token of the tests" if UNDER_TLS else None,
    )
    with Platform(config, launch=launch) as platform:
        yield platform


@dataclass
class Outcome:
    """What a run sampled, was rewarded for and learned, step by step."""

    lessons: list[list[GrpoSample]] = field(default_factory=list)
    reports: list[GrpoReport] = field(default_factory=list)

    @property
    def rewards(self) -> list[list[float]]:
        return [[sample.reward for sample in step] for step in self.lessons]


class RecordingLearner(GrpoLearner):
    """A learner that keeps what it learned from."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__(policy, GrpoSettings(lr=OPTIONS.lr, warmup=1))
        self.outcome = Outcome()

    def step(self, samples: Sequence[GrpoSample]) -> GrpoReport:
        report = super().step(samples)
        self.outcome.lessons.append(list(samples))
        self.outcome.reports.append(report)
        return report


class Pusher:
    """A run whose `push_weights` sends the policy in its own way; all else goes to the run."""

    def __init__(self, run: Run, policy: nn.Module) -> None:
        self._run = run
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def push_weights(self, _: object) -> None:
        self._run.push_weights(rounded(self._policy))


def rounded(policy: nn.Module) -> State:
    """Return a policy as it is served."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in policy.state_dict().items()}


class LowRank(nn.Module):
    """A LoRA adapter of one matrix."""

    def __init__(self, rows: int, columns: int, chance: torch.Generator) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(LORA["r"], columns, generator=chance) * 0.05)
        self.b = nn.Parameter(torch.zeros(rows, LORA["r"]))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + LORA["lora_alpha"] / LORA["r"] * (self.b @ self.a)


class AdapterPusher(Pusher):
    """A run that pushes a LoRA adapter, or the weights that instances make of it."""

    def __init__(self, run: Run, policy: nn.Module, base: State, merges: bool) -> None:
        super().__init__(run, policy)
        self._base = base
        self._merges = merges

    def push_weights(self, _: object) -> None:
        matrices = {
            f"base_model.model.{name}.lora_{side.upper()}.weight": getattr(
                module.parametrizations.weight[0], side
            )
            .detach()
            .clone()
            for name, module in self._policy.named_modules()
            if parametrize.is_parametrized(module)
            for side in "ab"
        }
        if not self._merges:
            self._run.push_adapter(Adapter(matrices, LORA))
            return
        shapes = [
            {name: tuple(each.shape) for name, each in state.items()} for state in (matrices, self._base)
        ]
        self._run.push_weights(dict(merged(self._base, plan_merge(LORA, *shapes), matrices, 1)))


class DeltasAlone(WeightFolder):
    """A folder whose full versions no instance can read once there is a delta."""

    def write_delta(self, published: t.Versions, folder: Path) -> Path | None:
        base = self.root / f"v{published.policy_version:08d}"
        for hidden in base.glob("*.hidden"):
            hidden.rename(hidden.with_suffix(""))
        change = super().write_delta(published, folder)
        assert (change is not None) == base.is_dir(), "there is a delta to every version but the first"
        for file in folder.glob("*.safetensors") if change else ():
            file.rename(file.with_name(f"{file.name}.hidden"))
        return change


def policy_of(model: Path, *, adapter: bool = False) -> nn.Module:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    policy: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter:
        policy.requires_grad_(False)
        chance = torch.Generator().manual_seed(0)
        for name, module in list(policy.named_modules()):
            if isinstance(module, nn.Linear) and name.endswith(tuple(LORA["target_modules"])):
                low_rank = LowRank(module.out_features, module.in_features, chance)
                parametrize.register_parametrization(module, "weight", low_rank)
    return policy


def learn(
    client: Client,
    name: str,
    model: Path,
    steps: int,
    weights: WeightFolder | WeightStream,
    *,
    adapter: str = "",
) -> Outcome:
    """Train from the model on, and return what came of it. `adapter`: "" for none, or "pushed" or "merged"."""
    policy = policy_of(model, adapter=bool(adapter))
    base = rounded(policy_of(model))
    learner = RecordingLearner(policy)
    before = client.versions().policy_version
    with client.run(name, seed=OPTIONS.seed, weights=weights) as run:
        run.push_weights(base)
        pusher = AdapterPusher(run, policy, base, adapter == "merged") if adapter else Pusher(run, policy)
        for _ in train(pusher, learner, replace(OPTIONS, steps=steps)):  # type: ignore[arg-type]
            pass
    assert client.versions().policy_version == before + 1 + steps
    return learner.outcome


def check(outcome: Outcome, steps: int) -> None:
    """Assert that a run had something to learn, and did learn."""
    assert len(outcome.rewards) == steps
    assert any(len(set(step)) > 1 for step in outcome.rewards)
    # The prompts are those of every step.
    assert len({str(step) for step in outcome.rewards}) > 1


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_all_transports_give_one_run_digit_for_digit(
    platform: Platform, client: Client, model: Path, tmp_path: Path, steps: int
) -> None:
    by_folder = learn(client, "folder", model, steps, WeightFolder(tmp_path / "folder", model))
    check(by_folder, steps)
    by_stream = learn(client, "stream", model, steps, WeightStream(piece_bytes=65536, shard_bytes=10**6))
    assert by_stream.rewards == by_folder.rewards
    assert by_stream == by_folder
    # Instances link what is on their own disk, and read no delta then.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other_disk:
        assert Path(other_disk).stat().st_dev != platform.config.adopted.stat().st_dev
        by_delta = learn(client, "delta", model, steps, DeltasAlone(Path(other_disk), model, deltas=True))
    assert by_delta.rewards == by_folder.rewards
    assert by_delta == by_folder


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_an_adapter_gives_the_run_of_the_merged_weights_digit_for_digit(
    client: Client, model: Path, tmp_path: Path, steps: int
) -> None:
    weights = WeightFolder(tmp_path / "adapter", model)
    by_adapter = learn(client, "adapter", model, steps, weights, adapter="pushed")
    check(by_adapter, steps)
    by_stream = learn(client, "merged", model, steps, WeightStream(), adapter="merged")
    assert by_stream.rewards == by_adapter.rewards
    assert by_stream == by_adapter
