"""Builds batches from requests, and final samples and journal writes from batches.

Pure: plain data and protobuf messages in, the same out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.timestamp_pb2 import Timestamp

from paceline.internal.v1 import generation_pb2
from paceline.v1 import rollout_pb2, sample_pb2
from services.drafts.lenience import FLOOR
from services.gateway.batch import Batch, BatchKey, Ending, GroupSpec, SampleState

# (run_seed, step, prompt_id, slot, coupled history) -> seed
SeedOf = Callable[[int, int, str, int, bool], int]


@dataclass(frozen=True, slots=True)
class Extension:
    """Tokens of a sample that the journal does not have yet: packed uint32 and float32, to be written at
    `offset` bytes. Writing the same extension twice changes nothing."""

    index: int
    offset: int
    tokens: bytes
    logprobs: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """A sample that ended, as a serialised paceline.v1.Sample."""

    index: int
    payload: bytes


@dataclass(slots=True)
class Write:
    """All that the journal does not have yet of one batch."""

    key: BatchKey
    extensions: list[Extension] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.extensions or self.ended)


def exactness_of(requested: sample_pb2.Exactness, lenience: float | None = None) -> sample_pb2.Exactness:
    """The exactness that samples get, with defaults filled in. `lenience` is the l to be used where the
    level is LENIENT; None: the one asked for."""
    level = requested.level or sample_pb2.EXACTNESS_LEVEL_EXACT
    if level != sample_pb2.EXACTNESS_LEVEL_LENIENT:
        return sample_pb2.Exactness(level=level)
    exactness = sample_pb2.Exactness()
    exactness.CopyFrom(requested)
    if lenience is None:
        lenience = requested.lenience if requested.HasField("lenience") else FLOOR
    exactness.lenience = lenience
    return exactness


def batch_of(
    request: rollout_pb2.SubmitRolloutsRequest,
    *,
    accepted_at: float,
    max_seconds: float,
    max_attempts: int,
    seed_of: SeedOf,
    lenience: float | None = None,
) -> Batch:
    """The batch that a valid request asks for. Its deadline is the request's, `max_seconds` at most."""
    exactness = exactness_of(request.exactness, lenience)
    coupled = exactness.level == sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY
    groups = [
        GroupSpec(
            group.prompt_id,
            group.prompt_token_ids,
            group.sampling if group.HasField("sampling") else request.sampling,
            group.expected_tokens,
        )
        for group in request.groups
    ]
    samples: list[SampleState] = []
    for number, group in enumerate(request.groups):
        for slot in range(group.samples):
            seed = seed_of(request.run_seed, request.step, group.prompt_id, slot, coupled)
            samples.append(SampleState(len(samples), number, slot, seed))
    seconds = max_seconds
    if request.HasField("deadline"):
        seconds = min(seconds, request.deadline.ToTimedelta().total_seconds())
    return Batch(
        key=(request.run_id, request.batch_id),
        policy_version=request.policy_version,
        groups=groups,
        exactness=exactness,
        samples=samples,
        accepted_at=accepted_at,
        deadline_at=accepted_at + seconds,
        max_attempts=max_attempts,
        step=request.step,
        cached_run=request.run_id,
    )


def single(
    request: rollout_pb2.GenerateRequest,
    key: BatchKey,
    policy_version: int,
    *,
    accepted_at: float,
    max_seconds: float,
    max_attempts: int,
    seed_of: SeedOf,
    lenience: float | None = None,
) -> Batch:
    """The batch of one sample that a Generate call asks for. Rollouts are cached for batches; only LENIENT
    asks for one, so for any other level the instance is spared the search."""
    exactness = exactness_of(request.exactness, lenience)
    coupled = exactness.level == sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY
    seed = seed_of(request.run_seed, request.step, request.prompt_id, request.slot, coupled)
    group = GroupSpec(
        request.prompt_id, request.prompt_token_ids, request.sampling, prefix=request.prefix_token_ids
    )
    return Batch(
        key=key,
        policy_version=policy_version,
        groups=[group],
        exactness=exactness,
        samples=[SampleState(0, 0, request.slot, seed)],
        accepted_at=accepted_at,
        deadline_at=accepted_at + max_seconds,
        max_attempts=max_attempts,
        step=request.step,
        cached_run=request.run_id if exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT else "",
    )


