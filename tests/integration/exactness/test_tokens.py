"""Speculation changes no token: real vLLM, Qwen3, every kind of draft and of sampling."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineRequest, Finish
from tests.integration.exactness.conftest import T06, T1, Bench, requests_of, run
from tests.support.draft_policies import PLANNED, POLICIES, Drafts
from tests.support.engine_host import Outcome
from tests.support.models import END_TOKEN
from tests.support.oracle import log_softmax

pytestmark = pytest.mark.timeout(400)

VARIANTS = {
    "greedy": Sampling(max_tokens=48, temperature=0),
    "top-k, hot": Sampling(max_tokens=48, top_k=20, temperature=2.5, processed_logprobs=True),
    "min-p": Sampling(max_tokens=48, min_p=0.2),
    "penalties": Sampling(max_tokens=48, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.3),
    "min-tokens": Sampling(max_tokens=48, min_tokens=30, stop_token_ids=tuple(range(2, 60))),
    "allowed": Sampling(max_tokens=48, allowed_token_ids=(1, *range(3, 300, 3)), processed_logprobs=True),
    "allowed, masks": Sampling(
        max_tokens=48, allowed_token_ids=tuple(range(100)), min_tokens=20, top_p=0.9, repetition_penalty=1.2
    ),
    "processed": replace(T06, processed_logprobs=True),
    "everything": Sampling(
        max_tokens=48,
        temperature=0.8,
        top_p=0.95,
        top_k=200,
        min_p=0.01,
        repetition_penalty=1.1,
        min_tokens=5,
        processed_logprobs=True,
    ),
}
SAMPLINGS = {"T=1": T1, "T=0.6, top-p": T06} | VARIANTS
DRAFTED = [*(name for name in POLICIES if name != "none"), PLANNED]


class Plain:
    """Plain decoding, run once for each way of sampling."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.of = cache(self._run)

    def requests(self, name: str) -> tuple[EngineRequest, ...]:
        return requests_of(self.bench.host.vocab_size, SAMPLINGS[name], count=10 if name in VARIANTS else 24)

    def _run(self, name: str) -> Outcome:
        return run(self.bench, self.requests(name))


@pytest.fixture(scope="module")
def plain(qwen3: Bench) -> Plain:
    return Plain(qwen3)


def _same_logprobs(found: Outcome, expected: Outcome) -> None:
    for key, values in expected.logprobs.items():
        assert found.logprobs[key] == pytest.approx(values, abs=2e-5)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_plain_decoding_is_what_the_reference_samples(plain: Plain, name: str) -> None:
    plain.bench.check(plain.requests(name), plain.of(name))


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(("T=1", policy) for policy in DRAFTED),
        *(("T=0.6, top-p", each) for each in ("true", "random", "varying")),
    ],
)
def test_no_draft_changes_a_token(plain: Plain, name: str, policy: str) -> None:
    expected, requests = plain.of(name), plain.requests(name)
    found = run(plain.bench, requests, drafts=Drafts(policy, truth=expected.tokens))
    assert found.tokens == expected.tokens
    assert found.finishes == expected.finishes
    assert found.drafted > 100
    _same_logprobs(found, expected)
    if policy == "true":
        # A draft may run past the end of its sample only where the plain sample ends by a stop token.
        assert found.accepted >= found.drafted - len(requests)
        assert found.steps < expected.steps / 4


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, "varying") for name in VARIANTS),
        *((name, "adversarial") for name in ("greedy", "penalties", "allowed, masks", "everything")),
    ],
)
def test_every_way_of_sampling_verifies_row_by_row(plain: Plain, name: str, policy: str) -> None:
    expected, requests = plain.of(name), plain.requests(name)
    found = run(plain.bench, requests, drafts=Drafts(policy, truth=expected.tokens))
    assert found.tokens == expected.tokens
    assert found.finishes == expected.finishes
    assert found.accepted > 100
    _same_logprobs(found, expected)


