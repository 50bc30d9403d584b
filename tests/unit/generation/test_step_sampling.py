"""A step's sampling on both engines: what is read to lay it out, and the memory that its logits take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from services.generation.engine.runner import CoupledRunnerMixin
from services.generation.engine.sampling import sampler
from services.generation.engine.sampling.constraints import History, TokenCounts, penalise
from services.generation.engine.sampling.inputs import BatchSettings, LatestSettings, SampleSettings
from services.generation.engine.sampling.outputs import unpack
from services.generation.engine.sampling.rows import Rows
from services.generation.engine.v2 import row_sampler
from services.generation.engine.v2.row_sampler import DeviceRows

VOCAB = 512
CPU = torch.device("cpu")
# What a step may ask for, one of them or several.
ASKS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"min_tokens": 30, "forbidden": (1, 2, 3)},
    {"allowed": tuple(range(0, VOCAB, 7)), "processed_logprobs": True},
    {"min_p": 0.02, "top_logprobs": 3},
    {"top_logprobs": 2, "processed_logprobs": True, "frequency_penalty": 0.3},
    {"near_ties": True},
    {"near_ties": True, "min_p": 0.02, "presence_penalty": 0.5},
]

HEATS = [0.0, 1e-4, 0.005, 0.7, 1.0, 3.0, 1e4]


class Step:
    """A step of samples with drafts, for the samplers of both engines."""

    def __init__(self, seed: int, drafted: list[int], asks: list[int], temperature: list[float]) -> None:
        rng = np.random.default_rng(seed)
        n = len(drafted)
        self.cu = np.concatenate(([0], np.cumsum(np.array(drafted) + 1)))
        self.samples = [
            SampleSettings(
                seed=int(rng.integers(2**63)),
                temperature=temperature[i],
                top_k=5 if i % 2 else 0,
                top_p=1.0 if i % 3 else 0.8,
                **ASKS[ask],
            )
            for i, ask in enumerate(asks)
        ]
        self.positions = rng.integers(0, 60, n)
        self.logits = torch.from_numpy(rng.normal(0, 2, (int(self.cu[-1]), VOCAB))).to(torch.bfloat16)
        self.batch = BatchSettings.of(self.samples)
        # Half of the drafts are what a sample without any would pick.
        best = self.logits.float().argmax(1).numpy()
        own = np.concatenate([best[a : b - 1] for a, b in zip(self.cu, self.cu[1:], strict=False)])
        self.drafts = np.where(rng.random(len(own)) < 0.5, own, rng.integers(0, VOCAB, len(own)))
        self.counts = TokenCounts(VOCAB, CPU)

    def histories(self) -> Any:
        told = [
            History(str(i), np.array([4, 4, 9]), np.full(int(self.positions[i]), 5))
            if item.penalised
            else None
            for i, item in enumerate(self.samples)
        ]
        return self.counts.histories(told)

    def on_v1(self) -> sampler.Verified:
        rows = Rows(self.cu, self.positions, self.drafts)
        return sampler.sample(self.logits, rows, self.batch, {}, histories=self.histories())

    def on_v2(self) -> row_sampler.SampledRows:
        inputs = np.zeros(int(self.cu[-1]), np.int64)
        offsets = np.concatenate([np.arange(b - a) for a, b in zip(self.cu, self.cu[1:], strict=False)])
        inputs[offsets > 0] = self.drafts
        rows = DeviceRows(self.cu, torch.from_numpy(self.positions), torch.from_numpy(inputs))
        return row_sampler.sample_rows(self.logits, rows, self.batch, self._penalise)

    def _penalise(self, scores: torch.Tensor) -> None:
        rows = Rows(self.cu, self.positions, self.drafts)
        index = np.flatnonzero([self.samples[i].penalised for i in rows.samples])
        changed = penalise(scores[torch.from_numpy(index)], index, rows, self.samples, self.histories())
        scores[torch.from_numpy(index)] = changed


@st.composite
def steps(draw: st.DrawFn) -> Step:
    n = draw(st.integers(1, 5))
    each = {"min_size": n, "max_size": n}
    return Step(
        draw(st.integers(0, 1000)),
        draw(st.lists(st.integers(0, 4), **each)),
        draw(st.lists(st.integers(0, len(ASKS) - 1), **each)),
        draw(st.lists(st.sampled_from(HEATS), **each)),
    )


@given(steps())
def test_both_engines_sample_alike(step: Step) -> None:
    before = step.logits.clone()
    expected, found = step.on_v1(), step.on_v2()
    tokens, counts, told = found.tokens, found.counts, found.logprobs
    assert not found.reused.any()
    assert torch.equal(step.logits, before)
    assert counts.tolist() == expected.counts.tolist()
    for i, count in enumerate(expected.counts.tolist()):
        own = slice(int(step.cu[i]), int(step.cu[i]) + count)
        assert tokens[i, :count].tolist() == expected.tokens[own].tolist()
        assert told.logprobs[own, 0].numpy() == pytest.approx(expected.logprobs[own], abs=2e-5)
        drafted = int(np.diff(step.cu)[i]) - 1
        assert unpack(told.selected_token_ranks[own].tolist()) == (drafted, count - 1, 0)
        asked = step.samples[i].top_logprobs or int(step.samples[i].near_ties)
        assert (
            told.logprob_token_ids[own, 1 : 1 + asked].tolist() == expected.top_tokens[own, :asked].tolist()
        )
        likeliest = told.logprobs[own, 1 : 1 + asked].numpy()
        assert likeliest == pytest.approx(expected.top_logprobs[own, :asked], abs=2e-5, rel=1e-5)


@pytest.mark.parametrize("heat", HEATS[1:])
def test_what_is_sampled_and_told_is_of_the_temperature_asked(heat: float) -> None:
    """Over many seeds tokens are drawn as often as the softmax of logits / T says, and told with its logarithm."""
    count, gaps = 2000, np.array([0, 0.5, 1, 3, np.inf])
    logits = torch.from_numpy(np.tile(5 - heat * gaps, (count, 1))).float()
    # What single precision makes of them is the distribution that is asked for.
    scaled = logits[0].double().numpy() / float(np.float32(heat))
    expected = scaled - np.logaddexp.reduce(scaled)
    noise = [
        SampleSettings(seed, temperature=heat, processed_logprobs=True, top_logprobs=2)
        for seed in range(count)
    ]
    rows = Rows(np.arange(count + 1), np.zeros(count, np.int64), np.empty(0, np.int64))
    found = sampler.sample(logits, rows, BatchSettings.of(noise), {})
    share = np.bincount(found.tokens, minlength=5) / count
    assert share == pytest.approx(np.exp(expected), abs=0.04)
    # logits / T is rounded to 24 bits.
    rounding = 2e-6 + 2e-7 * abs(scaled[0])
    assert found.logprobs == pytest.approx(expected[found.tokens], abs=rounding)
    assert found.top_tokens[0].tolist() == [0, 1]
    assert found.top_logprobs[0] == pytest.approx(expected[:2], abs=rounding)


@pytest.mark.parametrize(
    ("edge", "kept"),
    [
        ({"top_p": 1.4e-45}, 1),
        ({"min_p": 1.0}, 1),
        ({"min_p": 1.4e-45}, VOCAB),
        ({"top_k": 1}, 1),
        ({"top_k": 2**31 - 1}, VOCAB),
        ({"repetition_penalty": 1e-4, "temperature": 1e-4}, VOCAB),
        ({"repetition_penalty": 1e4, "frequency_penalty": -2.0, "presence_penalty": 2.0}, VOCAB),
    ],
)
def test_masks_and_penalties_at_their_edges_leave_what_they_say(edge: dict[str, Any], kept: int) -> None:
    count = 16
    logits = torch.from_numpy(np.random.default_rng(3).normal(0, 8, (count, VOCAB))).float()
    noise = [SampleSettings(seed, processed_logprobs=True, top_logprobs=20, **edge) for seed in range(count)]
    rows = Rows(np.arange(count + 1), np.zeros(count, np.int64), np.empty(0, np.int64))
    told = [History(str(i), np.array([4, 4, 9]), np.array([5])) for i in range(count)]
    histories = TokenCounts(VOCAB, CPU).histories([each if noise[0].penalised else None for each in told])
    found = sampler.sample(logits, rows, BatchSettings.of(noise), {}, histories=histories)
    assert np.isfinite(found.logprobs).all()
    assert np.isfinite(found.top_logprobs).sum(1).tolist() == [min(kept, 20)] * count
    if kept == 1:
        assert found.tokens.tolist() == logits.argmax(1).tolist()
    elif "repetition_penalty" not in edge:
        plain = [SampleSettings(seed) for seed in range(count)]
        expected = sampler.sample(logits, rows, BatchSettings.of(plain), {})
        assert found.tokens.tolist() == expected.tokens.tolist()


class Allocations(TorchDispatchMode):
    """Counts the bytes of results that are rows of logits, if they are more than a part of those of a step."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.bytes, self._seen = least, 0, set[int]()
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(each, torch.Tensor) or not each.is_floating_point():
                continue
            if each.numel() * each.element_size() >= self.least:
                storage = each.untyped_storage()
                if storage.data_ptr() not in self._seen:
                    self._seen.add(storage.data_ptr())
                    # Kept, so that no address comes twice.
                    self._kept.append(each)
                    self.bytes += storage.nbytes()
        return result