def work_item(batch: Batch, sample: SampleState, handle: int) -> generation_pb2.WorkItem:
    """What an instance is asked for: the sample from where it is."""
    group = batch.groups[sample.group]
    item = generation_pb2.WorkItem(
        handle=handle,
        prompt_token_ids=group.prompt_token_ids,
        prefix_token_ids=group.prefix,
        sampling=group.sampling,
        exactness=batch.exactness,
        seed=sample.seed,
        policy_version=batch.policy_version,
        prompt_id=group.prompt_id,
        run_id=batch.cached_run,
        slot=sample.slot,
        step=batch.step,
    )
    item.prefix_token_ids.extend(sample.tokens)
    return item


def final_sample(batch: Batch, ending: Ending) -> sample_pb2.Sample:
    """The sample as the trainer gets it. Of a Generate with a prefix, only what came after the prefix."""
    state = batch.samples[ending.index]
    result = sample_pb2.Sample(
        prompt_id=batch.groups[state.group].prompt_id,
        slot=state.slot,
        token_ids=state.tokens,
        logprobs=state.logprobs,
        finish_reason=ending.finish_reason,
        status=ending.status,
        provenance=_provenance(batch, state, ending),
        seed=state.seed,
        error=ending.error,
        nonfinite_logprobs=_nonfinite(state),
    )
    if state.tokens:
        result.version_spans.add(begin=0, end=len(state.tokens), policy_version=batch.policy_version)
    return result


def collect(batch: Batch) -> Write:
    """Takes from the batch all that the journal does not have, and notes that it has it. The tokens of
    ended samples are let go: from here on they are in the write only."""
    write = Write(batch.key)
    for index in batch.unjournaled:
        state = batch.samples[index]
        begin, end = state.journaled, len(state.tokens)
        if begin < end:
            tokens, logprobs = state.tokens[begin:end].tobytes(), state.logprobs[begin:end].tobytes()
            write.extensions.append(Extension(index, begin * 4, tokens, logprobs))
            state.journaled = end
    batch.unjournaled.clear()
    for ending in batch.endings:
        payload = final_sample(batch, ending).SerializeToString()
        write.ended.append(Ended(ending.index, payload))
        state = batch.samples[ending.index]
        state.forget_tokens()
    batch.endings.clear()
    return write


def timestamp(seconds: float) -> Timestamp:
    """Unix seconds as a protobuf timestamp, to the microsecond."""
    whole, micros = divmod(round(seconds * 1e6), 1_000_000)
    return Timestamp(seconds=whole, nanos=micros * 1000)


def _provenance(batch: Batch, state: SampleState, ending: Ending) -> sample_pb2.Provenance:
    first = min(state.first_step_at or ending.at, ending.at)
    cached, reused = state.reuse
    sources = [
        sample_pb2.DraftSource(drafter=drafter, drafted=drafted, accepted=accepted)
        for drafter, (drafted, accepted) in sorted(state.drafts.items())
    ]
    return sample_pb2.Provenance(
        draft_sources=sources,
        drafted=sum(source.drafted for source in sources),
        accepted=sum(source.accepted for source in sources),
        decode_steps=state.decode_steps,
        verify_steps=state.verify_steps,
        resubmissions=state.resubmissions,
        exactness=batch.exactness,
        lossless=batch.exactness.level != sample_pb2.EXACTNESS_LEVEL_LENIENT,
        instance_spans=[
            sample_pb2.InstanceSpan(
                instance_id=span.instance_id,
                begin_token=span.begin_token,
                end_token=span.end_token,
                begin=timestamp(span.begin),
                end=timestamp(span.end),
            )
            for span in state.spans
            if span.end_token > span.begin_token
        ],
        queue_seconds=max(0.0, first - batch.accepted_at),
        generation_seconds=ending.at - first,
        reused_prefix=reused,
        cached_tokens=cached,
    )


def _nonfinite(state: SampleState) -> list[int]:
    # A sum of float32 values cannot overflow a double, so one pass in C clears the usual case.
    if math.isfinite(sum(state.logprobs)):
        return []
    return [at for at, logprob in enumerate(state.logprobs) if not math.isfinite(logprob)]
