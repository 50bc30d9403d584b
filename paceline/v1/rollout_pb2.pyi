import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from paceline.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Stale(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STALE_UNSPECIFIED: _ClassVar[Stale]
    STALE_REFUSE: _ClassVar[Stale]
    STALE_REGENERATE: _ClassVar[Stale]
STALE_UNSPECIFIED: Stale
STALE_REFUSE: Stale
STALE_REGENERATE: Stale

class Group(_message.Message):
    __slots__ = ("prompt_id", "prompt_token_ids", "samples", "sampling", "expected_tokens")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    samples: int
    sampling: _sample_pb2.SamplingParams
    expected_tokens: int
    def __init__(self, prompt_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., samples: _Optional[int] = ..., sampling: _Optional[_Union[_sample_pb2.SamplingParams, _Mapping]] = ..., expected_tokens: _Optional[int] = ...) -> None: ...

class SubmitRolloutsRequest(_message.Message):
    __slots__ = ("run_id", "batch_id", "step", "policy_version", "groups", "sampling", "exactness", "run_seed", "deadline", "priority", "weight", "max_staleness", "stale", "tools")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    RUN_SEED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    batch_id: str
    step: int
    policy_version: int
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    sampling: _sample_pb2.SamplingParams
    exactness: _sample_pb2.Exactness
    run_seed: int
    deadline: _duration_pb2.Duration
    priority: int
    weight: int
    max_staleness: int
    stale: Stale
    tools: _sample_pb2.ToolUse
    def __init__(self, run_id: _Optional[str] = ..., batch_id: _Optional[str] = ..., step: _Optional[int] = ..., policy_version: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., sampling: _Optional[_Union[_sample_pb2.SamplingParams, _Mapping]] = ..., exactness: _Optional[_Union[_sample_pb2.Exactness, _Mapping]] = ..., run_seed: _Optional[int] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., weight: _Optional[int] = ..., max_staleness: _Optional[int] = ..., stale: _Optional[_Union[Stale, str]] = ..., tools: _Optional[_Union[_sample_pb2.ToolUse, _Mapping]] = ...) -> None: ...

class SubmitRolloutsResponse(_message.Message):
    __slots__ = ("batch_id", "samples", "already_submitted")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ALREADY_SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    samples: int
    already_submitted: bool
    def __init__(self, batch_id: _Optional[str] = ..., samples: _Optional[int] = ..., already_submitted: bool = ...) -> None: ...

class OpenBatchRequest(_message.Message):
    __slots__ = ("run_id", "batch_id", "step", "policy_version", "sampling", "exactness", "run_seed", "deadline", "priority", "weight", "max_staleness", "stale", "tools")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    RUN_SEED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    batch_id: str
    step: int
    policy_version: int
    sampling: _sample_pb2.SamplingParams
    exactness: _sample_pb2.Exactness
    run_seed: int
    deadline: _duration_pb2.Duration
    priority: int
    weight: int
    max_staleness: int
    stale: Stale
    tools: _sample_pb2.ToolUse
    def __init__(self, run_id: _Optional[str] = ..., batch_id: _Optional[str] = ..., step: _Optional[int] = ..., policy_version: _Optional[int] = ..., sampling: _Optional[_Union[_sample_pb2.SamplingParams, _Mapping]] = ..., exactness: _Optional[_Union[_sample_pb2.Exactness, _Mapping]] = ..., run_seed: _Optional[int] = ..., deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., priority: _Optional[int] = ..., weight: _Optional[int] = ..., max_staleness: _Optional[int] = ..., stale: _Optional[_Union[Stale, str]] = ..., tools: _Optional[_Union[_sample_pb2.ToolUse, _Mapping]] = ...) -> None: ...

class OpenBatchResponse(_message.Message):
    __slots__ = ("batch_id", "already_opened")
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    ALREADY_OPENED_FIELD_NUMBER: _ClassVar[int]
    batch_id: str
    already_opened: bool
    def __init__(self, batch_id: _Optional[str] = ..., already_opened: bool = ...) -> None: ...

class AddSamplesRequest(_message.Message):
    __slots__ = ("run_id", "batch_id", "groups")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    batch_id: str
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    def __init__(self, run_id: _Optional[str] = ..., batch_id: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ...) -> None: ...

class AddSamplesResponse(_message.Message):
    __slots__ = ("added", "total")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    added: int
    total: int
    def __init__(self, added: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class CloseBatchRequest(_message.Message):
    __slots__ = ("run_id", "batch_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    batch_id: str
    def __init__(self, run_id: _Optional[str] = ..., batch_id: _Optional[str] = ...) -> None: ...

class CloseBatchResponse(_message.Message):
    __slots__ = ("total", "already_closed")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    ALREADY_CLOSED_FIELD_NUMBER: _ClassVar[int]
    total: int
    already_closed: bool
    def __init__(self, total: _Optional[int] = ..., already_closed: bool = ...) -> None: ...

class ContinueSamplesRequest(_message.Message):
    __slots__ = ("run_id", "batch_id", "continuations")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    batch_id: str
    continuations: _containers.RepeatedCompositeFieldContainer[Continuation]
    def __init__(self, run_id: _Optional[str] = ..., batch_id: _Optional[str] = ..., continuations: _Optional[_Iterable[_Union[Continuation, _Mapping]]] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("prompt_id", "slot", "position", "token_ids", "end")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    slot: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    end: bool
    def __init__(self, prompt_id: _Optional[str] = ..., slot: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., end: bool = ...) -> None: ...

class ContinueSamplesResponse(_message.Message):
    __slots__ = ("continued",)
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    continued: int
    def __init__(self, continued: _Optional[int] = ...) -> None: ...

class StreamRolloutsRequest(_message.Message):
    __slots__ = ("run_id", "batch_id", "cursor", "most_samples", "whole_calls")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    MOST_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_CALLS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    batch_id: str
    cursor: int
    most_samples: int
    whole_calls: bool
    def __init__(self, run_id: _Optional[str] = ..., batch_id: _Optional[str] = ..., cursor: _Optional[int] = ..., most_samples: _Optional[int] = ..., whole_calls: bool = ...) -> None: ...

class AckRolloutsRequest(_message.Message):
    __slots__ = ("run_id", "batch_id", "cursor")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    batch_id: str
    cursor: int
    def __init__(self, run_id: _Optional[str] = ..., batch_id: _Optional[str] = ..., cursor: _Optional[int] = ...) -> None: ...

class AckRolloutsResponse(_message.Message):
    __slots__ = ("trimmed",)
    TRIMMED_FIELD_NUMBER: _ClassVar[int]
    trimmed: int
    def __init__(self, trimmed: _Optional[int] = ...) -> None: ...

class StreamRolloutsResponse(_message.Message):
    __slots__ = ("cursor", "sample", "finished", "total", "earlier", "open", "calls")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    sample: _sample_pb2.Sample
    finished: int
    total: int
    earlier: _containers.RepeatedCompositeFieldContainer[FinishedSample]
    open: bool
    calls: _containers.RepeatedCompositeFieldContainer[SampleCall]
    def __init__(self, cursor: _Optional[int] = ..., sample: _Optional[_Union[_sample_pb2.Sample, _Mapping]] = ..., finished: _Optional[int] = ..., total: _Optional[int] = ..., earlier: _Optional[_Iterable[_Union[FinishedSample, _Mapping]]] = ..., open: bool = ..., calls: _Optional[_Iterable[_Union[SampleCall, _Mapping]]] = ...) -> None: ...

class SampleCall(_message.Message):
    __slots__ = ("prompt_id", "slot", "number", "begin", "tokens", "environment_spans")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_SPANS_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    slot: int
    number: int
    begin: int
    tokens: _sample_pb2.TokenColumns
    environment_spans: _containers.RepeatedCompositeFieldContainer[_sample_pb2.EnvironmentSpan]
    def __init__(self, prompt_id: _Optional[str] = ..., slot: _Optional[int] = ..., number: _Optional[int] = ..., begin: _Optional[int] = ..., tokens: _Optional[_Union[_sample_pb2.TokenColumns, _Mapping]] = ..., environment_spans: _Optional[_Iterable[_Union[_sample_pb2.EnvironmentSpan, _Mapping]]] = ...) -> None: ...

class FinishedSample(_message.Message):
    __slots__ = ("cursor", "sample")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    sample: _sample_pb2.Sample
    def __init__(self, cursor: _Optional[int] = ..., sample: _Optional[_Union[_sample_pb2.Sample, _Mapping]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("run_id", "prompt_id", "slot", "step", "policy_version", "prompt_token_ids", "prefix_token_ids", "sampling", "exactness", "run_seed", "prefix_logprobs")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    RUN_SEED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    prompt_id: str
    slot: int
    step: int
    policy_version: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prefix_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sample_pb2.SamplingParams
    exactness: _sample_pb2.Exactness
    run_seed: int
    prefix_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, run_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., slot: _Optional[int] = ..., step: _Optional[int] = ..., policy_version: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., prefix_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sample_pb2.SamplingParams, _Mapping]] = ..., exactness: _Optional[_Union[_sample_pb2.Exactness, _Mapping]] = ..., run_seed: _Optional[int] = ..., prefix_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("delta", "sample")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    delta: _sample_pb2.TokenColumns
    sample: _sample_pb2.Sample
    def __init__(self, delta: _Optional[_Union[_sample_pb2.TokenColumns, _Mapping]] = ..., sample: _Optional[_Union[_sample_pb2.Sample, _Mapping]] = ...) -> None: ...

class CancelRolloutsRequest(_message.Message):
    __slots__ = ("run_id", "batch_id", "samples", "keep_partial")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    KEEP_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    batch_id: str
    samples: _containers.RepeatedCompositeFieldContainer[SampleKey]
    keep_partial: bool
    def __init__(self, run_id: _Optional[str] = ..., batch_id: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[SampleKey, _Mapping]]] = ..., keep_partial: bool = ...) -> None: ...

class SampleKey(_message.Message):
    __slots__ = ("prompt_id", "slot")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    slot: int
    def __init__(self, prompt_id: _Optional[str] = ..., slot: _Optional[int] = ...) -> None: ...

class CancelRolloutsResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: int
    def __init__(self, cancelled: _Optional[int] = ...) -> None: ...

class HintNextBatchRequest(_message.Message):
    __slots__ = ("run_id", "step", "policy_version", "groups", "sampling", "exactness", "run_seed")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    RUN_SEED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    policy_version: int
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    sampling: _sample_pb2.SamplingParams
    exactness: _sample_pb2.Exactness
    run_seed: int
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., policy_version: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., sampling: _Optional[_Union[_sample_pb2.SamplingParams, _Mapping]] = ..., exactness: _Optional[_Union[_sample_pb2.Exactness, _Mapping]] = ..., run_seed: _Optional[int] = ...) -> None: ...

class HintNextBatchResponse(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: int
    def __init__(self, samples: _Optional[int] = ...) -> None: ...

class Reward(_message.Message):
    __slots__ = ("prompt_id", "slot", "reward")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    slot: int
    reward: float
    def __init__(self, prompt_id: _Optional[str] = ..., slot: _Optional[int] = ..., reward: _Optional[float] = ...) -> None: ...

class ReportRewardsRequest(_message.Message):
    __slots__ = ("run_id", "batch_id", "rewards", "kl", "clip_fraction", "step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    KL_FIELD_NUMBER: _ClassVar[int]
    CLIP_FRACTION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    batch_id: str
    rewards: _containers.RepeatedCompositeFieldContainer[Reward]
    kl: float
    clip_fraction: float
    step: int
    def __init__(self, run_id: _Optional[str] = ..., batch_id: _Optional[str] = ..., rewards: _Optional[_Iterable[_Union[Reward, _Mapping]]] = ..., kl: _Optional[float] = ..., clip_fraction: _Optional[float] = ..., step: _Optional[int] = ...) -> None: ...

class ReportRewardsResponse(_message.Message):
    __slots__ = ("matched",)
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    matched: int
    def __init__(self, matched: _Optional[int] = ...) -> None: ...

class BatchStatus(_message.Message):
    __slots__ = ("run_id", "batch_id", "step", "policy_version", "accepted_at", "total", "finished", "acknowledged", "cursor", "open")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_AT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    batch_id: str
    step: int
    policy_version: int
    accepted_at: _timestamp_pb2.Timestamp
    total: int
    finished: int
    acknowledged: int
    cursor: int
    open: bool
    def __init__(self, run_id: _Optional[str] = ..., batch_id: _Optional[str] = ..., step: _Optional[int] = ..., policy_version: _Optional[int] = ..., accepted_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., total: _Optional[int] = ..., finished: _Optional[int] = ..., acknowledged: _Optional[int] = ..., cursor: _Optional[int] = ..., open: bool = ...) -> None: ...

class GetBatchRequest(_message.Message):
    __slots__ = ("run_id", "batch_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    batch_id: str
    def __init__(self, run_id: _Optional[str] = ..., batch_id: _Optional[str] = ...) -> None: ...

class GetBatchResponse(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: BatchStatus
    def __init__(self, batch: _Optional[_Union[BatchStatus, _Mapping]] = ...) -> None: ...

class ListBatchesRequest(_message.Message):
    __slots__ = ("run_id", "page_size", "page_token")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    page_size: int
    page_token: str
    def __init__(self, run_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListBatchesResponse(_message.Message):
    __slots__ = ("batches", "next_page_token")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[BatchStatus]
    next_page_token: str
    def __init__(self, batches: _Optional[_Iterable[_Union[BatchStatus, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class EndRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class EndRunResponse(_message.Message):
    __slots__ = ("batches", "cancelled")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    batches: int
    cancelled: int
    def __init__(self, batches: _Optional[int] = ..., cancelled: _Optional[int] = ...) -> None: ...
