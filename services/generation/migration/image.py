"""Translate a running sample to messages and back, so that it continues elsewhere as if nothing had happened.

Its noise is a function of seed and position, so no generator state is carried. Its log-probabilities go to the
gateway with the event that it has moved. The receiver builds its suffix index from its own copy of the rollouts.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from paceline.internal.v1 import generation_pb2
from paceline.internal.v1 import migration_pb2 as pb
from paceline.times import seconds_of
from paceline.v1 import sample_pb2
from services.contracts import rollout_messages as convert
from services.contracts.sampling import Sampling
from services.generation.engine.types import Verifier
from services.generation.kv_transfer.reason import Reason
from services.generation.loop.samples import RunningSample
from services.generation.migration.receiver import Incoming

_LEVELS = {
    Verifier.COUPLED: sample_pb2.EXACTNESS_LEVEL_EXACT,
    Verifier.REJECTION: sample_pb2.EXACTNESS_LEVEL_REJECTION,
    Verifier.LENIENT: sample_pb2.EXACTNESS_LEVEL_LENIENT,
}


def reserve_request(sample: RunningSample, migration_id: str, policy_version: int) -> pb.ReserveRequest:
    """Describe a sample to a receiver; the caller adds donor, geometry, capacity and timeout."""
    rollout = sample.rollout
    return pb.ReserveRequest(
        migration_id=migration_id,
        item=item_of(sample, policy_version),
        rollout=None if rollout is None else convert.to_proto(rollout),
        cached_token_ids=sample.request.cached,
        migrations=sample.migrations,
    )


def item_of(sample: RunningSample, policy_version: int) -> generation_pb2.WorkItem:
    """Return the work item that continues a sample; its prefix is the response so far."""
    request, origin = sample.request, sample.origin
    exactness = sample_pb2.Exactness(level=_LEVELS[request.verifier])
    if request.verifier is Verifier.LENIENT:
        exactness.lenience = request.lenience
    return generation_pb2.WorkItem(
        prompt_token_ids=request.prompt,
        prefix_token_ids=sample.response,
        # A sample that decodes has had its prompt told.
        sampling=sampling_params(replace(request.sampling, prompt_logprobs=None)),
        exactness=exactness,
        seed=request.seed,
        policy_version=policy_version,
        reference_token_ids=request.given,
        prompt_id=request.prompt_id,
        run_id=origin.run_id,
        slot=origin.slot,
        step=origin.step,
        trace_parent=sample.trace.traceparent,
        streamed=sample.streamed,
    )


def sampling_params(sampling: Sampling) -> sample_pb2.SamplingParams:
    """Return the message that `services.contracts.sampling.resolve` turns into these parameters."""
    fields = asdict(sampling)
    del fields["unknown_logprobs_mode"]
    processed = fields.pop("processed_logprobs")
    mode = sample_pb2.LOGPROBS_MODE_PROCESSED if processed else sample_pb2.LOGPROBS_MODE_RAW
    return sample_pb2.SamplingParams(logprobs_mode=mode, **fields)


def take_counters(sample: RunningSample, counters: generation_pb2.Finished, now: float) -> None:
    """Continue the counters of an arrived sample; `now` is a time of the loop's clock, in seconds."""
    sample.started = now - seconds_of(counters.generation_time)
    sample.arrived = sample.started - seconds_of(counters.queue_time)
    sample.decode_steps, sample.verify_steps = counters.decode_steps, counters.verify_steps
    sample.prefill_seconds = seconds_of(counters.prefill_time)
    sample.verify_seconds = seconds_of(counters.verify_time)
    sample.plain_seconds = seconds_of(counters.plain_time)
    sample.cached_tokens, sample.reused_prefix = counters.cached_tokens, counters.reused_prefix
    sample.drafts = {source.drafter: source for source in counters.draft_sources}
    # All but the last token came with their KV.
    sample.cached_context = len(sample.request.prompt) + len(sample.request.prefix) - 1


def drafter_states(states: Mapping[str, bytes]) -> pb.DrafterStates:
    """Wrap the state of a sample's drafters, by drafter name."""
    return pb.DrafterStates(
        states=[pb.DrafterState(drafter=name, state=state) for name, state in states.items()]
    )


def carried(message: pb.DrafterStates) -> dict[str, bytes]:
    """Read `drafter_states`."""
    return {each.drafter: each.state for each in message.states}


def tokens_crc(tokens: Sequence[int]) -> int:
    """Return the CRC-32 of a response, as the protocol defines it."""
    return zlib.crc32(np.asarray(tokens, "<u4").tobytes())


def migration(incoming: Incoming, receiver_id: str) -> pb.Migration:
    """Return the report of an arrival."""
    return pb.Migration(
        migration_id=incoming.migration_id,
        state=incoming.state.value,
        reason=reason_value(incoming.reason),
        message=incoming.message,
        key=incoming.sample_id,
        receiver_id=receiver_id,
    )


def commit_answer(incoming: Incoming | None) -> pb.CommitResponse:
    """Return the answer to a commit, given the migration as it is then; None for an unknown one."""
    if incoming is None:
        return pb.CommitResponse(
            state=pb.MIGRATION_STATE_CANCELLED,
            reason=Reason.WITHDRAWN.value,
            message="there is no such reservation",
        )
    return pb.CommitResponse(
        state=incoming.state.value, reason=reason_value(incoming.reason), message=incoming.message
    )


def reason_value(reason: Reason | None) -> pb.MoveReason:
    """Return the protocol's value of a reason; UNSPECIFIED for None."""
    value: pb.MoveReason = pb.MOVE_REASON_UNSPECIFIED if reason is None else reason.value
    return value
