"""Rollouts to and from their messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from paceline.internal.v1 import draft_pb2 as pb
from services.drafts.rollout import Kind, Rollout
from services.platform.errors import InvalidArgument
from services.platform.violations import Violation

MESSAGE_BYTES = 1_000_000
"""Rollouts are sent in messages of about this size; one that is larger goes alone."""

_TOKEN, _LOGPROB = np.dtype("<u4"), np.dtype("<f4")
_LONGEST_ID = 256
_ENTRY_BYTES = 64
"""Upper bound of a rollout's bytes in a message beside its ids and arrays."""

KINDS = {
    pb.ROLLOUT_KIND_PREGENERATED: Kind.PREGENERATED,
    pb.ROLLOUT_KIND_HISTORY: Kind.HISTORY,
}
_NUMBERS = {kind: number for number, kind in KINDS.items()}


def to_proto(rollout: Rollout) -> pb.Rollout:
    """The message of a rollout."""
    return pb.Rollout(
        run_id=rollout.run_id,
        prompt_id=rollout.prompt_id,
        slot=rollout.slot,
        policy_version=rollout.version,
        kind=kind_to_proto(rollout.kind),
        step=rollout.step,
        seed=rollout.seed,
        token_ids=rollout.tokens.astype(_TOKEN, copy=False).tobytes(),
        logprobs=rollout.logprobs.astype(_LOGPROB, copy=False).tobytes(),
        finished=rollout.finished,
    )


def from_proto(message: pb.Rollout, field: str = "rollout") -> Rollout:
    """The rollout of a message; its arrays are read-only. InvalidArgument names what is wrong below `field`."""
    tokens, logprobs = message.token_ids, message.logprobs
    if violations := list(_violations(message, tokens, logprobs, field)):
        raise InvalidArgument(violations)
    return Rollout(
        run_id=message.run_id,
        prompt_id=message.prompt_id,
        slot=message.slot,
        version=message.policy_version,
        kind=KINDS[message.kind],
        step=message.step,
        seed=message.seed,
        tokens=np.frombuffer(tokens, _TOKEN),
        logprobs=np.frombuffer(logprobs, _LOGPROB),
        finished=message.finished,
    )


def kind_to_proto(kind: Kind) -> pb.RolloutKind:
    """The number of a kind."""
    return _NUMBERS[kind]


def batches(rollouts: Iterable[Rollout]) -> Iterator[list[pb.Rollout]]:
    """The messages of rollouts, in order, in lists of at most MESSAGE_BYTES (or one rollout)."""
    batch: list[pb.Rollout] = []
    room = MESSAGE_BYTES
    for rollout in rollouts:
        size = rollout.nbytes + 4 * (len(rollout.run_id) + len(rollout.prompt_id)) + _ENTRY_BYTES
        if batch and size > room:
            yield batch
            batch, room = [], MESSAGE_BYTES
        batch.append(to_proto(rollout))
        room -= size
    if batch:
        yield batch


def _violations(message: pb.Rollout, tokens: bytes, logprobs: bytes, field: str) -> Iterator[Violation]:
    for name, value in (("run_id", message.run_id), ("prompt_id", message.prompt_id)):
        if not value:
            yield Violation(f"{field}.{name}", "is empty")
        elif len(value) > _LONGEST_ID:
            yield Violation(f"{field}.{name}", f"has {len(value)} characters; at most {_LONGEST_ID}")
    if message.kind not in KINDS:
        yield Violation(f"{field}.kind", f"is {message.kind}; must be PREGENERATED or HISTORY")
    if not tokens:
        yield Violation(f"{field}.token_ids", "is empty")
    for name, packed in (("token_ids", tokens), ("logprobs", logprobs)):
        if len(packed) % 4:
            yield Violation(f"{field}.{name}", f"has {len(packed)} bytes; must be a multiple of 4")
            return
    if not logprobs and message.kind == pb.ROLLOUT_KIND_HISTORY:
        yield Violation(f"{field}.logprobs", "is empty; HISTORY needs one for each token")
    elif logprobs and len(logprobs) != len(tokens):
        yield Violation(f"{field}.logprobs", f"has {len(logprobs) // 4} values for {len(tokens) // 4} tokens")
    elif np.isnan(np.frombuffer(logprobs, _LOGPROB)).any():
        yield Violation(f"{field}.logprobs", "holds NaN")
