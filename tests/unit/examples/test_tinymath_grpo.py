"""The learning part, against sums done by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from examples.tinymath import grpo, objective  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from more, and on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=16,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=32,
            tie_word_embeddings=True,
            initializer_range=0.3,
        )
    )


def with_logprobs(model: torch.nn.Module, samples: list[grpo.GrpoSample]) -> list[grpo.GrpoSample]:
    """Return the samples as the model itself would have drawn them."""
    with torch.no_grad():
        return [
            grpo.GrpoSample(
                s.group, s.prompt_ids, s.response_ids, grpo.response_logprobs(model, [s]).tolist(), s.reward
            )
            for s in samples
        ]


SAMPLES = [
    grpo.GrpoSample("a", [1, 2], [3, 4, 5], [], 1.0),
    grpo.GrpoSample("a", [1, 2], [6], [], 0.0),
    grpo.GrpoSample("b", [1], [7, 8], [], 0.5),
    grpo.GrpoSample("b", [1], [9, 3, 4, 4], [], 0.5),
]


def test_advantages_are_normalised_in_each_group() -> None:
    got = objective.group_advantages([1, 0, 0, 0, 0.5, 0.5], ["a", "a", "a", "a", "b", "b"], eps=1e-4)
    std = math.sqrt(3) / 4
    want = [0.75 / (std + 1e-4), *[-0.25 / (std + 1e-4)] * 3, 0.0, 0.0]
    assert got == pytest.approx(want)


def test_the_loss_is_clipped_only_where_that_lowers_the_gain() -> None:
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    gain = torch.tensor([2.0, 2.0, -2.0, 2.0, -2.0])
    losses = objective.policy_loss(ratio.log(), torch.zeros(5), gain, 0.2, 0.3)
    assert losses.tolist() == pytest.approx([-2.0, -2.6, 3.0, -1.0, 1.6])


def test_the_penalty_is_zero_at_the_reference_and_positive_elsewhere() -> None:
    got = objective.kl_penalty(torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -2.0, -1.0]))
    assert got.tolist() == pytest.approx([0.0, math.exp(-1), math.e - 2])


def test_micro_batches_hold_every_row_once_and_keep_the_limit() -> None:
    lengths = [9, 1, 3, 3, 20, 2, 8]
    batches = list(objective.micro_batches(lengths, 10))
    assert sorted(place for batch in batches for place in batch) == list(range(7))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) <= 10


def test_padding_does_not_change_log_probabilities() -> None:
    model = tiny_model()
    with torch.no_grad():
        together = grpo.response_logprobs(model, SAMPLES)
        alone = torch.cat([grpo.response_logprobs(model, [sample]) for sample in SAMPLES])
    assert torch.allclose(together, alone, atol=1e-5)
    assert together.shape == (10,)


def test_on_policy_loss_and_gradient_match_the_plain_policy_gradient() -> None:
    model = tiny_model()
    samples = with_logprobs(model, SAMPLES)
    plain = grpo.response_logprobs(model, samples)
    gain = torch.tensor([1 / 3] * 3 + [-1.0] + [0.0] * 6) * 0.5 / (0.5 + 1e-4)
    (-(plain * gain).sum() / 4).backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    report = grpo.GrpoLearner(tiny_model(), grpo.GrpoSettings(updates=1, micro_tokens=4)).step(samples)
    assert report.grad_norm == pytest.approx(float(want), rel=1e-4)
    assert report.loss == pytest.approx(0.0, abs=1e-6)
    assert report.reward == pytest.approx(0.5)
    assert report.clipped_ratio == 0.0


def test_every_sample_weighs_the_same_however_long() -> None:
    losses = torch.tensor([1.0, 2.0, 6.0, 5.0])
    assert float(objective.sum_of_means(losses, [3, 1])) == pytest.approx(3 + 5)


def test_drift_is_zero_for_own_samples_and_counts_what_left_the_clip_range() -> None:
    learner = grpo.GrpoLearner(tiny_model(), grpo.GrpoSettings(micro_tokens=4))
    own = with_logprobs(learner.model, SAMPLES)
    at_home = learner.drift(own)
    assert (at_home.tokens, at_home.outside) == (10, 0)
    assert at_home.kl == pytest.approx(0.0, abs=1e-9)
    # Of the ten tokens one is twice as likely now as when it was sampled, one half as likely.
    moved = [own[0], replace(own[1], logprobs=[own[1].logprobs[0] - math.log(2)]), *own[2:]]
    moved[2] = replace(own[2], logprobs=[own[2].logprobs[0] + math.log(2), own[2].logprobs[1]])
    drift = learner.drift(moved)
    assert drift.clipped_ratio == pytest.approx(2 / 10)
    assert drift.kl == pytest.approx((2 - math.log(2) - 1 + 0.5 + math.log(2) - 1) / 10, rel=1e-3)


def test_the_report_covers_all_updates() -> None:
    model = tiny_model()
    samples = with_logprobs(model, SAMPLES[:2])
    # The first update sees its own policy; the second one sees what the first has made of it.
    report = grpo.GrpoLearner(model, grpo.GrpoSettings(lr=0.05, updates=2, warmup=1)).step(samples)
    assert report.kl > 1e-4
    assert 0 < report.clipped_ratio < 1


@pytest.mark.parametrize(
    "settings", [grpo.GrpoSettings(lr=1e-2, updates=1), grpo.GrpoSettings(lr=1e-2, kl=0.01, updates=2)]
)
def test_a_step_raises_the_chance_of_the_better_response(settings: grpo.GrpoSettings) -> None:
    model = tiny_model()
    samples = with_logprobs(model, SAMPLES)
    before = [sum(sample.logprobs) for sample in samples[:2]]
    grpo.GrpoLearner(model, settings).step(samples)
    after = [sum(sample.logprobs) for sample in with_logprobs(model, samples[:2])]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_equal_rewards_teach_nothing() -> None:
    model = tiny_model()
    samples = with_logprobs(model, SAMPLES[2:])
    before = [p.detach().clone() for p in model.parameters()]
    report = grpo.GrpoLearner(model, grpo.GrpoSettings()).step(samples)
    assert report.grad_norm == 0.0
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_the_learning_rate_rises_over_the_first_updates() -> None:
    learner = grpo.GrpoLearner(tiny_model(), grpo.GrpoSettings(lr=0.4, warmup=4, updates=1))
    rates = []
    for _ in range(6):
        rates += learner.schedule.get_last_lr()
        learner.step(with_logprobs(learner.model, SAMPLES[:2]))
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
