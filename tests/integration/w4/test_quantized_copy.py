"""The quantized copy in a real engine: what it drafts changes no token, whatever happens around it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from kernels.w4a16 import for_cpu, linear, quantise
from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineRequest, Finish
from tests.integration.exactness.conftest import requests_of
from tests.integration.w4.conftest import DEPTH, Bench
from tests.support import quantized_runs
from tests.support.models import VOCAB_SIZE, tiny_weights
from tests.support.quantized_runs import Rolled, Rolling, roll

pytestmark = pytest.mark.timeout(400)

LENGTH = 40
T1 = Sampling(max_tokens=LENGTH)
SAMPLINGS = {
    "T=1": T1,
    "T=0.6, top-p": Sampling(max_tokens=LENGTH, temperature=0.6, top_p=0.9),
    "top-k, min-p": Sampling(max_tokens=LENGTH, top_k=20, min_p=0.02),
    "penalties": Sampling(
        max_tokens=LENGTH, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, min_tokens=20
    ),
    "greedy": Sampling(max_tokens=LENGTH, temperature=0),
}
DRAFTING = Rolling(DEPTH)


def _requests(sampling: Sampling = T1, count: int = 12, **how: object) -> tuple[EngineRequest, ...]:
    return requests_of(VOCAB_SIZE, sampling, count, **how)  # type: ignore[arg-type]


def _same(found: Rolled, plain: Rolled) -> None:
    assert found.tokens == plain.tokens
    assert found.finishes == plain.finishes
    for sample_id, values in plain.logprobs.items():
        assert found.logprobs[sample_id] == pytest.approx(values, abs=2e-5)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_of_the_quantized_copy_change_no_token_and_save_steps(quantized: Bench, name: str) -> None:
    requests = _requests(SAMPLINGS[name])
    plain = quantized.engine.run(roll, requests)
    found = quantized.engine.run(roll, requests, DRAFTING)
    _same(found, plain)
    assert found.acceptance > (0.5 if name == "T=1" else 0.25)
    assert found.steps < 0.6 * plain.steps
    assert plain.drafted == 0


def test_unlike_samples_that_come_at_any_time_share_draft_steps(quantized: Bench) -> None:
    requests = tuple(
        replace(request, sample_id=f"{name}/{request.sample_id}")
        for name, sampling in SAMPLINGS.items()
        for request in _requests(sampling, 3)
    )
    plain = quantized.engine.run(roll, requests)
    _same(
        quantized.engine.run(roll, requests, replace(DRAFTING, arrivals=tuple(range(len(requests))))), plain
    )


def test_the_target_never_reads_what_the_quantized_copy_writes(quantized: Bench) -> None:
    """A quantized copy whose weights are garbage writes garbage; the true tokens are then verified on top of it."""
    requests = _requests(lengths=(20, 60))
    plain = quantized.engine.run(roll, requests)
    quantized.engine.run(quantized_runs.spoil_quantized)
    try:
        spoilt = quantized.engine.run(roll, requests, replace(DRAFTING, watch=True))
        over = quantized.engine.run(roll, requests, replace(DRAFTING, truth=plain.tokens))
    finally:
        quantized.engine.run(quantized_runs.rebuild_quantized)
    _same(spoilt, plain)
    _same(over, plain)
    # What is left is the embedding's, which the two share.
    assert spoilt.acceptance < 0.2
    assert over.accepted > 100
    # It did write into the target's cache, and into no block of tokens that the target had computed.
    assert spoilt.written > 10
    assert spoilt.harmed == 0


def test_a_filled_prefix_cache_is_as_clean_as_without_the_quantized(quantized: Bench) -> None:
    requests = _requests(lengths=(70, 120), count=8)
    plain = quantized.engine.run(roll, requests)
    _same(quantized.engine.run(roll, requests, DRAFTING), plain)
    _same(quantized.engine.run(roll, requests, replace(DRAFTING, cold=False)), plain)
    _same(quantized.engine.run(roll, requests, Rolling(cold=False)), plain)


def test_preemption_loses_neither_tokens_nor_blocks(quantized: Bench) -> None:
    requests = _requests(count=16, lengths=(60, 130))
    plain = quantized.engine.run(roll, requests)
    found = quantized.engine.run(roll, requests, DRAFTING)
    _same(found, plain)
    assert found.preemptions > 0
    assert found.acceptance > 0.25
    assert found.blocks[0] == found.blocks[1] == plain.blocks[1]


def test_new_weights_have_a_new_quantized_copy_and_the_old_one_is_never_asked(quantized: Bench) -> None:
    config = json.loads((quantized.model / "config.json").read_text())
    requests = _requests()
    before = quantized.engine.run(roll, requests)
    quantized.engine.run(quantized_runs.apply_only, tiny_weights(config, 7))
    try:
        # Until it is made anew nothing is drafted, and the worker refuses as well.
        unready = quantized.engine.run(roll, requests, DRAFTING)
        assert not any(unready.proposals.values())
        with pytest.raises(RuntimeError, match="StaleDrafter"):
            quantized.engine.run(quantized_runs.ask_for_version, 0)
        at_once, ready, slices, building = quantized.engine.run(
            quantized_runs.update, tiny_weights(config, 7)
        )
        assert (at_once, ready, building) == (False, True, False)
        # A slice is at most a layer's.
        assert slices >= 12
        found = quantized.engine.run(roll, requests, DRAFTING)
        _same(found, unready)
        assert found.acceptance > 0.25
        assert found.tokens != before.tokens
    finally:
        quantized.engine.run(quantized_runs.update, load_file(quantized.model / "model.safetensors"))
    again = quantized.engine.run(roll, requests, DRAFTING)
    _same(again, before)
    assert again.acceptance > 0.25


def test_samples_go_on_under_new_weights_with_drafts_of_the_new_copy(quantized: Bench) -> None:
    config = json.loads((quantized.model / "config.json").read_text())
    requests = _requests(count=16, lengths=(20, 130))
    before = quantized.engine.run(roll, requests, DRAFTING)
    new = tiny_weights(config, 7)
    arrivals = tuple(range(0, 32, 2))
    try:
        found = quantized.engine.run(roll, requests, replace(DRAFTING, renew=(9, new), arrivals=arrivals))
        plain, rest = quantized.engine.run(quantized_runs.go_on, requests, found)
    finally:
        quantized.engine.run(quantized_runs.update, load_file(quantized.model / "model.safetensors"))
    cuts = found.before_renewal
    assert any(cuts.values())
    # Some had not come yet.
    assert len(cuts) < len(requests)
    for sample_id, cut in cuts.items():
        assert found.tokens[sample_id][:cut] == before.tokens[sample_id][:cut]
        assert found.logprobs[sample_id][:cut] == pytest.approx(before.logprobs[sample_id][:cut], abs=2e-5)
    _same(rest, plain)
    assert found.acceptance > 0.25
    _same(quantized.engine.run(roll, requests, DRAFTING), before)


def test_a_draft_ends_at_a_stop_token_and_at_the_length_limits(quantized: Bench) -> None:
    free = _requests(replace(T1, ignore_eos=True), lengths=(120, 160))
    whole = quantized.engine.run(roll, free)
    stops = {key: tokens[10] for key, tokens in whole.tokens.items()}
    requests = tuple(
        replace(r, sampling=replace(r.sampling, stop_token_ids=(stops[r.sample_id],))) for r in free
    )
    found = quantized.engine.run(roll, requests, DRAFTING)
    for key, tokens in found.tokens.items():
        assert tokens == whole.tokens[key][: whole.tokens[key].index(stops[key]) + 1]
        assert found.finishes[key] is Finish.STOP
        for _, proposed, _ in found.proposals[key]:
            assert stops[key] not in proposed[:-1]
    # A prompt of up to 160 leaves 32 tokens of the model's 192.
    endless = tuple(replace(r, sampling=Sampling(ignore_eos=True)) for r in free)
    plain = quantized.engine.run(roll, endless)
    found = quantized.engine.run(roll, endless, DRAFTING)
    _same(found, plain)
    for request in endless:
        limit = 192 - len(request.prompt)
        assert len(found.tokens[request.sample_id]) == limit
        # A token is always left to the target.
        assert all(there + len(tokens) < limit for there, tokens, _ in found.proposals[request.sample_id])


def test_unlike_drafters_share_an_engine(quantized: Bench) -> None:
    requests = _requests(count=12)
    plain = quantized.engine.run(roll, requests)
    mixed = tuple(
        replace(request, given=tuple(plain.tokens[request.sample_id])) if i % 2 else request
        for i, request in enumerate(requests)
    )
    found = quantized.engine.run(quantized_runs.speculate, mixed, DEPTH)
    assert found.tokens == plain.tokens
    assert found.finishes == plain.finishes
    drafters = {key: {source for source, _, _ in drafts} for key, drafts in found.sources.items()}
    for i, request in enumerate(requests):
        if i % 2 == 0:
            assert "quantized" in drafters[request.sample_id]
        else:
            assert "reference" in drafters[request.sample_id]
    # A sample that is given the truth soon needs no quantized copy.
    last = [found.sources[request.sample_id][-1][0] for i, request in enumerate(requests) if i % 2]
    assert last == ["reference"] * len(last)


def test_the_quantized_copy_is_the_targets_weights_rounded_to_nearest(quantized: Bench) -> None:
    packed = quantized.engine.run(quantized_runs.packed_weights)
    weights = load_file(quantized.model / "model.safetensors")
    assert len(packed) == 3 * 4
    for name, found in packed.items():
        head, _, last = name.rpartition(".")
        parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        whole = torch.cat([weights[f"{head}.{part}.weight"] for part in parts.get(last, (last,))])
        rounded = quantise(whole, 32, scale_dtype=linear.SCALES)
        assert torch.equal(found, for_cpu(rounded).packed), name
    # Half a byte, and a scale and an offset of 32 columns in two each.
    count = sum(each.numel() * 2 for each in packed.values())
    assert quantized.engine.run(quantized_runs.quantized_bytes) == count * (0.5 + 4 / 32)


def test_a_group_that_does_not_divide_is_refused(quantized: Bench) -> None:
    with pytest.raises(RuntimeError, match="a group of 256 does not divide the 128 inputs"):
        quantized.engine.run(quantized_runs.make_quantized, 256)


def test_16_bits_run_in_vllms_kernel_where_this_build_has_it(sixteen_bits: Bench) -> None:
    there = sixteen_bits.engine.run(quantized_runs.has_wna16)
    assert sixteen_bits.engine.run(quantized_runs.kernels) == ({"CPUWNA16LinearKernel"} if there else {""})
    requests = _requests()
    plain = sixteen_bits.engine.run(roll, requests)
    found = sixteen_bits.engine.run(roll, requests, DRAFTING)
    # In bfloat16 a tie may fall the other way; most samples have none.
    same = sum(found.tokens[key] == tokens for key, tokens in plain.tokens.items())
    assert same > len(requests) / 2
    assert found.acceptance > 0.25
    at_once, ready, _, _ = sixteen_bits.engine.run(
        quantized_runs.update, load_file(sixteen_bits.model / "model.safetensors")
    )
    assert (at_once, ready) == (False, True)
    # The copy of the new weights drafts as the first one did. Where products depend on the number of rows,
    # ties fall otherwise from run to run, too.
    again = sixteen_bits.engine.run(roll, requests, DRAFTING)
    assert sum(found.tokens[key] == tokens for key, tokens in again.tokens.items()) > len(requests) / 2
    assert again.acceptance == pytest.approx(found.acceptance, rel=0.2)
