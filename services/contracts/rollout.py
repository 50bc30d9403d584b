"""Represent stored rollouts, the tokens of a sample for later use as a draft, and convert them to messages."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import Violation
from paceline.internal.v1 import draft_pb2 as pb
from services.contracts.errors import InvalidArgument

MESSAGE_BYTES = 1_000_000
"""Approximate size of the messages in which rollouts are sent; a larger rollout is sent alone."""

_TOKEN, _LOGPROB = np.dtype("<u4"), np.dtype("<f4")
_LONGEST_ID = 256
_ENTRY_BYTES = 64
"""Upper bound of a rollout's bytes in a message in addition to its ids and arrays."""

Tokens = NDArray[np.uint32]
Logprobs = NDArray[np.float32]


class RolloutKind(enum.StrEnum):
    """Origin of a rollout."""

    PREGENERATED = "pregenerated"
    """Generated ahead of its step with the seed that the sample will have; possibly incomplete."""
    HISTORY = "history"
    """A finished sample of an earlier step."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredRollout:
    """Response tokens of one sample of a prompt, generated under one policy version.

    Its name in the store is (run_id, prompt_id, slot, kind), for HISTORY with version, for PREGENERATED with fork.
    """

    run_id: str
    prompt_id: str
    slot: int
    """Index of the sample in its group."""
    version: int
    """Policy version of the weights that generated it or last verified it."""
    kind: RolloutKind
    step: int
    """Step for which it was generated."""
    seed: int
    """Seed of its noise: a sample with the same seed agrees with it up to differences between the policies."""
    tokens: Tokens
    """uint32 [n], n >= 1."""
    logprobs: Logprobs
    """float32 [n], natural logarithms under `version`; [0] when not known (PREGENERATED only)."""
    finished: bool
    """True if the last token ended the response; otherwise the rollout is incomplete."""
    fork: int = 0
    """0, or 1 + the position at which a pre-generated rollout takes the runner-up of a near-tie.

    Such a fork is a draft of the same sample, in case the updated policy takes the runner-up.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of tokens and log-probabilities."""
        return self.tokens.nbytes + self.logprobs.nbytes


KINDS = {pb.ROLLOUT_KIND_PREGENERATED: RolloutKind.PREGENERATED, pb.ROLLOUT_KIND_HISTORY: RolloutKind.HISTORY}
_NUMBERS = {kind: number for number, kind in KINDS.items()}
_SAME = ("run_id", "prompt_id", "slot", "step", "seed", "finished", "fork")


def to_proto(rollout: StoredRollout) -> pb.Rollout:
    """Return the message of a rollout."""
    return pb.Rollout(
        policy_version=rollout.version,
        kind=_NUMBERS[rollout.kind],
        token_ids=rollout.tokens.astype(_TOKEN, copy=False).tobytes(),
        logprobs=rollout.logprobs.astype(_LOGPROB, copy=False).tobytes(),
        **{name: getattr(rollout, name) for name in _SAME},
    )


def from_proto(message: pb.Rollout, field: str = "rollout") -> StoredRollout:
    """Return the rollout of a message, with read-only arrays; InvalidArgument names the fields below `field`."""
    tokens, logprobs = message.token_ids, message.logprobs
    if violations := list(_violations(message, tokens, logprobs, field)):
        raise InvalidArgument(violations)
    return StoredRollout(
        version=message.policy_version,
        kind=KINDS[message.kind],
        tokens=np.frombuffer(tokens, _TOKEN),
        logprobs=np.frombuffer(logprobs, _LOGPROB),
        **{name: getattr(message, name) for name in _SAME},
    )


def batches(rollouts: Iterable[StoredRollout]) -> Iterator[list[pb.Rollout]]:
    """Yield the messages of rollouts, in order, in lists of at most MESSAGE_BYTES (or one rollout)."""
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
    if message.fork and message.kind == pb.ROLLOUT_KIND_HISTORY:
        yield Violation(f"{field}.fork", f"is {message.fork}; must be 0 for HISTORY")
    if not tokens:
        yield Violation(f"{field}.token_ids", "is empty")
    elif len(tokens) // 4 < message.fork:
        yield Violation(f"{field}.fork", f"is {message.fork}; must be at most the {len(tokens) // 4} tokens")
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
