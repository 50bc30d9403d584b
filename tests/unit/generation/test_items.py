"""Which work items are taken, and what the others are told."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import Violation
from paceline.internal.v1 import generation_pb2 as pb
from paceline.v1 import sample_pb2
from services.contracts.errors import (
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unimplemented,
)
from services.contracts.rollout import RolloutKind, StoredRollout
from services.contracts.sampling import ModelLimits
from services.generation.draft_cache.cache import DraftCache
from services.generation.engine.types import EngineRequest, Verifier
from services.generation.loop.work_items import AdmissionTerms, check_item, refusal
from tests.support.instances import item
from tests.unit.generation.rollouts import rollout

LIMITS = ModelLimits(vocab_size=100, max_model_len=32)
TERMS = AdmissionTerms(policy_version=3, limits=LIMITS)


def check(
    terms: AdmissionTerms = TERMS, taken: tuple[int, ...] = (), cache: DraftCache | None = None, **fields: Any
) -> EngineRequest:
    """Check an item that is good but for the fields given."""
    prompt = fields.pop("prompt", [1, 2, 3])
    made = item(fields.pop("handle", 1), prompt, **({"policy_version": 3} | fields))
    return check_item(made, terms, taken, lambda: "id", cache)


def test_a_good_item_becomes_the_engines_request() -> None:
    request = check(
        prefix_token_ids=[4, 5],
        seed=2**63 + 1,
        reference_token_ids=[4, 5, 6],
        prompt_id="p",
        max_tokens=7,
        top_k=5,
    )
    assert (request.sample_id, request.prompt, request.prefix) == ("id", (1, 2, 3), (4, 5))
    assert (request.seed, request.given, request.prompt_id) == (2**63 + 1, (4, 5, 6), "p")
    assert (request.sampling.max_tokens, request.sampling.top_k, request.sampling.temperature) == (7, 5, 1.0)


def test_parameters_that_items_share_are_checked_once_for_each_model() -> None:
    first, other = check(top_k=17), check(handle=2, top_k=17)
    assert first.sampling is other.sampling
    # What one model can serve another cannot: what was found is not that of the first.
    with pytest.raises(InvalidArgument, match=r"allowed_token_ids"):
        check(AdmissionTerms(3, ModelLimits(vocab_size=10, max_model_len=32)), allowed_token_ids=[50])
    assert check(allowed_token_ids=[50]).sampling.allowed_token_ids == (50,)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt_token_ids", {"prompt": []}),
        ("prompt_token_ids[1]", {"prompt": [1, 100]}),
        ("prompt_token_ids", {"prompt": [1] * 32}),
        ("prefix_token_ids[0]", {"prefix_token_ids": [4000]}),
        ("prompt_token_ids", {"prefix_token_ids": [1] * 30}),
        ("prompt_token_ids", {"prefix_token_ids": [1] * 6, "max_tokens": 5}),
        ("reference_token_ids[2]", {"reference_token_ids": [1, 1, 2**32 - 1]}),
        ("sampling.temperature", {"temperature": -0.1}),
        ("sampling.temperature", {"temperature": math.nan}),
        ("sampling.top_p", {"top_p": 1.1}),
        ("sampling.top_k", {"top_k": -1}),
        ("sampling.min_p", {"min_p": -1}),
        ("sampling.repetition_penalty", {"repetition_penalty": 0}),
        ("sampling.presence_penalty", {"presence_penalty": 3}),
        ("sampling.frequency_penalty", {"frequency_penalty": -3}),
        ("sampling.max_tokens", {"max_tokens": 0}),
        ("sampling.min_tokens", {"min_tokens": -1}),
        ("sampling.stop_token_ids[0]", {"stop_token_ids": [100]}),
        ("sampling.logprobs_mode", {"logprobs_mode": 9}),
        ("handle", {"handle": 8, "taken": (8,)}),
    ],
)
def test_bad_input_is_refused_by_the_name_of_its_field(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(**fields)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_all_faults_of_an_item_are_named_at_once() -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(prompt=[500], prefix_token_ids=[600], reference_token_ids=[700], top_p=0)
    fields = [violation.field for violation in caught.value.violations]
    assert fields == [
        "prompt_token_ids[0]",
        "prefix_token_ids[0]",
        "reference_token_ids[0]",
        "sampling.top_p",
    ]
    refused = refusal(5, caught.value)
    assert (refused.handle, refused.field) == (5, "prompt_token_ids[0]")
    assert all(field in refused.message for field in fields)


@given(
    prompt=st.lists(st.integers(0, 120), max_size=40),
    prefix=st.lists(st.integers(0, 120), max_size=40),
    max_tokens=st.none() | st.integers(0, 40),
)
def test_an_item_is_taken_exactly_when_its_tokens_and_lengths_fit(
    prompt: list[int], prefix: list[int], max_tokens: int | None
) -> None:
    room = LIMITS.max_model_len - len(prompt)
    longest = room if max_tokens is None else min(room, max_tokens)
    fits = (
        bool(prompt)
        and all(token < LIMITS.vocab_size for token in prompt + prefix)
        and (max_tokens is None or 1 <= max_tokens <= LIMITS.max_model_len)
        and room >= 1
        # As long as it can be is complete: such a sample finishes at once.
        and len(prefix) <= longest
    )
    try:
        check(prompt=prompt, prefix_token_ids=prefix, max_tokens=max_tokens)
    except InvalidArgument:
        assert not fits
    else:
        assert fits


@pytest.mark.parametrize("version", [0, 2, 4, 2**64 - 1])
def test_another_policy_version_is_refused_whatever_else_is_wrong(version: int) -> None:
    with pytest.raises(FailedPrecondition, match=f"asks for policy version {version}, served is 3") as caught:
        check(policy_version=version, prompt=[])
    assert caught.value.reason == "STALE_VERSION"


def test_nothing_is_taken_while_closed() -> None:
    with pytest.raises(FailedPrecondition, match="it is draining"):
        check(terms=AdmissionTerms(3, LIMITS, "it is draining"))


@pytest.mark.parametrize(
    ("level", "verifier"),
    [
        (sample_pb2.EXACTNESS_LEVEL_UNSPECIFIED, Verifier.COUPLED),
        (sample_pb2.EXACTNESS_LEVEL_EXACT, Verifier.COUPLED),
        (sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY, Verifier.COUPLED),
        (sample_pb2.EXACTNESS_LEVEL_REJECTION, Verifier.REJECTION),
        (sample_pb2.EXACTNESS_LEVEL_LENIENT, Verifier.LENIENT),
    ],
)
def test_exactness_levels_choose_the_verifier(level: int, verifier: Verifier) -> None:
    assert check(exactness={"level": level}).verifier is verifier


def test_a_level_that_is_not_known_is_refused() -> None:
    with pytest.raises(Unimplemented, match="exactness level 99 is not served"):
        check(exactness={"level": 99})


# -- lenient --------------------------------------------------------------------------------------------------


def lenient(
    cache: DraftCache | None, exactness: dict[str, Any] | None = None, **fields: Any
) -> EngineRequest:
    level = {"level": sample_pb2.EXACTNESS_LEVEL_LENIENT, "lenience": 1.5}
    names = {"run_id": "r", "prompt_id": "p", "slot": 0, "step": 9, "seed": 77}
    return check(cache=cache, exactness=level | (exactness or {}), **(names | fields))


def history(*rollouts: StoredRollout) -> DraftCache:
    cache = DraftCache(LIMITS.vocab_size, 1 << 20)
    cache.add(rollouts)
    return cache


def test_a_lenient_sample_takes_over_the_cached_rollout_of_its_slot() -> None:
    cache = history(
        rollout([4, 5], version=1, logprobs=[-0.5, -0.25]),
        rollout([6, 7], version=2, logprobs=[-2, -1]),
        rollout([8], version=2, slot=1),
    )
    request = lenient(cache)
    assert (request.cached, request.cached_logprobs, request.lenience) == ((6, 7), (-2, -1), 1.5)
    delayed = lenient(cache, {"reuse_delay": 1})
    assert (delayed.cached, delayed.cached_logprobs) == ((4, 5), (-0.5, -0.25))
    assert lenient(cache, {"reuse_delay": 2}).cached == ()
    assert lenient(cache, slot=1).cached == (8,)
    assert lenient(cache, reference_token_ids=[1, 2]).given == (1, 2)


def test_where_there_is_nothing_to_take_over_a_lenient_sample_is_an_exact_one() -> None:
    for request in (
        lenient(None),
        lenient(history()),
        lenient(history(rollout([6, 7])), slot=3),
        lenient(history(rollout([6, 7])), run_id=""),
        lenient(history(rollout([6, 7], kind=RolloutKind.PREGENERATED))),
        # It is gone on with: what it took over is in its prefix.
        lenient(history(rollout([6, 7])), prefix_token_ids=[6]),
    ):
        assert (request.cached, request.cached_logprobs) == ((), ())
        assert (request.verifier, request.lenience, request.follows) == (Verifier.LENIENT, 1.5, False)


def test_by_drafts_a_lenient_sample_has_them_verified_by_what_is_on_record() -> None:
    terms = AdmissionTerms(3, LIMITS, lenient_drafts=True)
    ahead = rollout([4, 5], kind=RolloutKind.PREGENERATED, logprobs=[-0.5, -0.25])
    request = lenient(history(rollout([6, 7]), ahead), terms=terms)
    assert (request.verifier, request.lenience, request.cached) == (Verifier.REJECTION, 1.5, ())
    assert request.recorded is not None
    assert request.recorded.find([1, 2, 3], [4, 5]).tolist() == [-0.5, -0.25]
    # It needs none, and goes on with one.
    for cache in (None, history(), history(rollout([6, 7]))):
        request = lenient(cache, terms=terms)
        assert (request.verifier, request.recorded) == (Verifier.REJECTION, None)
    assert lenient(history(ahead), terms=terms, prefix_token_ids=[4]).recorded is not None
    with pytest.raises(InvalidArgument, match="lenience"):
        lenient(None, {"lenience": 0.5}, terms=terms)
    assert (
        check(terms=terms, exactness={"level": sample_pb2.EXACTNESS_LEVEL_EXACT}).verifier is Verifier.COUPLED
    )


def test_in_a_group_of_equals_the_seed_decides_who_takes_over() -> None:
    cache = history(*[rollout([1, 2, 3, 4, 5], slot=slot) for slot in range(8)])
    taken = [bool(lenient(cache, {"diversity_floor": 0.5}, seed=seed).cached) for seed in range(60)]
    assert any(taken)
    assert not all(taken)
    assert all(lenient(cache, seed=seed).cached for seed in range(60))


def test_only_a_lenient_sample_takes_over() -> None:
    cache = history(rollout([6, 7], seed=77))
    for level in set(sample_pb2.ExactnessLevel.values()) - {sample_pb2.EXACTNESS_LEVEL_LENIENT}:
        assert lenient(cache, {"level": level}).cached == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [("lenience", each) for each in (0.99, 0, -1, math.inf, math.nan)]
    + [("diversity_floor", each) for each in (0, 1.01, -1, math.nan)],
)
def test_a_bad_lenient_rule_is_refused_by_the_name_of_its_field(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        lenient(history(), {field: value})
    assert [violation.field for violation in caught.value.violations] == [f"exactness.{field}"]


def test_no_id_is_spent_on_a_refused_item() -> None:
    made: list[str] = []
    bad = pb.WorkItem(handle=1, policy_version=3)

    def next_id() -> str:
        made.append("id")
        return "id"

    with pytest.raises(InvalidArgument):
        check_item(bad, TERMS, (), next_id)
    assert not made


@pytest.mark.parametrize(
    ("error", "code", "field"),
    [
        (InvalidArgument([Violation("a.b", "no"), Violation("c", "no")]), "INVALID_ARGUMENT", "a.b"),
        (FailedPrecondition("R", "closed"), "FAILED_PRECONDITION", ""),
        (ResourceExhausted("queue", "full"), "RESOURCE_EXHAUSTED", ""),
        (Unimplemented("x", "not there"), "UNIMPLEMENTED", ""),
    ],
)
def test_a_refusal_carries_code_message_and_field(error: ServiceError, code: str, field: str) -> None:
    refused = refusal(12, error)
    assert refused.code == getattr(code_pb2, code) == getattr(grpc.StatusCode, code).value[0]
    assert (refused.handle, refused.message, refused.field) == (12, error.message, field)
