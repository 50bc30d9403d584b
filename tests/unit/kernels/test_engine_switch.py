"""The engine's sampler: what one sample asks for is no matter to another, and the switch of the kernels."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels import backend
from kernels.backend import Backend, BackendUnavailable
from services.generation.engine.kernel_choice import use_kernels
from services.generation.engine.sampling.constraints import History, TokenCounts
from services.generation.engine.sampling.inputs import BatchSettings, CachedRollout, SampleSettings
from services.generation.engine.sampling.rows import Rows
from services.generation.engine.sampling.sampler import sample
from services.generation.engine.types import Verifier

VOCAB = 300
ROWS = Rows(np.array([0, 1, 4, 6]), np.array([0, 7, 100]), np.array([1, 2, 3]))
TEXTS = [([4, 4, 9], [1, 2, 2]), ([7], [5] * 7), ([1, 2, 3], list(range(100)))]


@pytest.fixture(autouse=True)
def switch(monkeypatch):
    monkeypatch.setattr(backend, "_chosen", Backend.AUTO)


def verified(logits, noise, rows=ROWS, which=(0, 1, 2), followed=None, **masks):
    own = [{name: values[i] for name, values in masks.items()} for i in which]
    settings = [
        replace(item, temperature=(1.0, 0.0, 0.7)[i], **each)
        for item, i, each in zip(noise, which, own, strict=True)
    ]
    counts = TokenCounts(VOCAB, torch.device("cpu"))
    told = [
        History(str(i), np.array(TEXTS[i][0]), np.array(TEXTS[i][1])) if item.penalised else None
        for i, item in zip(which, noise, strict=True)
    ]
    return sample(logits, rows, BatchSettings.of(settings), followed or {}, histories=counts.histories(told))


def alone(logits, noise, i, **masks):
    begin, end = int(ROWS.cu[i]), int(ROWS.cu[i + 1])
    rows = Rows(np.array([0, end - begin]), ROWS.positions[i : i + 1], ROWS.drafts_of(i))
    return verified(logits[begin:end], [noise], rows, (i,), **masks)


COMPANIONS = {
    "plain": {},
    "min-p": {"min_p": 0.01, "processed_logprobs": True},
    "min-tokens": {"min_tokens": 102, "forbidden": (1, 2, 3)},
    "allowed": {"allowed": tuple(range(0, 300, 7))},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "likeliest": {"top_logprobs": 3},
    "rejection": {"verifier": Verifier.REJECTION},
}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("masks", [{}, {"top_k": [5, 300, 40], "top_p": [0.9, 1.0, 0.4]}], ids=["", "masks"])
@pytest.mark.parametrize("asks", COMPANIONS.values(), ids=COMPANIONS)
def test_companions_change_nothing(asks, masks, ties):
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (6, VOCAB))).float()
    logits = logits.round() if ties else logits
    before = logits.clone()
    plain = [SampleSettings(seed=seed) for seed in (3, 2**64 - 1, 5)]
    for one in range(3):
        noise = [replace(item, **asks) if i == one else item for i, item in enumerate(plain)]
        found = verified(logits, noise, **masks)
        for i, item in enumerate(noise):
            begin, end = int(ROWS.cu[i]), int(ROWS.cu[i + 1])
            own = alone(logits, item, i, **masks)
            assert found.tokens[begin:end].tolist() == own.tokens.tolist()
            assert found.counts[i] == own.counts[0]
            np.testing.assert_array_equal(found.logprobs[begin:end], own.logprobs)
    assert torch.equal(logits, before)


def test_a_sample_that_follows_a_rollout_changes_nothing_for_others():
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (6, VOCAB))).float()
    noise = [SampleSettings(seed=seed) for seed in (3, 2**64 - 1, 5)]
    rollout = CachedRollout(np.arange(200) % VOCAB, np.full(200, -50.0), 1.0)
    expected, found = verified(logits, noise), verified(logits, noise, followed={0: rollout})
    assert found.reused.tolist() == [1, 0, 0]
    assert found.tokens[0] == 0
    assert found.tokens[1:].tolist() == expected.tokens[1:].tolist()
    np.testing.assert_array_equal(found.logprobs[1:], expected.logprobs[1:])


def test_penalties_are_those_of_the_tokens_before_each_row():
    """Of a sample with drafts, against each row by itself; counts grow with the response, and are forgotten."""
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 1, (3, VOCAB))).float()
    penalties = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
    settings = SampleSettings(3, temperature=0.0, processed_logprobs=True, top_logprobs=VOCAB, **penalties)
    prompt, response = np.array([8, 9, 9]), np.array([5, 5, 6])
    best = logits.argmax(dim=1)
    expected = []
    for j in range(3):
        output = [*response.tolist(), *best[:j].tolist()]
        row = logits[j].double().numpy().copy()
        seen = sorted({8, 9, *output})
        row[seen] = np.where(row[seen] > 0, row[seen] / 1.3, row[seen] * 1.3)
        counts = np.bincount(output, minlength=VOCAB)
        expected.append(row - 0.4 * counts - 0.7 * (counts > 0))
    counts = TokenCounts(VOCAB, torch.device("cpu"))
    counts.histories([History("a", prompt, response[:1])])
    for _ in range(2):
        histories = counts.histories([History("a", prompt, response)])
        rows = Rows(np.array([0, 3]), np.array([3]), best[:2].numpy())
        found = sample(logits, rows, BatchSettings.of([settings]), {}, histories=histories)
        for j in range(int(found.counts[0])):
            ordered = np.argsort(found.top_tokens[j])
            log_softmax = expected[j] - np.log(np.exp(expected[j]).sum())
            np.testing.assert_allclose(found.top_logprobs[j][ordered], log_softmax, atol=1e-5)
            assert found.tokens[j] == expected[j].argmax()
        # A second sample takes another slot, and leaves the first alone.
        counts.histories([History("b", prompt, response[:0])])
        counts.forget("b")
        counts.forget("nobody")


def test_a_slot_that_is_taken_again_begins_anew():
    counts = TokenCounts(VOCAB, torch.device("cpu"))
    for i in range(20):
        histories = counts.histories([History(str(i), np.array([i]), np.array([i + 1, i + 1]))])
        row = histories.table[histories.slots[0]]
        assert row.nonzero().squeeze(1).tolist() == [i, i + 1]
        assert row[i + 1] == 2
        if i % 3:
            counts.forget(str(i))
    assert len(histories.table) <= 16


def test_a_row_that_cannot_be_sampled_is_marked():
    logits = torch.zeros(6, VOCAB)
    logits[0] = torch.nan
    found = verified(logits, [SampleSettings(seed=i) for i in range(3)])
    assert found.counts[0] == 1
    assert np.isnan(found.logprobs[0])


def test_on_cpu_auto_is_the_reference_and_triton_is_refused():
    assert use_kernels("auto", torch.device("cpu")) is Backend.AUTO
    with pytest.raises(BackendUnavailable, match="allowed here: auto, reference"):
        use_kernels("triton", torch.device("cpu"))
