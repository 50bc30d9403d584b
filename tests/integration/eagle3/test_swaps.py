"""Other weights in a running engine: of the head, and of the policy that it drafts for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from services.generation.engine.types import EngineRequest
from tests.integration.eagle3.conftest import DRAFTING, LENGTH, Bench, same, wishes
from tests.support import eagle3_runs
from tests.support.eagle3 import DraftOracle, head_shape, random_head, save_head
from tests.support.models import tiny_model, tiny_weights
from tests.support.quantized_runs import Rolled, go_on, roll

pytestmark = pytest.mark.timeout(400)


def _part(found: Rolled, since: dict[str, int] | None) -> Rolled:
    """With the proposals before the swap only, or with those since."""
    kept = {
        key: made[: found.before_swap[key]] if since is None else made[found.before_swap[key] :]
        for key, made in found.proposals.items()
    }
    return replace(found, proposals=kept)


def test_a_head_takes_the_place_of_another_in_mid_decode(bench: Bench) -> None:
    requests = wishes()
    other = random_head(head_shape(bench.model, draft_vocabulary=300), seed=2)
    plain = bench.engine.run(roll, requests)
    try:
        found = bench.engine.run(roll, requests, replace(DRAFTING, swap=(8, other.tensors())))
        same(found, plain)
        bench.check(requests, _part(found, None))
        # From the first draft on: nothing that the old head had read is left.
        bench.check(requests, _part(found, found.before_swap), head=other)
    finally:
        bench.engine.run(eagle3_runs.swap, bench.head.tensors())
    bench.check(requests, bench.engine.run(roll, requests, DRAFTING))


def test_a_head_that_comes_while_the_engine_sleeps_drafts_when_it_wakes(bench: Bench) -> None:
    requests = wishes(count=4)
    other = random_head(head_shape(bench.model, draft_vocabulary=300), seed=3)
    plain = bench.engine.run(roll, requests)
    assert bench.engine.run(eagle3_runs.swap_asleep, other.tensors())
    try:
        found = bench.engine.run(roll, requests, DRAFTING)
    finally:
        bench.engine.run(eagle3_runs.swap_asleep, bench.head.tensors())
    same(found, plain)
    bench.check(requests, found, head=other)


def test_the_head_drafts_for_new_weights_of_the_policy(bench: Bench, tmp_path: Path) -> None:
    config = json.loads((bench.model / "config.json").read_text())
    requests = wishes()
    before = bench.engine.run(roll, requests, DRAFTING)
    try:
        assert bench.engine.run(eagle3_runs.apply, tiny_weights(config, 7)) == (False, True)
        plain = bench.engine.run(roll, requests)
        found = bench.engine.run(roll, requests, DRAFTING)
    finally:
        bench.engine.run(eagle3_runs.apply, load_file(bench.model / "model.safetensors"))
    same(found, plain)
    assert found.tokens != before.tokens
    bench.check(requests, found, oracle=DraftOracle(tiny_model(tmp_path / "seventh", seed=7)))
    again = bench.engine.run(roll, requests, DRAFTING)
    same(again, before)
    bench.check(requests, again)


def test_samples_go_on_under_new_weights_of_the_policy(bench: Bench) -> None:
    config = json.loads((bench.model / "config.json").read_text())
    requests = wishes()
    before = bench.engine.run(roll, requests, DRAFTING)
    try:
        found = bench.engine.run(roll, requests, replace(DRAFTING, renew=(9, tiny_weights(config, 7))))
        plain, rest = bench.engine.run(go_on, requests, found)
    finally:
        bench.engine.run(eagle3_runs.apply, load_file(bench.model / "model.safetensors"))
    same(rest, plain)
    cuts = found.before_renewal
    assert [found.tokens[key][:cut] for key, cut in cuts.items()] == [
        before.tokens[key][:cut] for key, cut in cuts.items()
    ]
    assert found.tokens != before.tokens
    same(bench.engine.run(roll, requests, DRAFTING), before)


def test_a_head_for_another_model_is_refused(bench: Bench) -> None:
    shape = head_shape(bench.model)
    for version, changes, fault in (
        (11, {"layers": (1, 2, 3)}, r"it reads layers \[1, 2, 3\], the model has 3"),
        (12, {"num_key_value_heads": 4}, "num_key_value_heads is 4, the model's is 2"),
        (13, {"vocab_size": 600, "draft_vocab_size": 600}, "vocab_size is 600, the model's is 512"),
    ):
        unfit = random_head(replace(shape, **changes), seed=1)  # type: ignore[arg-type]
        path = str(save_head(unfit, bench.folder, version).path)
        with pytest.raises(RuntimeError, match=f"UnsupportedDrafter.*is no drafter for this model.*{fault}"):
            bench.engine.run(eagle3_runs.make_head, path)


def test_its_memory_is_counted(bench: Bench) -> None:
    nbytes, blocks = bench.engine.run(eagle3_runs.memory)
    parameters = sum(each.numel() for each in bench.head.parameters())
    # And a place of 8 bytes for each token that it can draft.
    assert nbytes == 4 * parameters + 8 * 300
    assert blocks == 40


def _tokens(bench: Bench, requests: tuple[EngineRequest, ...]) -> dict[str, list[list[int]]]:
    found = bench.engine.run(roll, requests, DRAFTING)
    return {key: [tokens for _, tokens, _ in made] for key, made in found.proposals.items()}


def test_16_bits_are_packed_anew(sixteen_bits: Bench) -> None:
    """vLLM multiplies 16-bit weights from packed copies: those are to be the new head's, all of them."""
    requests = wishes(count=6)
    plain = sixteen_bits.engine.run(roll, requests)
    found = sixteen_bits.engine.run(roll, requests, DRAFTING)
    # In bfloat16 a tie may fall the other way; most samples have none.
    assert sum(found.tokens[key] == tokens for key, tokens in plain.tokens.items()) > len(requests) / 2
    before = {key: [tokens for _, tokens, _ in made] for key, made in found.proposals.items()}
    # The head's draws are mostly those of the oracle in 32 bits.
    agreed = compared = 0
    for request in requests:
        made = found.proposals[request.sample_id]
        places = [(there, 1) for there, _, _ in made]
        wanted = sixteen_bits.oracle.drafts(
            sixteen_bits.head, request, found.tokens[request.sample_id], places
        )
        agreed += sum(tokens[0] == first[0] for (_, tokens, _), (first, _) in zip(made, wanted, strict=True))
        compared += len(made)
    assert compared > LENGTH
    assert agreed / compared > 0.85
    other = random_head(head_shape(sixteen_bits.model), seed=5)
    sixteen_bits.engine.run(eagle3_runs.swap, other.tensors())
    between = _tokens(sixteen_bits, requests)
    sixteen_bits.engine.run(eagle3_runs.swap, sixteen_bits.head.tensors())
    assert _tokens(sixteen_bits, requests) == before
    first = [a[0][0] == b[0][0] for a, b in zip(before.values(), between.values(), strict=True) if a and b]
    assert not all(first)


def test_a_load_that_fails_half_way_ends_drafting_and_nothing_else(sixteen_bits: Bench) -> None:
    """The last test of its engine: what was not checked got through."""
    requests = wishes(count=6)
    plain = sixteen_bits.engine.run(roll, requests)
    tensors = sixteen_bits.head.tensors()
    tensors["midlayer.mlp.down_proj.weight"] = tensors["midlayer.mlp.down_proj.weight"][:, :5]
    assert sixteen_bits.engine.run(eagle3_runs.fail_to_swap, tensors) == (True, False)
    found = sixteen_bits.engine.run(roll, requests, DRAFTING)
    assert not any(found.proposals.values())
    assert found.tokens == plain.tokens
