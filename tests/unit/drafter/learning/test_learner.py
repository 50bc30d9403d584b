"""The learner: updates, what spoils them, and going on after a stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.contracts.drafter_checkpoint import CorruptCheckpoint
from services.drafter.learning.data import LearningSettings, Targets, TrainingSample, UpdateReport
from services.drafter.learning.learner import CorruptState, Learner
from services.drafter.learning.target import PolicyMismatch
from tests.unit.drafter.learning.conftest import VOCABULARY, write_policy
from tests.unit.drafter.learning.samples import random_rollouts, rollout

SETTINGS = LearningSettings(depth=3, batch_tokens=48, lr=1e-2, warmup_steps=2)
ROLLOUTS = random_rollouts(10, VOCABULARY, seed=4)


@pytest.fixture
def learner(policy_path: Path) -> Learner:
    return Learner(policy_path, SETTINGS)


def learn(learner: Learner, rollouts: Sequence[TrainingSample] = ROLLOUTS) -> UpdateReport:
    return learner.update(rollouts, [1.0] * len(rollouts))


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.head.tensors().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_update_reports_what_it_did(learner: Learner) -> None:
    report = learn(learner)
    assert report.samples == len(ROLLOUTS)
    assert report.tokens == sum(len(each.response) - 1 for each in ROLLOUTS)
    assert (report.steps, report.skipped, report.left_out) == (round(report.tokens / 48), 0, 0)
    assert len(report.by_place) == 3
    assert 0 < min(report.by_place) <= report.kd_loss <= max(report.by_place)
    again = [learn(learner).kd_loss for _ in range(5)]
    assert again[-1] < 0.8 * report.kd_loss, "a fifth of the loss"


def test_the_policy_is_not_learned(learner: Learner) -> None:
    before = {name: tensor.clone() for name, tensor in learner.policy.model.state_dict().items()}
    learn(learner)
    assert same(before, dict(learner.policy.model.state_dict()))
    assert all(parameter.grad is None for parameter in learner.policy.model.parameters())


def test_resumed_it_goes_on_bit_for_bit(policy_path: Path, learner: Learner, tmp_path: Path) -> None:
    learn(learner)
    learner.save_state(tmp_path / "state")
    reports = [learn(learner), learn(learner)]
    resumed = Learner(policy_path, replace(SETTINGS, seed=9))
    resumed.load_state(tmp_path / "state")
    assert [replace(learn(resumed), seconds=0) for _ in range(2)] == [replace(r, seconds=0) for r in reports]
    assert same(weights_of(learner), weights_of(resumed))


def test_a_checkpoint_gives_the_same_drafter(policy_path: Path, learner: Learner, tmp_path: Path) -> None:
    learn(learner)
    saved = learner.save(tmp_path, 3)
    found = learner.evaluate(ROLLOUTS)
    learn(learner)
    assert learner.evaluate(ROLLOUTS) != found
    assert learner.evaluate(ROLLOUTS, saved.path) == found
    assert Learner(policy_path, SETTINGS, saved.path).evaluate(ROLLOUTS) == found
    learner.adopt(saved.path, saved.sha256)
    assert learner.evaluate(ROLLOUTS) == found


def test_a_damaged_checkpoint_or_state_changes_nothing(
    policy_path: Path, learner: Learner, tmp_path: Path
) -> None:
    saved = learner.save(tmp_path, 3)
    learner.save_state(tmp_path / "state")
    for file in (saved.path / "model.safetensors", tmp_path / "state"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    before = weights_of(learner)
    with pytest.raises(CorruptCheckpoint):
        learner.adopt(saved.path, saved.sha256)
    for path in (tmp_path / "state", tmp_path / "nowhere", policy_path / "config.json"):
        with pytest.raises(CorruptState):
            learner.load_state(path)
    assert same(before, weights_of(learner))


def test_a_drafter_of_another_policy_is_refused(learner: Learner, tmp_path: Path) -> None:
    other = Learner(write_policy(tmp_path / "other", num_hidden_layers=6), SETTINGS)
    saved = other.save(tmp_path, 1)
    other.save_state(tmp_path / "state")
    with pytest.raises(CorruptCheckpoint, match="another policy"):
        learner.adopt(saved.path)
    with pytest.raises(CorruptState, match="another policy"):
        learner.load_state(tmp_path / "state")


def test_a_drafter_of_other_layers_goes_on_with_its_own(
    policy_path: Path, learner: Learner, tmp_path: Path
) -> None:
    other = Learner(policy_path, replace(SETTINGS, layers=(1, 3)))
    learn(other)
    found = other.evaluate(ROLLOUTS)
    saved = other.save(tmp_path, 1)
    other.save_state(tmp_path / "state")
    assert learner.evaluate(ROLLOUTS, saved.path) == found
    learner.load_state(tmp_path / "state")
    assert learner.evaluate(ROLLOUTS) == found


def test_a_loss_that_is_not_finite_is_skipped(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(learner)
    plain, read, broken = weights_of(learner), learner.policy.read, [True]

    def spoiled(tokens: torch.Tensor, layers: Sequence[int]) -> object:
        seen = read(tokens, layers)
        return replace(seen, features=seen.features * torch.nan) if broken[0] else seen

    monkeypatch.setattr(learner.policy, "read", spoiled)
    report = learn(learner)
    assert (report.steps, report.skipped > 0) == (0, True)
    assert math.isnan(report.kd_loss)
    assert same(plain, weights_of(learner))
    broken[0] = False
    report = learn(learner)
    assert report.skipped == 0
    assert math.isfinite(report.kd_loss)
    assert all(tensor.isfinite().all() for tensor in weights_of(learner).values())


def test_a_sample_that_weighs_nearly_everything_is_nearly_all_that_is_learned(policy_path: Path) -> None:
    settings = replace(SETTINGS, batch_tokens=10_000)
    alone, weighted = Learner(policy_path, settings), Learner(policy_path, settings)
    for _ in range(3):
        alone.update(ROLLOUTS[:1], [1.0])
        weighted.update(ROLLOUTS, [1.0] + [1e-7] * (len(ROLLOUTS) - 1))
    one, two = weights_of(alone), weights_of(weighted)
    fresh = weights_of(Learner(policy_path, settings))
    moved = sum(float((one[name] - fresh[name]).abs().sum()) for name in one)
    apart = sum(float((one[name] - two[name]).abs().sum()) for name in one)
    assert apart < 0.05 * moved


def test_what_cannot_be_drafted_for_is_left_out(learner: Learner) -> None:
    short, long = rollout((1, 2), (3,)), rollout((1,), (2,) * 200)
    before = weights_of(learner)
    report = learn(learner, [short, long])
    assert (report.samples, report.steps, report.left_out) == (0, 0, 2)
    assert math.isnan(report.kd_loss)
    assert same(before, weights_of(learner))
    assert learner.evaluate([short]).acceptance_length == 0
    assert learn(learner, [short, *ROLLOUTS]).left_out == 1


def test_bad_arguments_say_what_is_wrong(learner: Learner) -> None:
    with pytest.raises(ValueError, match="2 rollouts, but 1 weights"):
        learner.update(ROLLOUTS[:2], [1.0])
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="positive and finite"):
            learner.update(ROLLOUTS[:1], [weight])
    with pytest.raises(ValueError, match="tokens outside"):
        learn(learner, [rollout((1,), (2, VOCABULARY))])


def test_new_weights_of_the_policy_are_taken_over_in_place(learner: Learner, tmp_path: Path) -> None:
    tokens = torch.tensor([[1, 2, 3]])
    old = learner.policy.read(tokens, ()).output
    learner.set_policy(write_policy(tmp_path / "v1", seed=1), 1)
    new = learner.policy.read(tokens, ()).output
    assert learner.policy.version == 1
    assert not torch.allclose(old, new)
    expected = Learner(tmp_path / "v1", SETTINGS).policy.read(tokens, ()).output
    torch.testing.assert_close(new, expected)


def test_weights_of_another_policy_are_refused(learner: Learner, tmp_path: Path) -> None:
    tokens = torch.tensor([[1, 2, 3]])
    old = learner.policy.read(tokens, ()).output
    wider = write_policy(tmp_path / "wider", intermediate_size=64)
    deeper = write_policy(tmp_path / "deeper", num_hidden_layers=5)
    spoiled = write_policy(tmp_path / "spoiled")
    tensors = load_file(spoiled / "model.safetensors")
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, spoiled / "model.safetensors")
    for path, says in (
        (wider, "shape"),
        (deeper, "not of this policy"),
        (spoiled, "NaN"),
        (tmp_path, "no \\*"),
    ):
        with pytest.raises(PolicyMismatch, match=says):
            learner.set_policy(path, 2)
    assert learner.policy.version == 0
    assert torch.equal(learner.policy.read(tokens, ()).output, old)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyMismatch, match="no model"):
        Learner(tmp_path, SETTINGS)


def test_a_draft_vocabulary_is_taken_from_the_first_rollouts(policy_path: Path, tmp_path: Path) -> None:
    learner = Learner(policy_path, replace(SETTINGS, draft_vocabulary=8))
    frequent = [rollout((1,), (40, 41, 42, 43) * 4, slot) for slot in range(6)]
    report = learn(learner, [*frequent, rollout((1,), (7, 8, 40), 6)])
    assert report.steps > 0
    assert math.isfinite(report.kd_loss)
    assert learner.head.tokens.tolist() == [0, 1, 7, 8, 40, 41, 42, 43]
    learn(learner, ROLLOUTS)
    assert learner.head.tokens.tolist() == [0, 1, 7, 8, 40, 41, 42, 43], "it stays"
    saved = learner.save(tmp_path, 1)
    resumed = Learner(policy_path, replace(SETTINGS, draft_vocabulary=8), saved.path)
    assert resumed.evaluate(frequent) == learner.evaluate(frequent)
    unnamed = learner.evaluate([rollout((1,), (2, 3, 4, 5), seed=5)])
    assert unnamed.acceptance_length == 1, "what has no row is never drafted"


def test_top_k_targets_leave_the_rest_out(policy_path: Path) -> None:
    whole = Learner(policy_path, SETTINGS)
    most = Learner(policy_path, replace(SETTINGS, targets=Targets.TOP_K, top_k=VOCABULARY))
    few = Learner(policy_path, replace(SETTINGS, targets=Targets.TOP_K, top_k=2))
    one, two, three = (learn(each).kd_loss for each in (whole, most, few))
    assert one == two
    assert three > one, "less entropy in the target, the same drafter"
    for each in (whole, few):
        each.load_state(_state_of(whole, policy_path.parent / "state"))
    assert few.evaluate(ROLLOUTS) == whole.evaluate(ROLLOUTS), "measured is the whole distribution"


def _state_of(learner: Learner, path: Path) -> Path:
    learner.save_state(path)
    return path


def _rank(rank: int, path: str, policy: str, queue: object) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=90)
    )
    learner = Learner(Path(policy), SETTINGS)
    reports = [learn(learner) for _ in range(2)]
    assert torch.distributed.get_world_size() == 2
    queue.put((rank, [r.kd_loss for r in reports], {n: t.tolist() for n, t in weights_of(learner).items()}))
    torch.distributed.destroy_process_group()


def test_pieces_learn_what_the_whole_does(policy_path: Path) -> None:
    plain = Learner(policy_path, replace(SETTINGS, draft_vocabulary=30))
    pieces = Learner(policy_path, replace(SETTINGS, draft_vocabulary=30, chunk_entries=500, micro_tokens=60))
    one, two = learn(plain), learn(pieces)
    assert (one.steps, one.kd_loss) == (two.steps, pytest.approx(two.kd_loss, rel=1e-3))
    for name, tensor in weights_of(plain).items():
        torch.testing.assert_close(weights_of(pieces)[name], tensor, rtol=1e-2, atol=1e-3)
    assert pieces.evaluate(ROLLOUTS).kd_loss == pytest.approx(plain.evaluate(ROLLOUTS).kd_loss, rel=1e-2)


def test_two_ranks_learn_what_one_does(policy_path: Path, learner: Learner, tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    meet = str(tmp_path / "meet")
    other = context.Process(target=_rank, args=(1, meet, str(policy_path), queue), daemon=True)
    other.start()
    threads = torch.get_num_threads()
    try:
        _rank(0, meet, str(policy_path), queue)
    finally:
        torch.set_num_threads(threads)
    found = sorted((queue.get(timeout=90) for _ in range(2)), key=lambda each: each[0])
    other.join(30)
    assert found[0][1:] == found[1][1:], "the ranks agree"
    losses = [learn(learner).kd_loss for _ in range(2)]
    assert found[0][1] == pytest.approx(losses, rel=1e-4)
    for name, tensor in weights_of(learner).items():
        torch.testing.assert_close(torch.tensor(found[0][2][name]), tensor, rtol=1e-2, atol=1e-3)
