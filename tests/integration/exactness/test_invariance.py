"""With `batch_invariant`, bfloat16 on CPU gives the same tokens in batches of every shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.contracts.sampling import Sampling
from services.generation.engine.arguments import engine_config
from services.generation.engine.invariance import checks
from services.generation.engine.invariance.checks import (
    HeadForm,
    NotInvariant,
    ProductForm,
    check_attention,
    check_by_row,
    checked_least_rows,
)
from services.generation.engine.types import EngineOptions
from tests.integration.exactness.conftest import Bench, engine, requests_of, run
from tests.support.draft_policies import Drafts
from tests.support.models import tiny_model

pytestmark = pytest.mark.timeout(400)
DTYPE = torch.bfloat16


@pytest.fixture(scope="module")
def invariant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Qwen3 in bfloat16 with the option, under pressure: few blocks of KV, and prompts in chunks."""
    yield from engine(
        tmp_path_factory.mktemp("model"),
        "qwen3",
        {},
        dtype="bfloat16",
        batch_invariant=True,
        max_num_batched_tokens=64,
        max_num_seqs=32,
        kv_cache_memory_bytes=40 * 3 * 32 * 2 * 32 * 2 * 2,
    )


def test_tokens_do_not_depend_on_the_batch(invariant: Bench) -> None:
    sampling = Sampling(max_tokens=80, ignore_eos=True)
    requests = requests_of(invariant.host.vocab_size, sampling, count=40)
    requests = tuple(
        replace(each, sampling=replace(sampling, top_p=0.9, top_k=40)) if place % 4 == 0 else each
        for place, each in enumerate(requests)
    )
    plain = run(invariant, requests)
    assert plain.preemptions
    for policy in ("true", "adversarial", "varying"):
        drafted = run(invariant, requests, drafts=Drafts(policy, truth=plain.tokens))
        assert drafted.tokens == plain.tokens, policy
        assert drafted.drafted > 1000
    alone = {each.sample_id: run(invariant, (each,)).tokens[each.sample_id] for each in requests[:3]}
    assert alone == {name: plain.tokens[name] for name in alone}
    resumed = tuple(replace(each, prefix=tuple(plain.tokens[each.sample_id][:37])) for each in requests)
    rest = run(invariant, resumed).tokens
    assert {each.sample_id: [*each.prefix, *rest[each.sample_id]] for each in resumed} == plain.tokens


def test_a_product_whose_order_depends_on_every_number_of_rows_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight.float()
        # As a kernel that divides its sums by the number of rows.
        layer.cpu_linear = lambda x, _, bias: sum(
            part @ other.T
            for part, other in zip(
                x.float().tensor_split(1 + len(x) % 3, 1), weight.tensor_split(1 + len(x) % 3, 1), strict=True
            )
        )

    monkeypatch.setattr(checks, "dispatch_cpu_unquantized_gemm", dispatch)
    with pytest.raises(NotInvariant, match="a product of 96 by 64 in bfloat16 depends on its number of rows"):
        checked_least_rows(ProductForm(64, 96, DTYPE, False))


@pytest.mark.parametrize("bias", [False, True])
def test_products_have_a_fewest_number_of_rows(bias: bool) -> None:
    assert 1 <= checked_least_rows(ProductForm(192, 64, DTYPE, bias)) <= 16


def test_attention_of_more_query_tokens_than_a_tile_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_attention(HeadForm(16, 8, 128, DTYPE, "vec"), 4096)
    monkeypatch.setitem(checks.QUERY_ROWS, "vec", 64)
    with pytest.raises(NotInvariant, match="depends on the number of query tokens"):
        check_attention(HeadForm(16, 8, 128, DTYPE, "vec"), 4096)


def test_a_layer_whose_rows_depend_on_their_number_is_refused() -> None:
    check_by_row("Doubled", lambda rows: (torch.ones(rows, 3),))
    with pytest.raises(NotInvariant, match="Doubled depends on its number of rows: 33 differ from 1"):
        check_by_row("Doubled", lambda rows: (torch.ones(rows, 3) * (1 + rows // 33),))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 2}, "on CPU it needs tensor_parallel_size 1"),
        ({"trees": True}, "set max_branches to 0"),
        ({"engine": "v2"}, "on CPU it needs engine v1"),
        ({"enforce_eager": False}, "leave enforce_eager out"),
    ],
)
def test_options_for_which_it_is_not_known_are_refused(
    options: dict[str, object], reason: str, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "model", "qwen3")
    with pytest.raises(ValueError, match=f"batch_invariant: .*{reason}"):
        engine_config(EngineOptions(str(model), batch_invariant=True, **options))  # type: ignore[arg-type]
