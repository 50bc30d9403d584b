"""Encoding of tokens and log-probabilities: what protobuf reads is what was given."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from paceline.v1 import sample_pb2
from services.gateway.journal.chunks import join_spans, pack, whole
from services.gateway.state.sample import TokenColumns

TOKENS = st.one_of(st.integers(0, 200_000), st.integers(0, 2**32 - 1))
LOGPROBS = st.floats(width=32, allow_nan=False)


@given(st.lists(st.tuples(TOKENS, LOGPROBS), max_size=300), st.integers(0, 300))
def test_pieces_in_a_row_are_one_message(pairs: list[tuple[int, float]], cut: int) -> None:
    tokens = array("I", [token for token, _ in pairs])
    logprobs = array("f", [logprob for _, logprob in pairs])
    rest = sample_pb2.Sample(prompt_id="p", slot=3).SerializeToString()
    for likeliest in (False, True):
        # Two of each position.
        top_tokens, top_logprobs = (tokens * 2, logprobs * 2) if likeliest else (array("I"), array("f"))
        parts = [
            TokenColumns(tokens[part], logprobs[part], top_tokens[twice], top_logprobs[twice])
            for part, twice in ((slice(cut), slice(2 * cut)), (slice(cut, None), slice(2 * cut, None)))
        ]
        payload = b"".join(map(pack, parts)) + rest
        assert sample_pb2.Sample.FromString(payload) == sample_pb2.Sample(
            prompt_id="p",
            slot=3,
            token_ids=tokens,
            logprobs=logprobs,
            top_token_ids=top_tokens,
            top_logprobs=top_logprobs,
        )


def test_usual_tokens_take_three_bytes_and_their_log_probabilities_four() -> None:
    columns = TokenColumns(array("I", [149_999] * 100), array("f", [-0.5] * 100), array("I"), array("f"))
    assert len(pack(columns)) == 700 + 2 * 3


VERSIONS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3), st.booleans()), max_size=5)


@given(VERSIONS, VERSIONS, st.booleans())
def test_only_the_spans_of_a_serialised_sample_are_joined(
    first: list[tuple[int, int, bool]], rest: list[tuple[int, int, bool]], chunked: bool
) -> None:
    sample = sample_pb2.Sample(prompt_id="p", token_ids=[7] * 300, logprobs=[-0.5] * 300, seed=5, error="e")
    sample.provenance.queue_time.nanos = 9
    at = 0
    for length, version, mixed in (*first, *rest):
        sample.version_spans.add(begin=at, end=at + length, policy_version=version, mixed_kv=mixed)
        at += length
    head = (
        sample_pb2.Sample(version_spans=sample.version_spans[: len(first)])
        if chunked
        else sample_pb2.Sample()
    )
    joined = sample_pb2.Sample.FromString(whole(head.SerializeToString() + sample.SerializeToString()))
    join_spans(sample)
    assert joined == sample
