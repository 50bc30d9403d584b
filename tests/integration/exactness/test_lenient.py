"""Cached rollouts are taken over as far as SPEC-RL's rule goes, token for token what the reference takes over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from services.contracts.sampling import Sampling
from services.generation.engine.sampling.inputs import RecordedTokens
from services.generation.engine.types import EngineRequest, Finish, Verifier
from tests.integration.exactness.conftest import T1, Bench, requests_of, run
from tests.support.draft_policies import Drafts
from tests.support.engine_host import Outcome
from tests.support.lenient_oracle import LenientOracle, other_policy, rollout
from tests.support.models import END_TOKEN, tiny_model
from tests.support.oracle import Oracle

pytestmark = pytest.mark.timeout(400)

COUNT, LENGTH = 12, 40
FREE = Sampling(max_tokens=LENGTH, ignore_eos=True)
LENIENCES = {"1": 1.0, "e^0.5": math.exp(0.5), "50": 50.0, "infinite": math.inf}
CHUNKS = (1, 3, 8, 128)
VARIANTS = {
    "T=0.6, top-p": Sampling(max_tokens=LENGTH, temperature=0.6, top_p=0.9),
    "top-k": Sampling(max_tokens=LENGTH, top_k=250),
    "min-p": Sampling(max_tokens=LENGTH, min_p=0.01),
    "penalties": Sampling(
        max_tokens=LENGTH, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.3
    ),
    "min-tokens": Sampling(max_tokens=LENGTH, min_tokens=25, stop_token_ids=tuple(range(2, 40))),
    "processed": Sampling(max_tokens=LENGTH, temperature=0.7, processed_logprobs=True),
    "processed, masked": Sampling(
        max_tokens=LENGTH,
        temperature=0.8,
        top_p=0.98,
        top_k=300,
        repetition_penalty=1.1,
        processed_logprobs=True,
    ),
}
Rollout = tuple[tuple[int, ...], tuple[float, ...]]


def lenient(request: EngineRequest, cached: Rollout, lenience: float) -> EngineRequest:
    """Return a request that takes over a rollout."""
    return replace(
        request, verifier=Verifier.LENIENT, cached=cached[0], cached_logprobs=cached[1], lenience=lenience
    )


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Cached rollouts of the prompts of all tests, by where they come from.

    same: the engine's own weights, other seeds, no end token. other: weights with noise on them, up to the end
    token. wrong: of another prompt, its log-probabilities as well.
    """

    bench: Bench
    of: Callable[[str], list[Rollout]]

    def requests(self, sampling: Sampling, origin: str, lenience: float) -> tuple[EngineRequest, ...]:
        """Return the requests of all prompts, each with its rollout of an origin."""
        return tuple(
            lenient(request, cached, lenience)
            for request, cached in zip(prompts(sampling), self.of(origin), strict=True)
        )

    def check(self, requests: tuple[EngineRequest, ...], found: Outcome) -> None:
        """Tokens, how many were taken over, and both log-probabilities are the reference's."""
        oracle = LenientOracle(self.bench.oracle)
        for request in requests:
            key, response = request.sample_id, found.tokens[request.sample_id]
            wanted = oracle.retrace(request, response, found.reused[key])
            assert response == wanted.tokens, key
            assert found.reused[key] == wanted.reused, key
            assert found.logprobs[key] == pytest.approx(wanted.logprobs, abs=1e-4), key
            assert found.verified[key] == pytest.approx(wanted.verified, abs=1e-4), key
            ends = (*request.sampling.stop_token_ids, *(() if request.sampling.ignore_eos else (END_TOKEN,)))
            assert not set(response[:-1]) & set(ends), key
            assert found.finishes[key] is (Finish.STOP if response[-1] in ends else Finish.LENGTH), key


def prompts(sampling: Sampling, seed: int = 7) -> tuple[EngineRequest, ...]:
    return requests_of(512, sampling, count=COUNT, seed=seed)