@contextmanager
def _without_kernels(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Iterator[None]:
    """The kernels, which on a GPU take no memory of this size, are the references here, which do."""
    real = getattr(module, name)

    def outside(*args: Any, **options: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return real(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, outside)
        yield


@pytest.mark.parametrize("engine", ["v1", "v2"])
@pytest.mark.parametrize("ask", range(len(ASKS)))
def test_what_a_sample_asks_for_takes_one_copy_of_the_logits(
    engine: str, ask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(1, [3] * 12, [ask] * 12, [1.0] * 12)
    # Kept as long as samples are, and not part of a step.
    step.histories()
    once = 4 * step.logits.numel()
    # Smaller parts are worked on one after the other.
    monkeypatch.setattr("services.generation.engine.sampling.constraints.PART_BYTES", once // 4)
    # vLLM's own, in place.
    monkeypatch.setattr(step, "_penalise", lambda scores: None)
    module, name, run = (
        (sampler, "draw", step.on_v1) if engine == "v1" else (row_sampler, "sample", step.on_v2)
    )
    with _without_kernels(monkeypatch, module, name), Allocations(once // 4 + 1) as found:
        run()
    edits = not ASKS[ask].keys().isdisjoint({"presence_penalty", "forbidden", "allowed", "frequency_penalty"})
    assert found.bytes <= once
    assert bool(found.bytes) == edits


def test_settings_are_collected_when_the_batch_changes_and_not_before() -> None:
    asked = list[str]()

    def settings_of(sample_id: str) -> SampleSettings:
        asked.append(sample_id)
        return SampleSettings(seed=ord(sample_id))

    latest, ids = LatestSettings(), ["a", "b"]
    first = latest.of(ids, settings_of)
    assert latest.of(ids, settings_of) is first
    # As vLLM does: it is the same list.
    ids.reverse()
    assert latest.of(ids, settings_of).seeds.tolist() == [ord("b"), ord("a")]
    assert asked == ["a", "b", "b", "a"]


def test_a_sample_has_its_own_settings_under_the_id_of_one_that_has_left() -> None:
    class Vllms:
        def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
            """Forget nothing."""

    runner = type("Runner", (CoupledRunnerMixin, Vllms), {})()
    runner.init_coupled()
    for heat in (1.0, 0.5):
        runner._settings["a"] = SampleSettings(seed=1, temperature=heat)
        assert runner._latest.of(["a"], runner.settings_of).temperature.tolist() == [heat]
        runner._on_request_state_removed("a", None)


class Unread:
    """A tensor of the device, which nobody is to read."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a device's tensor is read")


def test_v1_lays_a_step_out_from_host_memory() -> None:
    runner = CoupledRunnerMixin()
    runner.init_coupled()
    runner.input_batch = SimpleNamespace(
        req_ids=["a", "b", "c"],
        num_reqs=3,
        num_tokens_no_spec=np.array([5, 7, 9, 0], np.int32),
        num_prompt_tokens=np.array([5, 4, 4, 0], np.int32),
        sampling_metadata=Unread(),
    )
    asked = zip("abc", (1.0, 0.0, 0.6), (1.0, 1.0, 0.9), strict=True)
    runner._settings = {
        name: SampleSettings(seed=i, temperature=heat, top_p=top_p)
        for i, (name, heat, top_p) in enumerate(asked)
    }
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (6, VOCAB))).float()
    runner._drafts = {"b": [int(logits[1].argmax()), int(logits[2].argmax()), 1]}
    output = runner._sample(logits, Unread())
    settings = BatchSettings.of(list(runner._settings.values()))
    assert settings.temperature.tolist() == np.array([1, 0, 0.6], np.float32).tolist()
    assert settings.top_k is None
    assert settings.top_p is not None
    assert settings.top_p.tolist() == np.array([1, 1, 0.9], np.float32).tolist()
    rows = Rows(np.array([0, 1, 5, 6]), np.array([0, 3, 5]), np.array(runner._drafts["b"]))
    expected = sampler.sample(logits, rows, settings, {})
    assert output.sampled_token_ids[1].tolist() == [*expected.tokens[1:4].tolist(), -1]
    assert output.sampled_token_ids[[0, 2], 0].tolist() == expected.tokens[[0, 5]].tolist()
    # Where vLLM reads them, without another copy.
    assert output.sampled_token_ids.device == CPU
    runner._drafts = {}
    assert runner._sample(logits[:3], None).sampled_token_ids.shape == (3, 1)
