"""A sample as it travels: everything that makes it go on elsewhere as if nothing had happened. Translation only.

Its noise is a function of seed and position, so there is no generator to carry; its log-probabilities have been
sent to its caller before it leaves; the suffix index of the receiver is built from its own copy of the rollouts.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from paceline.internal.v1 import generation_pb2, migration_pb2
from paceline.v1 import sample_pb2
from services.drafts import convert
from services.generation.engine.types import Verifier
from services.generation.migration.reason import Reason
from services.generation.samples import DraftCount, RunningSample
from services.platform.sampling import Sampling

_LEVELS = {
    Verifier.COUPLED: sample_pb2.EXACTNESS_LEVEL_EXACT,
    Verifier.REJECTION: sample_pb2.EXACTNESS_LEVEL_REJECTION,
    Verifier.LENIENT: sample_pb2.EXACTNESS_LEVEL_LENIENT,
}


def reserve_request(
    sample: RunningSample, migration_id: str, policy_version: int
) -> migration_pb2.ReserveRequest:
    """What the receiver must know to take a sample; donor, geometry and times are the caller's to add."""
    rollout = sample.rollout
    return migration_pb2.ReserveRequest(
        migration_id=migration_id,
        item=item_of(sample, policy_version),
        rollout=None if rollout is None else convert.to_proto(rollout),
        cached_token_ids=sample.request.cached,
        migrations=sample.migrations,
    )


def item_of(sample: RunningSample, policy_version: int) -> generation_pb2.WorkItem:
    """The item that a sample would be gone on with; its prefix is its response so far."""
    request, origin = sample.request, sample.origin
    exactness = sample_pb2.Exactness(level=_LEVELS[request.verifier])
    if request.verifier is Verifier.LENIENT:
        exactness.lenience = request.lenience
    return generation_pb2.WorkItem(
        prompt_token_ids=request.prompt,
        prefix_token_ids=sample.response,
        sampling=sampling_params(request.sampling),
        exactness=exactness,
        seed=request.seed,
        policy_version=policy_version,
        given_draft=request.given,
        prompt_id=request.prompt_id,
        run_id=origin.run_id,
        slot=origin.slot,
        step=origin.step,
        trace_parent=sample.trace.traceparent,
    )


def sampling_params(sampling: Sampling) -> sample_pb2.SamplingParams:
    """The message that `services.platform.sampling.resolve` reads as these parameters."""
    processed = sample_pb2.LOGPROBS_MODE_PROCESSED
    return sample_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs_mode=processed if sampling.processed_logprobs else sample_pb2.LOGPROBS_MODE_RAW,
    )


def take_counters(sample: RunningSample, counters: generation_pb2.Finished, now: float) -> None:
    """Let an arrived sample count on from where it was; `now` is of the loop's clock, in seconds."""
    sample.started = now - counters.generation_seconds
    sample.arrived = sample.started - counters.queue_seconds
    sample.decode_steps, sample.verify_steps = counters.decode_steps, counters.verify_steps
    sample.cached_tokens, sample.reused_prefix = counters.cached_tokens, counters.reused_prefix
    sample.drafts = {
        source.drafter: DraftCount(source.drafted, source.accepted) for source in counters.draft_sources
    }


def drafter_states(states: Mapping[str, bytes]) -> migration_pb2.DrafterStates:
    """What drafters know of a sample, by their names."""
    return migration_pb2.DrafterStates(
        states=[migration_pb2.DrafterState(drafter=name, state=state) for name, state in states.items()]
    )


def carried(message: migration_pb2.DrafterStates) -> dict[str, bytes]:
    """Reads `drafter_states`."""
    return {each.drafter: each.state for each in message.states}


def tokens_crc(tokens: Sequence[int]) -> int:
    """CRC-32 of a response, as the protocol has it."""
    return zlib.crc32(np.asarray(tokens, "<u4").tobytes())


def refusal(reason: Reason, message: str) -> migration_pb2.Refusal:
    """Why a sample is not taken."""
    return migration_pb2.Refusal(reason=reason.value, message=message)
