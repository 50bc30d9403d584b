"""Messages of batches: requests of trainers in, work items and finished samples out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from paceline.internal.v1 import generation_pb2
from paceline.times import duration, seconds_of, timestamp
from paceline.v1 import rollout_pb2, sample_pb2
from services.contracts.gateway_keys import BatchKey
from services.contracts.seeds import sample_seed
from services.gateway.state.calls import CallRules, with_calls
from services.gateway.state.lenience import FLOOR
from services.gateway.state.rollout_batch import Account, RolloutBatch
from services.gateway.state.sample import BatchGroup, GatewaySample, SampleEnding


def exactness_of(requested: sample_pb2.Exactness, lenience: float | None = None) -> sample_pb2.Exactness:
    """Return the exactness of samples, with defaults filled in.

    `lenience` is the l to use if the level is LENIENT; None: the requested one.
    """
    level = requested.level or sample_pb2.EXACTNESS_LEVEL_EXACT
    if level != sample_pb2.EXACTNESS_LEVEL_LENIENT:
        return sample_pb2.Exactness(level=level)
    exactness = sample_pb2.Exactness()
    exactness.CopyFrom(requested)
    if lenience is None:
        lenience = requested.lenience if requested.HasField("lenience") else FLOOR
    exactness.lenience = lenience
    return exactness


def has_coupled_history(exactness: sample_pb2.Exactness) -> bool:
    """Return True if seeds of this level do not depend on the step."""
    return exactness.level == sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY


@dataclass(frozen=True, slots=True)
class BatchBuilder:
    """Builder of batches, with the gateway's limits and defaults."""

    max_seconds: float
    """Longest deadline of a batch."""
    max_attempts: int
    """Fruitless attempts in a row that make a sample FAILED."""
    max_calls: int = 1024
    """Most tool calls of a sample."""
    call_wait_seconds: float = 600.0
    """Longest wait of a sample for its environment, if its batch names none."""

    def from_submission(
        self,
        request: rollout_pb2.SubmitRolloutsRequest,
        accepted_at: float,
        lenience: float | None = None,
        *,
        opened: bool = False,
        account: Account | None = None,
    ) -> RolloutBatch:
        """Return the batch of a valid request, with the deadline of the request, at most `max_seconds`.

        `opened`: groups may be added. `account` belongs to the token with which it was submitted.
        """
        key = (request.run_id, request.batch_id)
        batch = self._begin(request, key, request.policy_version, [], accepted_at, lenience)
        batch.priority, batch.weight, batch.open = request.priority, request.weight or 1, opened
        if request.HasField("deadline"):
            batch.deadline_at = min(batch.deadline_at, accepted_at + seconds_of(request.deadline))
        if request.HasField("max_staleness"):
            batch.max_staleness = request.max_staleness
            batch.regenerates = request.stale == rollout_pb2.STALE_REGENERATE
        if request.HasField("tools"):
            batch.tools = CallRules.of(request.tools, self.max_calls, self.call_wait_seconds)
        batch.account = account
        batch.groups, batch.samples = build_groups(request, request.groups, batch.exactness, account=account)
        batch.most_tokens = sum(group.count * group.most_tokens for group in batch.groups)
        return batch

    def from_generate(
        self,
        request: rollout_pb2.GenerateRequest,
        key: BatchKey,
        policy_version: int,
        accepted_at: float,
        lenience: float | None = None,
        account: Account | None = None,
    ) -> RolloutBatch:
        """Return the batch of one sample that a Generate call requests, for the token of `account`.

        Without a prompt id its rollouts are not cached, since they have no name.
        """
        group = BatchGroup(
            request.prompt_id,
            request.prompt_token_ids,
            request.sampling,
            prefix=request.prefix_token_ids,
            prefix_logprobs=request.prefix_logprobs,
            most_tokens=_most_tokens(account, request.prompt_token_ids, request.sampling),
        )
        batch = self._begin(request, key, policy_version, [group], accepted_at, lenience)
        batch.account, batch.most_tokens = account, group.most_tokens
        batch.rewarded_as = single_samples(request.step)
        if not request.prompt_id:
            batch.cached_run = ""
        coupled = has_coupled_history(batch.exactness)
        seed = sample_seed(
            request.run_seed, request.step, request.prompt_id, request.slot, coupled_history=coupled
        )
        batch.samples.append(GatewaySample(0, 0, request.slot, seed))
        return batch

    def _begin(
        self,
        request: rollout_pb2.SubmitRolloutsRequest | rollout_pb2.GenerateRequest,
        key: BatchKey,
        policy_version: int,
        groups: list[BatchGroup],
        accepted_at: float,
        lenience: float | None,
    ) -> RolloutBatch:
        return RolloutBatch(
            key,
            policy_version,
            groups,
            exactness_of(request.exactness, lenience),
            samples=[],
            accepted_at=accepted_at,
            deadline_at=accepted_at + self.max_seconds,
            max_attempts=self.max_attempts,
            step=request.step,
            cached_run=request.run_id,
        )


def single_samples(step: int) -> str:
    """Return the batch id of all Generate samples of a step. It has a slash, so no trainer's batch can have it."""
    return f"generate/{step}"


