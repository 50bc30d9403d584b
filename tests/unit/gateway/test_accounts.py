"""Quotas of tokens: what samples may come to, and what is counted of them as they begin and end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.errors import ResourceExhausted
from services.gateway.metrics import GatewayMetrics
from services.gateway.scheduler.active_batches import Accounts
from services.gateway.state.messages import BatchBuilder, build_groups
from services.gateway.state.rollout_batch import Account, RolloutBatch
from services.platform.security.caller import TokenHolder

ACCOUNT = Account("few", 100)
LIMITS = (None, 1, 50, 200)


def request(limits: list[int | None]) -> rollout_pb2.SubmitRolloutsRequest:
    """Return a batch whose groups have two prompt tokens and these max_tokens; the first has the batch's own."""
    made = rollout_pb2.SubmitRolloutsRequest(
        run_id="run", batch_id="b", sampling=sample_pb2.SamplingParams(max_tokens=7)
    )
    for number, most in enumerate([None, *limits]):
        group = made.groups.add(prompt_id=f"p{number}", prompt_token_ids=[1, 2], samples=2)
        if number:
            group.sampling.SetInParent()
        if most is not None:
            group.sampling.max_tokens = most
    return made


def left(batch: RolloutBatch) -> int:
    """Return what the unfinished samples may come to, one by one."""
    found = 0
    for sample in batch.samples:
        if sample.phase.name != "ENDED":
            group = batch.groups[sample.group]
            most = group.sampling.max_tokens if group.sampling.HasField("max_tokens") else 100
            found += min(100, 2 + most)
    return found


@given(st.lists(st.sampled_from(LIMITS), max_size=4), st.lists(st.integers(0, 9), max_size=12))
def test_a_batch_counts_the_tokens_of_what_has_not_ended(limits: list[int | None], ends: list[int]) -> None:
    asked = request(limits)
    batch = BatchBuilder(100.0, 3).from_submission(asked, 0.0, account=ACCOUNT)
    assert batch.most_tokens == ACCOUNT.tokens_of(asked.groups, asked.sampling) == left(batch)
    for index in ends:
        index %= len(batch.samples)
        if batch.samples[index].phase.name == "ENDED":
            batch.reopen(index)
        elif index % 2:
            batch.mark_ended(index)
        else:
            batch.abort(index, 1.0)
        assert batch.most_tokens == left(batch)


def test_a_batch_of_a_service_counts_nothing() -> None:
    asked = request([50])
    batch = BatchBuilder(100.0, 3).from_submission(asked, 0.0)
    assert (batch.account, batch.most_tokens) == (None, 0)
    groups, _ = build_groups(asked, asked.groups, batch.exactness, account=ACCOUNT)
    assert [group.most_tokens for group in groups] == [9, 52]


@pytest.mark.parametrize("name", ["few", "a.b-c_d", "größe", "x" * 64])
def test_the_journal_has_the_account(name: str) -> None:
    account = Account(name, 40960)
    assert Account.from_text(account.to_text()) == account
    assert Account.from_text("") is None


def test_a_quota_is_what_is_unfinished_at_once() -> None:
    accounts = Accounts(GatewayMetrics(CollectorRegistry()))
    account = accounts.note(TokenHolder(name="few", max_queued_samples=4, max_queued_tokens=50), 100)
    accounts.check(account, 4, 50)
    used = accounts.of("few")
    used.samples, used.tokens = 3, 30
    accounts.check(account, 1, 20)
    accounts.check(None, 10**9, 10**9)
    for samples, tokens, resource, waits in (
        (2, 1, "max_queued_samples", True),
        (5, 1, "max_queued_samples", False),
        (1, 21, "max_queued_tokens", True),
        (1, 51, "max_queued_tokens", False),
    ):
        with pytest.raises(ResourceExhausted) as caught:
            accounts.check(account, samples, tokens)
        assert caught.value.reason == resource
        assert any(each.DESCRIPTOR.name == "RetryInfo" for each in caught.value.details) is waits
    # A limit that was lowered meanwhile holds, and refuses nothing that adds nothing.
    accounts.note(TokenHolder(name="few", max_queued_samples=2), 100)
    accounts.check(account, 0, 0)
    with pytest.raises(ResourceExhausted, match="3 unfinished samples; 1 more would exceed 2"):
        accounts.check(account, 1, 1)
    used.samples, used.tokens = 0, 0
    accounts.check(account, 2, 10**9)
