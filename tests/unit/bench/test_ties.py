"""A difference is excused only where the two tokens are the two best and close."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from bench.comparison import Difference  # noqa: E402
from bench.ties import NEAR, Judge, Tie, judge_all  # noqa: E402
from bench.training import TrainedStep  # noqa: E402
from bench.trajectory import Trajectory  # noqa: E402
from examples.tinymath.train import Options  # noqa: E402
from kernels.coupled_sampler.noise import gumbel  # noqa: E402
from paceline import Group, SampleKey  # noqa: E402
from tests.unit.bench.steps import named, sample  # noqa: E402

PROMPT, RESPONSE, SEED, POSITION = [1, 2, 3], [4, 5, 6], 77, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
    )
    path = tmp_path_factory.mktemp("model")
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    yield path
    torch.set_num_threads(threads)


def difference(expected: int | None, found: int | None) -> Difference:
    return Difference("x", 0, SampleKey("p", 0), POSITION, expected, found)


def scores(folder: Path) -> list[float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *RESPONSE[:POSITION]]])).logits[0, -1]
    return list((logits / 0.5).numpy() + gumbel(SEED, POSITION, 32))


def test_the_judge_recomputes_the_two_best_scores(folder: Path) -> None:
    found = Judge().judge(difference(0, 1), folder, PROMPT, RESPONSE, SEED, 0.5)
    expected = scores(folder)
    order = sorted(range(32), key=expected.__getitem__)
    assert (found.best, found.second) == (order[-1], order[-2])
    assert found.gap == pytest.approx(expected[order[-1]] - expected[order[-2]], abs=1e-4)


def test_only_a_near_tie_between_the_two_best_excuses() -> None:
    assert Tie(difference(4, 9), best=9, second=4, gap=NEAR / 2).near
    assert not Tie(difference(4, 9), best=9, second=4, gap=NEAR * 2).near
    assert not Tie(difference(4, 9), best=9, second=5, gap=NEAR / 2).near
    assert not Tie(difference(4, None), best=9, second=4, gap=NEAR / 2).near


def test_every_difference_is_judged_where_it_was_sampled(folder: Path) -> None:
    """With the weights of its step, after the plain sample's tokens, with that sample's noise."""
    plain = named([sample(SEED, RESPONSE)])
    key = SampleKey("p", SEED)
    trained = TrainedStep(
        step=4,
        groups=(Group("p", PROMPT, 1),),
        samples=plain,
        weights=folder,
        rollout_seconds=1.0,
        update_seconds=1.0,
        push_seconds=1.0,
        reward=0.0,
        kl=0.0,
        update_kl=0.0,
        moved_kl=0.0,
        clip_fraction=0.0,
    )
    trajectory = Trajectory(Options(temperature=0.5), (trained,), folder)
    found = judge_all([Difference("x", 4, key, POSITION, 0, 1)], trajectory, [plain], Judge())
    expected = scores(folder)
    assert [tie.best for tie in found] == [max(range(32), key=expected.__getitem__)]