def build_groups(
    request: rollout_pb2.SubmitRolloutsRequest,
    groups: Sequence[rollout_pb2.Group],
    exactness: sample_pb2.Exactness,
    first_group: int = 0,
    first_sample: int = 0,
    account: Account | None = None,
) -> tuple[list[BatchGroup], list[GatewaySample]]:
    """Build groups and samples to append to a batch, numbered from `first_group` and `first_sample`."""
    default = with_calls(request.sampling, request.tools)
    firsts = accumulate((group.samples for group in groups), initial=first_sample)
    made = []
    for group, first in zip(groups, firsts, strict=False):
        own = with_calls(group.sampling, request.tools) if group.HasField("sampling") else default
        made.append(
            BatchGroup(
                group.prompt_id,
                group.prompt_token_ids,
                own,
                group.expected_tokens,
                first=first,
                count=group.samples,
                most_tokens=_most_tokens(account, group.prompt_token_ids, own),
            )
        )
    coupled, samples = has_coupled_history(exactness), list[GatewaySample]()
    for number, each in enumerate(made, first_group):
        for slot in range(each.count):
            seed = sample_seed(request.run_seed, request.step, each.prompt_id, slot, coupled_history=coupled)
            samples.append(GatewaySample(each.first + slot, number, slot, seed))
    return made, samples


def _most_tokens(account: Account | None, prompt: Sequence[int], sampling: sample_pb2.SamplingParams) -> int:
    return 0 if account is None else account.most_tokens(len(prompt), sampling)


def work_item(
    batch: RolloutBatch, sample: GatewaySample, handle: int, *, streamed: bool = False
) -> generation_pb2.WorkItem:
    """Return the request of a sample to an instance, which continues from the sample's tokens.

    The instance reports the tokens of a `streamed` sample immediately, of any other sample in checkpoints.
    """
    group = batch.groups[sample.group]
    item = generation_pb2.WorkItem(
        handle=handle,
        prompt_token_ids=group.prompt_token_ids,
        prefix_token_ids=group.prefix,
        sampling=group.sampling,
        exactness=batch.exactness,
        seed=sample.seed,
        policy_version=batch.current_version,
        prompt_id=group.prompt_id,
        run_id=batch.cached_run,
        slot=sample.slot,
        step=batch.step,
        streamed=streamed,
    )
    item.prefix_token_ids.extend(sample.tokens)
    item.environment_last = sample.ends_with_environment
    if sample.prompt_logprobs is not None:
        item.sampling.ClearField("prompt_logprobs")
    return item


def final_sample(batch: RolloutBatch, ending: SampleEnding) -> sample_pb2.Sample:
    """Return the sample as the trainer gets it, without the prefix of a Generate call."""
    state, result = batch.samples[ending.index], sample_fields(batch, ending)
    result.tokens.CopyFrom(state.columns.message())
    return result


def sample_fields(batch: RolloutBatch, ending: SampleEnding) -> sample_pb2.Sample:
    """Return the sample as the trainer gets it, without its tokens."""
    state = batch.samples[ending.index]
    result = sample_pb2.Sample(
        prompt_id=batch.groups[state.group].prompt_id,
        slot=state.slot,
        finish_reason=ending.finish_reason,
        status=ending.status,
        seed=state.seed,
        error=ending.error,
        failure=ending.failure,
        stop_string=ending.stop_string,
        prompt_logprobs=state.prompt_logprobs,
        nonfinite_logprobs=_nonfinite(state),
    )
    _fill(result.provenance, batch, state, ending)
    return result


def _fill(
    provenance: sample_pb2.Provenance, batch: RolloutBatch, state: GatewaySample, ending: SampleEnding
) -> None:
    """Set the provenance of a sample in place, because passing a message as a field would copy it."""
    first = min(state.first_step_at or ending.at, ending.at)
    for drafter, (drafted, accepted) in sorted(state.drafts.items()):
        provenance.draft_sources.add(drafter=drafter, drafted=drafted, accepted=accepted)
        provenance.drafted += drafted
        provenance.accepted += accepted
    provenance.decode_steps = state.decode_steps
    provenance.verify_steps = state.verify_steps
    provenance.resubmissions, provenance.migrations = state.resubmissions, state.migrations
    provenance.exactness.CopyFrom(batch.exactness)
    lenient = batch.exactness.level == sample_pb2.EXACTNESS_LEVEL_LENIENT
    provenance.lossless = not (lenient or state.columns.mixed_kv)
    for span in state.spans:
        if span.end_token > span.begin_token:
            provenance.instance_spans.add(
                instance_id=span.instance_id,
                begin_token=span.begin_token,
                end_token=span.end_token,
                begin=timestamp(span.begin),
                end=timestamp(span.end),
                cached_context_tokens=span.cached_context,
            )
    provenance.queue_time.CopyFrom(duration(max(0.0, first - batch.accepted_at)))
    provenance.generation_time.CopyFrom(duration(ending.at - first))
    provenance.cached_tokens, provenance.reused_prefix = state.reuse


def _nonfinite(state: GatewaySample) -> list[int]:
    if not state.tokens:
        return []
    finite = np.isfinite(np.frombuffer(state.columns.logprobs, np.float32))
    return [] if finite.all() else np.flatnonzero(~finite).tolist()