@pytest.fixture(scope="module")
def rollouts(qwen3: Bench, tmp_path_factory: pytest.TempPathFactory) -> Rollouts:
    @cache
    def of(origin: str) -> list[Rollout]:
        if origin == "wrong":
            return of("same")[1:] + of("same")[:1]
        if origin == "same":
            # The prompts are the same, the seeds are not.
            requests = tuple(replace(r, seed=r.seed ^ 1) for r in prompts(FREE))
            made = run(qwen3, requests)
            return [(tuple(made.tokens[r.sample_id]), tuple(made.logprobs[r.sample_id])) for r in requests]
        folder: Path = tmp_path_factory.mktemp("other")
        model = other_policy(tiny_model(folder / "base"), folder / "noisy", 0.1)
        oracle = Oracle(model)
        return [rollout(oracle, r.prompt, i, LENGTH, END_TOKEN) for i, r in enumerate(prompts(FREE))]

    return Rollouts(qwen3, of)


@pytest.mark.parametrize(
    ("name", "origin", "chunks"),
    [
        ("1", "same", (1, 8)),
        ("1", "other", (0, 1, 3, 8)),
        ("1", "wrong", (0, 3)),
        ("e^0.5", "other", (1, 8)),
        ("50", "wrong", (1, 8)),
        ("infinite", "same", (0, 3)),
        ("infinite", "other", (0, 3)),
    ],
)
def test_any_lenience_takes_over_what_the_reference_does(
    rollouts: Rollouts, name: str, origin: str, chunks: tuple[int, ...]
) -> None:
    requests = rollouts.requests(T1, origin, LENIENCES[name])
    found = run(rollouts.bench, requests, chunk=128)
    rollouts.check(requests, found)
    reused, cached = sum(found.reused.values()), sum(len(r.cached) for r in requests)
    if (name, origin) == ("e^0.5", "other"):
        assert 0.2 * cached < reused < 0.9 * cached
    if name == "infinite":
        # Rollouts of the other model may be shorter than the limit, and go on.
        assert reused == min(cached, sum(map(len, found.tokens.values())))
    for chunk in chunks:
        again = run(rollouts.bench, requests, chunk=chunk)
        assert (again.tokens, again.reused, again.finishes) == (found.tokens, found.reused, found.finishes)
        for key, values in found.logprobs.items():
            assert again.logprobs[key] == pytest.approx(values, abs=2e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_way_of_sampling_is_verified_row_by_row(rollouts: Rollouts, name: str) -> None:
    requests = rollouts.requests(VARIANTS[name], "other", 2.0)
    found = run(rollouts.bench, requests, chunk=8)
    rollouts.check(requests[::2], found)
    assert 0 < sum(found.reused.values()) < sum(len(r.cached) for r in requests)
    again = run(rollouts.bench, requests, chunk=3, drafts=Drafts("varying", truth=found.tokens))
    assert (again.tokens, again.reused) == (found.tokens, found.reused)


def test_a_token_that_may_not_be_sampled_now_is_not_taken_over(rollouts: Rollouts) -> None:
    """However lenient: an end token before min_tokens, a token outside of the top k."""
    cached = rollouts.of("same")
    stops = [tokens[6] for tokens, _ in cached]
    requests = tuple(
        replace(r, sampling=replace(FREE, min_tokens=20, stop_token_ids=(stop,)))
        for r, stop in zip(rollouts.requests(FREE, "same", math.inf), stops, strict=True)
    )
    found = run(rollouts.bench, requests, chunk=16)
    rollouts.check(requests, found)
    assert found.reused == {
        r.sample_id: r.cached.index(stop) for r, stop in zip(requests, stops, strict=True)
    }
    masked = rollouts.requests(replace(FREE, top_k=150), "same", math.inf)
    found = run(rollouts.bench, masked, chunk=16)
    rollouts.check(masked, found)
    assert 0 < sum(found.reused.values()) < 0.5 * COUNT * LENGTH


def test_at_temperature_0_the_best_tokens_are_taken_over_and_no_others(rollouts: Rollouts) -> None:
    greedy = prompts(replace(FREE, temperature=0))
    plain = run(rollouts.bench, greedy)
    changed = [list(plain.tokens[r.sample_id]) for r in greedy]
    for i, tokens in enumerate(changed):
        tokens[3 * i] = (tokens[3 * i] + 1) % 512
    requests = tuple(
        lenient(r, (tuple(tokens), (-1.0,) * LENGTH), math.inf)
        for r, tokens in zip(greedy, changed, strict=True)
    )
    found = run(rollouts.bench, requests, chunk=8)
    assert found.tokens == plain.tokens
    assert list(found.reused.values()) == [3 * i for i in range(COUNT)]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_same_weights_take_over_everything_in_few_steps(rollouts: Rollouts, chunk: int) -> None:
    requests = rollouts.requests(FREE, "same", 1.0)
    found = run(rollouts.bench, requests, chunk=chunk)
    assert found.tokens == {r.sample_id: list(r.cached) for r in requests}
    assert set(found.reused.values()) == {LENGTH}
    for request in requests:
        assert found.logprobs[request.sample_id] == list(request.cached_logprobs)
        assert found.verified[request.sample_id] == pytest.approx(request.cached_logprobs, abs=2e-5)
    # One step more tells the engine that all have ended.
    assert found.steps == 1 + math.ceil((LENGTH - 1) / (chunk + 1)) + 1


def test_drafts_change_nothing(rollouts: Rollouts) -> None:
    requests = rollouts.requests(T1, "other", math.exp(0.5))
    plain = run(rollouts.bench, requests, chunk=8)
    # With chunk 0 a sample that follows its rollout verifies what the drafter guesses, not the rollout.
    cases = (
        ("true", 0),
        ("random", 8),
        ("adversarial", 0),
        ("varying", 0),
        ("varying", 8),
        ("flipping", 8),
        ("stale", 0),
    )
    for policy, chunk in cases:
        found = run(rollouts.bench, requests, chunk=chunk, drafts=Drafts(policy, truth=plain.tokens))
        assert (found.tokens, found.reused) == (plain.tokens, plain.reused), (policy, chunk)
        assert found.drafted > 50


def test_unlike_samples_share_a_batch(rollouts: Rollouts) -> None:
    others = tuple(replace(r, sample_id=f"plain {r.sample_id}") for r in prompts(T1, seed=8))
    alone = run(rollouts.bench, others)
    requests = rollouts.requests(T1, "other", 2.0)
    expected = run(rollouts.bench, requests, chunk=8)
    by_rejection = tuple(
        replace(r, sample_id=f"rejection {i}", verifier=Verifier.REJECTION)
        for i, r in enumerate(prompts(T1, seed=9))
    )
    mixed = tuple(sample for three in zip(requests, others, by_rejection, strict=True) for sample in three)
    truth = expected.tokens | alone.tokens
    truth |= {
        r.sample_id: alone.tokens[other.sample_id] for r, other in zip(by_rejection, others, strict=True)
    }
    for arrivals in ((), tuple(i // 4 for i in range(len(mixed)))):
        found = run(
            rollouts.bench, mixed, chunk=8, arrivals=arrivals, drafts=Drafts("varying", window=4, truth=truth)
        )
        for key in (*expected.tokens, *alone.tokens):
            assert found.tokens[key] == truth[key], key
        assert {key: found.reused[key] for key in expected.reused} == expected.reused
        assert not any(found.reused[r.sample_id] for r in (*others, *by_rejection))
        assert all(len(found.tokens[r.sample_id]) > 0 for r in by_rejection)


@pytest.mark.parametrize("chunk", [1, 128])
def test_a_stop_token_that_is_taken_over_ends_the_sample(rollouts: Rollouts, chunk: int) -> None:
    free = rollouts.requests(FREE, "same", math.inf)
    stops = [r.cached[20] for r in free]
    requests = tuple(
        replace(r, sampling=replace(FREE, stop_token_ids=(stop,)))
        for r, stop in zip(free, stops, strict=True)
    )
    found = run(rollouts.bench, requests, chunk=chunk)
    for request, stop in zip(requests, stops, strict=True):
        end = request.cached.index(stop) + 1
        assert found.tokens[request.sample_id] == list(request.cached[:end])
        assert found.logprobs[request.sample_id] == list(request.cached_logprobs[:end])
        assert found.reused[request.sample_id] == end
        assert found.finishes[request.sample_id] is Finish.STOP


def test_a_rollout_longer_than_the_limit_is_cut(rollouts: Rollouts) -> None:
    """At other places of its chunks for each sample."""
    whole = rollouts.requests(FREE, "same", math.inf)
    lengths = {r.sample_id: (1, 2, 9, 17)[i % 4] for i, r in enumerate(whole)}
    requests = tuple(replace(r, sampling=replace(FREE, max_tokens=lengths[r.sample_id])) for r in whole)
    found = run(rollouts.bench, requests, chunk=8)
    assert found.tokens == {r.sample_id: list(r.cached[: lengths[r.sample_id]]) for r in requests}
    assert set(found.finishes.values()) == {Finish.LENGTH}
    assert found.reused == lengths


def test_behind_an_unfinished_rollout_the_sample_goes_on(rollouts: Rollouts) -> None:
    """From another place of its chunks for each sample."""
    whole = rollouts.requests(FREE, "same", math.inf)
    lengths = {r.sample_id: (1, 9, 10, 27)[i % 4] for i, r in enumerate(whole)}
    requests = tuple(
        replace(r, cached=r.cached[:length], cached_logprobs=r.cached_logprobs[:length])
        for r, length in zip(whole, lengths.values(), strict=True)
    )
    found = run(rollouts.bench, requests, chunk=8)
    rollouts.check(requests, found)
    assert found.reused == lengths
    assert {len(tokens) for tokens in found.tokens.values()} == {LENGTH}


def test_without_a_rollout_or_with_a_prefix_a_sample_is_a_coupled_one(rollouts: Rollouts) -> None:
    plain = run(rollouts.bench, prompts(T1))
    empty = tuple(replace(r, verifier=Verifier.LENIENT) for r in prompts(T1))
    assert run(rollouts.bench, empty, chunk=8).tokens == plain.tokens
    resumed = tuple(
        replace(r, prefix=tuple(plain.tokens[r.sample_id][:5]))
        for r in rollouts.requests(T1, "same", math.inf)
    )
    found = run(rollouts.bench, resumed, chunk=8)
    assert found.tokens == {key: tokens[5:] for key, tokens in plain.tokens.items()}
    assert not any(found.reused.values())


def test_a_token_without_a_cached_probability_is_not_taken_over(rollouts: Rollouts) -> None:
    broken = (math.nan, -math.inf, math.inf)
    requests = tuple(
        replace(r, cached_logprobs=(*r.cached_logprobs[:i], broken[i % 3], *r.cached_logprobs[i + 1 :]))
        for i, r in enumerate(rollouts.requests(FREE, "same", math.inf))
    )
    found = run(rollouts.bench, requests, chunk=8)
    rollouts.check(requests, found)
    assert list(found.reused.values()) == list(range(COUNT))


def test_the_budget_of_a_step_changes_no_token(rollouts: Rollouts) -> None:
    requests = rollouts.requests(FREE, "same", 1.0)
    expected = run(rollouts.bench, requests, chunk=128)
    found = run(rollouts.bench, requests, chunk=128, budget=2 * COUNT + 5)
    assert (found.tokens, found.reused) == (expected.tokens, expected.reused)
    # Two rows and a half of each sample a step, in place of all of its 40.
    assert found.steps > 5 * expected.steps


def test_drafts_that_are_on_record_are_accepted_by_the_ratio(qwen3: Bench) -> None:
    """The same weights said so before: by the ratio all drafts hold, by their probability now fewer do."""
    requests = tuple(replace(r, verifier=Verifier.REJECTION) for r in prompts(FREE))
    plain = run(qwen3, requests)
    drafts = Drafts("true", truth=plain.tokens)
    by_ratio = tuple(
        replace(
            request,
            recorded=RecordedTokens.of(
                request.prompt, [(plain.tokens[request.sample_id], plain.logprobs[request.sample_id])]
            ),
            # The arithmetic of another batch shape may make the ratio a little less than 1.
            lenience=1.001,
        )
        for request in requests
    )
    found = run(qwen3, by_ratio, drafts=drafts)
    assert found.accepted == found.drafted > COUNT * LENGTH / 2
    # What was not drafted has the noise that it had.
    assert found.tokens == plain.tokens
    for key, logprobs in plain.logprobs.items():
        assert found.logprobs[key] == pytest.approx(logprobs, abs=2e-5)
    assert set(found.reused.values()) == {0}
    fewer = run(qwen3, requests, drafts=drafts)
    assert fewer.accepted < fewer.drafted / 2
    assert fewer.tokens != plain.tokens
