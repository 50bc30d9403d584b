"""Columns of tokens as messages."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.columns import TokenBuffer
from paceline.v1 import sample_pb2


def columns(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    version: int | None = None,
    *,
    mixed_kv: bool = False,
    top_token_ids: Sequence[int] = (),
    top_logprobs: Sequence[float] = (),
) -> sample_pb2.TokenColumns:
    """Return tokens of one policy version, or of none that is named."""
    made = sample_pb2.TokenColumns(
        token_ids=tokens, logprobs=logprobs, top_token_ids=top_token_ids, top_logprobs=top_logprobs
    )
    if version is not None:
        made.versions.add(tokens=len(tokens), policy_version=version, mixed_kv=mixed_kv)
    return made


def buffer(tokens: Sequence[int], logprobs: Sequence[float], version: int | None = None) -> TokenBuffer:
    """Return the same as a buffer, without top tokens."""
    made, given = TokenBuffer(), columns(tokens, logprobs, version)
    made.extend(given, given.versions)
    return made
