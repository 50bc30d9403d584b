"""What V2's rows propose is what V1's do, though V2's host knows neither drafts nor positions. No engine."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from kernels.coupled_sampler.proposals import RowProposals
from services.generation.engine.sampling.inputs import BatchSettings, CachedRollout, SampleSettings
from services.generation.engine.sampling.rows import Rows
from services.generation.engine.sampling.sampler import proposals_of
from services.generation.engine.types import Verifier
from services.generation.engine.v2.references import RolloutTable
from services.generation.engine.v2.row_sampler import DeviceRows, proposals_of_rows, settings_of

VOCAB = 5
HOST = torch.device("cpu")


class _Step:
    """A step of a few samples: their verifiers, rollouts and drafts, which mostly are the rollouts'."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        n = int(rng.integers(1, 7))
        self.noise = [
            SampleSettings(
                int(rng.integers(0, 1 << 63)) * 2 + 1,
                verifier=list(Verifier)[rng.integers(3)],
                processed_logprobs=bool(rng.random() < 0.5),
            )
            for _ in range(n)
        ]
        self.rollouts = [self.rollout(int(rng.integers(1, 400))) for _ in range(n)]
        drafts = rng.integers(0, 6, n)
        positions = np.array([rng.integers(0, len(each.tokens) + 2) for each in self.rollouts])
        guesses = [
            np.where(rng.random(k) < 0.8, np.resize(each.tokens[p : p + k], k), rng.integers(0, VOCAB, k))
            if len(each.tokens) > p
            else rng.integers(0, VOCAB, k)
            for each, p, k in zip(self.rollouts, positions, drafts, strict=True)
        ]
        cu = np.concatenate(([0], np.cumsum(drafts + 1)))
        self.rows = Rows(cu, positions, np.concatenate(guesses))
        inputs = np.concatenate([np.concatenate(([0], each)) for each in guesses])
        self.on_device = DeviceRows(
            cu, torch.from_numpy(positions), torch.from_numpy(inputs.astype(np.int32))
        )
        self.batch = BatchSettings.of(self.noise)

    def rollout(self, length: int) -> CachedRollout:
        rng = self.rng
        values = rng.choice([rng.normal(-1, 1, length), np.full(length, np.nan), np.full(length, -np.inf)])
        tokens = rng.integers(0, VOCAB, length)
        return CachedRollout(tokens, values, float(rng.choice([0.5, 1.0, np.inf])))


def _same(found: RowProposals | None, expected: RowProposals | None) -> None:
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.tokens.tolist() == expected.tokens.tolist()
    there = expected.tokens >= 0
    torch.testing.assert_close(
        found.log_odds[there], expected.log_odds[there], rtol=0, atol=0, equal_nan=True
    )
    assert found.raw[there].tolist() == expected.raw[there].tolist()
    assert found.residual.tolist() == expected.residual.tolist()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_rows_propose_what_v1s_do(seed: int) -> None:
    step = _Step(seed)
    names = [f"s{i}" for i in range(len(step.noise))]
    table, followed = RolloutTable(HOST), {}
    for i, (name, each) in enumerate(zip(names, step.noise, strict=True)):
        if each.verifier is Verifier.LENIENT:
            table.begin(name, step.rollouts[i])
            followed[i] = step.rollouts[i]
    for i in list(followed):
        # One has left its rollout, of which the host does not know yet; of another it does.
        match step.rng.integers(4):
            case 0:
                table.live[table._rows[names[i]]] = False
                del followed[i]
            case 1:
                table.end(names[i])
                del followed[i]
    followers = table.among(names)
    found = proposals_of_rows(step.on_device, step.batch, followers, table)
    expected = proposals_of(step.rows, step.batch, followed)
    if expected is None and found is not None:
        assert (found.tokens < 0).all()
        assert not found.residual.any()
    else:
        _same(found, expected)


def test_a_sample_follows_until_it_takes_a_token_of_its_own_or_the_rollout_ends() -> None:
    table = RolloutTable(HOST)
    for i in range(12):
        table.begin(
            f"s{i}", CachedRollout(np.arange(300 if i == 3 else 4) % VOCAB, np.zeros(4 + 296 * (i == 3)), 1.0)
        )
    names = ["s0", "s1", "other", "s2", "s3", "s4"]
    followers = table.among(names)
    assert followers is not None
    positions = torch.tensor([0, 0, 0, 2, 2, 0])
    counts, reused = torch.tensor([2, 2, 5, 2, 2, 2]), torch.tensor([2, 1, 5, 2, 2, 1])
    whole = torch.tensor([True, True, True, True, True, False])
    table.advance(followers, positions, counts, reused, whole)
    live = [bool(table.live[table._rows[f"s{i}"]]) for i in range(5)]
    # s1 took a token of its own, s2's rollout is over, of s4 nothing counts.
    assert live == [True, False, False, True, True]
    table.end("s1")
    table.end("unknown")
    table.begin("again", CachedRollout(np.array([1]), np.array([0.0]), 1.0))
    assert bool(table.live[table._rows["again"]])
    assert len(table) == 12


def test_a_request_of_vllms_own_proposes_nothing() -> None:
    settings = BatchSettings.of([settings_of(SamplingParams())])
    rows = DeviceRows(np.array([0, 1]), torch.tensor([0]), torch.tensor([0]))
    assert proposals_of_rows(rows, settings, None, RolloutTable(HOST)) is None
