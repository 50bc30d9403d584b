"""Encoding of tokens and log-probabilities: what protobuf reads is what was given."""

from __future__ import annotations

from array import array

from google.protobuf import empty_pb2
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st

from paceline.columns import TokenBuffer
from paceline.v1 import sample_pb2
from services.gateway.journal.chunks import pack, whole
from tests.support.token_columns import columns

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
        sent = columns(tokens, logprobs, top_token_ids=top_tokens, top_logprobs=top_logprobs)
        buffer = TokenBuffer()
        buffer.extend(sent)
        payload = pack(buffer, 0, min(cut, len(pairs))) + pack(buffer, min(cut, len(pairs))) + rest
        found = sample_pb2.Sample.FromString(payload)
        assert (found.prompt_id, found.slot, found.tokens) == ("p", 3, sent)
        assert sample_pb2.Sample.FromString(whole(payload)) == found
        assert _fields(whole(payload)).count(3) == (len(pairs) > 0)


def test_usual_tokens_take_three_bytes_and_their_log_probabilities_four() -> None:
    buffer = TokenBuffer(array("I", [149_999] * 100), array("f", [-0.5] * 100))
    assert len(pack(buffer)) == 700 + 3 * 3


def _fields(payload: bytes) -> list[int]:
    """Return the numbers of a message's fields, each as often as it is in the bytes."""
    found = UnknownFieldSet(empty_pb2.Empty.FromString(payload))
    return [field.field_number for field in found]