def test_unlike_samples_share_a_batch(plain: Plain) -> None:
    """Every way of sampling at once: no sample's settings touch another's tokens."""
    requests, truth = [], {}
    for name in SAMPLINGS:
        for request in plain.requests(name)[:5]:
            key = f"{name}/{request.sample_id}"
            requests.append(replace(request, sample_id=key))
            truth[key] = plain.of(name).tokens[request.sample_id]
    for drafts in (Drafts(), Drafts("varying", truth=truth)):
        assert run(plain.bench, tuple(requests), drafts=drafts).tokens == truth


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("T=1", "none"),
        ("penalties", "varying"),
        ("allowed, masks", "varying"),
        ("processed", "none"),
        ("processed", "varying"),
    ],
)
def test_the_likeliest_tokens_of_each_position_are_those_of_its_row(
    plain: Plain, name: str, policy: str
) -> None:
    """As many as each sample asks for, beside samples that ask for none, cut with the tokens."""
    requests = tuple(
        replace(request, sampling=replace(request.sampling, top_logprobs=(0, 1, 20)[i % 3]))
        for i, request in enumerate(plain.requests(name))
    )
    expected = plain.of(name).tokens
    found = run(plain.bench, requests, drafts=Drafts(policy, truth=expected))
    assert found.tokens == expected
    oracle = plain.bench.oracle
    for request in requests[:9]:
        key, most = request.sample_id, request.sampling.top_logprobs
        tokens, ids, values = found.tokens[key], found.top_token_ids[key], found.top_logprobs[key]
        assert len(ids) == len(values) == most * len(tokens)
        logits = oracle.logits([*request.prompt, *tokens[:-1]])[len(request.prompt) - 1 :]
        for i, row in enumerate(logits if most else ()):
            if request.sampling.processed_logprobs:
                row = oracle.process(request, tokens[:i], row)
            told, scores = ids[i * most : (i + 1) * most], log_softmax(row)
            assert len(set(told)) == most
            assert values[i * most : (i + 1) * most] == pytest.approx(scores[told], abs=1e-4)
            assert np.sort(scores)[::-1][:most] == pytest.approx(scores[told], abs=1e-4)


def test_prompts_are_told_whatever_is_cached_or_resumed(plain: Plain) -> None:
    """Also where the policy's distribution is not the one that is sampled from."""
    own = replace(VARIANTS["everything"], prompt_logprobs=2)
    requests = requests_of(plain.bench.host.vocab_size, own, count=10, lengths=(40, 120), seed=6)
    cold = run(plain.bench, requests)
    plain.bench.check_prompts(requests, cold)
    resumed = tuple(
        replace(r, prefix=tuple(cold.tokens[r.sample_id][: 1 + i % 9])) for i, r in enumerate(requests)
    )
    resumed = tuple(r for r in resumed if len(r.prefix) < len(cold.tokens[r.sample_id]))
    assert len(resumed) > 5
    for again, drafts in ((requests, Drafts()), (resumed, Drafts("varying", truth=cold.tokens))):
        warm = run(plain.bench, again, cold=False, drafts=drafts)
        assert {r.sample_id: [*r.prefix, *warm.tokens[r.sample_id]] for r in again} == {
            r.sample_id: cold.tokens[r.sample_id] for r in again
        }
        plain.bench.check_prompts(again, warm)


@pytest.mark.parametrize("policy", ["none", "varying"])
def test_order_and_time_of_arrival_do_not_matter(plain: Plain, policy: str) -> None:
    expected, requests = plain.of("T=1"), plain.requests("T=1")
    drafts = Drafts(policy, seed=3, truth=expected.tokens)
    assert run(plain.bench, requests[::-1], drafts=drafts).tokens == expected.tokens
    late = tuple(3 * i for i in range(len(requests)))
    found = run(plain.bench, requests, drafts=drafts, arrivals=late)
    assert found.tokens == expected.tokens
    assert found.most_running < len(requests)
    alone = run(plain.bench, requests[:1], drafts=drafts)
    assert alone.tokens["r0"] == expected.tokens["r0"]


def test_a_filled_prefix_cache_changes_nothing(plain: Plain) -> None:
    requests = requests_of(plain.bench.host.vocab_size, T1, count=12, lengths=(70, 120), seed=4)
    cold = run(plain.bench, requests)
    warm = run(plain.bench, requests, cold=False, drafts=Drafts("varying", truth=cold.tokens))
    assert warm.tokens == cold.tokens
    plain.bench.check(requests, cold)


