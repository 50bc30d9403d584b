"""Families of models: whatever an engine does beyond plain decoding gives the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec

from services.generation.engine.model_support import (
    COPIED_KINDS,
    EXACT_KINDS,
    MOVABLE_KINDS,
    EngineTraits,
    Feature,
    model_support,
)
from services.generation.engine.types import EngineOptions
from tests.support.architectures import FAMILIES, second_of, serve_make
from tests.support.draft_checks import (
    listed,
    refused_by_check,
    refused_by_failing_check,
    refused_to_resume,
    refused_without_copies,
)
from tests.support.draft_policies import PLANNED, Drafts
from tests.support.engine_actor import EngineActor
from tests.support.engine_host import Outcome, Scenario, run_scenario
from tests.support.engine_process import EngineProcess
from tests.support.exactness_matrix import (
    matrix_row,
    off_transformers,
    options_of,
    plain_of,
    requests_of,
    resumed_of,
)
from tests.support.pushes import push
from tests.support.self_moves import moved, refused_moves
from tests.support.soak import Progress, record

pytestmark = pytest.mark.timeout(400)
_MAKE_SECONDS = 120
SHORT = ("llama", "gpt-oss", "granite4-hybrid", "deepseek-mla")
"""They have every kind of KV that is known: of the whole context, of a window with sinks, a state, a latent."""


def make_models(folder: Path, names: tuple[str, ...]) -> dict[str, Path]:
    """Make models where transformers is imported already."""
    folders = {name: folder / name for name in names}
    with EngineProcess(serve_make, folders) as process:
        process.answer(_MAKE_SECONDS)
    return folders


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), SHORT)


@pytest.fixture
def granite(models: dict[str, Path]) -> Iterator[EngineActor]:
    with EngineActor(
        options_of("granite4-hybrid", models["granite4-hybrid"], kv_cache_memory_bytes=1 << 20)
    ) as actor:
        yield actor


def test_every_kind_of_kv_that_vllm_has_is_allowed_by_name_or_refused() -> None:
    kinds = {KVCacheSpec}
    while more := {each for kind in kinds for each in kind.__subclasses__()} - kinds:
        kinds |= more
    names = {kind.__name__ for kind in kinds if kind.__module__.startswith("vllm.")}
    assert names >= EXACT_KINDS >= MOVABLE_KINDS
    assert len(names) >= 15
    for name in names - EXACT_KINDS - COPIED_KINDS:
        support = model_support(EngineTraits("cpu", kinds=frozenset({name})))
        assert {Feature.DRAFTS, Feature.MOVES} <= support.refused.keys(), name


def test_windows_and_sinks_are_exact_with_wrong_drafts(models: dict[str, Path]) -> None:
    with EngineActor(options_of("gpt-oss", models["gpt-oss"])) as actor:
        assert actor.call(listed).keys() == {"trees", "quantized", "eagle3", "moves"}
        assert actor.call(refused_moves) == "KV behind a window is dropped"
        requests = requests_of()
        plain = plain_of(actor, requests)
        drafts = Drafts("adversarial", truth=plain.tokens)
        found = actor.call(run_scenario, Scenario(requests, drafts))
        assert found.tokens == plain.tokens
        assert found.drafted > found.accepted > 0
        assert resumed_of(actor, requests, plain, cold=True) == plain.tokens
        assert actor.call(refused_by_check) == {}


def test_kv_of_the_whole_context_moves(models: dict[str, Path]) -> None:
    with EngineActor(options_of("llama", models["llama"])) as actor:
        assert actor.call(listed) == {}
        assert actor.call(refused_moves) == ""
        requests = requests_of()
        plain = plain_of(actor, requests)
        assert actor.call(moved, requests, 20) == plain.tokens
        # A check that fails leaves an engine that decodes plainly.
        refused = actor.call(refused_by_failing_check)
        assert refused["drafts"] == "a step with drafts failed: ValueError: no draft can be put"
        drafts = Drafts("adversarial", truth=plain.tokens)
        found = actor.call(run_scenario, Scenario(requests, drafts))
        assert (found.tokens, found.drafted) == (plain.tokens, 0)


@pytest.mark.parametrize("policy", ["adversarial", PLANNED])
def test_a_recurrent_state_is_exact_with_wrong_drafts(granite: EngineActor, policy: str) -> None:
    refused = granite.call(listed)
    assert refused.keys() == {"trees", "quantized", "eagle3", "moves", "prefix_cache", "keep_kv"}
    assert granite.call(refused_moves) == refused["moves"]
    requests = requests_of()
    plain = plain_of(granite, requests)
    found = granite.call(run_scenario, Scenario(requests, Drafts(policy, truth=plain.tokens)))
    assert found.tokens == plain.tokens
    assert found.drafted > found.accepted > 0
    # The cache is too small for all of them: some lose their state and its copy, and compute both again.
    assert found.preemptions > 0
    assert granite.call(refused_by_check) == {}


def test_a_recurrent_sample_is_resumed(granite: EngineActor) -> None:
    requests = requests_of()
    plain = plain_of(granite, requests)
    assert resumed_of(granite, requests, plain, cold=False) == plain.tokens


def test_the_check_finds_a_state_that_drafts_change(granite: EngineActor) -> None:
    found = granite.call(refused_without_copies)
    assert found.keys() == {"drafts", "trees", "quantized", "eagle3", "pregeneration"}
    assert "refused draft" in found["drafts"]
    requests = requests_of(3)
    plain = plain_of(granite, requests)
    drafted = granite.call(run_scenario, Scenario(requests, Drafts("adversarial", truth=plain.tokens)))
    assert (drafted.tokens, drafted.drafted) == (plain.tokens, 0)


def test_latent_attention_decodes_plainly(models: dict[str, Path]) -> None:
    with EngineActor(options_of("deepseek-mla", models["deepseek-mla"])) as actor:
        refused = actor.call(listed)
        assert "latent" in refused["drafts"]
        requests = requests_of(3)
        plain = plain_of(actor, requests)
        drafted = actor.call(run_scenario, Scenario(requests, Drafts("adversarial", truth=plain.tokens)))
        assert (drafted.tokens, drafted.drafted) == (plain.tokens, 0)
        begun = replace(requests[0], prefix=tuple(plain.tokens["r0"][:5]))
        assert actor.call(refused_to_resume, begun) == f"RESUMING: prefix_token_ids: {refused['resuming']}"
        assert plain_of(actor, requests).tokens == plain.tokens


def pushed(family: str, folder: Path) -> tuple[Outcome, Outcome]:
    """What an engine of a second policy decodes, and what one does after that policy was pushed to it."""
    requests = requests_of()
    with EngineActor(options_of(family, second_of(folder))) as actor:
        fresh = plain_of(actor, requests)
    with EngineActor(options_of(family, folder)) as actor:
        before = plain_of(actor, requests)
        actor.call(push, second_of(folder))
        after = plain_of(actor, requests)
        assert after.tokens != before.tokens
    return fresh, after


def test_experts_and_latent_attention_take_new_weights(models: dict[str, Path]) -> None:
    fresh, after = pushed("deepseek-mla", models["deepseek-mla"])
    assert after.tokens == fresh.tokens


def test_weights_that_vllm_leaves_out_are_an_error(models: dict[str, Path]) -> None:
    with (
        EngineActor(options_of("gpt-oss", models["gpt-oss"])) as actor,
        pytest.raises(RuntimeError, match="GptOssRoutedExperts, OAIAttention, and has left the old ones"),
    ):
        actor.call(push, second_of(models["gpt-oss"]))


UNSHOWN = {"qwen3-next", "deepseek-mla", "lfm2"}
"""Families whose prefill differs from decoding here: their samples are not resumed."""
UNLIKE = {"cohere2", "gpt-oss"}
"""Other families whose log-probabilities are not those of transformers: by 0.03 and 1.5 nats."""


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_every_family_is_exact_in_every_way_that_it_allows(tmp_path: Path) -> None:
    folders = make_models(tmp_path, tuple(FAMILIES))
    progress, rows, refused = Progress("models", len(FAMILIES), "family"), [], {}
    for done, (family, folder) in enumerate(folders.items()):
        progress.tell(done, family)
        try:
            with EngineActor(options_of(family, folder)) as actor:
                rows.append(matrix_row(family, actor))
                plain, few = plain_of(actor, requests_of()), requests_of()[:2]
                rows[-1].off_transformers = off_transformers(folder, few, plain)
                rows[-1].refused_by_check = actor.call(refused_by_check)
        except RuntimeError as error:
            refused[family] = str(error).strip().splitlines()[-1]
            continue
        try:
            fresh, after = pushed(family, folder)
            rows[-1].add("pushed", fresh.tokens, after.tokens)
        except RuntimeError as error:
            rows[-1].refused["push"] = str(error).strip().splitlines()[-1]
    refused["qwen3-next in float32"] = why_not_served(
        options_of("qwen3-next", folders["qwen3-next"], dtype="float32")
    )
    record("models", {"rows": [each.figures() for each in rows], "not served": refused})
    assert refused.keys() == {"qwen3-next in float32"}
    assert "CPU GDN attention requires BF16" in refused["qwen3-next in float32"]
    assert [row.family for row in rows if "push" in row.refused] == ["gpt-oss"]
    for row in rows:
        assert not any(row.differ.values()), row
        assert ("resuming" in row.refused) == (row.family in UNSHOWN), row
        assert row.family in UNSHOWN | UNLIKE or row.off_transformers < 1e-3, row
        # The rules know all that the check finds.
        assert row.refused_by_check.keys() <= row.refused.keys(), row


def why_not_served(options: EngineOptions) -> str:
    """Return what vLLM says of a model that it cannot serve."""
    try:
        with EngineActor(options) as actor:
            plain_of(actor, requests_of(1))
    except Exception as error:
        return str(error).strip().splitlines()[-1]
    return ""
