"""Both engines pick the same tokens, whatever happens on the way: 16 cases that have every pair of conditions.

V1 decodes plainly, and V2 plainly or with drafts, scheduling ahead or not, after a preemption or from a prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest

from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineOptions, EngineRequest, Verifier
from tests.integration.exactness.conftest import requests_of
from tests.support.draft_policies import Drafts
from tests.support.engine_host import EngineHost, Outcome, Scenario
from tests.support.models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.timeout(500)

TOKENS = 16
SAMPLINGS = {
    "T=1": Sampling(max_tokens=TOKENS, top_logprobs=2),
    "masks": Sampling(max_tokens=TOKENS, temperature=0.6, top_k=200, top_p=0.9, processed_logprobs=True),
    "penalties": Sampling(
        max_tokens=TOKENS,
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=0.3,
        prompt_logprobs=1,
    ),
    "min-p": Sampling(
        max_tokens=TOKENS, temperature=0.9, min_p=0.05, min_tokens=12, stop_token_ids=tuple(range(2, 99))
    ),
}
# Model, whether V2 schedules ahead, and pairs of a sampling and of what happens. Models differ in their KV.
CASES = {
    ("qwen3", False): [("T=1", "plain"), ("masks", "drafts"), ("penalties", "resumed"), ("min-p", "preempted")],
    ("llama", True): [("T=1", "drafts"), ("masks", "resumed"), ("penalties", "preempted"), ("min-p", "plain")],
    ("gemma3_text", True): [
        ("T=1", "preempted"), ("masks", "plain"), ("penalties", "drafts"), ("min-p", "resumed")
    ],
    ("qwen3_moe", False): [
        ("T=1", "resumed"), ("masks", "preempted"), ("penalties", "plain"), ("min-p", "drafts")
    ],
}  # fmt: skip
# Bytes of a block: 3 layers, 32 positions, 2 heads of 32 numbers, keys and values.
_BLOCK_BYTES = 3 * 32 * 2 * 32 * 2 * 4


# Models whose samples also take over cached rollouts, and by which sampling.
LENIENT = {"qwen3": "T=1", "llama": "penalties", "gemma3_text": "masks"}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines of one model, one after the other: what V1 generated, and V2."""

    plain: dict[str, Outcome]
    v2: EngineHost
    lenient: tuple[EngineRequest, ...]
    taken_over: Outcome


def requests(name: str) -> tuple[EngineRequest, ...]:
    return requests_of(VOCAB_SIZE, SAMPLINGS[name], count=7, lengths=(20, 60), seed=3)


def lenient(v1: EngineHost, name: str) -> tuple[EngineRequest, ...]:
    """Requests with rollouts of the same weights and other noise, whose log-probabilities are off."""
    random, asked = Random(4), requests(name)
    then = v1.run(Scenario(tuple(replace(each, seed=each.seed ^ 1) for each in asked)))
    return tuple(
        replace(
            each,
            verifier=Verifier.LENIENT,
            cached=tuple(then.tokens[each.sample_id]),
            cached_logprobs=tuple(value + random.gauss(0, 0.3) for value in then.logprobs[each.sample_id]),
            lenience=1.0,
        )
        for each in asked
    )


@pytest.fixture(scope="module", params=CASES, ids=lambda key: f"{key[0]}{', ahead' if key[1] else ''}")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """V1's tokens, then V2 with a cache that is too small for all samples."""
    architecture, ahead = request.param
    model = tiny_model(tmp_path_factory.mktemp("model") / architecture, architecture)
    options = EngineOptions(
        model=str(model),
        dtype="float32",
        max_num_seqs=8,
        max_model_len=128,
        max_num_batched_tokens=128,
        block_size=32,
        kv_cache_memory_bytes=64 * _BLOCK_BYTES,
    )
    with EngineHost(options) as v1:
        plain = {name: v1.run(Scenario(requests(name))) for name in SAMPLINGS}
        following = lenient(v1, LENIENT[architecture]) if architecture in LENIENT else ()
        taken_over = v1.run(Scenario(following))
    small = 12 * _BLOCK_BYTES
    with EngineHost(replace(options, engine="v2", schedule_ahead=ahead, kv_cache_memory_bytes=small)) as v2:
        yield Pair(plain, v2, following, taken_over)


@pytest.mark.parametrize("case", range(4))
def test_v2_picks_v1s_tokens(pair: Pair, request: pytest.FixtureRequest, case: int) -> None:
    name, way = CASES[request.node.callspec.params["pair"]][case]
    expected, asked = pair.plain[name], requests(name)
    if way != "preempted":
        # So few fit.
        asked = asked[:3]
    if way == "resumed":
        asked = tuple(
            replace(r, prefix=tuple(expected.tokens[r.sample_id][: 1 + 5 * i])) for i, r in enumerate(asked)
        )
    drafts = Drafts() if way in ("plain", "preempted") else Drafts("varying", truth=expected.tokens)
    found = pair.v2.run(Scenario(asked, drafts=drafts))
    for each in asked:
        key, begin = each.sample_id, len(each.prefix)
        assert found.tokens[key] == expected.tokens[key][begin:]
        assert found.finishes[key] == expected.finishes[key]
        assert found.logprobs[key] == pytest.approx(expected.logprobs[key][begin:], abs=2e-5)
        most = each.sampling.top_logprobs
        assert found.top_token_ids[key] == expected.top_token_ids[key][most * begin :]
        if each.sampling.prompt_logprobs is not None:
            told = found.prompts[key]
            assert told.logprobs == pytest.approx(expected.prompts[key].logprobs, abs=2e-5)
    # A resumed sample comes as a preempted one.
    assert (found.preemptions > len(asked) * (way == "resumed")) == (way == "preempted")
    if way == "drafts":
        assert found.accepted > 20


def test_v2_takes_over_as_much_of_a_rollout_as_v1(pair: Pair) -> None:
    """Preempted, and by chunks that change nothing."""
    if not pair.lenient:
        pytest.skip("another model")
    found, expected = pair.v2.run(Scenario(pair.lenient, chunk=3)), pair.taken_over
    assert (found.tokens, found.reused, found.finishes) == (
        expected.tokens,
        expected.reused,
        expected.finishes,
    )
    assert 10 < sum(found.reused.values()) < sum(len(each.cached) for each in pair.lenient)
    assert found.accepted
    for key, values in expected.logprobs.items():
        assert found.logprobs[key] == pytest.approx(values, abs=2e-5)
        assert found.verified[key] == pytest.approx(expected.verified[key], abs=2e-5)
    assert found.preemptions > 0