def test_a_turn_finds_the_kv_of_those_before_it_or_computes_it_again(plain: Plain) -> None:
    """A tool's answer ends with the end-of-sequence token, which ends nothing there."""
    bench, block = plain.bench, 32
    size = bench.host.vocab_size
    turn = replace(T1, max_tokens=20, ignore_eos=True)
    first = requests_of(size, turn, count=4, lengths=(50, 90), seed=8)
    said = run(bench, first)
    second = tuple(
        replace(
            request,
            prefix=(*said.tokens[request.sample_id], 5, 6, END_TOKEN),
            sampling=replace(T1, max_tokens=40),
            environment_last=True,
        )
        for request in first
    )
    computed = {r.sample_id: (len(r.prompt) + 20 - 1) // block * block for r in first}
    kept = run(bench, second, cold=False, drafts=Drafts("varying", truth=said.tokens))
    assert kept.cached == computed
    for request in second:
        given, own = len(request.prefix), kept.tokens[request.sample_id]
        judged = bench.oracle.judge(request, [*request.prefix, *own])
        assert own
        assert judged.expected[given:] == own
    # Others take all 1,365 blocks: those that were used least lately first. Half of them share 3 of their 7.
    crowd = requests_of(size, replace(T1, max_tokens=1), count=360, lengths=(220, 230), seed=9)
    assert len(run(bench, crowd, cold=False).tokens) == 360
    evicted = run(bench, second, cold=False)
    assert set(evicted.cached.values()) == {0}
    assert evicted.tokens == kept.tokens


@pytest.mark.parametrize("name", ["T=1", "penalties", "min-tokens"])
def test_a_resumed_sample_goes_on_with_the_same_noise(plain: Plain, name: str) -> None:
    expected, drafts = plain.of(name).tokens, Drafts("varying", truth=plain.of(name).tokens)
    requests = tuple(
        replace(request, prefix=tuple(expected[request.sample_id][: 1 + i]))
        for i, request in enumerate(plain.requests(name))
        if len(expected[request.sample_id]) > 1 + i
    )
    assert len(requests) > 5
    for how in (Drafts(), drafts):
        found = run(plain.bench, requests, drafts=how)
        for request in requests:
            assert found.tokens[request.sample_id] == expected[request.sample_id][len(request.prefix) :]


@pytest.mark.parametrize("policy", ["true", "varying"])
def test_a_stop_token_inside_a_draft_ends_the_sample(plain: Plain, policy: str) -> None:
    sampling = replace(T1, ignore_eos=True)
    free = requests_of(plain.bench.host.vocab_size, sampling)
    whole = run(plain.bench, free).tokens
    stops = {key: tokens[20] for key, tokens in whole.items()}
    requests = tuple(
        replace(request, sampling=replace(sampling, stop_token_ids=(stops[request.sample_id],)))
        for request in free
    )
    # The drafts go on past the stop token.
    found = run(plain.bench, requests, drafts=Drafts(policy, truth=whole))
    for key, tokens in found.tokens.items():
        assert tokens == whole[key][: whole[key].index(stops[key]) + 1]
        assert found.finishes[key] is Finish.STOP
    if policy == "true":
        # The first token is of the prompt's step. Of those after it every ninth is none of the eight drafts of its
        # step; a stop token that is a draft is accepted as any other.
        behind = [len(tokens) - 1 for tokens in found.tokens.values()]
        assert any(count % 9 for count in behind)
        assert found.accepted == sum(count - count // 9 for count in behind)


def test_the_models_end_token_inside_a_draft_ends_the_sample(plain: Plain) -> None:
    requests = requests_of(
        plain.bench.host.vocab_size, replace(T1, temperature=1.5, max_tokens=200), count=24
    )
    endless = tuple(replace(r, sampling=replace(r.sampling, ignore_eos=True)) for r in requests)
    whole = run(plain.bench, endless).tokens
    found = run(plain.bench, requests, drafts=Drafts("true", truth=whole))
    stopped = [key for key, finish in found.finishes.items() if finish is Finish.STOP]
    assert stopped
    for key in stopped:
        assert found.tokens[key] == whole[key][: whole[key].index(END_TOKEN) + 1]


def test_max_tokens_is_exact_with_drafts_that_go_beyond(plain: Plain) -> None:
    """A step has eight drafts: each sample ends at another place of one, and some with the whole of it."""
    requests = requests_of(plain.bench.host.vocab_size, replace(T1, ignore_eos=True, max_tokens=30), count=8)
    whole = run(plain.bench, requests).tokens
    lengths = {r.sample_id: (1, 2, 9, 10, 17, 18, 19, 20)[i] for i, r in enumerate(requests)}
    short = tuple(replace(r, sampling=replace(r.sampling, max_tokens=lengths[r.sample_id])) for r in requests)
    found = run(plain.bench, short, drafts=Drafts("true", truth=whole))
    assert found.tokens == {key: tokens[: lengths[key]] for key, tokens in whole.items()}
    assert set(found.finishes.values()) == {Finish.LENGTH}


def test_the_models_length_ends_a_sample_inside_a_draft(plain: Plain) -> None:
    sampling = Sampling(ignore_eos=True)
    requests = requests_of(plain.bench.host.vocab_size, sampling, count=6, lengths=(215, 250))
    expected = run(plain.bench, requests)
    found = run(plain.bench, requests, drafts=Drafts("true", window=16, truth=expected.tokens))
    assert found.tokens == expected.tokens
    assert {key: len(tokens) for key, tokens in found.tokens.items()} == {
        request.sample_id: 256 - len(request.prompt) for request in requests
    }
    assert set(found.finishes.values()) == {Finish.LENGTH}


def test_the_longest_window_is_verified_in_one_step(plain: Plain) -> None:
    sampling = Sampling(max_tokens=140, ignore_eos=True)
    requests = requests_of(plain.bench.host.vocab_size, sampling, count=4)
    expected = run(plain.bench, requests)
    found = run(plain.bench, requests, drafts=Drafts("true", window=138, truth=expected.tokens))
    assert found.tokens == expected.tokens
    assert found.steps <= 3
